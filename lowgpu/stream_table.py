"""Market tables larger than the memory that is theirs: a window at a time on the device."""

import itertools
from dataclasses import dataclass

import numpy as np

from lowgpu.draws import shuffled
from lowgpu.loader import DoubleBufferedLoader
from lowgpu.pools import Declared, Plan
from lowgpu.table_file import LAST, PRECISION, element, open_table, padded
from lowgpu_kernels.dims import SEED, Int

_ROWS, _NUMBER = Int(2, 2**31 - 1, int), Int(0, 2**62, int)


@dataclass(frozen=True)
class Window:
    """Consecutive rows of a table, on the device.

    Attributes:
        number: of the window, counted from 0.
        start: its first row in the file.
        slot: 0 or 1, the buffer it is in.
        table: [W, I], the leading columns of each row's observation, padded with zeros.
        series: float32 [S, W]; `last` is 1 on the last row.
    """

    number: int
    start: int
    slot: int
    table: object
    series: object


def window_plan(env, rows, precision="float32"):
    """The Plan of one window's arrays. A StreamedTable has two.

    Args:
        env: the Env.
        rows: W, of a window.
        precision: "float32" or "bfloat16".
    """
    shrink = "fewer rows in a window"
    return Plan(
        {
            "table": Declared(
                (rows, env.width), element(precision), "features of a window", shrink
            ),
            "series": Declared(
                (len(env.series), rows), np.dtype(np.float32), "series of a window", shrink
            ),
        }
    )


class StreamedTable:
    """Windows of a table on disk, in an order of the seed, each on its way while another is used.

    A window holds the bits of the same rows of a resident table, with `last` set on its last row, so
    that no episode leaves it. A window starts on the last row of the one before, where an episode can
    go on, so that every step of the table is in a window of every pass; the last one reaches back to
    be full. None starts on a `last` row: an episode needs two. (Should the window that ends with the
    table have to, it ends one row before.) The order of pass p is a function of (seed, p) alone.

        with StreamedTable("bars/", env, rows=1_000_000, seed=3, precision="bfloat16") as stream:
            for _ in range(iterations):
                window = stream.next_window()
                iterate[window.slot]()

    Two buffers alternate and stay where they are. A trainer that replays a graph captures two, one on
    each buffer (`slots`), and between iterations asks for the next window, resets its environments
    on it, as their states point at rows of the last one, and replays the graph of `window.slot`. All
    of it is queued on one stream: nothing waits on the host unless the disk is late. A trainer with
    one graph copies the window into a buffer of its own on its stream and asks for the next after
    that.

    Args:
        source: a folder or a Parquet file, as open_table takes them, or what it returned.
        env: the Env; it needs the series `last`.
        rows: W, of a window: from 2 to the rows of the table.
        seed: in [0, 2^64).
        precision: "float32" or "bfloat16", of the table on the device.
        normalizer: a Normalizer for the features of a Parquet file; None leaves them.
        first: number of the first window; a run that goes on gives the number of its next one.
        feed: further keyword arguments of DoubleBufferedLoader, such as kind, library, slots (two
            dicts of `table` and `series`), ahead and debug.

    Attributes:
        windows: in a pass over the table.
        plan: the Plan of one window; the device holds two.

    Raises:
        TypeError, ValueError: an argument out of range.
        TableFileError: a file that is no table of this Env.
        FeedError: a window that cannot be read, with the cause.
    """

    def __init__(
        self,
        source,
        env,
        rows,
        *,
        seed=0,
        precision="float32",
        normalizer=None,
        first=0,
        **feed,
    ):
        self._env = env
        if LAST not in env.series:
            raise ValueError(f"env must have a series {LAST!r}, which ends windows, got {env}")
        self._source = source if hasattr(source, "read") else open_table(source, env)
        self.rows, self._seed = _ROWS("rows", rows), int(SEED("seed", seed))
        if self.rows > self._source.rows:
            raise ValueError(
                f"rows must be at most the table's {self._source.rows}, got {rows}; a table that "
                "fits is better resident"
            )
        self.plan = window_plan(env, self.rows, PRECISION("precision", precision))
        self._precision, self._normalizer = precision, normalizer
        if self._source.ready and normalizer is not None:
            raise ValueError("normalizer is for Parquet files: give it to save_table instead")
        if self._source.ready and self._source.dtype != element(precision):
            raise ValueError(
                f"precision must be that of the file, which holds {self._source.dtype}, got "
                f"{precision!r}"
            )
        self._starts = self._all_starts()
        self.windows = len(self._starts)
        self._number = _NUMBER("first", first)
        slots = feed.pop("slots", None)
        if slots is not None:
            feed["slots"] = [(slot["table"], slot["series"]) for slot in slots]
        self._loader = DoubleBufferedLoader(self._read(self._number), **feed)
        self._batches = iter(self._loader)

    def _all_starts(self):
        """The first row of each window, in the order of the file."""
        most, starts, start = self._source.rows - self.rows, [], 0
        while start < most:
            starts.append(start)
            end = start + self.rows - 1
            start = end + self._is_last(end)
        # An episode needs two rows of a segment, also where it starts on the window's first.
        final = most - (most > 0 and self._is_last(most))
        return starts if final in starts else [*starts, final]

    def _is_last(self, row):
        return bool(self._source.read_series(row, row + 1)[self._env.series.index(LAST), 0])

    def start_of(self, number):
        """The first row of a window, by its number."""
        turn, place = divmod(number, self.windows)
        return self._starts[shuffled(self._seed, self.windows, turn)[place]]

    def _read(self, first):
        """Windows without end, from a number on; in the same arrays every time."""
        declared = self.plan.declared
        series = np.empty(declared["series"].shape, np.float32)
        # Padding stays zero.
        made = None
        if not self._source.ready:
            made = np.zeros(declared["table"].shape, declared["table"].dtype)
        last = self._env.series.index(LAST)
        for number in itertools.count(first):
            start = self.start_of(number)
            table, series[...] = self._source.read(start, start + self.rows)
            series[last, -1] = 1
            if made is not None:
                if self._normalizer is not None:
                    table = self._normalizer.apply(table)
                table = padded(table, self._env, self._precision, made)
            yield table, series

    def next_window(self):
        """The next Window; the one before it may be overwritten once work queued on it is done.

        Raises:
            FeedError: it cannot be read.
            RuntimeError: it is closed.
        """
        try:
            table, series = next(self._batches)
        except StopIteration:
            raise RuntimeError("the table is closed; make another") from None
        number, self._number = self._number, self._number + 1
        return Window(number, self.start_of(number), self._loader.slot, table, series)

    def close(self):
        """End the thread after the window that it reads, and wait for copies under way."""
        self._batches.close()
        self._loader.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
