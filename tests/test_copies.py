"""GpuCopies against a runtime that does things late: what it asks for, and in what order."""

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from lowgpu.pinned import PinnedPool
from lowgpu.streams import GpuCopies
from lowgpu_kernels.arrays import Buffer
from tests.late_device import COMPUTE, COPY, LAZY, SLOW_CONSUMER, SLOW_LINK, LateDevice

STREAM = 41  # the address of the stream of copies


class Runtime:
    """CUDA's runtime as CuPy spells it, on a LateDevice."""

    memcpyHostToDevice = 1
    CUDARuntimeError = RuntimeError

    def __init__(self, device):
        self._device, self._marks = device, {}

    def _lane(self, stream):
        return {STREAM: None, COMPUTE: COMPUTE}[stream]

    def memcpyAsync(self, target, source, nbytes, kind, stream):
        assert kind == self.memcpyHostToDevice
        made = [(ctypes.c_ubyte * nbytes).from_address(address) for address in (source, target)]
        self._device.copy_in(*map(np.frombuffer, made, ["u1"] * 2), self._lane(stream))

    def memsetAsync(self, target, value, nbytes, stream):
        assert (value, stream) == (0xFF, STREAM)
        place = (ctypes.c_ubyte * nbytes).from_address(target)
        self._device.poison(np.frombuffer(place, "u1"))

    def eventRecord(self, event, stream):
        self._marks[event] = self._device.mark(self._lane(stream))

    def streamWaitEvent(self, stream, event):
        self._device.after(self._marks[event], self._lane(stream))


class Device(nullcontext):
    """The current device is number 3, and everything must stay on it."""

    def __init__(self, number=3):
        assert number == 3
        self.id, self.enter_result = number, self


@pytest.fixture
def late(monkeypatch):
    """Sets how late the device is, and gives it."""

    def make(eager):
        device = LateDevice(eager)
        runtime = Runtime(device)

        class Event:
            def __init__(self, block, disable_timing):
                assert block and disable_timing
                self.ptr = id(self)

            @property
            def done(self):
                return device.passed(runtime._marks[self.ptr])

            def synchronize(self):
                device.wait(runtime._marks[self.ptr])

        def stream(non_blocking):
            # Else work on the default stream would wait for every copy.
            assert non_blocking
            return SimpleNamespace(ptr=STREAM, synchronize=device.drain)

        cuda = SimpleNamespace(
            runtime=runtime,
            Event=Event,
            Stream=stream,
            Device=Device,
            alloc_pinned_memory=bytearray,
        )
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        return device

    return make


def place(array):
    return Buffer(array.ctypes.data, array.shape, array.dtype)


@pytest.mark.parametrize("eager", [LAZY, SLOW_LINK, SLOW_CONSUMER])
@pytest.mark.parametrize("stream", [None, COMPUTE])
def test_uploads_through_page_locked_blocks_arrive_as_they_were(late, eager, stream):
    device = late(eager)
    arrived = np.full((200, 3), np.nan, np.float32)
    with PinnedPool(12, 2) as pool:
        assert pool.pinned and isinstance(pool.copies, GpuCopies)
        for i, row in enumerate(arrived):
            pool.upload(np.full(3, i, np.float32), place(row), stream)
    assert (arrived == np.arange(200)[:, None]).all()
    assert not device.queues[COPY]


def test_a_copy_waits_for_the_mark_of_another_stream_and_poison_is_nan(late):
    device = late(SLOW_LINK)
    copies, target = GpuCopies(), np.zeros(4, np.float32)
    source, seen = np.ones(4, np.float32), []
    copies.copy_in(source, place(target))
    copied = copies.mark()
    copies.after(copied, COMPUTE)
    device.work(lambda: seen.append(target.copy()))
    released = copies.mark(COMPUTE)
    copies.after(released)
    copies.poison(place(target))
    assert not copies.passed(copied) and not seen
    copies.wait(copied)
    assert copies.passed(copied)
    copies.drain()
    assert (seen[0] == 1).all() and np.isnan(target).all()
