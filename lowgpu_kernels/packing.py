"""A kernel's arguments in one buffer, as the kernel reads them."""

import ctypes
import struct
import threading

from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.tensor_map import TensorMap

MAP_ALIGNMENT = 64  # of a CUtensorMap
# What the driver's list of `extra` values says next (CU_LAUNCH_PARAM_*).
BUFFER, BUFFER_NBYTES, END = 1, 2, 0


class Packing:
    """Where the arguments of one kernel lie, by their types and, for Numba's kernels, shapes.

    Addresses and scalars are packed anew each time. The bytes between two of them never change: gaps,
    and what Numba's kernels are told of arrays. The driver copies the buffer during a launch, so one
    serves every launch; `lock` keeps two threads from packing at once.

    Attributes:
        lock: to hold from `pack` to the end of the launch.
        offsets: of the arguments, in bytes.
        nbytes: of all, without a gap at the end.
        extra: address of the list that hands the buffer to the driver.
        pointers: address of the list of the arguments' addresses, as cooperative launches want it.
            Of no use to Numba's kernels, which have more parameters than arguments.
    """

    def __init__(self, args, numba):
        self.lock = threading.Lock()
        self.maps = any(type(a) is TensorMap for a in args)
        self.offsets, between = [], []
        layout, end, behind = "@", 0, b""
        for a in args:
            code, nbytes, alignment = _field(a)
            gap = bytes(-end % alignment)
            before, after = _description(a) if numba and type(a) is Buffer else (b"", b"")
            between.append(behind + gap + before)
            end += len(gap + before)
            layout += f"{len(between[-1])}{'s' if numba else 'x'}{code}"
            self.offsets.append(end)
            end, behind = end + nbytes + len(after), after
        self.layout = struct.Struct(f"{layout}{len(behind)}{'s' if numba else 'x'}")
        assert self.layout.size == end, "struct leaves no gaps of its own"
        # What is between arguments, with places for them; None where there are gaps alone.
        self.values = [v for b in between for v in (b, None)] + [behind] if numba else None
        self.nbytes = end
        self.buffer = ctypes.create_string_buffer(max(end, 1))
        base, self._size = ctypes.addressof(self.buffer), ctypes.c_size_t(end)
        size = ctypes.addressof(self._size)
        self._extra = (ctypes.c_void_p * 5)(BUFFER, base, BUFFER_NBYTES, size, END)
        self.extra = ctypes.addressof(self._extra)
        self._pointers = (ctypes.c_void_p * len(args))(*(base + at for at in self.offsets))
        self.pointers = ctypes.addressof(self._pointers)

    def pack(self, args):
        """Put the arguments of a launch in their places."""
        given = [a[0] if type(a) is Buffer else 0 if a is None else a for a in args]
        if self.maps:
            given = [a.encoded() if type(a) is TensorMap else a for a in given]
        if self.values is not None:
            self.values[1::2] = given
            given = self.values
        self.layout.pack_into(self.buffer, 0, *given)


def _field(arg):
    """(struct's code, bytes, alignment) of an argument."""
    if type(arg) is TensorMap:
        return f"{TensorMap.NBYTES}s", TensorMap.NBYTES, MAP_ALIGNMENT
    if arg is None or type(arg) is Buffer:
        return "q", 8, 8
    return arg.dtype.char, arg.dtype.itemsize, arg.dtype.itemsize


def _description(buffer):
    """What Numba's kernels are told of an array: parameters in front of its address, and behind."""
    strides, step = [], buffer.dtype.itemsize
    for size in reversed(buffer.shape):
        strides.insert(0, step)
        step *= size
    behind = *buffer.shape, *strides
    return (
        struct.pack("@4q", 0, 0, buffer.size, buffer.dtype.itemsize),
        struct.pack(f"@{len(behind)}q", *behind),
    )
