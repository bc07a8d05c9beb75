"""Tables on disk as runs use them: split as bars in memory are, normalized by their training rows."""

import dataclasses
import json
from types import SimpleNamespace

import ml_dtypes
import numba
import numpy as np
import pytest
from typer.testing import CliRunner

from lowgpu import checkpoint, market_tables, runs, tasks
from lowgpu.__main__ import app
from lowgpu.config import from_dict, in_use, merge
from lowgpu.data.features import Table
from lowgpu.data.normalizer import Normalizer
from lowgpu.data.splits import split_by_time
from lowgpu.envs import make
from lowgpu.hardware import Hardware, choose
from lowgpu.market_tables import SplitRows, TableFile, convert, fitted
from lowgpu.ppo import PPO
from lowgpu.table_file import TableFileError, open_table, save_table

SHARES = 0.6, 0.2
LENGTHS = 211, 90, 3, 160  # of the segments, which begin on different days
FIRST_DAYS = 0, 100, 126, 50
DAY = 86_400


@pytest.fixture(autouse=True)
def one_thread():
    """Loops of a few rows, on a machine that others use too."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def env_of(features=5):
    return make("market", features=features, episode=16)


def bars(features=5):
    """A Table of four symbols, of which one has a single row after the first cut."""
    rng = np.random.default_rng(0)
    rows = sum(LENGTHS)
    last = np.zeros(rows, np.float32)
    last[np.cumsum(LENGTHS) - 1] = 1
    return Table(
        symbol=("LONG", "LATE", "FEW", "MIDDLE"),
        features=(3 * rng.normal(size=(rows, features)) + 1).astype(np.float32),
        price=np.exp(rng.normal(0, 0.01, rows).cumsum()).astype(np.float32),
        last=last,
        date=np.concatenate([DAY * (d + np.arange(n)) for d, n in zip(FIRST_DAYS, LENGTHS)]),
        segment=np.repeat(np.arange(4, dtype=np.int32), LENGTHS),
        row=np.arange(rows),
    )


def series_of(table):
    return np.stack([table.price, table.last])


def saved(folder, table, **given):
    given = {"date": table.date, "symbols": table.symbol} | given
    save_table(folder, env_of(table.features.shape[1]), table.features, series_of(table), **given)
    return folder


def parquet(path, table, **changes):
    polars = pytest.importorskip("polars", reason="Parquet tables need polars")
    columns = {
        "date": table.date,
        "symbol": [table.symbol[s] for s in table.segment],
        "price": table.price,
        "last": table.last,
        **{f"f{i}": column for i, column in enumerate(table.features.T)},
    }
    made = columns | changes
    polars.DataFrame({n: c for n, c in made.items() if c is not None}).write_parquet(path)
    return path


def stored(form, tmp_path, table=None, **given):
    table = table or bars()
    if form == "parquet":
        return parquet(tmp_path / "bars.parquet", table)
    return saved(tmp_path / "bars", table, **given)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Steps that divide nothing."""
    monkeypatch.setattr(market_tables, "STEP", 37)


FORMS = pytest.mark.parametrize("form", ["folder", "parquet"])


@FORMS
@pytest.mark.filterwarnings("ignore:.* one row in the", "ignore:.* has 1 of the 2 rows")
@pytest.mark.parametrize("shares", [SHARES, (0.33, 0.2), (0.51, 0.1)])
def test_a_table_on_disk_is_split_as_bars_in_memory_are(form, shares, tmp_path):
    file = TableFile(stored(form, tmp_path), env_of(), shares)
    for name, want in zip(market_tables.SPLITS, split_by_time(bars(), (*shares, 1 - sum(shares)))):
        rows = getattr(file, name)
        features, series = rows.read(0, rows.rows)
        assert features[:, :5].tobytes() == want.features.tobytes(), name
        assert series.tobytes() == series_of(want).tobytes(), name


def test_a_segment_with_one_row_in_a_split_is_left_out_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="1 of 4 segments have one row in the train split"):
        TableFile(stored("folder", tmp_path), env_of(), (0.33, 0.2))


@FORMS
def test_any_range_of_a_split_has_the_bits_of_its_pieces(form, tmp_path):
    given = {"precision": "bfloat16"} if form == "folder" else {}
    source = open_table(stored(form, tmp_path, **given), env_of())
    ranges = np.array([[3, 40], [211, 213], [300, 301 + 3]])
    rows = SplitRows(source, env_of(), ranges)
    want = np.concatenate([source.read(*r)[0] for r in ranges])
    series = np.concatenate([source.read_series(*r) for r in ranges], axis=1)
    series[1, [36, 38, 42]] = 1
    assert rows.rows == 43 and rows.dtype == want.dtype
    assert form == "parquet" or want.dtype == ml_dtypes.bfloat16
    for start in range(0, 43, 5 if form == "parquet" else 1):
        for stop in range(start + 1, 44):
            table, its = rows.read(start, stop)
            assert table.tobytes() == want[start:stop].tobytes()
            assert its.tobytes() == series[:, start:stop].tobytes()
            assert rows.read_series(start, stop).tobytes() == its.tobytes()


def test_figures_summed_in_steps_are_those_of_all_rows_at_once(tmp_path):
    train = TableFile(stored("parquet", tmp_path), env_of(), SHARES).train
    want = Normalizer.fit(split_by_time(bars(), (*SHARES, 0.2))[0].features)
    got = fitted(train)
    # Sums of another order in float64, rounded once to float32.
    for name in ("mean", "std"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=2.0**-23)


def test_features_that_are_constant_are_named_and_such_that_are_not_finite_refused(tmp_path):
    table = bars()
    table.features[:, 2] = 4
    with pytest.warns(UserWarning, match=r"feature columns \[2\] are constant"):
        by = TableFile(parquet(tmp_path / "a.parquet", table), env_of(), SHARES).normalizer()
    assert by.std[2] == 0 and by.mean[2] == 4
    table.features[5, 3] = np.inf
    with pytest.raises(
        TableFileError, match=r"columns \[3\] .* not finite in training rows 0 to 36"
    ):
        TableFile(parquet(tmp_path / "b.parquet", table), env_of(), SHARES).normalizer()


@FORMS
def test_the_test_split_is_evaluated_as_that_of_bars_in_memory(form, tmp_path):
    train, _, test = split_by_time(bars(), (*SHARES, 0.2))
    by = Normalizer.fit(train.features)
    given = {"normalizer": by} if form == "folder" else {}
    file = TableFile(stored(form, tmp_path, **given), env_of(), SHARES)
    table, series, segments = file.tested(by)
    want_table, want_series = runs.arrays_of(env_of(), test, by)
    assert table.tobytes() == want_table.tobytes() and series.tobytes() == want_series.tobytes()
    present, starts, lengths = np.unique(test.segment, return_index=True, return_counts=True)
    assert segments.symbols == tuple(test.symbol[s] for s in present)
    assert segments.starts.tolist() == starts.tolist()
    assert segments.lengths.tolist() == lengths.tolist()
    assert segments.date.tolist() == test.date.tolist()
    assert segments.price.tobytes() == test.price.tobytes()


def test_features_that_other_figures_normalized_are_not_evaluated(tmp_path):
    by = Normalizer.fit(bars().features)
    other = dataclasses.replace(by, mean=by.mean + np.float32(1))
    file = TableFile(stored("folder", tmp_path, normalizer=by), env_of(), SHARES)
    with pytest.raises(TableFileError, match="normalized by other figures than the run's"):
        file.tested(other)


def test_a_folder_without_figures_gives_its_features_as_they_are(tmp_path):
    by = TableFile(stored("folder", tmp_path), env_of(), SHARES).normalizer()
    assert by.mean.tolist() == [0] * 5 and by.std.tolist() == [1] * 5


def test_dates_of_every_form_are_the_same_seconds(tmp_path):
    polars = pytest.importorskip("polars")
    table = bars()
    seconds = polars.Series(table.date)
    for kind in (polars.Datetime("ms"), polars.Datetime("ns"), polars.Date):
        date = polars.from_epoch(seconds, time_unit="s").cast(kind)
        path = parquet(tmp_path / "bars.parquet", table, date=date)
        assert open_table(path, env_of()).dates().tolist() == table.date.tolist()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"date": None}, "has no dates, by which it would be split"),
        (
            {"date": ["1970-01-01"] * sum(LENGTHS)},
            "date must be a date, a time or Int64, got String",
        ),
        ({"date": [None] + [0] * (sum(LENGTHS) - 1)}, "date has 1 empty values"),
        ({"date": bars().date[::-1]}, "dates of a segment must rise, and those of rows 0 and 1 do"),
        ({"last": 0 * bars().last}, r"`last` must be 1 on the last row, 463"),
    ],
)
def test_a_table_that_cannot_be_split_is_refused(changes, message, tmp_path):
    with pytest.raises(TableFileError, match=message):
        TableFile(parquet(tmp_path / "bars.parquet", bars(), **changes), env_of(), SHARES)


def test_what_does_not_belong_to_the_rows_is_not_saved_beside_them(tmp_path):
    table = bars()
    for given, message in (
        ({"date": table.date[1:]}, r"date must be int64\[464\], .* got int64\[463\]"),
        ({"date": table.date.astype(np.int32)}, r"got int32\[464\]"),
        ({"date": "now"}, r"got str\[\]"),
        ({"symbols": ["A"]}, "symbols must name the 4 segments that `last` ends, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            saved(tmp_path / "bars", table, **given)
    assert not list(tmp_path.iterdir())
    saved(tmp_path / "bars", table)
    np.save(tmp_path / "bars" / "date.npy", table.date[1:])
    with pytest.raises(TableFileError, match=r"date.npy must hold int64\[464\], got int64\[463\]"):
        TableFile(tmp_path / "bars", env_of(), SHARES)


SMALL = {
    "ppo": {"total_steps": 480, "envs": 6, "rollout_steps": 8, "minibatches": 3, "hidden": [8]},
    "market": {"train": 0.6, "validation": 0.2, "episode": 16},
}
WIDE = bars(51)


def settings_of(path, **more):
    return from_dict(merge(SMALL, {"data": str(path)}, more))


def test_a_table_that_does_not_fit_streams_and_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "WHOLE", 16)
    settings = settings_of(saved(tmp_path / "bars", WIDE))
    roomy = Hardware("cpu", "a machine", "for a test", 2**30, 2**30, 2)
    same, task = tasks.prepared(settings, roomy)
    assert same == settings and task.table.shape == (task.rows, 56)
    whole = PPO.plan_of(settings.ppo, task.env, task.rows, "cpu").nbytes
    row = 4 * 58
    tight = dataclasses.replace(roomy, free_nbytes=int((whole - 60 * row) / 0.9))
    with pytest.warns(
        UserWarning, match="rows do not fit beside .* on a machine: windows of "
    ) as said:
        chosen, task = tasks.prepared(settings, tight)
    assert len([w for w in said if "do not fit" in str(w.message)]) == 1
    window = chosen.stream.rows
    assert window % 16 == 0 and chosen.stream.every == 2 and task.rows == 2 * window
    fits = [PPO.plan_of(settings.ppo, task.env, 2 * w, "cpu") for w in (window, window + 16)]
    fits[0].check(tight.free_nbytes, "a machine")
    with pytest.raises(ValueError, match="give fewer bars"):
        fits[1].check(tight.free_nbytes, "a machine")
    assert in_use(chosen)["stream"] == {"rows": window, "every": 2}
    again = tasks.training_task(chosen)
    assert again.table.window == task.table.window and again.table.every == task.table.every


@pytest.mark.parametrize(
    "more, message",
    [
        (
            {"stream": {"rows": 10_000}},
            "at most the training split's [0-9]+, got 10000; without it",
        ),
        (
            {"stream": {"rows": 64}, "ppo": {"precision": "bfloat16"}},
            "give precision=float32, or save",
        ),
        ({"env": "cartpole", "stream": {"rows": 64}}, "stream.rows is for the market's table"),
        ({"data": "none.parquet"}, "none.parquet cannot be read"),
    ],
)
def test_what_cannot_stream_is_refused_before_a_run_is_made(more, message, tmp_path):
    settings = settings_of(saved(tmp_path / "bars", WIDE), **more)
    with pytest.raises(runs.RunError, match=message):
        runs.training_task(settings)


@pytest.mark.filterwarnings("ignore:training waits")
def test_a_streamed_run_is_the_same_from_every_file_stopped_and_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by = Normalizer.fit(split_by_time(WIDE, (0.6, 0.2, 0.2))[0].features)
    saved("folder", WIDE, normalizer=by)
    parquet("bars.parquet", WIDE)
    convert("bars.parquet", "converted", env_of(51), shares=(0.6, 0.2))
    with pytest.raises(TableFileError, match="it needs no conversion"):
        convert("folder", "again", env_of(51))

    def cli(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    given = [f"--set=ppo.{n}={v}" for n, v in SMALL["ppo"].items()]
    given += [f"--set=market.{n}={v}" for n, v in SMALL["market"].items()]
    given += ["--device=cpu", "--set=stream.rows=64", "--json"]
    printed = {
        data: json.loads(cli("train", *given, "--data", data, "--run", f"run-{data}"))
        for data in ("folder", "bars.parquet", "converted")
    }
    assert printed["folder"]["evaluation"] == printed["bars.parquet"]["evaluation"]
    assert printed["folder"]["evaluation"] == printed["converted"]["evaluation"]
    assert json.loads(cli("evaluate", "run-folder", "--json")) == printed["folder"]["evaluation"]

    with pytest.raises(runs.RunError, match="is a table of features; this needs bars as CSV"):
        runs.splits_of(runs.opened("run-folder"))

    settings, stop = runs.opened("run-folder"), SimpleNamespace(asked=False)
    assert settings.stream.rows == 64
    before = PPO.advance

    def advance(self):
        stop.asked = self.iteration == 4
        return before(self)

    monkeypatch.setattr(PPO, "advance", advance)
    task = runs.training_task(settings)
    runs.train(runs.create("part", settings), settings, task, choose("cpu"), False, stop)
    monkeypatch.setattr(PPO, "advance", before)
    assert checkpoint.load("part/checkpoint.safetensors").document["iteration"] == 5
    cli("train", "--run", "part", "--resume")
    want = checkpoint.load("run-folder/checkpoint.safetensors")
    for run in ("part", "run-bars.parquet", "run-converted"):
        got = checkpoint.load(f"{run}/checkpoint.safetensors")
        assert got.document["iteration"] == 10
        for name, array in want.arrays.items():
            assert got.arrays[name].tobytes() == array.tobytes(), (run, name)
    lines = [
        json.loads(line) for line in (tmp_path / "part/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["window"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
