"""Items made by a thread ahead of their use."""

import contextlib
import threading
from collections import deque


class FeedError(RuntimeError):
    """What feeds a trainer failed: one sentence, with the failure as its cause."""


class Background:
    """The items of a generator, made by a thread of its own while earlier ones are used.

    A thread and not a process: items are handed over without a copy, a process forked beside a CUDA
    context cannot use it, and NumPy, file reads and the driver's waits let other threads run.

    An error of the generator is raised where the item would have come. The generator runs and is
    closed on the thread, and nothing that outlives `close` refers to it.

    Args:
        items: a generator.
        ahead: finished items that may wait, at least 1; the next is begun when there are fewer.
        name: of the thread.
        context: () -> the context that the thread works in.
    """

    def __init__(self, items, ahead, name, context=contextlib.nullcontext):
        self._ready, self._ahead = deque(), ahead
        self._stopping, self._ended, self._error = False, False, None
        self._changed = threading.Condition()
        # A daemon: should a source never return, Python can still end.
        self._thread = threading.Thread(
            target=self._run, args=(items, context), name=name, daemon=True
        )
        self._thread.start()

    def _run(self, items, context):
        error = None
        try:
            with context(), contextlib.closing(items):
                while self._room():
                    item = next(items)
                    with self._changed:
                        self._ready.append(item)
                        self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as raised:
            error = raised
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def _room(self):
        """Wait until fewer items than allowed are ready; False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or len(self._ready) < self._ahead)
            return not self._stopping

    def __iter__(self):
        return self

    def __next__(self):
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is None:
            raise StopIteration
        raise error

    def close(self):
        """End the thread, after the item that it is at, and forget what is ready."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()
        self._ended, self._error = True, None
