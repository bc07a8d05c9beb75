"""Launch configuration from the device's own figures, and the launch itself."""

import ctypes
import functools
import os
import struct
import threading
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
        self.typed = {}  # kernels by the types of their arguments

    def __getitem__(self, configuration):
        grid, block, stream, shared = (*configuration, 0)[:4]
        return functools.partial(self._launch, _three(grid), _three(block), stream, shared)

    def _launch(self, grid, block, stream, shared, *args):
        if simulated():
            from lowgpu_kernels.device import cuda

            if 0 not in grid:
                cuda.jit(self.function)[grid, block](*args)
            return
        key = tuple(
            [(a.dtype.num, len(a.shape)) if type(a) is Buffer else a.dtype.num for a in args]
        )
        kernel = self.typed.get(key)
        if kernel is None:
            types = tuple([_type_of(a) for a in args])
            kernel = self.typed[key] = NumbaKernel(self.function, types, self.threads)
        launch(kernel, grid, block, args, stream, shared)


def kernel(threads):
    """Make a Numba kernel of a Python function; `threads` is the largest block it is launched with."""
    return lambda function: Launchable(function, threads)


def _type_of(value):
    if isinstance(value, Buffer):
        return f"{value.dtype.name}[{len(value.shape)}]"
    assert isinstance(value, np.generic), f"a kernel scalar needs a width: {value!r}"
    return value.dtype.name


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
    index = _current_device()
    loaded = _LOADED.get((id(kernel), index, shared))
    if loaded is None:
        loaded = _LOADED[id(kernel), index, shared] = _Loaded(kernel, index, shared)
    loaded(grid, block, args, stream)


def _current_device():
    from cupy.cuda import runtime

    return runtime.getDevice()


@functools.lru_cache(maxsize=4096)
def _numba_shape(shape, itemsize):
    """What numba's kernels are told of a C-contiguous array beside its address."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return step // itemsize, (*shape, *reversed(strides))


_LOADED = {}  # _Loaded by kernel, device and shared memory; each holds its kernel, so ids stay good


class _Loaded:
    """A kernel on one device, allowed its dynamic shared memory, and room to lay its arguments out.

    The driver copies the arguments during the call, so one buffer serves every launch of a kernel;
    a lock keeps two threads from laying out at once.
    """

    def __init__(self, kernel, index, shared):
        from cupy.cuda import function
        from cupy_backends.cuda.api import driver

        on, binary = _device(index), kernel.binary(_device(index).architecture)
        resources = binary.kernel(kernel.entry)
        if resources.shared + shared > on.shared_per_block:
            raise ValueError(
                f"{resources.entry} needs {resources.shared + shared} B of shared memory a block; "
                f"{on.name} has {on.shared_per_block} B"
            )
        self.kernel, self.shared, self.numba = kernel, shared, isinstance(kernel, NumbaKernel)
        self.module = function.Module()
        self.module.load(binary.cubin)
        self.address = self.module.get_function(resources.entry).ptr
        if resources.shared + shared > 48 * KB:
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(self.address, attribute, shared)
        self.driver_launch, self.lock, self.layout = driver.launchKernel, threading.Lock(), None

    def __call__(self, grid, block, args, stream):
        values = []
        for a in args:
            if type(a) is not Buffer:
                values.append(0 if a is None else a)
            elif self.numba:
                size, tail = _numba_shape(a.shape, a.dtype.itemsize)
                values += (0, 0, size, a.dtype.itemsize, a.address, *tail)
            else:
                values.append(a.address)
        with self.lock:
            if self.layout is None:
                self._lay_out(values)
            self.layout.pack_into(self.buffer, 0, *values)
            self.driver_launch(
                self.address, *grid, *block, self.shared, stream, self.pointers_address, 0
            )

    def _lay_out(self, values):
        """Fix the C type and place of each argument, from the first launch's values."""
        codes = [v.dtype.char if isinstance(v, np.generic) else "q" for v in values]
        self.layout = struct.Struct("@" + "".join(codes))
        self.buffer = ctypes.create_string_buffer(self.layout.size)
        base, offset, places = ctypes.addressof(self.buffer), 0, []
        for code in codes:
            size = struct.calcsize(code)
            offset = -(-offset // size) * size
            places.append(base + offset)
            offset += size
        self.pointers = (ctypes.c_void_p * len(places))(*places)
        self.pointers_address = ctypes.addressof(self.pointers)


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
