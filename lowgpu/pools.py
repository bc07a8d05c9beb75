"""Memory: every buffer is declared, counted, and cut from one allocation before the first step."""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

# What an allocation's failure is called by NumPy's and CuPy's MemoryError, the runtime, the driver.
OUT_OF_MEMORY = "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"
ALIGNMENT = 256  # bytes; what cudaMalloc gives, and more than any vector load needs
SHARE = 0.9  # of free memory that a plan may take: kernels, graphs and the driver need some


class MemoryPlanError(ValueError):
    """A plan that does not fit: one sentence with both numbers and what to shrink."""


class OutOfMemory(MemoryPlanError):
    """Memory that ran out although the plan fitted: one sentence, and the plan.

    Attributes:
        plan: the Plan of what was to be allocated.
    """

    def __init__(self, message, plan):
        super().__init__(message)
        self.plan = plan


@dataclass(frozen=True)
class Declared:
    """One buffer: its shape, its element type, what it holds, and the setting that makes it smaller."""

    shape: tuple
    dtype: np.dtype
    meaning: str
    shrink: str = ""

    @property
    def nbytes(self):
        """Bytes it takes, rounded up to the alignment."""
        exact = int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize
        return -(-exact // ALIGNMENT) * ALIGNMENT


class Plan:
    """The bytes of a set of declared buffers, known before any of them exists.

    Args:
        declared: {name: Declared}.
    """

    def __init__(self, declared):
        self.declared = dict(declared)
        self.offsets, self.nbytes = {}, 0
        for name, buffer in self.declared.items():
            self.offsets[name] = self.nbytes
            self.nbytes += buffer.nbytes

    def __str__(self):
        rows = sorted(self.declared.items(), key=lambda item: -item[1].nbytes)
        lines = [
            f"{n:24} {shown(b.nbytes):>10}  {np.dtype(b.dtype).name}{list(b.shape)}  {b.meaning}"
            for n, b in rows
        ]
        return "\n".join([*lines, f"{'total':24} {shown(self.nbytes):>10}"])

    def views(self, memory):
        """Arrays by name in memory that somebody else owns.

        Args:
            memory: uint8 array on the host, of at least `nbytes`.
        """
        return {
            name: np.ndarray(b.shape, b.dtype, buffer=memory.data, offset=self.offsets[name])
            for name, b in self.declared.items()
        }

    def check(self, free_nbytes, place, beside_nbytes=0):
        """Refuse a plan that takes more than 90 % of what is free.

        Args:
            free_nbytes: free memory in bytes, or None where it is not known.
            place: the device's name, for the message.
            beside_nbytes: what is taken beside the buffers.

        Raises:
            MemoryPlanError: with what is over and the setting whose buffers take the most.
        """
        needed = self.nbytes + beside_nbytes
        if free_nbytes is None or needed <= SHARE * free_nbytes:
            return
        beside = f" and {shown(beside_nbytes)} beside them" if beside_nbytes else ""
        raise MemoryPlanError(
            f"the buffers need {shown(self.nbytes)}{beside} and {shown(SHARE * free_nbytes)} may "
            f"be used on {place} (90 % of what is free); {self.remedy()}"
            f"{shown(needed - SHARE * free_nbytes)} are over budget"
        )

    def remedy(self):
        """The setting whose buffers take the most, as the start of a sentence; "" without one."""
        by_setting = {}
        for buffer in self.declared.values():
            if buffer.shrink:
                by_setting[buffer.shrink] = by_setting.get(buffer.shrink, 0) + buffer.nbytes
        if not by_setting:
            return ""
        largest = max(by_setting, key=by_setting.get)
        return f"give {largest}: {shown(by_setting[largest])} depend on it, "


@contextmanager
def one_error(plan, place):
    """Within this context memory that runs out, whoever asks for it, is an OutOfMemory.

    Args:
        plan: the Plan of what is allocated within.
        place: the device's name, for the message.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not _is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"memory ran out on {place} beside {shown(plan.nbytes)} of buffers; {plan.remedy()}"
            f"or end what else uses it ({error})",
            plan,
        ) from None


def _is_out_of_memory(error):
    return isinstance(error, MemoryError) or any(name in str(error) for name in OUT_OF_MEMORY)


def shown(nbytes):
    """Bytes as people read them, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def allocate(plan, kind):
    """Allocate a plan: zeroed arrays by name, all in one piece of memory.

    Args:
        plan: a Plan.
        kind: "cpu" for NumPy arrays, "cuda" for CuPy arrays on the current device.

    Returns:
        A namespace with an array for each declared name, and `slab`, the memory they lie in.

    Raises:
        OutOfMemory: the memory is not to be had in one piece.
    """
    make = _on_gpu if kind == "cuda" else _on_cpu
    with one_error(plan, "the GPU" if kind == "cuda" else "the CPU"):
        return SimpleNamespace(**make(plan))


def _on_cpu(plan):
    slab = np.zeros(plan.nbytes + ALIGNMENT, np.uint8)
    start = -slab.ctypes.data % ALIGNMENT
    slab = slab[start : start + plan.nbytes]
    return {"slab": slab, **plan.views(slab)}


def _on_gpu(plan):
    import cupy

    # Straight from cudaMalloc: CuPy's pool would round up and keep what it once had.
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(plan.nbytes, 1)), 0)
    memory.memset(0, plan.nbytes)
    slab = cupy.ndarray((plan.nbytes,), np.uint8, memptr=memory)
    arrays = {
        name: cupy.ndarray(b.shape, b.dtype, memptr=memory + plan.offsets[name])
        for name, b in plan.declared.items()
    }
    return {"slab": slab, **arrays}


def staging(shape, dtype, kind):
    """A zeroed NumPy array that a GPU can copy to without the CPU's help, in page-locked memory.

    Where the system refuses page-locked memory, as WSL does beyond a limit, it is ordinary memory
    and a warning says so; copies are then slower and the numbers the same.

    Args:
        shape, dtype: of the array.
        kind: "cuda"; for "cpu" it is ordinary memory.
    """
    array = page_locked(shape, dtype) if kind == "cuda" else None
    return np.zeros(shape, dtype) if array is None else array


def page_locked(shape, dtype):
    """A zeroed NumPy array in page-locked memory; None where there is none, with a warning."""
    import cupy

    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return None
    try:
        memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
        warnings.warn(
            f"no page-locked memory ({error}): copies to and from the GPU are slower", stacklevel=3
        )
        return None
    array = np.frombuffer(memory, dtype, count).reshape(shape)
    array[...] = 0
    return array
