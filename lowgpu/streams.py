"""Queues of work on a device, graphs, and the only places that wait for a GPU."""

import contextlib
import threading
import time

from lowgpu_kernels import launch
from lowgpu_kernels.compile import build

GATE_SECONDS = 1.0  # that work to be timed is held back at most, should its queue be full before


class CpuQueue:
    """The queue of a CPU: work is done when it is given."""

    def running(self):
        """The context in which ops are called."""
        return contextlib.nullcontext()

    def prepare(self, *works):
        """Compile side by side what `works`, functions without arguments, will launch."""

    def repeatable(self, work, changes):
        """`work`, made quick to repeat.

        Args:
            work: a function without arguments that calls ops on arrays that stay where they are.
            changes: arrays that it changes and whose contents matter.

        Returns:
            A function that does the work again.
        """
        return work

    def seconds(self, work):
        """The time that the device takes for what `work` queues, without the host's own delays."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def copy_out(self, source, target):
        """Copy a device's array into a host's, in order with the work.

        Returns:
            A function that returns when `target` holds the values.
        """
        target[...] = source
        return lambda: None

    def read(self, arrays):
        """NumPy copies of arrays by name, after all work given so far."""
        return {name: array.copy() for name, array in arrays.items()}

    def write(self, arrays, values):
        """Set arrays by name from NumPy arrays, before all work given later."""
        for name, value in values.items():
            arrays[name][...] = value


class GpuQueue:
    """A CUDA stream. The same methods as CpuQueue; work is queued, and `read` waits."""

    def __init__(self):
        import cupy

        self._cupy = cupy
        # Memory is zeroed on the default stream; a stream of its own does not wait for that one.
        cupy.cuda.get_current_stream().synchronize()
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def running(self):
        return self.stream

    def prepare(self, *works):
        on = launch.device()
        with launch.recording(on) as made:
            for work in works:
                work()
        build([recorded.kernel for recorded in made], on.architecture)

    def repeatable(self, work, changes):
        # Kernels are loaded in a first run, which a capture must not do. What it
        # changed is put back bit for bit, so the run counts for nothing.
        before = self.read(changes)
        with self.stream:
            work()
            self.write(changes, before)
            self.stream.begin_capture()
            try:
                work()
            finally:
                graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def seconds(self, work):
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        # The device waits until everything is queued: else it would be timed waiting for the host.
        queued = threading.Event()
        self.stream.launch_host_func(queued.wait, GATE_SECONDS)
        try:
            start.record(self.stream)
            with self.stream:
                work()
            end.record(self.stream)
        finally:
            queued.set()
        end.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, end) * 1e-3

    def copy_out(self, source, target):
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            target.ctypes.data,
            source.data.ptr,
            source.nbytes,
            runtime.memcpyDeviceToHost,
            self.stream.ptr,
        )
        # Whoever reads the target waits for this copy, not for work queued after it.
        return self.stream.record().synchronize

    def read(self, arrays):
        values = {name: array.get(stream=self.stream) for name, array in arrays.items()}
        # The values leave this file: they must be there.
        self.stream.synchronize()
        return values

    def write(self, arrays, values):
        for name, value in values.items():
            arrays[name].set(value, stream=self.stream)
        # The caller may change or free the values once this returns.
        self.stream.synchronize()


class CpuCopies:
    """Copies from a host's arrays into a device's, in order: on a CPU done when they are asked for.

    A mark is a place in the order of a stream's work; a stream can be told to wait for it.
    """

    kind = "cpu"
    late = False  # whether a copy may still read its source when copy_in returns

    def here(self):
        """The context that a thread of one's own works in."""
        return contextlib.nullcontext()

    def settle(self):
        """Wait for what was given to the default stream: memory is zeroed there."""

    def copy_in(self, source, target, stream=None):
        """Copy a contiguous host array into a device's array of its shape and element type.

        Args:
            stream: address of the stream that does it; None for the one that copies.
        """
        target[...] = source

    def poison(self, target):
        """Set every bit of a device's array: floats are NaN then, integers -1 or the largest."""
        target.reshape(-1).view("u1")[...] = 0xFF

    def mark(self, stream=None):
        """A mark after everything that the stream was given so far."""

    def after(self, mark, stream=None):
        """Let the stream wait for a mark before it does what it is given later."""

    def passed(self, mark):
        """Whether everything before a mark has been done."""
        return True

    def wait(self, mark):
        """Return when everything before a mark has been done."""

    def drain(self):
        """Return when every copy has been done."""


class GpuCopies:
    """A CUDA stream of copies beside the streams that compute. The same methods as CpuCopies.

    Targets are Buffers of the device that was current when it was made.
    """

    kind, late = "cuda", True

    def __init__(self):
        import cupy

        self._cupy, self._number = cupy, cupy.cuda.Device().id
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def here(self):
        # A new thread works on device 0 until it is told otherwise.
        return self._cupy.cuda.Device(self._number)

    def settle(self):
        self._cupy.cuda.get_current_stream(self._number).synchronize()

    def copy_in(self, source, target, stream=None):
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            target.address,
            source.ctypes.data,
            source.nbytes,
            runtime.memcpyHostToDevice,
            self._address(stream),
        )

    def poison(self, target):
        self._cupy.cuda.runtime.memsetAsync(
            target.address, 0xFF, target.nbytes, self._address(None)
        )

    def mark(self, stream=None):
        with self.here():
            # A thread that waits for it sleeps, and leaves the core to the one that trains.
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            self._cupy.cuda.runtime.eventRecord(event.ptr, self._address(stream))
        return event

    def after(self, mark, stream=None):
        self._cupy.cuda.runtime.streamWaitEvent(self._address(stream), mark.ptr)

    def passed(self, mark):
        return mark.done

    def wait(self, mark):
        mark.synchronize()

    def drain(self):
        self.stream.synchronize()

    def _address(self, stream):
        return self.stream.ptr if stream is None else stream


def copies_of(kind):
    """The copies to a device, "cpu" or "cuda"."""
    return GpuCopies() if kind == "cuda" else CpuCopies()


def queue_of(kind):
    """The queue of a device, "cpu" or "cuda"."""
    return GpuQueue() if kind == "cuda" else CpuQueue()
