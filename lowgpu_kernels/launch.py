"""Launch configuration from the device's own figures, and the launch itself."""

import functools
import os
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lowgpu_kernels import overlap
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import ARCHITECTURES, NumbaKernel
from lowgpu_kernels.packing import Packing

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
    if SIMULATED:
        return KNOWN["H100"]
    from cupy.cuda import runtime

    return _device(runtime.getDevice())


# Whether Numba kernels run in its simulator; numba reads the variable once, on import, as we do.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


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
        self.plans = {}  # how arguments lie, by their shapes, shared memory and device

    def __getitem__(self, configuration):
        grid, block, stream, shared = (*configuration, 0)[:4]
        return functools.partial(self._launch, _three(grid), _three(block), stream, shared)

    def _launch(self, grid, block, stream, shared, *args):
        if SIMULATED:
            from lowgpu_kernels.device import cuda

            if 0 not in grid:
                cuda.jit(self.function)[grid, block](*args)
            return
        if 0 in grid:
            return
        # A Buffer from its second field on is its shape and element type.
        key = tuple([a[1:] if type(a) is Buffer else type(a) for a in args])
        if _recorder is not None:
            _recorder.made.append(Made(self._typed(args), grid, block, shared, args))
            return
        place = key, shared, _current_device()
        plan = self.plans.get(place)
        if plan is None:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            loaded = _loaded(self._typed(args), place[-1], shared)
            plan = self.plans[place] = _Plan(loaded, args, numba=True)
        plan(grid, block, args, stream)

    def _typed(self, args):
        return _numba_kernel(self.function, tuple(map(_type_of, args)), self.threads)


def kernel(threads):
    """Make a Numba kernel of a Python function; `threads` is the largest block it is launched with."""
    return lambda function: Launchable(function, threads)


def _type_of(value):
    if isinstance(value, Buffer):
        return f"{value.dtype.name}[{len(value.shape)}]"
    assert isinstance(value, np.generic), f"a kernel scalar needs a width: {value!r}"
    return value.dtype.name


@functools.cache
def _numba_kernel(function, types, threads):
    return NumbaKernel(function, types, threads)


def launch(kernel, grid, block, args, stream, shared=0, cooperative=False, early=None):
    """Queue one CUDA C kernel. An empty grid is no launch.

    Args:
        kernel: what `cuda_c` gave.
        grid, block: three counts each, or one.
        args: Buffers, NumPy scalars, TensorMaps, and None for an array that was not given.
        stream: address of the stream.
        shared: dynamic shared memory a block, bytes.
        cooperative: whether all blocks must be on the GPU at once, because they wait for each other;
            the driver refuses a grid that is too large for that.
        early: of a kernel made for overlap.py, the one of `args` that it reads before it waits for the
            launch in front; None for any other kernel.
    """
    grid, block = _three(grid), _three(block)
    if 0 in grid:
        return
    if _recorder is not None:
        _recorder.made.append(Made(kernel, grid, block, shared, args))
        return
    place = id(kernel), shared, _current_device()
    plan = _PLANS.get(place)
    if plan is None:
        loaded = _loaded(kernel, place[-1], shared)
        plan = _PLANS[place] = _Plan(loaded, args, numba=False, cooperative=cooperative)
    if early is not None and overlap.capturing(stream):
        overlap.queue(plan, grid, block, args, stream, early)
    else:
        plan(grid, block, args, stream)


def from_the_wait():
    """`early` of a kernel that waits for the launch in front before it reads anything at all."""
    return overlap.NOTHING if device().capability >= overlap.OVERLAPS else None


def clear(buffer, stream):
    """Queue the writing of zeros over a Buffer."""
    if _recorder is not None:
        return
    from cupy.cuda import runtime

    runtime.memsetAsync(buffer.address, 0, buffer.nbytes, stream)


def _current_device():
    global _current_device
    from cupy.cuda.runtime import getDevice

    _current_device = getDevice  # an import statement a launch costs more than asking
    return getDevice()


_PLANS = {}  # _Plan by kernel, shared memory and device; each holds its kernel, so ids stay good
MOST_PLANS = 256  # shapes of one Numba kernel whose argument layout is kept


@dataclass(frozen=True)
class _Loaded:
    """A kernel on one device, allowed its dynamic shared memory."""

    kernel: object
    module: object
    address: int
    shared: int


@functools.cache
def _loaded(kernel, index, shared):
    from cupy.cuda import function
    from cupy_backends.cuda.api import driver

    on = _device(index)
    binary = kernel.binary(on.architecture)
    resources = binary.kernel(kernel.entry)
    if resources.shared + shared > on.shared_per_block:
        raise ValueError(
            f"{resources.entry} needs {resources.shared + shared} B of shared memory a block; "
            f"{on.name} has {on.shared_per_block} B"
        )
    module = function.Module()
    module.load(binary.cubin)
    address = module.get_function(resources.entry).ptr
    if resources.shared + shared > 48 * KB:
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(address, attribute, shared)
    return _Loaded(kernel, module, address, shared)


class _Plan:
    """A kernel on one device, and where the arguments of its launches lie."""

    def __init__(self, loaded, args, numba, cooperative=False):
        from cupy_backends.cuda.api import driver

        self.loaded, self.packing, self.cooperative = loaded, Packing(args, numba), cooperative
        self.driver_launch = driver.launchKernel
        # A tensor map that came in one buffer is an illegal instruction (H200, driver 580).
        self.handed = (self.packing.pointers, 0) if self.packing.maps else (0, self.packing.extra)
        if cooperative:  # that call has no list of extra values
            self.driver_launch = driver.launchCooperativeKernel
            self.handed = (self.packing.pointers,)

    def __call__(self, grid, block, args, stream):
        packing, loaded = self.packing, self.loaded
        with packing.lock:
            packing.pack(args)
            self.driver_launch(loaded.address, *grid, *block, loaded.shared, stream, *self.handed)


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
    args: tuple

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
