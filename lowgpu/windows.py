"""A trainer's table that streams: windows of it in two places on the device, and when to change."""

import time
import warnings
import weakref
from dataclasses import dataclass

import numpy as np

from lowgpu.stream_table import StreamedTable
from lowgpu.table_file import LAST

LATE, JUDGED = 0.05, 8  # share of the time that waits for windows may take, over so many of them


@dataclass(frozen=True)
class Streaming:
    """What a trainer is given instead of a table and series that stay.

    Attributes:
        source: rows of a table, as StreamedTable takes them.
        window: rows of a window, from 2 to those of the source.
        every: iterations on a window, from 1.
        normalizer: a Normalizer, for features as they were computed; None where they are ready.
    """

    source: object
    window: int
    every: int
    normalizer: object = None

    @property
    def rows(self):
        """Rows on the device: two windows."""
        return 2 * self.window

    @property
    def alone(self):
        """Whether one window holds the whole table, and stays."""
        return self.window == self.source.rows


class Windows:
    """The windows of a trainer, by its iterations.

    Window n is that of the iterations from n * every on, so a run that goes on needs to know nothing
    but its iteration. Where one window holds the whole table, it stays.

    Args:
        streaming: a Streaming.
        env: the Env.
        config: the trainer's settings, of which it takes the seed and the precision.
        buffers: with `table` [2 * W, I] and `series` [S, 2 * W], whose memory holds two windows.
        feed: keyword arguments of DoubleBufferedLoader, such as kind and stream.

    Attributes:
        slots: (table [W, I], series [S, W]) of both places.
        slot: the place of the current window.
        every: iterations on a window.
        feed: the keyword arguments, as the next loader takes them.
    """

    def __init__(self, streaming, env, config, buffers, **feed):
        self._streaming, self.feed = streaming, feed
        self._about = env, streaming.window
        self._given = {"seed": config.seed, "precision": config.precision}
        self._given["normalizer"] = streaming.normalizer
        table = buffers.table.reshape(2, streaming.window, -1)
        series = buffers.series.reshape(2, len(env.series), -1)
        self.slots = [(table[k], series[k]) for k in range(2)]
        self.slot, self.every = 0, streaming.every
        self._number = self._stream = self._close = None
        self._waited, self._since, self._seen, self._said = 0.0, 0.0, 0, False

    @staticmethod
    def blank(env, window):
        """Series [S, 2 * W] in which an environment can play before the first window is there."""
        series = np.ones((2, len(env.series), window), np.float32)
        series[:, env.series.index(LAST), :-1] = 0
        return series.reshape(len(env.series), -1)

    def number_of(self, iteration):
        """The window of an iteration, both counted from 0."""
        return 0 if self._streaming.alone else iteration // self.every

    def first_of(self, iteration):
        """The first iteration of its window."""
        return 0 if self._streaming.alone else iteration - iteration % self.every

    def enter(self, iteration):
        """Have the window of an iteration in `slot`, before all work given later.

        Returns:
            Whether the iteration is the first of a window that was not there before.
        """
        number = self.number_of(iteration)
        if number == self._number:
            return False
        if self._stream is None:
            self._open(number)
        begun = time.monotonic()
        window = self._stream.next_window()
        self._count(time.monotonic() - begun)
        assert window.number == number, "iterations were left out"
        self._number, self.slot = number, window.slot
        if self._streaming.alone:
            # No other follows.
            self._close()
        return iteration == self.first_of(iteration)

    def _open(self, number):
        slots = [{"table": table, "series": series} for table, series in self.slots]
        given = self._given | self.feed | {"first": number, "slots": slots}
        self._stream = StreamedTable(self._streaming.source, *self._about, **given)
        # Its thread would wait for ever for a trainer that was thrown away.
        self._close = weakref.finalize(self, self._stream.close)
        self._seen, self._waited = 0, 0.0

    def _count(self, seconds):
        """Add up what windows were waited for, the first left out, and say once that it is much."""
        self._waited, self._seen = self._waited + seconds, self._seen + 1
        if self._seen not in (1, 1 + JUDGED):
            return
        now = time.monotonic()
        share = self._waited / (now - self._since) if self._seen > 1 else 0
        self._since, self._waited, self._seen = now, 0.0, 1
        if share > LATE and not self._said:
            self._said = True
            warnings.warn(
                f"training waits for its windows {share:.0%} of the time: the table is not read as fast "
                "as it is trained on. Give more iterations to a window (stream.every), write a Parquet "
                "table as a folder (lowgpu.market_tables.convert), or use a faster disk",
                stacklevel=2,
            )

    def close(self):
        """End the thread that reads, and forget where it was; `enter` begins anew."""
        if self._close is not None:
            self._close()
        self._number = self._stream = self._close = None
