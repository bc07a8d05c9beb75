"""The next epoch's data, computed while this one trains."""

from dataclasses import dataclass, replace

import numpy as np

from lowgpu.background import Background, FeedError
from lowgpu.draws import draws
from lowgpu.monitor import stage
from lowgpu_kernels.dims import SEED, Int

_COUNT = Int(0, 2**62, int)


class EpochPrefetcher:
    """The results of `compute(epoch)` in order, each computed while the one before it is used.

        for data in EpochPrefetcher(compute, epochs=100):
            train(data)

    A trainer of this library goes on with each by `change_data`:

        windows = EpochWindows(bars, length=1000)
        for epoch in EpochPrefetcher(windows, epochs=20):
            trainer.change_data(*epoch.arrays(env))
            for _ in range(10):
                trainer.advance()
            trainer.drain()

    The results are those of calling `compute` in the loop, bit for bit, if it depends on its
    argument alone; EpochWindows does. It runs on a thread, one epoch at a time. The thread begins
    with the first epoch that is asked for and has ended when the loop has, however it ends.

    Args:
        compute: epoch -> anything.
        epochs: how many, at least 0.
        first: number of the first one; give the next after a checkpoint's.
        ahead: finished results that may wait to be used; 0 computes each when it is asked for.

    Raises:
        TypeError, ValueError: compute cannot be called; a number that is no integer or below 0.
        FeedError: while iterating, with the cause: `compute` failed.
    """

    def __init__(self, compute, epochs, *, first=0, ahead=1):
        if not callable(compute):
            raise TypeError(f"compute must be a function, got {type(compute).__name__}")
        self._compute = compute
        self._ahead, self._next = _COUNT("ahead", ahead), _COUNT("first", first)
        self._last = self._next + _COUNT("epochs", epochs)
        self._running = None

    def __iter__(self):
        if self._running is not None:
            raise RuntimeError("these epochs are being gone through already; close() first")
        results = _results(self._compute, self._next, self._last)
        self._running = (
            Background(results, self._ahead, "lowgpu-epochs") if self._ahead else results
        )
        try:
            # Counted, so that a loop that was left early goes on where it was.
            for result in self._running:
                self._next += 1
                yield result
        finally:
            self.close()

    def close(self):
        """End the thread; waits for the epoch that it is at."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def _results(compute, first, last):
    for epoch in range(first, last):
        try:
            with stage("compute epoch"):
                result = compute(epoch)
        except Exception as error:
            raise FeedError(f"epoch {epoch} failed: {type(error).__name__}: {error}") from error
        yield result


@dataclass(frozen=True, eq=False)
class Epoch:
    """The data of an epoch.

    Attributes:
        number: of the epoch.
        table: the Table of the window's bars; its features are normalized.
        normalizer: fitted on the window.
        rows: of the bars, where the window lies in each segment: [start, stop) by symbol.
    """

    number: int
    table: object
    normalizer: object
    rows: dict

    def arrays(self, env):
        """The padded table [R, I] and the series [S, R] of an Env, float32, as trainers take them."""
        padded = np.zeros((len(self.table), env.width), np.float32)
        padded[:, : env.table_columns] = self.table.features
        series = [getattr(self.table, name) for name in env.series]
        return padded, np.stack(series).astype(np.float32)


class EpochWindows:
    """The window of bars that belongs to an epoch, with its features and normalization.

    Every symbol gives `bars` consecutive bars, of a symbol with fewer all of them. Where the window
    lies is a function of (seed, epoch, symbol) alone.

    Args:
        bars: the Bars to cut from, those of training alone.
        length: bars of each symbol in a window; the features need WARMUP + 2.
        seed: in [0, 2^64).

    Raises:
        TypeError: length or seed is no integer.
        ValueError: a length the features cannot be made of, a seed out of range.
        BarsError: when called, a symbol has too few bars.
    """

    def __init__(self, bars, length, seed=0):
        from lowgpu.data.features import WARMUP

        self.bars, self.length = bars, _COUNT("length", length)
        self.seed = int(SEED("seed", seed))
        if self.length < WARMUP + 2:
            raise ValueError(
                f"length must be at least {WARMUP + 2} bars, {WARMUP} of which warm the features "
                f"up, got {length}"
            )

    def __call__(self, epoch):
        """The Epoch of this number."""
        from lowgpu.data.features import features
        from lowgpu.data.normalizer import Normalizer

        windows = self.windows(epoch)
        table = features(_cut(self.bars, windows))
        normalizer = Normalizer.fit(table.features)
        table = replace(table, features=normalizer.apply(table.features))
        return Epoch(epoch, table, normalizer, dict(zip(self.bars.symbol, windows)))

    def windows(self, epoch):
        """The rows of each symbol's window, as [(start, stop)] in the order of the symbols."""
        segments = [self.bars.rows(s) for s in range(len(self.bars.symbol))]
        drawn = draws(self.seed, len(segments), epoch)
        found = []
        for rows, number in zip(segments, drawn):
            places = max(rows.stop - rows.start - self.length, 0) + 1
            start = rows.start + int(number) % places
            found.append((start, min(start + self.length, rows.stop)))
        return found


def _cut(bars, windows):
    """Bars of the rows of each window."""
    rows = np.concatenate([np.arange(*window) for window in windows])
    lengths = [stop - start for start, stop in windows]
    columns = ("date", "open", "high", "low", "close", "volume", "line")
    return replace(
        bars,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        **{name: getattr(bars, name)[rows] for name in columns},
    )
