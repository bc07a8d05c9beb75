"""Launch configuration from the device's own figures, and the launch itself."""

import functools
import os
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import ARCHITECTURES, NumbaKernel

KB = 1024
WARP = 32


@dataclass(frozen=True)
class Device:
    """The figures of a GPU that a launch depends on. Memory in bytes."""

    name: str
    capability: tuple
    sms: int
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    l2_bytes: int
    registers_per_sm: int = 65536
    threads_per_block: int = 1024

    @property
    def architecture(self):
        """The compile target, such as "sm_90a". Raises RuntimeError below compute capability 8.0."""
        if self.capability < (8, 0):
            raise RuntimeError(
                f"{self.name} has compute capability {self.capability[0]}.{self.capability[1]}; "
                "the kernels need 8.0 (Ampere) or newer"
            )
        return ARCHITECTURES.get(self.capability, "sm_{}{}".format(*self.capability))


def _known(name, capability, sms, block, sm, threads, resident, l2_mb):
    return Device(name, capability, sms, block * KB, sm * KB, threads, resident, l2_mb * KB * KB)


# Vendor figures (CUDA C++ Programming Guide, table of technical specifications per compute
# capability, and the parts' datasheets), so that launches can be planned without the card.
KNOWN = {
    d.name: d
    for d in (
        _known("A100", (8, 0), 108, 163, 164, 2048, 32, 40),
        _known("RTX 3050 Ti", (8, 6), 20, 99, 100, 1536, 16, 2),
        _known("L4", (8, 9), 58, 99, 100, 1536, 24, 48),
        _known("L40S", (8, 9), 142, 99, 100, 1536, 24, 96),
        _known("H100", (9, 0), 132, 227, 228, 2048, 32, 50),
        _known("H200", (9, 0), 132, 227, 228, 2048, 32, 60),
    )
}


@functools.cache
def _device(index):
    from cupy.cuda import runtime

    facts = runtime.getDeviceProperties(index)
    return Device(
        name=facts["name"].decode(),
        capability=(facts["major"], facts["minor"]),
        sms=facts["multiProcessorCount"],
        shared_per_block=facts["sharedMemPerBlockOptin"],
        shared_per_sm=facts["sharedMemPerMultiprocessor"],
        threads_per_sm=facts["maxThreadsPerMultiProcessor"],
        blocks_per_sm=facts["maxBlocksPerMultiProcessor"],
        l2_bytes=facts["l2CacheSize"],
        registers_per_sm=facts["regsPerMultiprocessor"],
        threads_per_block=facts["maxThreadsPerBlock"],
    )


def device():
    """The GPU that launches go to: the current one, or the one a recording was opened for."""
    if _recorder is not None:
        return _recorder.device
    if simulated():
        return KNOWN["H100"]
    from cupy.cuda import runtime

    return _device(runtime.getDevice())


def simulated():
    """Whether Numba kernels run in its simulator, which NUMBA_ENABLE_CUDASIM=1 asks for."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


@dataclass(frozen=True)
class Occupancy:
    """How many blocks share an SM, what part of its threads they fill, and what runs out first."""

    blocks_per_sm: int
    fraction: float
    limit: str

    def __str__(self):
        return f"{self.blocks_per_sm} blocks an SM, {self.fraction:.0%}, limited by {self.limit}"


def occupancy(resources, threads, shared=0, on=None):
    """Occupancy of a kernel launched with `threads` a block and `shared` bytes of dynamic memory.

    Args:
        resources: the kernel's Resources.
        threads: threads in a block.
        shared: dynamic shared memory of a block, bytes.
        on: a Device; the current one when not given.

    Source: CUDA C++ Programming Guide, compute capabilities; registers are given to warps in units
    of 256 and shared memory to blocks in units of 128 bytes after 1 KB kept by the system.
    """
    on = on or device()
    warps = -(-threads // WARP)
    registers = -(-resources.registers * WARP // 256) * 256 * warps
    held = -(-(resources.shared + shared) // 128) * 128 + KB
    limits = {
        "threads": on.threads_per_sm // (warps * WARP),
        "blocks": on.blocks_per_sm,
        "registers": on.registers_per_sm // max(registers, 1),
        "shared memory": on.shared_per_sm // held,
    }
    limit = min(limits, key=limits.get)
    count = limits[limit]
    return Occupancy(count, count * warps * WARP / on.threads_per_sm, limit)


def fitting_threads(resources, wanted, on=None):
    """The largest block of whole warps, at most `wanted`, whose registers one SM can hold."""
    on = on or device()
    a_warp = -(-resources.registers * WARP // 256) * 256
    return min(wanted, on.threads_per_block, on.registers_per_sm // max(a_warp, 1) * WARP)


class Launchable:
    """A Numba kernel launched as numba spells it: `kernel[grid, block, stream, shared](*args)`.

    It is compiled once for each set of argument types, to a cubin that is kept on disk, and
    launched without numba's dispatcher.
    """

    def __init__(self, function, threads):
        functools.update_wrapper(self, function)
        self.function, self.threads = function, threads

    def __getitem__(self, configuration):
        grid, block, stream, shared = (*configuration, 0)[:4]
        return functools.partial(self._launch, _three(grid), _three(block), stream, shared)

    def _launch(self, grid, block, stream, shared, *args):
        if simulated():
            from lowgpu_kernels.device import cuda

            if 0 not in grid:
                cuda.jit(self.function)[grid, block](*args)
            return
        kernel = _typed(self.function, self.threads, tuple([_type_of(a) for a in args]))
        launch(kernel, grid, block, args, stream, shared)


def kernel(threads):
    """Make a Numba kernel of a Python function; `threads` is the largest block it is launched with."""
    return lambda function: Launchable(function, threads)


@functools.cache
def _typed(function, threads, types):
    return NumbaKernel(function, types, threads)


_ARRAY_TYPES = {}


def _type_of(value):
    if isinstance(value, (Buffer, np.ndarray)):
        key = value.dtype, len(value.shape)
        known = _ARRAY_TYPES.get(key)
        if known is None:
            known = _ARRAY_TYPES[key] = f"{key[0].name}[{key[1]}]"
        return known
    if isinstance(value, np.generic):
        return value.dtype.name
    raise AssertionError(f"a kernel scalar needs a width: {value!r}")


def launch(kernel, grid, block, args, stream, shared=0):
    """Queue one kernel. An empty grid is no launch.

    Args:
        kernel: a CudaC or a NumbaKernel.
        grid, block: three counts each, or one.
        args: Buffers, NumPy scalars, and None for an array that was not given (CUDA C only).
        stream: address of the stream.
        shared: dynamic shared memory a block, bytes.
    """
    grid, block = _three(grid), _three(block)
    if 0 in grid:
        return
    if _recorder is not None:
        _recorder.made.append(Made(kernel, grid, block, shared))
        return
    from cupy.cuda import runtime

    function = _loaded(kernel, runtime.getDevice(), shared)
    if isinstance(kernel, NumbaKernel):
        flat = []
        for a in args:
            if isinstance(a, Buffer):
                flat += _numba_array(a)
            else:
                flat.append(a)
    else:
        flat = [
            a.address if isinstance(a, Buffer) else np.uint64(0) if a is None else a for a in args
        ]
    function(grid, block, flat, shared, _stream(stream))


class _Stream:
    """The little of a stream that CuPy's launch reads."""

    __slots__ = ("ptr",)

    def __init__(self, ptr):
        self.ptr = ptr


@functools.lru_cache(maxsize=64)
def _stream(address):
    return _Stream(address)


def _numba_array(buffer):
    """A C-contiguous array as numba's kernels take it: two nulls, counts, address, shape, strides."""
    itemsize = buffer.dtype.itemsize
    strides, step = [], itemsize
    for size in reversed(buffer.shape):
        strides.append(step)
        step *= size
    return (0, 0, step // itemsize, itemsize, buffer.address, *buffer.shape, *reversed(strides))


@functools.cache
def _loaded(kernel, index, shared):
    """The function of a kernel on one device, allowed `shared` bytes of dynamic shared memory."""
    module, resources = _module(kernel, index)
    function = module.get_function(resources.entry)
    allowed = _device(index).shared_per_block
    if resources.shared + shared > allowed:
        raise ValueError(
            f"{resources.entry} needs {resources.shared + shared} B of shared memory a block; "
            f"{_device(index).name} has {allowed} B"
        )
    if shared > 48 * KB - resources.shared:
        from cupy_backends.cuda.api import driver

        driver.funcSetAttribute(
            function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared
        )
    return function


@functools.cache
def _module(kernel, index):
    from cupy.cuda import function

    binary = kernel.binary(_device(index).architecture)
    module = function.Module()
    module.load(binary.cubin)
    return module, binary.kernel(kernel.entry)


def _three(count):
    if isinstance(count, tuple):
        return (*count, 1, 1)[:3]
    return (int(count), 1, 1)


@dataclass(frozen=True)
class Made:
    """A launch that was recorded instead of made."""

    kernel: object
    grid: tuple
    block: tuple
    shared: int

    def resources(self, on):
        return self.kernel.binary(on.architecture).kernel(self.kernel.entry)


@dataclass
class _Recorder:
    device: Device
    made: list


_recorder = None


@contextmanager
def recording(on):
    """Within this context launches are recorded as `Made`, for the Device `on`; no GPU is needed."""
    global _recorder
    before, _recorder = _recorder, _Recorder(on, [])
    try:
        yield _recorder.made
    finally:
        _recorder = before
