"""A device whose copies and work happen as late, or as early, as its events allow.

It has the methods of lowgpu.streams.GpuCopies. Nothing happens when it is queued: what runs and when is
chosen to hurt. A wait of the host runs no more than it needs.
"""

import contextlib
import random
import threading
from collections import deque

COPY, COMPUTE = "copy", 0  # the stream of copies, and the address of the default one

SLOW_CONSUMER = (COPY,)  # copies run as soon as they may, work as late as it can
SLOW_LINK = (COMPUTE,)
EAGER = (COPY, COMPUTE)
LAZY = ()


class Mark:
    def __init__(self, stream):
        self.stream, self.done = stream, False


class LateDevice:
    """Args:
    eager: streams that run whatever their marks allow as soon as it is queued.
    seed: of a random stream to run, a random number of steps, after each thing queued; None for none.
    forget: "copied", the consumer does not wait for a copy; "released", a copy does not wait for the
        consumer; "refilled", the host does not wait for a copy. Faults, to show that tests see them.
    """

    kind, late = "cpu", True

    def __init__(self, eager=LAZY, seed=None, forget=None):
        self.eager, self.forget = eager, forget
        self.random = None if seed is None else random.Random(seed)
        self.queues = {COPY: deque(), COMPUTE: deque()}
        self.lock = threading.RLock()

    def here(self):
        return contextlib.nullcontext()

    def settle(self):
        pass

    def copy_in(self, source, target, stream=None):
        def copy():
            target[...] = source

        self._queue(stream, copy)

    def poison(self, target):
        def fill():
            target.reshape(-1).view("u1")[...] = 0xFF

        self._queue(None, fill)

    def work(self, function):
        """Queue the consumer's work."""
        self._queue(COMPUTE, function)

    def mark(self, stream=None):
        mark = Mark(COPY if stream is None else stream)
        self._queue(stream, mark)
        return mark

    def after(self, mark, stream=None):
        if self.forget == ("released" if stream is None else "copied"):
            return
        self._queue(stream, (mark,))

    def passed(self, mark):
        return mark.done or self.forget == "refilled"

    def wait(self, mark):
        if self.forget != "refilled":
            self._force(mark)

    def drain(self):
        self._force(self.mark())

    def finish(self):
        """Run everything."""
        for stream in COMPUTE, None:
            self._force(self.mark(stream))

    def _queue(self, stream, step):
        with self.lock:
            self.queues[COPY if stream is None else stream].append(step)
            for eager in self.eager:
                self._run(eager)
            if self.random is not None:
                self._run(self.random.choice((COPY, COMPUTE)), self.random.randrange(6))

    def _run(self, stream, steps=None):
        while self.queues[stream] and steps != 0:
            if self._blocked(stream) is not None:
                return
            self._step(stream)
            steps = None if steps is None else steps - 1

    def _blocked(self, stream):
        """The mark that the stream's next step waits for; None where it may go on."""
        step = self.queues[stream][0]
        return step[0] if isinstance(step, tuple) and not step[0].done else None

    def _step(self, stream):
        step = self.queues[stream].popleft()
        if isinstance(step, Mark):
            step.done = True
        elif not isinstance(step, tuple):
            step()

    def _force(self, mark):
        with self.lock:
            while not mark.done:
                blocked = self._blocked(mark.stream)
                if blocked is None:
                    self._step(mark.stream)
                else:
                    self._force(blocked)
