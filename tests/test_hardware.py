"""What the machine is, with a GPU, without one, and without anything to ask."""

import builtins
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lowgpu import hardware
from lowgpu.hardware import DeviceError, choose
from lowgpu.machine import HardwareBudget, report
from tests.cards import BY_NAME, CARDS, CONTEXT_NBYTES, Machine, NVMLFailure, uuid_of


class NoDevice(Exception):
    """Stands for CuPy's CUDARuntimeError."""


@pytest.fixture(autouse=True)
def every_gpu_is_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


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
    monkeypatch.setattr(hardware, "installed", lambda name: "1.0")
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
    monkeypatch.setattr(hardware, "installed", lambda name: None)
    with pytest.raises(DeviceError, match="without cuda-core and numba-cuda"):
        choose("cuda")


def test_a_machine_without_cupy_is_a_cpu(without):
    without("cupy", "pynvml")
    assert choose("auto").kind == "cpu"
    assert choose("auto").reason == "CuPy is not installed"
    machine = HardwareBudget.detect()
    assert machine.gpus == () and machine.gpu is None
    assert report(machine)["driver"] is None
    with pytest.raises(DeviceError, match="CuPy is not installed"):
        choose("cuda")


def test_another_word_is_refused():
    with pytest.raises(DeviceError, match="auto, cpu or cuda, got 'tpu'"):
        choose("tpu")


def test_the_report_is_json_and_says_why(monkeypatch):
    Machine(BY_NAME["H200"]).install(monkeypatch)
    found = json.loads(json.dumps(report(HardwareBudget.detect())))
    assert found["used"]["kind"] == "cuda"
    assert found["used"]["reason"]
    assert found["driver"] == "13.0"
    assert found["machine"]["gpu"]["sms"] == 132


@pytest.mark.parametrize("card", [c for c in CARDS if c.capability >= (8, 0)], ids=lambda c: c.name)
def test_a_card_is_known_by_its_figures(monkeypatch, card):
    machine = Machine(card).install(monkeypatch)
    found = HardwareBudget.detect()
    gpu, board = found.gpu, found.board
    assert gpu.name == f"NVIDIA {card.name}" and gpu.uuid == f"GPU-{uuid_of(0)}"
    assert (gpu.capability, gpu.sms, gpu.mig) == (card.capability, card.sms, False)
    assert (gpu.shared_per_block, gpu.l2_nbytes) == (
        card.device.shared_per_block,
        card.l2_mb * 2**20,
    )
    assert found.chosen.total_nbytes == gpu.total_nbytes == card.total_nbytes
    assert found.chosen.free_nbytes == card.total_nbytes - CONTEXT_NBYTES
    # Makers round: 4.8 TB/s are sold where the clocks give 4.92.
    assert board.bytes_per_second == pytest.approx(card.gb_per_second * 1e9, rel=0.025)
    assert (board.sm_clock_hz, board.memory_clock_hz) == (1980e6, card.memory_mhz * 1e6)
    assert board.driver == "580.1"
    assert found.notes == () and not found.wsl and found.visible is None
    assert machine.opened == 0 and machine.most_open == 1


@pytest.mark.parametrize("visible", ["1", "1,0", f"GPU-{uuid_of(1)}"])
def test_the_visible_gpu_is_meant_whatever_nvml_numbers_first(monkeypatch, visible):
    Machine(BY_NAME["RTX 4060"], BY_NAME["H100"]).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = HardwareBudget.detect()
    assert found.chosen.total_nbytes == BY_NAME["H100"].total_nbytes
    assert (found.gpu.index, found.gpu.uuid) == (0, f"GPU-{uuid_of(1)}")
    assert found.board.memory_clock_hz == 2619e6
    assert len(found.gpus) == visible.count(",") + 1
    assert found.visible == visible
    assert found.notes == ()  # another GPU that could be used too is no news


def test_a_machine_whose_gpus_are_hidden_says_so(monkeypatch):
    Machine(BY_NAME["H100"]).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = HardwareBudget.detect()
    assert found.chosen.kind == "cpu" and found.gpus == ()
    assert found.chosen.reason == "the CUDA runtime finds no GPU; CUDA_VISIBLE_DEVICES is ''"


def test_what_a_context_takes_is_seen_once(monkeypatch):
    Machine(BY_NAME["L4"]).install(monkeypatch)
    assert HardwareBudget.detect().context_nbytes == CONTEXT_NBYTES
    assert HardwareBudget.detect().context_nbytes is None  # it was there before


def test_a_card_that_is_too_old_is_refused_and_the_other_is_named(monkeypatch):
    Machine(BY_NAME["Tesla T4"], BY_NAME["L4"]).install(monkeypatch)
    found = HardwareBudget.detect()
    assert found.chosen.kind == "cpu" and found.gpu is None
    assert "NVIDIA Tesla T4 has compute capability 7.5, and 8.0 is needed" in found.chosen.reason
    assert found.notes == (f"NVIDIA L4 can be used: set CUDA_VISIBLE_DEVICES=GPU-{uuid_of(1)}",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    found = HardwareBudget.detect()
    assert found.gpu.name == "NVIDIA L4"
    assert found.notes == (
        "GPU 1 cannot be used: NVIDIA Tesla T4 has compute capability 7.5, and 8.0 is needed",
    )
    assert HardwareBudget.detect("cpu").notes == found.notes


@pytest.mark.parametrize("board_uuid", [False, True])
@pytest.mark.parametrize("eighths", [1, 4])
def test_a_mig_slice_has_its_share_of_the_bandwidth(monkeypatch, eighths, board_uuid):
    card = BY_NAME["A100 40 GB"]
    machine = Machine((card, eighths), board_uuid=board_uuid).install(monkeypatch)
    found = HardwareBudget.detect()
    assert found.gpu.mig and found.gpu.uuid.startswith("MIG-")
    assert found.chosen.total_nbytes == card.total_nbytes * eighths // 8
    assert found.board.bytes_per_second == 2 * 1215e6 * 640 * eighths / 8
    assert "MIG slice" in found.notes[0]
    assert machine.opened == 0


def test_without_nvml_the_gpu_is_used_and_its_clocks_are_not_known(monkeypatch, without):
    machine = Machine(BY_NAME["H100"]).install(monkeypatch)

    def fail():
        raise NVMLFailure("NVML Shared Library Not Found")

    machine.nvmlInit = fail
    found = HardwareBudget.detect()
    assert found.chosen.kind == "cuda" and found.board.sm_clock_hz is None
    assert "NVML does not start: NVML Shared Library Not Found" in found.notes[0]
    without("pynvml")
    assert "nvidia-ml-py is not installed" in HardwareBudget.detect().notes[0]
    assert HardwareBudget.detect().context_nbytes is None


def test_a_gpu_that_nvml_does_not_know_is_used(monkeypatch):
    machine = Machine(BY_NAME["H100"]).install(monkeypatch)

    def fail(uuid):
        raise NVMLFailure("Not Found")

    machine.nvmlDeviceGetHandleByUUID = fail
    found = HardwareBudget.detect()
    assert found.chosen.kind == "cuda"
    assert f"NVML does not know GPU-{uuid_of(0)}: Not Found" in found.notes[0]
    assert machine.opened == 0


FIGURES = {
    "nvmlDeviceGetMemoryInfo": "free_nbytes",
    "nvmlDeviceGetMaxClockInfo": "sm_clock_hz",
    "nvmlDeviceGetMemoryBusWidth": "bytes_per_second",
}


@pytest.mark.parametrize("missing", FIGURES)
def test_a_figure_that_nvml_does_not_have_is_none_and_the_others_are_there(monkeypatch, missing):
    Machine(BY_NAME["H100"], fails=[missing]).install(monkeypatch)
    board = HardwareBudget.detect().board
    assert getattr(board, FIGURES[missing]) is None
    assert board.driver == "580.1"
    others = {*FIGURES.values()} - {FIGURES[missing]}
    if missing == "nvmlDeviceGetMaxClockInfo":
        others -= {"bytes_per_second"}
    assert all(getattr(board, name) for name in others)


def test_linux_in_windows_is_said(monkeypatch):
    Machine(BY_NAME["RTX 4090"]).install(monkeypatch)
    monkeypatch.setattr("platform.release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    found = HardwareBudget.detect()
    assert found.wsl and "lends host memory" in found.notes[0]
    assert HardwareBudget.detect("cpu").notes == ()


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


FORK = """
import os
import lowgpu, lowgpu_kernels, lowgpu.__main__, lowgpu.runs
child = os.fork()
if not child:
    from lowgpu.config import PPOConfig
    from lowgpu.envs import make
    from lowgpu.ppo import PPO
    # A child can use CUDA only where its parent had not begun to.
    trainer = PPO(PPOConfig(total_steps=1000, hidden=(8,)), make("cartpole"), kind="cuda")
    trainer.advance()
    os._exit(0 if trainer.drain().iteration == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.gpu
def test_a_process_forked_after_importing_can_use_the_gpu():
    """Case S7."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_importing_makes_no_cuda_context():
    done = subprocess.run([sys.executable, "-c", CONTEXT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
