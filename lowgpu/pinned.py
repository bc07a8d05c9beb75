"""Page-locked memory in blocks: a block is filled again only when its copy has been done."""

import threading
import time
import weakref
from collections import deque

import numpy as np

from lowgpu.pools import ALIGNMENT, page_locked, shown
from lowgpu.streams import copies_of
from lowgpu_kernels.dims import Int

_COUNT = Int(1, 2**62, int)


class PoolExhausted(RuntimeError):
    """Every block is in somebody's hands: one sentence with the size and what to do."""


class Block:
    """A block in one taker's hands, until it is given back."""

    def __init__(self, pool, memory):
        self._pool, self._memory = pool, memory

    @property
    def memory(self):
        """Its bytes, uint8.

        Raises:
            RuntimeError: it was given back.
        """
        if self._memory is None:
            raise RuntimeError("this block was given back to its pool; take another")
        return self._memory

    def give_back(self, mark=None):
        """Return it to the pool, which lends it again when the mark has passed.

        Args:
            mark: of the copies' stream, after the copies that read it; None makes one now.

        Raises:
            RuntimeError: it was given back before.
        """
        memory, self._memory = self.memory, None
        self._pool._returned(memory, self._pool.copies.mark() if mark is None else mark)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._memory is not None:
            self.give_back()


class PinnedPool:
    """Blocks of page-locked host memory, all allocated at once and used over and over.

    Several threads may take and give back. Where the system refuses page-locked memory, as WSL does
    beyond a limit, the pool is ordinary memory and one warning says so: copies are slower, and the
    numbers the same.

    Args:
        nbytes: of a block, at least 1.
        blocks: how many, at least 1.
        kind: "cuda", or "cpu" for ordinary memory.
        copies: the stream of copies that reads the blocks; None makes one for `kind`.

    Attributes:
        pinned: whether its memory is page-locked.

    Raises:
        TypeError, ValueError: nbytes or blocks is no integer, or below 1; another kind.
    """

    def __init__(self, nbytes, blocks=2, *, kind="cuda", copies=None):
        self.nbytes, self.blocks = _COUNT("nbytes", nbytes), _COUNT("blocks", blocks)
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"kind must be 'cpu' or 'cuda', got {kind!r}")
        stride = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        shape = self.blocks, stride
        memory = page_locked(shape, np.uint8) if kind == "cuda" else None
        self.pinned = memory is not None
        if memory is None:
            memory = np.zeros(shape, np.uint8)
        self.copies = copies_of(kind) if copies is None else copies
        # Blocks that wait for a mark, the oldest first; a mark of None has passed.
        self._waiting = deque((row[: self.nbytes], None) for row in memory)
        self._closed = False
        self._changed = threading.Condition()
        # CuPy lends memory that nobody refers to anew, also while a copy still reads it.
        weakref.finalize(self, _wait_for, self._waiting, self.copies)

    def take(self, nbytes=None, timeout=0.0):
        """A block that nothing reads any more; waits for a copy that is still under way.

        Args:
            nbytes: that are needed; None for a whole block.
            timeout: seconds to wait for another thread to give one back, should all be held.

        Returns:
            The Block, whose memory holds what it was last filled with.

        Raises:
            ValueError: more bytes than a block has.
            PoolExhausted: every block is held.
            RuntimeError: the pool is closed.
        """
        if nbytes is not None and _COUNT("nbytes", nbytes) > self.nbytes:
            raise ValueError(
                f"nbytes must be at most {self.nbytes}, what a block has, got {nbytes}; "
                "make a pool of larger blocks"
            )
        memory, mark = self._taken(timeout)
        if mark is not None:
            # Outside the lock: others go on while this thread waits for the link.
            try:
                self.copies.wait(mark)
            except BaseException:
                self._returned(memory, mark)
                raise
        return Block(self, memory)

    def _taken(self, timeout):
        """The memory that is free first, with its mark."""
        with self._changed:
            self._open()
            end = time.monotonic() + timeout
            while not self._waiting:
                left = end - time.monotonic()
                if left <= 0:
                    raise PoolExhausted(
                        f"all {self.blocks} blocks of {shown(self.nbytes)} are held; give blocks "
                        "back sooner, or make the pool with more"
                    )
                self._changed.wait(left)
                self._open()
            marks = enumerate(mark for _, mark in self._waiting)
            passed = (i for i, mark in marks if mark is None or self.copies.passed(mark))
            place = next(passed, 0)
            memory, mark = self._waiting[place]
            del self._waiting[place]
            return memory, mark

    def upload(self, values, target, stream=None):
        """Copy a host's array to a device through a block, without waiting for the copy.

        Args:
            values: NumPy array, free to change when this returns.
            target: Buffer of the device, or a NumPy array on a CPU; its shape and element type.
            stream: address of the stream to copy in; None for the pool's own.

        Raises:
            TypeError: another element type.
            ValueError: another shape, or more bytes than a block has.
            PoolExhausted: every block is held.
        """
        if values.dtype != target.dtype:
            raise TypeError(f"values must be {target.dtype} as the target is, got {values.dtype}")
        if values.shape != target.shape:
            raise ValueError(f"values must have shape {target.shape}, got {values.shape}")
        if not values.nbytes:
            return
        with self.take(values.nbytes) as block:
            staged = np.ndarray(values.shape, values.dtype, buffer=block.memory.data)
            staged[...] = values
            self.copies.copy_in(staged, target, stream)
            block.give_back(self.copies.mark(stream))

    def _returned(self, memory, mark):
        with self._changed:
            self._waiting.append((memory, mark))
            self._changed.notify()

    def _open(self):
        if self._closed:
            raise RuntimeError("the pool is closed; make another")

    def close(self):
        """Wait for the copies under way and lend no more. What is held stays valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        _wait_for(self._waiting, self.copies)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def _wait_for(waiting, copies):
    while waiting:
        _, mark = waiting.popleft()
        if mark is not None:
            copies.wait(mark)
