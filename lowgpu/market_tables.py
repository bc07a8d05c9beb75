"""A market's table on disk as a run uses it: split by time, and normalized by its training rows."""

import warnings

import numpy as np

from lowgpu.data.normalizer import Normalizer
from lowgpu.evaluate import Segments
from lowgpu.table_file import (
    LAST,
    STEP,
    TableFileError,
    element,
    open_table,
    padded,
    save_table,
)

ROWS_MIN = 2  # of a segment: one to act on, and one whose price settles the action
SPLITS = "train", "validation", "test"


class HeldRows:
    """Rows in host memory, as training reads them.

    Args:
        table: [R, I], padded, of the element type on the device.
        series: float32 [S, R].
    """

    ready = True

    def __init__(self, table, series):
        self._table, self._series = table, series
        self.rows, self.dtype = len(table), table.dtype

    def read(self, start, stop):
        """The table's rows, and the series of them."""
        return self._table[start:stop], self._series[:, start:stop]

    def read_series(self, start, stop):
        """The series of a range of rows."""
        return self._series[:, start:stop]


class SplitRows:
    """Rows of a source in ranges, one after the other; the last row of each ends episodes.

    What `read` gives is overwritten by the next call.

    Args:
        source: rows as open_table gives them.
        env: the Env.
        ranges: int64 [K, 2], first row and the one after the last of each, at least two rows apart.
    """

    def __init__(self, source, env, ranges):
        self._source, self._last = source, env.series.index(LAST)
        self.ranges, self.ready, self.dtype = ranges, source.ready, source.dtype
        self._ends = np.cumsum(ranges[:, 1] - ranges[:, 0])
        self.rows = int(self._ends[-1])
        self._table = None

    def pieces(self, start, stop):
        """(first, stop) in the source of each part of a range of rows."""
        k = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first = int(self.ranges[k, 1] - self._ends[k]) + start
            count = min(stop, int(self._ends[k])) - start
            yield first, first + count
            start, k = start + count, k + 1

    def read(self, start, stop):
        """The features or the table's rows, and the series of them."""
        pieces = list(self.pieces(start, stop))
        series = self.read_series(start, stop)
        tables = [self._source.read(*piece)[0] for piece in pieces]
        if len(tables) == 1:
            return tables[0], series
        if self._table is None or len(self._table) < stop - start:
            self._table = np.empty((stop - start, tables[0].shape[1]), self.dtype)
        made = self._table[: stop - start]
        np.concatenate([_bits(table) for table in tables], out=_bits(made))
        return made, series

    def read_series(self, start, stop):
        """The series of a range of rows."""
        parts = [self._source.read_series(*piece) for piece in self.pieces(start, stop)]
        series = np.concatenate(parts, axis=1)
        ends = self._ends[(self._ends > start) & (self._ends <= stop)] - 1 - start
        series[self._last, ends] = 1
        return series


def _bits(array):
    """The same memory in whole numbers, which NumPy copies faster than bfloat16."""
    return array.view(f"u{array.dtype.itemsize}")


class TableFile:
    """A table on disk in its three splits.

    Memory is taken for the dates, 16 bytes a row, and for what is read; features stay on disk.

    Args:
        path: as open_table takes it.
        env: the Env.
        shares: of the rows that are training's and validation's, by time; the rest is the test's.

    Attributes:
        train, validation, test: SplitRows.
        rows: of the training split.
        whole: all rows, as open_table gives them.
        dates: int64 [N] of all rows, in seconds since 1970-01-01 UTC.
        firsts: the first row of each segment.

    Raises:
        TableFileError: no such table; one without dates, or with dates that do not rise.
    """

    def __init__(self, path, env, shares):
        self.path, self._env = path, env
        self.whole = open_table(path, env)
        dates = self.whole.dates()
        if dates is None:
            raise TableFileError(
                f"{path} has no dates, by which it would be split: give save_table `date`, or a "
                "Parquet file a column `date`"
            )
        segments = self._segments(dates)
        self.firsts = segments[:, 0]
        ranges = _ranges(dates, segments, shares)
        self.dates = dates
        made = (self._rows(name, part) for name, part in zip(SPLITS, ranges))
        self.train, self.validation, self.test = made
        self.rows = self.train.rows

    def _segments(self, dates):
        """First row, and the one after the last, of each segment, int64 [K, 2]."""
        rows, last, ends = self.whole.rows, self._env.series.index(LAST), []
        for start in range(0, rows, STEP):
            series = self.whole.read_series(start, min(start + STEP, rows))
            ends.append(start + 1 + np.flatnonzero(series[last]))
        stops = np.concatenate(ends)
        if not len(stops) or stops[-1] != rows:
            raise TableFileError(f"{self.path}: `last` must be 1 on the last row, {rows - 1}")
        falls = np.flatnonzero(dates[1:] <= dates[:-1]) + 1
        falls = falls[~np.isin(falls, stops)]
        if len(falls):
            raise TableFileError(
                f"{self.path}: dates of a segment must rise, and those of rows {falls[0] - 1} and "
                f"{falls[0]} do not"
            )
        return np.stack([np.concatenate([[0], stops[:-1]]), stops], axis=1)

    def _rows(self, name, ranges):
        whole = ranges[:, 1] - ranges[:, 0] >= ROWS_MIN
        short = np.count_nonzero(ranges[:, 1] - ranges[:, 0] == 1)
        if short:
            warnings.warn(
                f"{short} of {len(ranges)} segments have one row in the {name} split, and are left out "
                "of it",
                stacklevel=4,
            )
        if not whole.any():
            raise TableFileError(
                f"{self.path}: no segment has {ROWS_MIN} rows in the {name} split; give more data, or a "
                "larger share"
            )
        return SplitRows(self.whole, self._env, ranges[whole])

    def normalizer(self):
        """The Normalizer of the training rows: the folder's own, or fitted in steps."""
        if not self.whole.ready:
            return fitted(self.train)
        figures, columns = self.whole.figures(), self._env.table_columns
        if figures is None:
            return Normalizer(np.zeros(columns, np.float32), np.ones(columns, np.float32))
        return Normalizer(*np.array(figures))

    def resident(self, normalizer):
        """The padded table and the series of the training split, float32, in memory."""
        return self._arrays(self.train, normalizer)

    def source(self, normalizer, precision):
        """The training split as StreamedTable takes it, and the Normalizer that it still needs.

        Raises:
            TableFileError: rows that were stored for another precision.
        """
        if self.whole.ready and self.whole.dtype != element(precision):
            raise TableFileError(
                f"{self.path} holds {self.whole.dtype} and training is in {precision}: give "
                f"precision={self.whole.dtype}, or save it in {precision}"
            )
        return self.train, None if self.whole.ready else normalizer

    def _arrays(self, rows, normalizer):
        table = np.zeros((rows.rows, self._env.width), np.float32)
        series = np.empty((len(self._env.series), rows.rows), np.float32)
        for start in range(0, rows.rows, STEP):
            stop = min(start + STEP, rows.rows)
            part, series[:, start:stop] = rows.read(start, stop)
            if self.whole.ready:
                table[start:stop] = part
            else:
                padded(normalizer.apply(part), self._env, "float32", table[start:stop])
        return table, series

    def tested(self, normalizer):
        """Table, series and Segments of the test split.

        Args:
            normalizer: the run's Normalizer.

        Raises:
            TableFileError: a folder whose features were normalized by other figures.
        """
        own = self.normalizer() if self.whole.ready else normalizer
        if not all(
            np.array_equal(a, b) for a, b in zip(vars(own).values(), vars(normalizer).values())
        ):
            raise TableFileError(
                f"{self.path} holds features that were normalized by other figures than the run's: "
                "save it with the run's normalizer"
            )
        table, series = self._arrays(self.test, normalizer)
        ranges = self.test.ranges
        lengths = ranges[:, 1] - ranges[:, 0]
        names = self.whole.symbols(self.firsts)
        segment = np.searchsorted(self.firsts, ranges[:, 0], side="right") - 1
        segments = Segments(
            symbols=tuple(names[s] for s in segment),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            price=series[self._env.series.index("price")],
            date=np.concatenate([self.dates[a:b] for a, b in ranges]),
        )
        return table, series, segments


def convert(path, folder, env, *, shares=(0.7, 0.1), precision="float32"):
    """Write a Parquet table as save_table does, normalized by its training rows: it then needs no work.

    Args:
        path: as open_table takes a Parquet file.
        folder: to make.
        env: the Env.
        shares: of training and validation, as the runs on it have them.
        precision: of the runs on it, "float32" or "bfloat16".

    Raises:
        TableFileError: no such table.
        FileExistsError: the folder holds a table.
    """
    file = TableFile(path, env, shares)
    source = file.whole
    if source.ready:
        raise TableFileError(f"{path} is a folder that save_table wrote: it needs no conversion")
    spans = ((start, min(start + STEP, source.rows)) for start in range(0, source.rows, STEP))
    save_table(
        folder,
        env,
        _Features(source, env),
        np.concatenate([source.read_series(*span) for span in spans], axis=1),
        normalizer=file.normalizer(),
        precision=precision,
        date=file.dates,
        symbols=source.symbols(file.firsts),
    )


class _Features:
    """The features of a source, sliced like an array."""

    dtype = np.dtype(np.float32)

    def __init__(self, source, env):
        self._source, self.shape = source, (source.rows, env.table_columns)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        return self._source.read(*rows.indices(len(self))[:2])[0]


def _ranges(dates, segments, shares):
    """The rows of each segment that each split has: three of int64 [K, 2], some empty.

    Cuts are the dates at which a share of all rows has passed, the same for every segment.
    """
    ends = [min(round(share * len(dates)), len(dates) - 1) for share in np.cumsum(shares)]
    cuts = np.partition(dates, ends)[ends]
    bounds = np.array(
        [[a, *(a + np.searchsorted(dates[a:b], cuts, side="left")), b] for a, b in segments]
    )
    return [bounds[:, k : k + 2] for k in range(len(SPLITS))]


def fitted(rows):
    """The Normalizer of rows of features, read in steps and summed in float64.

    Args:
        rows: SplitRows of a source that is not ready.

    Raises:
        TableFileError: a value that is not finite.
    """
    spans = [(start, min(start + STEP, rows.rows)) for start in range(0, rows.rows, STEP)]
    total = 0
    for span in spans:
        features = rows.read(*span)[0]
        bad = np.flatnonzero(~np.isfinite(features).all(axis=0))
        if len(bad):
            raise TableFileError(
                f"feature columns {bad.tolist()} have values that are not finite in training rows "
                f"{span[0]} to {span[1] - 1}"
            )
        total = total + features.sum(axis=0, dtype=np.float64)
    mean, square = total / rows.rows, 0
    for span in spans:
        square = square + ((rows.read(*span)[0] - mean) ** 2).sum(axis=0)
    std = np.sqrt(square / rows.rows).astype(np.float32)
    if constant := np.flatnonzero(std == 0).tolist():
        warnings.warn(f"feature columns {constant} are constant, and normalized to 0", stacklevel=2)
    return Normalizer(mean.astype(np.float32), std)
