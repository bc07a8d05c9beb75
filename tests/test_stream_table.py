"""Tables that stream from disk: the bits of a resident table, in an order of the seed."""

import itertools
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from lowgpu.background import FeedError
from lowgpu.data.normalizer import Normalizer
from lowgpu.draws import shuffled
from lowgpu.envs import make
from lowgpu.stream_table import StreamedTable, window_plan
from lowgpu.table_file import TableFileError, open_table, save_table
from tests.late_device import COMPUTE, LAZY, SLOW_CONSUMER, SLOW_LINK, LateDevice

ENV = make("market", features=5, episode=8)
N = 1009


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


def data(ends=(300, N - 1)):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(N, 5)).astype(np.float32)
    price = np.exp(rng.normal(size=N)).astype(np.float32)
    last = np.zeros(N, np.float32)
    last[list(ends)] = 1
    return features, np.stack([price, last])


def normalizer():
    return Normalizer.fit(data()[0])


def resident(features, series, precision, by=None):
    """The whole table as a trainer holds it."""
    table = np.zeros((N, 8), np.float32)
    table[:, :5] = features if by is None else by.apply(features)
    return table.astype(ml_dtypes.bfloat16 if precision == "bfloat16" else np.float32), series


def parquet(path, features, series, **more):
    polars = pytest.importorskip("polars", reason="Parquet tables need polars")
    columns = {f"f{i}": features[:, i] for i in range(5)}
    date = np.arange(N, dtype=np.int64)
    made = {"date": date, "price": series[0], **columns, "last": series[1], **more}
    polars.DataFrame(made).write_parquet(path, row_group_size=100)
    return path


def stored(form, tmp_path, precision, by):
    """A table on disk, and the normalizer that its reader needs."""
    features, series = data()
    if form == "parquet":
        return parquet(tmp_path / "bars.parquet", features, series), by
    save_table(tmp_path, ENV, features, series, normalizer=by, precision=precision)
    return tmp_path, None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["mapped", "parquet"])
@pytest.mark.parametrize("normalized", [True, False])
def test_a_window_has_the_bits_of_the_same_rows_of_a_resident_table(
    form, precision, normalized, tmp_path
):
    by = normalizer() if normalized else None
    table, series = resident(*data(), precision, by)
    path, by = stored(form, tmp_path, precision, by)
    stream = StreamedTable(path, ENV, 100, precision=precision, normalizer=by, kind="cpu")
    with stream:
        for number in range(25):
            window = stream.next_window()
            rows = slice(window.start, window.start + 100)
            wanted = series[:, rows].copy()
            wanted[1, -1] = 1
            assert window.number == number
            assert window.table.dtype == table.dtype
            assert window.table.tobytes() == table[rows].tobytes()
            assert window.series.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("eager", [SLOW_CONSUMER, SLOW_LINK, LAZY])
def test_windows_are_right_when_the_device_comes_to_use_them(eager, tmp_path):
    features, series = data()
    save_table(tmp_path, ENV, features, series)
    device, right = LateDevice(eager), []
    feed = {"kind": "cpu", "copies": device, "stream": COMPUTE, "debug": True}
    with StreamedTable(tmp_path, ENV, 64, **feed) as stream:
        for _ in range(200):
            window = stream.next_window()

            def check(window=window):
                rows = slice(window.start, window.start + 64)
                same = window.table[:, :5] == features[rows]
                right.append(same.all() and (window.series[0] == series[0, rows]).all())

            device.work(check)
    device.finish()
    assert len(right) == 200 and all(right)


def starts(path, count, first=0, **given):
    price, found = data()[1][0], []
    with StreamedTable(path, ENV, 100, kind="cpu", first=first, **given) as stream:
        for number in range(first, first + count):
            window = stream.next_window()
            assert window.number == number
            assert (window.series[0] == price[window.start : window.start + 100]).all()
            found.append(window.start)
    return found


@pytest.mark.parametrize("end", [1, 98, 99, 100, 198, 300, 908, 910, N - 2])
def test_every_pass_has_every_step_of_the_table_and_no_start_without_a_next_row(end, tmp_path):
    """The market's reset would step before a window that starts on a `last` row."""
    ends = {end, N - 1} if end != N - 2 else {end - 1, N - 1}
    save_table(tmp_path, ENV, *data(ends))
    found = starts(tmp_path, 11)
    assert not ends & set(found)
    steps = {row for start in found for row in range(start, start + 99)}
    assert steps >= set(range(N)) - ends


def test_the_window_that_would_start_on_a_last_row_at_the_end_of_the_table_ends_one_row_before(
    tmp_path,
):
    save_table(tmp_path, ENV, *data((N - 100, N - 1)))
    assert max(starts(tmp_path, 11)) == N - 101


def test_the_order_is_the_seeds_and_new_in_every_pass(tmp_path):
    save_table(tmp_path, ENV, *data())
    passes = np.reshape(starts(tmp_path, 44, seed=3), (4, 11))
    assert len({tuple(turn) for turn in passes}) == 4
    assert {tuple(sorted(turn)) for turn in passes} == {tuple(sorted(passes[0]))}
    assert starts(tmp_path, 44, seed=3, ahead=False) == passes.ravel().tolist()
    assert starts(tmp_path, 44, seed=4) != passes.ravel().tolist()


def test_a_run_goes_on_with_the_window_it_was_at(tmp_path):
    save_table(tmp_path, ENV, *data())
    whole = starts(tmp_path, 30, seed=9)
    assert starts(tmp_path, 13, first=17, seed=9) == whole[17:]


def test_the_order_of_a_seed_is_this_one():
    """Philox written again, in integers: another order would be a change of every run."""
    assert shuffled(7, 8, 2).tolist() == sorted(range(8), key=_by_philox(7, 2))


def _by_philox(seed, step):
    def key(i):
        words = [2**31 + i, step % 2**32, step >> 32, 3]
        k0, k1 = seed % 2**32, seed >> 32
        for _ in range(10):
            a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
            words = [b >> 32 ^ words[1] ^ k0, b % 2**32, a >> 32 ^ words[3] ^ k1, a % 2**32]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        return words[0] << 32 | words[1]

    return key


@pytest.mark.filterwarnings("ignore:overflow")
def test_no_episode_of_the_market_leaves_its_window(tmp_path):
    rng = np.random.default_rng(3)
    save_table(tmp_path, ENV, *data((99, 101, 300, 500, N - 1)))
    with StreamedTable(tmp_path, ENV, 100, kind="cpu") as stream:
        for _ in range(2 * stream.windows):
            series = stream.next_window().series.ravel()
            for first in (0.0, 1 - 2.0**-24, *rng.random(30)):
                floats, ints = np.zeros(2, np.float32), np.zeros(2, np.int32)
                u, reward = np.full(4, first, np.float32), np.zeros(1, np.float32)
                ENV.reset(floats, ints, u, series, np.int32(100))
                assert ints[0] >= 0, "the window starts on a last row"
                ended = 0
                while not ended:
                    ended = ENV.step(floats, ints, np.int32(2), u, series, np.int32(100), reward)
                    assert ints[0] <= 99, "the window's last row does not end episodes"


def test_a_trainers_two_buffers_are_filled_in_turn(tmp_path):
    save_table(tmp_path, ENV, *data())
    plan = window_plan(ENV, 100)
    slots = [{n: np.full(d.shape, np.nan, d.dtype) for n, d in plan.declared.items()} for _ in "ab"]
    with StreamedTable(tmp_path, ENV, 100, kind="cpu", slots=slots) as stream:
        assert stream.plan.nbytes == plan.nbytes
        for i in range(5):
            window = stream.next_window()
            assert window.slot == i % 2
            assert window.table is slots[i % 2]["table"]
            assert window.series is slots[i % 2]["series"]


def test_a_file_that_breaks_while_it_is_read_is_raised_with_its_cause(tmp_path):
    class Breaking:
        rows, dtype, ready = N, np.dtype(np.float32), False
        read_windows = 0

        def read(self, start, stop):
            self.read_windows += 1
            if self.read_windows > 3:
                raise OSError("the disk is gone")
            return np.zeros((stop - start, 5), np.float32), self.read_series(start, stop)

        def read_series(self, start, stop):
            return np.zeros((2, stop - start), np.float32)

    with StreamedTable(Breaking(), ENV, 100, kind="cpu") as stream:
        for _ in range(3):
            stream.next_window()
        with pytest.raises(FeedError, match="batch 3: OSError: the disk is gone"):
            stream.next_window()
        with pytest.raises(RuntimeError, match="closed"):
            stream.next_window()


def test_an_empty_value_in_parquet_is_refused_with_its_rows(tmp_path):
    features, series = data()
    holes = [None if i == 450 else float(price) for i, price in enumerate(series[0])]
    polars = pytest.importorskip("polars")
    price = polars.Series(holes, dtype=polars.Float32)
    path = parquet(tmp_path / "bars.parquet", features, series, price=price)
    with pytest.raises(FeedError, match="'price' has 1 empty values in rows"):
        starts(path, 11)


def test_parquet_of_another_form_is_refused(tmp_path):
    features, series = data()
    more = {"f5": features[:, 0]}
    path = parquet(tmp_path / "more.parquet", features, series, **more)
    with pytest.raises(TableFileError, match=r"must have 5 Float32 columns beside .* got 6"):
        open_table(path, ENV)
    wide = {"last": series[1].astype(np.float64)}
    path = parquet(tmp_path / "wide.parquet", features, series, **wide)
    with pytest.raises(TableFileError, match="must have a Float32 column 'last', got Float64"):
        open_table(path, ENV)
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(TableFileError, match="cannot be read"):
        open_table(tmp_path / "text.parquet", ENV)


def test_polars_is_found_although_the_command_line_hides_it(tmp_path, monkeypatch):
    path = parquet(tmp_path / "bars.parquet", *data())
    monkeypatch.setitem(sys.modules, "polars", None)
    assert open_table(path, ENV).rows == N


def test_a_folder_of_another_form_is_refused(tmp_path):
    with pytest.raises(TableFileError, match=r"no folder with table\.npy .* no \.parquet file"):
        open_table(tmp_path / "none", ENV)
    with pytest.raises(TableFileError, match=r"table\.npy cannot be read"):
        open_table(tmp_path, ENV)
    save_table(tmp_path, ENV, *data())
    with pytest.raises(FileExistsError, match="give another folder"):
        save_table(tmp_path, ENV, *data())
    with pytest.raises(TableFileError, match=r"table\.npy must have shape \(1009, 56\)"):
        open_table(tmp_path, make("market"))
    np.save(tmp_path / "series.npy", data()[1].astype(np.float64))
    with pytest.raises(TableFileError, match=r"series\.npy must hold float32, got float64"):
        open_table(tmp_path, ENV)
    np.save(tmp_path / "table.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(TableFileError, match=r"table\.npy cannot be read"):
        open_table(tmp_path, ENV)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"rows": 1}, ValueError, r"rows must be in \[2, "),
        ({"rows": N + 1}, ValueError, "rows must be at most the table's 1009"),
        ({"seed": -1}, ValueError, "seed must be in"),
        ({"first": 0.5}, TypeError, "first must be an integer"),
        ({"precision": "float16"}, ValueError, "precision must be one of"),
        ({"precision": "bfloat16"}, ValueError, "the file, which holds float32, got 'bfloat16'"),
        ({"normalizer": 1}, ValueError, "give it to save_table instead"),
        ({"env": make("cartpole")}, ValueError, "env must have a series 'last'"),
    ],
)
def test_arguments_out_of_range_are_refused(given, error, message, tmp_path):
    save_table(tmp_path, ENV, *data())
    with pytest.raises(error, match=message):
        StreamedTable(**{"source": tmp_path, "env": ENV, "rows": 100, "kind": "cpu", **given})


def test_what_does_not_fit_the_env_is_not_saved(tmp_path):
    features, series = data()
    for given, error, message in (
        ((features[:, :4], series), ValueError, r"features must have shape \(1009, 5\)"),
        ((features, series[:, 1:]), ValueError, r"series must have shape \(2, 1009\)"),
        ((features.astype(np.float64), series), TypeError, "features must be float32"),
    ):
        with pytest.raises(error, match=message):
            save_table(tmp_path, ENV, *given)
    assert not list(tmp_path.iterdir())


def test_saving_in_steps_gives_the_bits_of_saving_at_once(tmp_path, monkeypatch):
    by = normalizer()
    for name, step in (("a", 7), ("b", 10_000)):
        monkeypatch.setattr("lowgpu.table_file.STEP", step)
        save_table(tmp_path / name, ENV, *data(), normalizer=by, precision="bfloat16")
    first, second = ((tmp_path / name / "table.npy").read_bytes() for name in "ab")
    assert first == second
    assert list(itertools.chain(tmp_path.rglob("*.part"))) == []
