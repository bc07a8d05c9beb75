"""The monitor of a GPU, with an NVML that is made up, and ranges for a timeline."""

import io
import json
import pickle
import sys
import threading
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from lowgpu import __main__, hardware, metrics, monitor, runs
from lowgpu.config import DQNConfig
from lowgpu.dqn import DQN
from lowgpu.loader import DoubleBufferedLoader
from lowgpu.metrics import ProgressLine
from lowgpu.monitor import Monitor, Sample, Tally
from lowgpu.ppo import PPO, TrainingError
from lowgpu.prefetch import EpochPrefetcher
from tests.test_command_line import SMALL, cli, lines_of, one_thread  # noqa: F401
from tests.test_ppo import CARTPOLE, trainer_of

SMALL_GPU, LARGE_GPU = (
    "GPU-11111111-0000-0000-0000-000000000000",
    "GPU-22222222-0000-0000-0000-00000000ab08",
)
TINY_DQN = DQNConfig(envs=4, capacity=120, batch=16, learning_starts=0, train_every=8, rounds=2)
SLICE = "MIG-33333333-0000-0000-0000-000000000000"  # of the large one


class NVMLError(Exception):
    """Stands for pynvml's."""


class FakeNVML:
    """Two GPUs in NVML's order and a slice of the second, of which only memory can be asked.

    Every reading of utilization takes the next of `busy`, then the last.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    memory = {SMALL_GPU: 8 << 30, LARGE_GPU: 80 << 30, SLICE: 10 << 30}  # noqa: RUF012

    def __init__(self, busy=(97,), fails=()):
        self.busy, self.fails, self.open, self.threads = list(busy), set(fails), 0, set()
        self.readings = 0

    def _maybe_fail(self, name, handle=None):
        if name in self.fails or handle == SLICE:
            raise NVMLError(f"{name}: Not Supported")

    def nvmlInit(self):
        self._maybe_fail("nvmlInit")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.memory:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return {SLICE: LARGE_GPU}[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.readings += 1
        self.threads.add(threading.current_thread().name)
        self._maybe_fail("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=self.busy.pop(0) if len(self.busy) > 1 else self.busy[0])

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._maybe_fail("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=self.memory[handle])

    def nvmlDeviceGetPowerUsage(self, handle):
        self._maybe_fail("nvmlDeviceGetPowerUsage", handle)
        return 412_500

    def nvmlDeviceGetClockInfo(self, handle, which):
        self._maybe_fail("nvmlDeviceGetClockInfo", handle)
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[which]


def watching():
    return [t for t in threading.enumerate() if t.name == "lowgpu monitor"]


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited for 10 s"
        time.sleep(0.001)


def test_a_sample_has_every_figure_in_its_unit_and_is_taken_in_a_thread_of_its_own():
    nvml = FakeNVML()
    with Monitor(SMALL_GPU, 1000, nvml) as watch:
        until(lambda: watch.latest is not None)
        assert [t.daemon for t in watching()] == [True]
    assert watch.latest == Sample(97, 8 << 30, 412.5, 1980, 3201)
    assert watch.reason is None
    assert nvml.threads == {"lowgpu monitor"}
    assert str(watch.latest) == "97 % 412 W 1980 MHz"


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_no_thread_and_no_open_nvml_is_left_however_the_block_ends(error):
    nvml = FakeNVML()
    try:
        with Monitor(SMALL_GPU, 1000, nvml) as watch:
            until(lambda: watch.latest is not None)
            assert len(watching()) == 1 and nvml.open == 1
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt, SystemExit) as raised:
        assert type(raised) is error
    assert not watching()
    assert nvml.open == 0


def test_leaving_does_not_wait_for_the_next_sample():
    start = time.monotonic()
    with Monitor(SMALL_GPU, 0.01, FakeNVML()) as watch:
        until(lambda: watch.latest is not None)
    assert not watching()
    assert time.monotonic() - start < 5


def test_samples_come_at_the_rate_that_was_asked_for():
    nvml = FakeNVML()
    with Monitor(SMALL_GPU, 50, nvml) as watch:
        time.sleep(0.5)
    # 26 at best; a machine that others use may skip some.
    assert 5 <= watch.summary().samples <= 27
    assert watch.summary().samples == nvml.readings


@pytest.mark.parametrize("hertz", [0, -1, float("nan")])
def test_a_rate_must_be_above_0(hertz):
    with pytest.raises(ValueError, match="hertz must be above 0"):
        Monitor(SMALL_GPU, hertz)


def test_without_a_gpu_nothing_is_watched_and_nvml_is_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Monitor(None) as watch:
        assert not watching()
    assert (watch.latest, watch.summary(), watch.reason) == (None, None, "no GPU is used")


def test_without_the_package_there_is_a_reason_and_no_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Monitor(SMALL_GPU) as watch:
        assert not watching()
    assert watch.reason == "nvidia-ml-py is not installed"
    assert watch.latest is None and watch.summary() is None


def test_without_the_library_there_is_a_reason_and_no_figure():
    with Monitor(SMALL_GPU, nvml=FakeNVML(fails=["nvmlInit"])) as watch:
        assert not watching()
    assert watch.reason.startswith("NVML does not start: nvmlInit")
    assert watch.latest is None and watch.summary() is None


def test_a_device_that_nvml_does_not_know_is_a_reason_and_closes_nvml():
    nvml = FakeNVML()
    with Monitor("GPU-unknown", nvml=nvml) as watch:
        assert not watching()
    assert watch.reason == "NVML does not know GPU-unknown: Not Found"
    assert nvml.open == 0


def test_the_package_itself_says_why_where_there_is_no_driver():
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with Monitor(SMALL_GPU) as watch:
            pass
        assert watch.reason.startswith("NVML does not start: ")
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is a driver")


def test_a_figure_that_the_device_does_not_give_is_none_and_the_others_are_there():
    nvml = FakeNVML(fails=["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"])
    with Monitor(SMALL_GPU, 1000, nvml) as watch:
        until(lambda: watch.latest is not None)
    assert watch.latest == Sample(None, 8 << 30, None, 1980, 3201)
    seen = watch.summary()
    assert seen.utilization is seen.utilization_low is seen.share_under_80 is None
    assert seen.power_watts is None and seen.sm_clock_mhz == 1980
    assert "not given" in str(seen)


def raw(uuid):
    return bytes.fromhex(uuid[4:].replace("-", ""))


def driver_of(uuids, failing=None, **more):
    """Stands for cuda.bindings.driver: (error, result) of every call, 0 being no error."""

    def answer(name, *results):
        return (100,) + (None,) * len(results) if name == failing else (0, *results)

    return SimpleNamespace(
        cuInit=lambda flags: answer("cuInit"),
        cuDeviceGet=lambda index: answer("cuDeviceGet", f"device {index}"),
        cuDeviceGetUuid=lambda device: answer(
            "cuDeviceGetUuid", SimpleNamespace(bytes=uuids[device])
        ),
        **more,
    )


def with_driver(monkeypatch, driver, name=b"NVIDIA A100 80 GB"):
    cuda = ModuleType("cupy.cuda")
    cuda.runtime = SimpleNamespace(
        getDevice=lambda: 0, getDeviceProperties=lambda index: {"name": name}
    )
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))


# As with CUDA_VISIBLE_DEVICES=1: what CUDA counts as its first device is NVML's second.
def test_the_device_is_that_of_cuda_whatever_nvml_numbers_first(monkeypatch):
    with_driver(monkeypatch, driver_of({"device 0": raw(LARGE_GPU)}))
    with Monitor(monitor.current_uuid(), 1000, FakeNVML()) as watch:
        until(lambda: watch.latest is not None)
    assert watch.latest.memory_nbytes == 80 << 30


@pytest.mark.parametrize("bindings", ["one question", "two questions"])
def test_a_slice_is_watched_by_its_own_uuid_and_its_clocks_are_its_board_s(monkeypatch, bindings):
    driver = driver_of({"device 0": raw(SLICE)})
    if bindings == "two questions":  # of which the older one gives the board's
        newer = driver.cuDeviceGetUuid
        driver = driver_of({"device 0": raw(LARGE_GPU)}, cuDeviceGetUuid_v2=newer)
    with_driver(monkeypatch, driver, b"NVIDIA A100 80 GB MIG 1g.10gb")
    assert monitor.current_uuid() == SLICE
    with Monitor(monitor.current_uuid(), 1000, FakeNVML()) as watch:
        until(lambda: watch.latest is not None)
    assert watch.latest == Sample(None, 10 << 30, 412.5, 1980, 3201)
    assert watch.summary().utilization is None and "not given" in str(watch.summary())


def test_a_slice_of_which_cuda_gives_the_board_s_uuid_is_watched_as_its_board(monkeypatch):
    with_driver(monkeypatch, driver_of({"device 0": raw(LARGE_GPU)}), b"NVIDIA A100 MIG 1g.10gb")
    nvml = FakeNVML()
    with Monitor(monitor.current_uuid(), 1000, nvml) as watch:
        until(lambda: watch.latest is not None)
    assert watch.latest.memory_nbytes == 80 << 30 and nvml.open == 0


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDeviceGetUuid"])
def test_a_driver_that_does_not_give_the_uuid_is_an_error(monkeypatch, call):
    with_driver(monkeypatch, driver_of({"device 0": bytes(16)}, failing=call))
    with pytest.raises(RuntimeError, match="does not give the GPU's UUID: 100"):
        monitor.current_uuid()


def tally_of(percentages):
    tally = Tally()
    for k, percent in enumerate(percentages):
        tally.add(Sample(percent, 100 - k, 2.0 * k, None, None), 10 + 0.5 * k)
    return tally.summary()


def test_a_summary_by_hand():
    seen = tally_of([100, 79, 80, 0])
    assert seen.samples == 4 and seen.seconds == 1.5
    assert seen.utilization == 64.75
    assert seen.share_under_80 == 0.5
    assert (seen.utilization_low, seen.utilization_least) == (0, 0)
    assert seen.memory_nbytes == 100  # the most
    assert seen.power_watts == 3.0
    assert seen.sm_clock_mhz is None
    assert str(seen) == (
        "GPU busy 64.8 % on average, 0 % at the 5th percentile, under 80 % for 50.0% of 2 s, 3 W"
    )


@pytest.mark.parametrize("count", [1, 19, 20, 21, 100, 997])
def test_the_5th_percentile_is_that_of_the_sorted_samples(count):
    percentages = np.random.default_rng(count).integers(0, 101, count)
    seen = tally_of(map(int, percentages))
    # numpy's name for the definition: the least value that 5 % of the samples do not exceed.
    assert seen.utilization_low == np.percentile(percentages, 5, method="inverted_cdf")
    assert seen.utilization_least == percentages.min()
    assert seen.utilization == pytest.approx(percentages.mean())
    assert seen.share_under_80 == pytest.approx((percentages < 80).mean())


def test_a_tally_of_a_long_run_takes_no_more_memory():
    def nbytes():
        return len(pickle.dumps(vars(tally)))

    tally = Tally()
    for k in range(10_000):
        tally.add(Sample(k % 101, k, 1.0, 1, 1), float(k))
        if k == 100:
            before = nbytes()
    assert nbytes() < before + 200  # longer numbers


def test_a_restart_forgets_what_came_before():
    nvml = FakeNVML(busy=[0, 0, 0, 99])
    with Monitor(SMALL_GPU, 1000, nvml) as watch:
        until(lambda: nvml.readings > 5)
        watch.restart()
        read = nvml.readings
        until(lambda: nvml.readings > read + 5)
    assert watch.summary().utilization_least == 99


def test_the_progress_shows_what_the_gpu_does(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with ProgressLine(10_000, 0, "3 MB", Console(file=out, width=200)) as progress:
        now[0] = 60.0
        progress.show(600, 1.5, Sample(97, 1, 412.5, 1980, None))
    assert out.getvalue() == (
        "600 steps  10 steps/s  return 1.5  memory 3 MB  GPU 97 % 412 W 1980 MHz  of 10,000 steps\n"
    )


GPU_FIGURES = {f"gpu_{name}" for name in vars(Sample())}


def watched_by(nvml, monkeypatch):
    """The command line takes the CPU for a GPU that this NVML knows."""
    monkeypatch.setattr(__main__, "_monitor", lambda *_: Monitor(LARGE_GPU, 1000, nvml))


DQN_RUN = (
    *("--env", "cartpole", "--device", "cpu", "--algo", "dqn", "--set", "cartpole.episodes=5"),
    *("--set", "learning_starts=100", "--set", "hidden=[8]", "--set", "max_steps=20"),
)


@pytest.mark.parametrize("arguments", [SMALL, DQN_RUN], ids=["ppo", "dqn"])
def test_a_run_writes_what_the_monitor_sees_and_sums_it_up(
    cli,  # noqa: F811
    tmp_path,
    monkeypatch,
    arguments,
):
    nvml = FakeNVML()
    watched_by(nvml, monkeypatch)
    result = cli("train", *arguments, "--steps", "9600", "--run", "r", "--json")
    assert result.exit_code == 0, result.stderr
    gpu = json.loads(result.stdout)["gpu"]
    assert gpu["utilization"] == 97 and gpu["memory_nbytes"] == 80 << 30
    assert "GPU busy 97.0 % on average" in result.stderr
    last = lines_of(tmp_path / "r/metrics.jsonl")[-1]
    assert {name: last[name] for name in GPU_FIGURES} == {
        "gpu_utilization": 97,
        "gpu_memory_nbytes": 80 << 30,
        "gpu_power_watts": 412.5,
        "gpu_sm_clock_mhz": 1980,
        "gpu_memory_clock_mhz": 3201,
    }
    assert not watching() and nvml.open == 0


def test_the_summary_of_a_run_begins_after_the_iteration_that_compiles(cli, monkeypatch):  # noqa: F811
    events, advance, restart = [], PPO.advance, Monitor.restart
    monkeypatch.setattr(PPO, "advance", lambda self: events.append("advance") or advance(self))
    monkeypatch.setattr(Monitor, "restart", lambda self: events.append("restart") or restart(self))
    watched_by(FakeNVML(), monkeypatch)
    assert cli("train", *SMALL, "--run", "r").exit_code == 0
    assert events == ["advance", "restart", *["advance"] * 19]


def test_a_run_that_is_stopped_or_fails_leaves_no_thread(cli, monkeypatch):  # noqa: F811
    advance = PPO.advance

    def interrupted(self):
        if self.iteration == 3:
            raise self.error
        return advance(self)

    for error, code in ((KeyboardInterrupt(), 130), (TrainingError("iteration 3: no"), 1)):
        nvml = FakeNVML()
        watched_by(nvml, monkeypatch)
        monkeypatch.setattr(PPO, "advance", interrupted)
        monkeypatch.setattr(PPO, "error", error, raising=False)
        assert cli("train", *SMALL, "--run", f"r{code}").exit_code == code
        assert not watching() and nvml.open == 0 and nvml.readings > 0


def test_a_run_on_a_cpu_has_the_figures_as_none_and_says_nothing(cli, tmp_path):  # noqa: F811
    result = cli("train", *SMALL, "--run", "r", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["gpu"] is None
    assert "NVML" not in result.stderr and "note" not in result.stderr
    for line in lines_of(tmp_path / "r/metrics.jsonl"):
        assert [line[name] for name in GPU_FIGURES] == [None] * len(GPU_FIGURES)


@pytest.mark.parametrize(
    "given, hertz", [((), 5), (("--hertz", "20"), 20), (("--hertz", "0"), None)]
)
def test_the_rate_of_samples_is_chosen_and_0_takes_none(cli, monkeypatch, given, hertz):  # noqa: F811
    made, of = [], __main__._monitor
    monkeypatch.setattr(monitor, "current_uuid", lambda: LARGE_GPU)

    def watched(chosen, hertz):
        made.append(of(replace(chosen, kind="cuda"), hertz))
        made[-1]._nvml = FakeNVML()
        return made[-1]

    monkeypatch.setattr(__main__, "_monitor", watched)
    result = cli("train", *SMALL, *given, "--run", "r")
    assert result.exit_code == 0 and "note" not in result.stderr
    (watch,) = made
    assert (watch.uuid, watch.period) == ((LARGE_GPU, 1 / hertz) if hertz else (None, 1 / 5))
    assert (watch.latest is None) == (hertz is None)


@pytest.mark.parametrize("hertz", ["-1", "1001", "x"])
def test_a_rate_out_of_range_is_bad_input(cli, hertz):  # noqa: F811
    assert cli("train", *SMALL, "--hertz", hertz).exit_code == 2


def test_a_gpu_without_nvml_is_said_once_and_trains(cli, tmp_path, monkeypatch):  # noqa: F811
    watched_by(FakeNVML(fails=["nvmlInit"]), monkeypatch)
    chosen = hardware.choose("cpu")
    # The command line believes in a GPU; the trainer is made for the CPU all the same.
    monkeypatch.setattr(hardware, "choose", lambda asked: chosen)
    monkeypatch.setattr(
        __main__,
        "_resolved",
        lambda *given, resolved=__main__._resolved: (
            resolved(*given)[0],
            replace(chosen, kind="cuda"),
        ),
    )
    monkeypatch.setattr(__main__, "_plan", lambda *_: None)
    train = runs.train
    monkeypatch.setattr(runs, "train", lambda d, s, t, _, *rest: train(d, s, t, chosen, *rest))
    result = cli("train", *SMALL, "--run", "r")
    assert result.exit_code == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if "NVML" in line]
    assert said == ["note: the GPU is not watched: NVML does not start: nvmlInit: Not Supported"]


@pytest.fixture
def ranges(monkeypatch):
    """An nvtx package that is made up: what was opened and closed, in order."""
    seen = []

    class Annotate:
        def __init__(self, message, domain):
            assert domain == "lowgpu"
            self.message = message

        def __enter__(self):
            seen.append(self.message)

        def __exit__(self, *error):
            seen.append(f"/{self.message}")

    nvtx = ModuleType("nvtx")
    nvtx.annotate = Annotate
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    monitor._annotate.cache_clear()
    yield seen
    monitor._annotate.cache_clear()


def ranges_of(names):
    return [part for name in names for part in (name, f"/{name}")]


@pytest.mark.parametrize("algo, first", [("ppo", "rollout"), ("dqn", "dqn_rounds")])
def test_every_op_of_an_iteration_is_a_range(ranges, algo, first):
    trainer = trainer_of(CARTPOLE) if algo == "ppo" else DQN(TINY_DQN, CARTPOLE)
    ranges.clear()  # DQN's loops are compiled by a dry run
    called = []
    trainer.walk(lambda op, *arrays, **given: called.append(str(op)))
    assert called[0] == first and {str(op) for op in trainer._settings} == {*called}
    trainer.advance()
    trainer.drain()
    inside = ranges_of(called)
    assert ranges == ["iteration", *inside, "/iteration", *ranges_of(["wait for figures"])]


@pytest.mark.parametrize("ahead", [True, False])
def test_every_stage_of_the_feed_is_a_range(ranges, ahead):
    batches = list(np.ones((3, 4), np.float32))
    assert len(list(DoubleBufferedLoader(batches, kind="cpu", ahead=ahead))) == 3
    # A last read finds no more.
    assert ranges == ranges_of(["read batch", "fill batch"] * 3 + ["read batch"])
    ranges.clear()
    assert list(EpochPrefetcher(abs, 2, ahead=int(ahead))) == [0, 1]
    assert ranges == ranges_of(["compute epoch"] * 2)


def test_without_nvtx_a_stage_is_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monitor._annotate.cache_clear()
    try:
        with monitor.stage("rollout") as entered:
            assert entered is None
    finally:
        monitor._annotate.cache_clear()
