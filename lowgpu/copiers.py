"""Copying within host memory, by several threads where arrays are large."""

import itertools
from concurrent.futures import ThreadPoolExecutor

LARGE = 8 << 20  # bytes from which an array is cut among threads; untuned


class Copiers:
    """Threads that share the copying of a large array: one core copies slower than a link carries.

    They begin with the first large array and end with `close`.

    Args:
        count: of threads, from 1; one copies on the caller's.
    """

    def __init__(self, count):
        self._count, self._threads = count, None

    def place(self, part, target):
        """Copy an array into one of at least as many rows, and zeros into the rows that are left.

        Args:
            part: of any strides.
            target: of the same element type and shape, but for the rows.
        """
        rows = len(part) if part.ndim else 0
        if part.ndim and rows < len(target):
            target[rows:] = 0
            target = target[:rows]
        if self._count == 1 or part.nbytes < LARGE or rows < 2:
            target[...] = part
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, "lowgpu-copier")
        cuts = [rows * i // self._count for i in range(self._count + 1)]
        pieces = [slice(*ends) for ends in itertools.pairwise(cuts)]
        copying = [self._threads.submit(_copy, part[piece], target[piece]) for piece in pieces]
        for piece in copying:
            piece.result()

    def close(self):
        """End the threads, after what they are at."""
        if self._threads is not None:
            self._threads.shutdown()


def _copy(part, target):
    target[...] = part
