"""Launches of a captured graph that begin while the launch in front of them still runs.

A kernel made for it (include/grid_order.cuh) copies one array, its early one, to shared memory, waits
for the grid in front, lets the next grid begin, and only then touches anything else. A launch begins
early when all three hold:

- in the graph being captured its only dependency is the node of one launch, F;
- F was queued here, so it is of such a kernel;
- nothing that F was given, but for its own early array, shares memory with this launch's early array.

That is right by construction. F lets its follower begin after its own wait, so all in front of F has
ended and is seen: only F can still write, and F is not given what is read early. Every thread waits, so
a launch ends after F has, and what follows in full order is behind both. Of a kernel of another kind
nothing is known; even one that lets no follower begin would not do, because its writes are seen for
certain only after a wait.

Outside a capture a launch takes longer to queue than to run, and nothing is gained.

Source: CUDA Programming Guide, "Programmatic Dependent Launch"; PTX ISA, griddepcontrol.
"""

import ctypes
import functools
import sys
from typing import NamedTuple

import numpy as np

from lowgpu_kernels.arrays import Buffer

OVERLAPS = (9, 0)  # the compute capability from which launches overlap
NOTHING = Buffer(0, (0,), np.dtype("u1"))  # what a kernel reads early that waits at its beginning
LEGACY_STREAMS = 0, 1  # addresses of the one stream that cannot be captured


class _Front(NamedTuple):
    """The launch queued last: what it left its stream depending on, and the arrays it was given."""

    capture: int
    nodes: tuple
    given: tuple


_front = None


def capturing(stream):
    """Whether launches on the stream at this address are being captured."""
    if stream in LEGACY_STREAMS:
        return False
    from cupy.cuda import runtime

    return runtime.streamIsCapturing(stream)


def queue(plan, grid, block, args, stream, early):
    """Capture a launch of a kernel made for it, which begins early if it may.

    Args:
        plan: of launch.py.
        grid, block: three counts each.
        args: as for `launch.launch`.
        stream: address of a stream that is being captured.
        early: the Buffer among `args` that is read before the wait.
    """
    global _front
    front, here = _front, _captured(stream)
    may = front is not None and front[:2] == here and not _any_shares(front.given, early)
    # The driver refuses a grid that waits for itself and begins early; others may follow it so.
    if may and not plan.cooperative:
        _launch_early(plan, grid, block, args, stream)
    else:
        plan(grid, block, args, stream)
    given = tuple(a for a in args if type(a) is Buffer and a is not early)
    # Threads that capture at the same time take each other's place here: nodes are then not equal.
    _front = _Front(*_captured(stream), given)


def _captured(stream):
    """(number of the capture, nodes that the next one depends on)."""
    status, capture, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    # cuda.bindings copies what is known of the edges, and crashes where the driver shows nothing.
    made = (ctypes.byref(value) for value in (nodes, edges, count))
    _check(
        _library().cuStreamGetCaptureInfo_v3(
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), None, *made
        )
    )
    return capture.value, tuple(nodes[: count.value])


@functools.cache
def _library():
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _any_shares(buffers, early):
    start, end = early.address, early.address + early.nbytes
    return any(b.address < end and start < b.address + b.nbytes for b in buffers)


def _launch_early(plan, grid, block, args, stream):
    from cuda.bindings import driver

    allowed = driver.CUlaunchAttribute()
    allowed.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    allowed.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = plan.loaded.shared, driver.CUstream(stream)
    config.attrs, config.numAttrs = [allowed], 1
    with plan.packing.lock:
        plan.packing.pack(args)
        (status,) = driver.cuLaunchKernelEx(config, plan.loaded.address, 0, plan.packing.extra)
    _check(status)


def _check(status):
    if status:
        from cuda.bindings import driver

        raise RuntimeError(f"{driver.CUresult(status).name} while a launch was captured")
