"""Everything about the machine that a plan depends on, for people and for the plan.

Free memory is the CUDA runtime's. NVML informs: without it there are no clocks.
"""

import platform
from dataclasses import asdict, dataclass

from lowgpu.hardware import MIG, Hardware, choose, gpu_unusable, installed, too_old, visible
from lowgpu.monitor import handles

LIBRARIES = (
    "numpy",
    "numba",
    "safetensors",
    "cupy",
    "cuda-core",
    "numba-cuda",
    "TA-Lib",
    "matplotlib",
)
LEAST_CONTEXT = 2**24  # bytes; NVML's free memory moves by less while nothing is made


@dataclass(frozen=True)
class Gpu:
    """A GPU as the CUDA runtime numbers those that CUDA_VISIBLE_DEVICES leaves.

    Attributes:
        index: the runtime's number. NVML has another, so the UUID is what names the GPU.
        uuid: as NVML and CUDA_VISIBLE_DEVICES spell it; None without cuda-core.
        total_nbytes: its memory.
        mig: whether it is a slice of a GPU (multi-instance GPU).
        shared_per_block, shared_per_sm: bytes of shared memory a block and an SM can have.
        l2_nbytes: size of the L2 cache.
        why_not: why kernels cannot run on it; None where they can.
    """

    index: int
    name: str
    uuid: str | None
    capability: tuple
    sms: int
    total_nbytes: int
    mig: bool
    shared_per_block: int
    shared_per_sm: int
    l2_nbytes: int
    why_not: str | None


@dataclass(frozen=True)
class Board:
    """What NVML knows of a GPU; None where it does not say.

    Attributes:
        sm_clock_hz, memory_clock_hz: the most that the device runs at.
        bytes_per_second: of its memory, 2 transfers a clock on each wire of the bus; of a MIG
            slice, the eighths of it that the slice's memory is.
        free_nbytes: free memory, by every process.
        driver: the driver's version.
    """

    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    bytes_per_second: float | None = None
    free_nbytes: int | None = None
    driver: str | None = None


@dataclass(frozen=True)
class HardwareBudget:
    """Everything about the machine that a plan depends on.

    Attributes:
        chosen: the Hardware that is used.
        gpus: every GPU that the CUDA runtime sees, used or not.
        gpu: the one that is used; None on a CPU.
        board: what NVML knows of it.
        context_nbytes: what the CUDA context took of it, as NVML saw it come; None where it was
            there before, or NVML does not say.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        wsl: whether this is Linux within Windows.
        notes: what is unusual, in sentences.
    """

    chosen: Hardware
    gpus: tuple = ()
    gpu: Gpu | None = None
    board: Board = Board()
    context_nbytes: int | None = None
    visible: str | None = None
    wsl: bool = False
    notes: tuple = ()

    @classmethod
    def detect(cls, asked="auto", nvml=None):
        """Look at the machine. Makes a CUDA context where a GPU is used.

        Args:
            asked: as of `choose`.
            nvml: the NVML module; `pynvml` of the package nvidia-ml-py when not given.

        Raises:
            DeviceError: as `choose` does.
        """
        gpus = _gpus()
        current = gpus[_current()] if gpus else None
        used = asked != "cpu" and gpu_unusable() is None
        gpu = current if used else None
        # The context takes memory: NVML sees the GPU without it, the runtime only with it.
        board, why_not = _board(gpu, nvml) if used else (Board(), None)
        chosen = choose(asked)
        after = _board(gpu, nvml)[0].free_nbytes if used else None
        taken = 0 if None in (board.free_nbytes, after) else board.free_nbytes - after
        wsl = "microsoft" in platform.release().lower()
        return cls(
            chosen=chosen,
            gpus=gpus,
            gpu=gpu,
            board=board,
            context_nbytes=taken if taken > LEAST_CONTEXT else None,
            visible=visible(),
            wsl=wsl,
            notes=tuple(_notes(current, gpus, wsl and used, why_not)),
        )


def _notes(current, gpus, lent, no_nvml):
    """What people should know of the machine, a sentence each."""
    if no_nvml:
        yield f"clocks and bandwidth are not known: {no_nvml}"
    if current and current.mig:
        yield "the GPU is a MIG slice: its SMs and memory are counted, not the whole board's"
    if lent:
        yield (
            "Windows lends host memory where the GPU's is full, which is slow and no error: plans "
            "are held against free memory, and page-locked memory is limited"
        )
    for other in gpus:
        if other is current:
            continue
        if other.why_not:
            yield f"GPU {other.index} cannot be used: {other.why_not}"
        elif current.why_not:
            yield f"{other.name} can be used: set CUDA_VISIBLE_DEVICES={other.uuid or other.index}"


def _current():
    from cupy.cuda import runtime

    return runtime.getDevice()


def _gpus():
    """Every GPU that the CUDA runtime sees. Makes no CUDA context."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return ()
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        return ()
    return tuple(_gpu_at(index, runtime.getDeviceProperties(index)) for index in range(count))


def _gpu_at(index, facts):
    name = facts["name"].decode()
    mig = MIG in name
    return Gpu(
        index=index,
        name=name,
        uuid=_uuid(index, mig),
        capability=(facts["major"], facts["minor"]),
        sms=facts["multiProcessorCount"],
        total_nbytes=facts["totalGlobalMem"],
        mig=mig,
        shared_per_block=facts["sharedMemPerBlockOptin"],
        shared_per_sm=facts["sharedMemPerMultiprocessor"],
        l2_nbytes=facts["l2CacheSize"],
        why_not=too_old(facts),
    )


def _uuid(index, mig):
    try:
        from cuda.core import Device
    except ImportError:
        return None
    uuid = Device(index).uuid
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"{'MIG' if mig else 'GPU'}-{uuid}"


def _board(gpu, nvml):
    """The Board of a GPU, and why NVML does not know it, None where it does."""
    try:
        if nvml is None:
            import pynvml as nvml
        nvml.nvmlInit()
    except ImportError:
        return Board(), "nvidia-ml-py is not installed"
    except nvml.NVMLError as error:
        return Board(), f"NVML does not start: {error}"
    try:
        return _read(gpu, nvml, *handles(gpu.uuid, nvml)), None
    except nvml.NVMLError as error:
        return Board(), f"NVML does not know {gpu.uuid}: {error}"
    finally:
        nvml.nvmlShutdown()


def _read(gpu, nvml, handle, board):
    def read(function, *arguments):
        # A device that does not measure something says so at every call.
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError:
            return None

    own = read("nvmlDeviceGetMemoryInfo", handle)
    share = 1
    if gpu.mig:
        # Clocks and the bus are the board's; a slice has as many eighths of it as of its memory.
        whole = read("nvmlDeviceGetMemoryInfo", board)
        share = whole and max(round(8 * gpu.total_nbytes / whole.total), 1) / 8
    sm = read("nvmlDeviceGetMaxClockInfo", board, nvml.NVML_CLOCK_SM)
    memory = read("nvmlDeviceGetMaxClockInfo", board, nvml.NVML_CLOCK_MEM)
    wires = read("nvmlDeviceGetMemoryBusWidth", board)
    known = None not in (memory, wires, share)
    return Board(
        sm_clock_hz=None if sm is None else sm * 1e6,
        memory_clock_hz=None if memory is None else memory * 1e6,
        bytes_per_second=2e6 * memory * wires / 8 * share if known else None,
        free_nbytes=None if own is None else int(own.free),
        driver=read("nvmlSystemGetDriverVersion"),
    )


def report(machine):
    """What `lowgpu info` prints of a HardwareBudget, its driver, the libraries, and the choice."""
    chosen = machine.chosen
    return {
        "used": asdict(chosen),
        "gpu": "usable" if chosen.kind == "cuda" else f"not used: {chosen.reason}",
        "machine": {n: value for n, value in asdict(machine).items() if n != "chosen"},
        "driver": _driver(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {name: installed(name) for name in LIBRARIES},
    }


def _driver():
    """The newest CUDA version that the driver knows, "13.0"; None without a driver."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return None
    try:
        number = runtime.driverGetVersion()  # 0 without a driver
    except runtime.CUDARuntimeError:
        return None
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
