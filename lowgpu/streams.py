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


def queue_of(kind):
    """The queue of a device, "cpu" or "cuda"."""
    return GpuQueue() if kind == "cuda" else CpuQueue()
