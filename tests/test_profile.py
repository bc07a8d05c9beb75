"""The stage report: what is counted of each call, how times add up, and the command."""

import contextlib
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from lowgpu import hardware, profile
from lowgpu.config import PRESETS, from_dict, merge
from lowgpu.envs import check, make
from lowgpu.ppo import PPO
from lowgpu.profile import NO_PEAK, Peak, Work, measure, show, work_of
from lowgpu.streams import CpuQueue
from lowgpu_kernels import gae, launch, minibatch_moments, observe
from lowgpu_kernels.dims import F32, M, N, Outputs
from lowgpu_kernels.op import OPS, op
from tests.test_command_line import SMALL, cli, one_thread  # noqa: F401
from tests.test_dqn import trainer_of as dqn_of
from tests.test_ppo import CARTPOLE, MARKET, trainer_of

CPU = hardware.choose("cpu")


@pytest.fixture
def scaled():
    """An op of its own: y = x, a *= 2, in 3 operations an element; no array shows M."""

    @op(
        error=lambda **_: 1,
        changes=("a",),
        sizes=lambda params, sizes: {M: 2 * sizes[N]},
        flops=lambda N, M, **_: N + M,
    )
    def scaled(x: F32[N], a: F32[N], rest: F32[N] | None = None) -> Outputs(y=F32[N]):
        return x.copy()

    def cpu(x, a, rest, y):
        y[:] = x
        a *= 2

    scaled.on_cpu(cpu)
    yield scaled
    del OPS["scaled"]


class Trainer:
    """A trainer of one op, called three times an iteration; the queue's times are given."""

    config = SimpleNamespace(iteration_steps=1000)

    def __init__(self, op, seconds):
        self.op, self.queue = op, CpuQueue()
        self.x, self.a, self.y = (np.ones(n, "f4") for n in (5, 5, 5))
        self.calls = self.iterations = 0
        given = iter(seconds)

        def timed(work):
            work()
            return next(given)

        self.queue.seconds = timed

    def walk(self, call_op):
        self.iterations += 1
        for _ in range(3):
            self.calls += 1
            call_op(self.op, self.x, self.a, out=self.y)

    def advance(self):
        self.iterations += 1

    def drain(self):
        return None

    def skip_warm_up(self):
        pass


def test_a_call_is_counted_from_what_its_op_declares(scaled):
    x, a, y = (np.ones(n, "f4") for n in (7, 7, 7))
    # 7 elements of 4 bytes: x and y once, a twice; what was left out counts for nothing.
    for out in (y, (y,)):
        assert work_of(scaled, (x, a), {"out": out}) == Work(None, 21, 7 * 4 * 4, "float32")
    assert work_of(scaled, (x, a), {"rest": x, "out": y}).nbytes == 7 * 4 * 5


def test_the_flops_of_gae_are_those_of_its_declaration_and_its_optional_inputs_count():
    reward = np.zeros((128, 4096), "f4")
    flags = np.zeros(reward.shape, bool)
    outs = np.empty_like(reward), np.empty_like(reward), np.empty(2, "f4")
    work = work_of(gae, (reward, reward, reward[0], flags), {"gamma": 0.9, "lam": 0.9, "out": outs})
    elements = 128 * 4096
    assert work.flops == gae.flops(T=128, E=4096)
    assert work.nbytes == elements * (4 + 4 + 1 + 4 + 4) + 4096 * 4 + 8


def test_a_size_that_follows_from_a_parameter_is_known():
    index, moments = np.zeros(60, "i4"), np.zeros((4, 2), "f4")
    work = work_of(
        minibatch_moments, (np.zeros(60, "f4"), index), {"minibatch": 15, "out": moments}
    )
    assert work.flops == minibatch_moments.flops(N=60)


def test_of_a_table_only_the_rows_that_are_picked_count():
    width, fields = MARKET.width, (len(MARKET.floats), len(MARKET.ints))
    floats, ints = np.zeros((100, fields[0]), "f4"), np.zeros((100, fields[1]), "i4")
    table, series = np.zeros((1000, width), "f4"), np.zeros((len(MARKET.series), 1000), "f4")
    index, x = np.zeros(10, "i4"), np.zeros((10, width), "f4")
    work = work_of(observe, (floats, ints, table, series, index), {"env": MARKET, "out": x})
    # Ten rows of everything; of the series, which the env reads as it likes, ten rows' worth too.
    assert work.nbytes == 4 * (10 * (sum(fields) + 1 + 2 * width) + 10 * len(MARKET.series))


def test_times_of_an_op_add_up_within_an_iteration_and_the_median_is_over_iterations(scaled):
    ops = [(1, 2, 3), (10, 10, 10), (4, 4, 1)]  # sums 6, 30, 9
    trainer = Trainer(scaled, [*(s for took in ops for s in took), 8, 5, 7])
    found = measure(trainer, CPU, rounds=3)
    (line,) = found.lines
    assert (line.op, line.calls, line.launches) == ("scaled", 3, None)
    assert line.seconds == found.ops_seconds == 9
    assert line.share == 1
    assert (line.flops, line.nbytes) == (3 * 15, 3 * 80)
    assert line.tflop_per_second == pytest.approx(45 / 9 / 1e12)
    assert line.gb_per_second == pytest.approx(240 / 9 / 1e9)
    assert line.share_of_peak is None
    assert found.iteration_seconds == 7
    assert trainer.calls == 3 * (1 + 3)  # the first iteration is not timed


def test_the_share_of_the_peak_is_the_least_time_over_the_time():
    peak = Peak(1e9, {"bfloat16": 1e12})
    assert peak.least_seconds(10**12, 10**6, "bfloat16") == 1.0
    assert peak.least_seconds(10**6, 10**9, "bfloat16") == 1.0
    assert peak.least_seconds(10**12, 10**9 // 4, "float32") == 0.25  # no peak known: bytes only
    assert peak.least_seconds(None, 5 * 10**8, "bfloat16") == 0.5
    assert NO_PEAK.least_seconds(10**12, 10**9, "float32") is None
    works = [Work(2, 10**12, 0, "bfloat16"), Work(3, 10**12, 0, "bfloat16")]
    line = profile._line("f", works, 8.0, 10.0, peak)
    assert (line.launches, line.share, line.share_of_peak) == (5, 0.8, 0.25)


def test_the_peak_follows_from_clocks_and_bus(monkeypatch):
    attributes = {13: 1_980_000, 36: 3_201_000, 37: 6016}
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        deviceGetAttribute=lambda which, device: attributes[which],
        cudaDevAttrClockRate=13,
        cudaDevAttrMemoryClockRate=36,
        cudaDevAttrGlobalMemoryBusWidth=37,
    )
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    h200 = replace(CPU, kind="cuda", capability=(9, 0), sms=132)
    peak = profile.peak_of(h200)
    assert peak.bytes_per_second == pytest.approx(4.814e12, rel=1e-3)  # the datasheet's 4.8 TB/s
    assert peak.flops_per_second["float32"] == pytest.approx(66.9e12, rel=1e-3)
    assert peak.flops_per_second["bfloat16"] == pytest.approx(1070e12, rel=1e-3)
    assert profile.peak_of(replace(h200, capability=(12, 0))).flops_per_second == {}
    assert profile.peak_of(CPU) is NO_PEAK


@pytest.mark.parametrize("env", [CARTPOLE, MARKET], ids=lambda env: env.name)
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_every_op_that_a_trainer_runs_has_a_line(env, algo):
    trainer = trainer_of(env) if algo == "ppo" else dqn_of(env)
    called = []
    trainer.walk(lambda op, *arrays, **given: called.append(op))
    before = trainer.iteration
    found = measure(trainer, CPU, rounds=2)
    assert {line.op: line.calls for line in found.lines} == {
        str(op): called.count(op) for op in called
    }
    assert [line.seconds for line in found.lines] == sorted(
        (line.seconds for line in found.lines), reverse=True
    )
    assert sum(line.share for line in found.lines) == pytest.approx(1)
    assert all(line.seconds > 0 and line.nbytes > 0 for line in found.lines)
    assert found.env_steps == trainer.config.iteration_steps
    assert trainer.iteration == before + 3  # the graph's, and none of the walks


def test_a_walk_does_an_iteration_bit_for_bit_and_counts_none():
    walked, advanced = trainer_of(CARTPOLE), trainer_of(CARTPOLE)
    for _ in range(3):
        walked.walk(lambda op, *arrays, **given: op(*arrays, **given))
        advanced.advance()
        advanced.drain()
    assert (walked.iteration, advanced.iteration) == (0, 3)
    there = advanced.state()[0]
    for name, array in walked.state()[0].items():
        assert array.tobytes() == there[name].tobytes(), name


def test_after_a_walk_that_failed_the_trainer_calls_its_ops_itself():
    trainer = trainer_of(CARTPOLE)

    def failing(op, *arrays, **given):
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        trainer.walk(failing)
    trainer.advance()
    assert trainer.drain().iteration == 1


def test_rounds_below_1_are_refused():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        measure(trainer_of(CARTPOLE), CPU, rounds=0)


def test_kernels_are_counted_without_being_launched(scaled, monkeypatch):
    h200, made = launch.KNOWN["H200"], []
    monkeypatch.setattr(launch, "device", lambda: h200)
    seen = []

    @contextlib.contextmanager
    def recording(on):
        assert on is h200
        seen.append("recorded")
        yield made
        made.extend(["kernel"] * 2)

    monkeypatch.setattr(launch, "recording", recording)
    x, a, y = (np.ones(n, "f4") for n in (5, 5, 5))
    # The recorder is made up, so the call within it is made; on a GPU it is not.
    work = profile._made(scaled, (x, a), {"out": y}, on_gpu=True)
    assert (work.launches, seen, list(a)) == (2, ["recorded"], [4.0] * 5)


def text_of(found):
    out = io.StringIO()
    show(found, Console(file=out, width=140))
    return out.getvalue()


def test_the_table_has_a_row_an_op_and_says_what_is_not_known(scaled):
    found = measure(Trainer(scaled, [0.001] * 3 + [0.002]), CPU, rounds=1)
    text = text_of(found)
    (row,) = [line for line in text.splitlines() if "scaled" in line]
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == [
        *("scaled", "3", "-", "3 ms", "100.0%"),
        *("4.5e-08", "0.00024", "1.5e-08", "8e-05", "-"),
    ]
    assert "the iteration as training does it 2 ms: 500,000 env steps/s (medians of 1)" in text
    on_gpu = replace(
        found, kind="cuda", lines=(replace(found.lines[0], launches=7, share_of_peak=0.5),)
    )
    assert "as one graph 2 ms" in text_of(on_gpu)
    assert "50.0%" in text_of(on_gpu)


def test_the_command_prints_a_table_or_json_and_writes_nothing(cli, tmp_path):  # noqa: F811
    small = [a for a in SMALL if a not in ("--steps", "950")]
    result = cli("profile", *small, "--rounds", 2, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["kind"] == "cpu" and found["rounds"] == 2 and found["env_steps"] == 48
    table = cli("profile", *small, "--rounds", 1)
    assert table.exit_code == 0, table.stderr
    assert all(line["op"] in table.stdout for line in found["lines"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--env", "pong"), "env must be one of"),
        (("--set", "envs=0"), "ppo.envs must be in"),
        (("--device", "cuda"), "device cuda was asked for and cannot be used"),
        (("--data", "nowhere.csv"), "nowhere.csv"),
    ],
)
def test_bad_input_to_the_command_is_one_sentence_and_2(cli, monkeypatch, arguments, message):  # noqa: F811
    monkeypatch.setattr(hardware, "gpu_unusable", lambda: "there is none")
    result = cli("profile", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated(cli, monkeypatch):  # noqa: F811
    monkeypatch.setattr(hardware, "choose", lambda asked: replace(CPU, free_nbytes=1000))
    result = cli("profile", *SMALL[:4])
    assert result.exit_code == 2
    assert "may be used" in result.stderr


def market_data(env, rows):
    """A table and series that the market can be trained on: prices above 0, one segment."""
    rng = np.random.default_rng(0)
    series = np.zeros((len(env.series), rows), "f4")
    series[0] = np.exp(np.cumsum(rng.normal(0, 0.01, rows)))
    series[1, -1] = 1
    table = np.zeros((rows, env.width), "f4")
    table[:, : env.table_columns] = rng.normal(size=(rows, env.table_columns))
    return table, series


def test_the_market_that_is_timed_on_a_gpu_keeps_to_its_data():
    # Within guards: what the env reads past its series is NaN, and refused.
    assert sum(check._run(MARKET, *market_data(MARKET, 50), seed=0, steps=200)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cartpole", "market"])
def test_on_a_gpu_ops_are_timed_without_the_hosts_delays_and_launches_are_counted(name):
    settings = from_dict(merge(PRESETS[name, "cuda"], {"env": name}))
    env = make(name)
    data = market_data(env, 10_000) if env.series else ()
    trainer = PPO(settings.ppo, env, *data, kind="cuda")
    found = measure(trainer, hardware.choose("cuda"), rounds=5)
    assert all(line.launches >= line.calls for line in found.lines)
    assert all(line.share_of_peak > 0 for line in found.lines)
    # Gaps between the ops are in the graph's time, launch latencies in that of single ops.
    assert 0.5 < found.ops_seconds / found.iteration_seconds < 4
