"""What the machine is, with a GPU, without one, and without anything to ask."""

import builtins
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lowgpu import hardware
from lowgpu.hardware import DeviceError, choose


class NoDevice(Exception):
    """Stands for CuPy's CUDARuntimeError."""


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA runtime with one GPU, whose facts the test may change."""
    facts = {"name": b"Test GPU", "major": 9, "minor": 0, "multiProcessorCount": 132}
    runtime = SimpleNamespace(
        CUDARuntimeError=NoDevice,
        facts=facts,
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        getDeviceProperties=lambda index: facts,
        memGetInfo=lambda: (80_000_000_000, 85_000_000_000),
        driverGetVersion=lambda: 13000,
    )
    cuda = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(hardware, "_version", lambda name: "1.0")
    return runtime


@pytest.fixture
def without(monkeypatch):
    """Make modules impossible to import: without("cupy")."""
    imported = builtins.__import__

    def forbid(*names):
        def fake(name, *args, **kwargs):
            if name.split(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
            return imported(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", fake)

    return forbid


def test_a_gpu_is_used_when_there_is_one(gpu):
    chosen = choose("auto")
    assert (chosen.kind, chosen.name, chosen.sms) == ("cuda", "Test GPU", 132)
    assert (chosen.free_nbytes, chosen.total_nbytes) == (80_000_000_000, 85_000_000_000)
    assert choose("cuda").reason == "asked for"
    assert choose("cpu").kind == "cpu"


def test_a_gpu_is_used_without_nvml(gpu, without):
    without("pynvml")
    assert choose("auto").kind == "cuda"


def no_gpu(runtime):
    runtime.getDeviceCount = lambda: 0


def no_driver(runtime):
    def fail():
        raise NoDevice("cudaErrorInsufficientDriver")

    runtime.getDeviceCount = fail


def old_gpu(runtime):
    runtime.facts.update(major=7, minor=5)


@pytest.mark.parametrize(
    "fault, words",
    [
        (no_gpu, "finds no GPU"),
        (no_driver, "cudaErrorInsufficientDriver"),
        (old_gpu, "Test GPU has compute capability 7.5, and 8.0 is needed"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_never_fallen_back_from_in_silence(gpu, fault, words):
    fault(gpu)
    chosen = choose("auto")
    assert chosen.kind == "cpu"
    assert words in chosen.reason
    with pytest.raises(DeviceError, match="cuda was asked for") as refused:
        choose("cuda")
    assert words in str(refused.value)


def test_a_missing_compiler_is_named(gpu, monkeypatch):
    monkeypatch.setattr(hardware, "_version", lambda name: None)
    with pytest.raises(DeviceError, match="without cuda-core and numba-cuda"):
        choose("cuda")


def test_a_machine_without_cupy_is_a_cpu(without):
    without("cupy", "pynvml")
    assert choose("auto").kind == "cpu"
    assert choose("auto").reason == "CuPy is not installed"
    assert hardware.report()["driver"] is None
    with pytest.raises(DeviceError, match="CuPy is not installed"):
        choose("cuda")


def test_another_word_is_refused():
    with pytest.raises(DeviceError, match="auto, cpu or cuda, got 'tpu'"):
        choose("tpu")


def test_the_report_is_json_and_says_why(gpu):
    report = json.loads(json.dumps(hardware.report()))
    assert report["used"]["kind"] == "cuda"
    assert report["used"]["reason"]
    assert report["driver"] == "13.0"


IMPORTED = """
import sys, time
start = time.perf_counter()
import lowgpu
took = time.perf_counter() - start
loaded = [m for m in ("cupy", "numba", "pynvml", "torch", "jax", "matplotlib") if m in sys.modules]
assert not loaded, loaded
assert took < 1, took
"""

COMMAND = """
import sys
import lowgpu.__main__
loaded = [m for m in ("numpy", "cupy", "numba") if m in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize("code", [IMPORTED, COMMAND])
def test_importing_takes_no_time_and_loads_no_heavy_library(code):
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


CONTEXT = """
import sys
import lowgpu, lowgpu_kernels
from lowgpu import hardware
why_not = hardware.gpu_unusable()
if why_not is None:
    from cuda.bindings import driver
    _, context = driver.cuCtxGetCurrent()
    assert int(context) == 0, "importing made a CUDA context"
"""


@pytest.mark.gpu
def test_importing_makes_no_cuda_context():
    done = subprocess.run([sys.executable, "-c", CONTEXT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
