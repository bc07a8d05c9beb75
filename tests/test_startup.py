"""What a start does: kernels compiled side by side, the device's time taken, and little imported."""

import gc
import os
import queue
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import busy, startup
from lowgpu import __main__, config, start, streams
from lowgpu.envs import make
from lowgpu.monitor import Monitor
from lowgpu.streams import CpuQueue, GpuQueue
from lowgpu_kernels import compile as lg_compile
from lowgpu_kernels import launch, moments, reset
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import Binary, CudaC, NumbaKernel, build
from lowgpu_kernels.device import cuda
from tests.test_monitor import SMALL_GPU, FakeNVML

H200 = launch.KNOWN["H200"]


def forget_compiled():
    for cached in (lg_compile._cuda_c, lg_compile._numba, lg_compile._numba_ltoir):
        cached.cache_clear()
    lg_compile._linked_ltoir.cache_clear()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWGPU_CACHE", str(tmp_path))
    forget_compiled()
    yield tmp_path
    forget_compiled()


def buffer_of(dtype, *shape):
    return Buffer(0x7F0000000000, shape, np.dtype(dtype))


def launches(env):
    """The kernels of resetting `env`, which link its functions."""
    floats, ints = (buffer_of(t, 5, len(n)) for t, n in (("f4", env.floats), ("i4", env.ints)))
    clock = buffer_of("u8", 1)
    with launch.recording(H200) as made:
        reset.cuda(floats, ints, None, clock, env, np.uint64(0), 0)
    return [recorded.kernel for recorded in made]


def doubling(x):
    x[0] = x[0] + x[0]


def halving(x):
    x[0] = x[0] * np.float32(0.5)


def code_of(kernel):
    """Machine code, without the count of compilations that numba puts into a name."""
    return re.sub(r"B\d+v\d+", "", lg_compile.disassemble(kernel.binary("sm_90a")))


def test_kernels_compiled_side_by_side_are_those_compiled_alone(empty_cache):
    numba = [NumbaKernel(f, ("float32[1]",), 32) for f in (doubling, halving)]
    kernels = [*launches(make("cartpole")), *numba]
    alone = [code_of(kernel) for kernel in kernels]
    for file in empty_cache.iterdir():
        file.unlink()
    forget_compiled()
    build(kernels, "sm_90a")
    assert len(list(empty_cache.iterdir())) == len(kernels)
    assert [code_of(kernel) for kernel in kernels] == alone


def test_a_file_is_compiled_once_however_many_of_its_kernels_are_launched(monkeypatch):
    asked = []
    monkeypatch.setattr(CudaC, "binary", lambda self, architecture: asked.append(self.entry))
    macros, linked = (("LG_A", 1),), ()
    build([CudaC("f", entry, macros, linked) for entry in ("a", "b", "a")], "sm_80")
    assert len(asked) == 1
    build([CudaC("f", "a", (("LG_A", value),), linked) for value in (1, 2)], "sm_80")
    assert len(asked) == 3


def test_functions_that_several_files_link_are_compiled_once(empty_cache, monkeypatch):
    compiled, compile_numba = [], lg_compile._compile_numba

    def counted(function, *rest, **options):
        compiled.append(function)
        return compile_numba(function, *rest, **options)

    monkeypatch.setattr(lg_compile, "_compile_numba", counted)
    monkeypatch.setattr(lg_compile, "link", lambda *_: Binary(b"", ()))
    (kernel,) = launches(make("cartpole"))
    twice = [
        CudaC(kernel.path, kernel.entry, (*kernel.macros, ("LG_X", k)), kernel.linked)
        for k in (1, 2)
    ]
    build(twice, "sm_90a")
    assert len(compiled) == len(kernel.linked) == len(set(compiled))


def test_numba_is_asked_by_one_thread_at_a_time(empty_cache, monkeypatch):
    inside, most, compiling = [], [], cuda.compile

    def watched(*arguments, **options):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.02)
        try:
            return compiling(*arguments, **options)
        finally:
            inside.pop()

    monkeypatch.setattr(cuda, "compile", watched)
    build([NumbaKernel(f, ("float32[1]",), 32) for f in (doubling, halving)], "sm_90a")
    assert most == [1, 1]


def test_a_kernel_that_does_not_compile_is_an_error(empty_cache):
    broken = CudaC("rollout/reset", "reset_kernel", (("LG_FLOATS", "nonsense"),))
    with pytest.raises(Exception, match="nonsense"):
        build([broken], "sm_90a")


class Device:
    """Stands for CuPy on a GPU whose stream is a thread that does one thing after the other."""

    def __init__(self):
        self.work, self.current = queue.Queue(), None
        self.cuda = SimpleNamespace(
            Event=lambda: Event(),
            Stream=lambda non_blocking: self,
            get_current_stream=lambda: self,
            get_elapsed_time=lambda start, end: 1e3 * (end.time - start.time),
        )
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (task := self.work.get()) is not None:
            task()

    def __enter__(self):
        self.current = self

    def __exit__(self, *error):
        self.current = None

    def launch_host_func(self, callback, argument):
        self.work.put(lambda: callback(argument))

    def synchronize(self):
        done = threading.Event()
        self.work.put(done.set)
        assert done.wait(10)


class Event:
    def __init__(self):
        self.reached = threading.Event()

    def record(self, stream):
        def reach():
            self.time = time.perf_counter()
            self.reached.set()

        stream.work.put(reach)

    def synchronize(self):
        assert self.reached.wait(10)


@pytest.fixture
def gpu(monkeypatch):
    device = Device()
    monkeypatch.setitem(sys.modules, "cupy", device)
    yield device
    device.work.put(None)


def test_the_time_of_work_on_a_gpu_holds_none_of_the_hosts_delays(gpu):
    def work():
        assert gpu.current is gpu
        for _ in range(3):
            time.sleep(0.1)  # the host, slow to queue
            gpu.work.put(lambda: time.sleep(0.01))

    assert 0.03 <= GpuQueue().seconds(work) < 0.25


def test_work_that_fails_lets_the_device_go_on(gpu):
    def failing():
        raise OSError("no")

    begun = time.monotonic()
    with pytest.raises(OSError, match="no"):
        GpuQueue().seconds(failing)
    gpu.synchronize()
    assert time.monotonic() - begun < streams.GATE_SECONDS / 2


def test_work_that_waits_for_the_device_itself_is_not_held_back_for_ever(gpu, monkeypatch):
    monkeypatch.setattr(streams, "GATE_SECONDS", 0.05)
    assert GpuQueue().seconds(gpu.synchronize) < 1


def test_the_time_of_work_on_a_cpu_is_that_of_the_wall():
    assert 0.05 <= CpuQueue().seconds(lambda: time.sleep(0.05)) < 1


def test_what_works_launch_is_compiled_before_any_of_it_is_launched(gpu, monkeypatch):
    built, done = [], []
    monkeypatch.setattr(launch, "device", lambda: H200)
    monkeypatch.setattr(
        streams, "build", lambda kernels, architecture: built.append((kernels, architecture))
    )

    def work(name):
        launch.launch(name, 1, 32, (), 0)
        done.append(name)

    GpuQueue().prepare(lambda: work("reset"), lambda: work("iterate"))
    assert built == [(["reset", "iterate"], "sm_90a")]
    assert done == ["reset", "iterate"]
    assert launch._recorder is None


def test_on_a_cpu_preparing_does_none_of_the_work():
    def work():
        raise AssertionError("was done")

    CpuQueue().prepare(work)


def modules_after(code):
    """Modules that a fresh Python has loaded after `code`."""
    print_all = "\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code + print_all],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_a_command_line_that_only_explains_itself_imports_nothing_heavy():
    loaded = modules_after("import lowgpu, lowgpu.__main__")
    assert not loaded & {"numpy", "numba", "cupy", "numba.cuda", "pynvml", "lowgpu_kernels"}


def test_training_imports_only_what_it_needs():
    loaded = modules_after("import lowgpu.runs")
    heavy = {
        "torch",
        "jax",
        "matplotlib",
        "polars",
        "pandas",
        "gymnasium",
        "cupy",
        "talib",
        "pynvml",
    }
    assert "lowgpu_kernels" in loaded
    assert not loaded & heavy


def test_training_imports_without_what_only_the_gpu_extra_has():
    absent = "ml_dtypes", "cupy", "cuda", "pynvml", "nvtx", "numba.cuda"
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import lowgpu.runs, lowgpu.policy"
    assert "lowgpu.policy" in modules_after(code)


BUILD = """
import sys, threading
from tests.test_startup import build, launches, make, statistics_launches
kernels = [*launches(make("cartpole")), *statistics_launches()]
running = True

def look():  # as inspect does, to find the module that something is of
    while running:
        [getattr(module, "__file__", None) for module in list(sys.modules.values())]

looking = threading.Thread(target=look)
looking.start()
try:
    build(kernels, "sm_90a")
finally:
    running = False
looking.join()
print(*(k.binary("sm_90a").kernel(k.entry).registers for k in kernels))
"""


def statistics_launches():
    with launch.recording(H200) as made:
        moments.cuda(buffer_of("f4", 1000), True, buffer_of("f4", 2), buffer_of("f4", 3, 1024), 0)
    return [recorded.kernel for recorded in made]


def test_kernels_are_built_beside_a_thread_that_looks_through_all_modules(tmp_path):
    env = {**os.environ, "LOWGPU_CACHE": str(tmp_path)}
    cold, warm = [
        subprocess.run(
            [sys.executable, "-c", BUILD], capture_output=True, text=True, check=True, env=env
        ).stdout.split()
        for _ in range(2)
    ]
    assert len(cold) == 3 and cold == warm


def test_a_command_loads_no_library_of_tables(tmp_path):
    """TA-Lib would, and then refuses to be imported where one is broken."""
    for name in ("pandas", "polars"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('was imported')")
    command = [sys.executable, "-m", "lowgpu", "profile", "--device", "cpu", "--rounds", "1"]
    for setting in ("envs=2", "rollout_steps=8", "minibatches=1", "hidden=[8]"):
        command += ["--set", setting]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    import_alone = [sys.executable, "-c", "import talib"]
    assert (
        "was imported"
        in subprocess.run(import_alone, capture_output=True, text=True, env=env).stderr
    )


class FakeDriver:
    """libcuda's three calls: each takes its time off Python's lock, and one may fail."""

    def __init__(self, failing=None):
        self.called, self.failing, self.let_go = [], failing, threading.Event()

    def __getattr__(self, name):
        def call(*arguments):
            assert self.let_go.wait(10)
            self.called.append(name)
            return 100 if name == self.failing else 0

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("failing", (None, *CALLS))
def test_the_gpu_is_begun_with_beside_python_and_the_first_error_ends_it(monkeypatch, failing):
    driver = FakeDriver(failing)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    thread = start.wake_gpu(None, elsewhere=False)
    assert driver.called == [] and thread.is_alive() and not thread.daemon
    driver.let_go.set()
    thread.join(10)
    assert driver.called == CALLS[: CALLS.index(failing) + 1 if failing else 3]


def test_the_gpu_is_left_alone_where_a_run_may_be_one_on_the_cpu(monkeypatch):
    def no_driver(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    begun = {
        (device, elsewhere): start.wake_gpu(device, elsewhere) is not None
        for device in (None, "auto", "cuda", "cpu", "tpu")
        for elsewhere in (False, True)
    }
    assert [call for call, begins in begun.items() if begins] == [
        *((None, False), ("auto", False), ("cuda", False), ("cuda", True))
    ]


def test_training_begins_with_the_gpu_unless_something_else_names_a_device(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        __main__, "wake_gpu", lambda device, elsewhere: seen.append(bool(elsewhere))
    )
    file, refused = tmp_path / "settings.toml", ("--set", "envs=none")
    file.write_text("")
    for more in ((), ("--config", str(file)), ("--set", " device=cpu"), ("--resume",)):
        CliRunner().invoke(__main__.app, ["train", *refused, *more])
    assert seen == [False, True, True, True]


@pytest.mark.parametrize("collects", (True, False))
def test_imports_are_not_searched_for_garbage_and_what_follows_is_as_before(collects):
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        gc.unfreeze()
        with pytest.raises(ImportError), start.importing():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_phases_share_no_time(monkeypatch):
    now, owner, phases = [100.0], SimpleNamespace(), startup.Phases(100.0)
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def passing(seconds, inner=lambda: None):
        def call():
            now[0] += seconds
            inner()
            return seconds

        return call

    owner.build = passing(5)
    phases.timed(owner, "build", "compile")
    owner.make = passing(2, lambda: owner.build())
    phases.timed(owner, "make", "allocation")
    now[0] += 1
    phases.imported()
    assert owner.make() == 2
    assert owner.build() == 5
    now[0] += 3
    assert phases.done() == {
        "imports": 1,
        "compile": 10,
        "allocation": 2,
        "first iteration and rest": 3,
        "total": 16,
    }


def test_a_start_is_measured_to_its_first_iteration_in_a_process_of_its_own(tmp_path):
    small = ("--device", "cpu", "--env", "cartpole", "--set", "hidden=[8]", "--set", "envs=2")
    # A warm start, where this machine has been tested on before.
    lg_compile.cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    (tmp_path / startup.CACHES["LOWGPU_CACHE"]).symlink_to(lg_compile.cache_folder().absolute())
    found = startup.started(small, tmp_path)
    assert next(iter(found)) == "imports" and found["imports"] > 0.05
    assert sum(found.values()) == pytest.approx(2 * found["total"])
    assert {"device", "data", "plan", "allocation"} <= found.keys()


def test_a_start_that_fails_is_an_error_with_its_words(tmp_path):
    with pytest.raises(RuntimeError, match="env must be one of"):
        startup.started(("--env", "pong"), tmp_path)


ENDLESS = (
    *("--device", "cpu", "--env", "cartpole", "--steps", "1000000000"),
    *("--set", "envs=2", "--set", "rollout_steps=8", "--set", "hidden=[8]"),
)


@pytest.mark.parametrize("env", ["market", "cartpole"])
@pytest.mark.parametrize("settings", [[], ["epochs=7"], ["envs=1", "minibatches=1"], ["epochs=1"]])
def test_a_run_to_watch_is_as_long_as_the_config_allows(env, settings):
    def run_of(steps):
        given = map(config.setting, settings)
        asked = {"env": env, "device": "cuda", "ppo": {"total_steps": steps}}
        return config.from_dict(config.merge(config.PRESETS[env, "cuda"], *given, asked))

    steps = busy.longest(env, settings)
    assert run_of(steps).ppo.iterations * run_of(steps).ppo.updates > 2**30
    with pytest.raises(config.ConfigError, match=r"below 2\^31 updates|total_steps must be in"):
        run_of(steps + 1)


def test_training_is_watched_once_it_trains_and_stopped_afterwards():
    nvml, started_at = FakeNVML(busy=[97]), time.monotonic()
    seen = busy.watch(ENDLESS, 0.5, Monitor(SMALL_GPU, 50, nvml))
    assert seen.utilization == seen.utilization_least == 97
    assert 0.2 < seen.seconds < 1.5 < time.monotonic() - started_at
    assert nvml.open == 0


def test_training_that_ends_or_cannot_be_watched_is_an_error():
    with pytest.raises(RuntimeError, match="ended with 2 before it trained"):
        busy.watch(("--env", "pong"), 1, Monitor(SMALL_GPU, 50, FakeNVML()))
    with pytest.raises(RuntimeError, match="cannot be watched: NVML does not know"):
        busy.watch(ENDLESS, 1, Monitor("GPU-unknown", 50, FakeNVML()))
    few = [part if part != "1000000000" else "16" for part in ENDLESS]
    with pytest.raises(RuntimeError, match="ended with 0 while watched"):
        busy.watch(few, 300, Monitor(SMALL_GPU, 50, FakeNVML()))


def test_a_start_that_takes_too_long_is_an_error(tmp_path):
    program = SimpleNamespace(poll=lambda: None)
    with pytest.raises(RuntimeError, match=r"no iteration in 0\.1 s"):
        busy.until_training(program, tmp_path / "metrics.jsonl", 0.1)
