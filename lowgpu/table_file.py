"""Market tables on disk, read a range of rows at a time."""

import sys
from pathlib import Path

import numpy as np

from lowgpu_kernels.dims import BF16, F32, Choice, I, Int

TABLE, SERIES = "table.npy", "series.npy"
DATE, SYMBOLS, NORMALIZER = "date.npy", "symbols.npy", "normalizer.npy"  # where they were given
LAST = "last"  # the series that marks the rows after which there is no price
STEP = 65_536  # rows written at a time; untuned
PRECISION = Choice("float32", "bfloat16")
_ROWS = Int(1, 2**31 - 1, int)


class TableFileError(ValueError):
    """A file that is no market table: one sentence with the place and what is wrong."""


def save_table(
    path, env, features, series, *, normalizer=None, precision="float32", date=None, symbols=None
):
    """Write a folder of memory-mapped arrays that need no work when they are read.

    Args:
        path: the folder, which is made.
        env: the Env whose observations lead with the features.
        features: float32 [N, F], an array or a memory map; read in steps.
        series: float32 [S, N], in the order of env.series.
        normalizer: a Normalizer to apply, which is kept beside the table; None where the features are
            as they should be.
        precision: "float32", or "bfloat16" for half the bytes: the rows as training reads them.
        date: int64 [N], the time of each row in seconds since 1970-01-01 UTC, which `lowgpu train`
            splits and evaluates by.
        symbols: a name for each segment, in order; None numbers them.

    Raises:
        TypeError, ValueError: arrays that do not fit the Env.
        FileExistsError: the folder holds a table.
    """
    PRECISION("precision", precision)
    rows = _ROWS("the rows of features", len(features))
    wanted = {"features": (rows, env.table_columns), "series": (len(env.series), rows)}
    for name, array in {"features": features, "series": series}.items():
        if array.dtype != np.float32:
            raise TypeError(f"{name} must be float32, got {array.dtype}")
        if array.shape != wanted[name]:
            raise ValueError(f"{name} must have shape {wanted[name]}, got {array.shape}")
    segments = int(np.count_nonzero(series[env.series.index(LAST)])) if symbols is not None else 0
    _check_beside(rows, segments, date, symbols)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / TABLE).exists():
        raise FileExistsError(f"{folder / TABLE} exists; give another folder")
    np.save(folder / SERIES, np.ascontiguousarray(series), allow_pickle=False)
    if date is not None:
        np.save(folder / DATE, date, allow_pickle=False)
    if symbols is not None:
        np.save(folder / SYMBOLS, np.array(symbols, str), allow_pickle=False)
    if normalizer is not None:
        figures = np.stack([normalizer.mean, normalizer.std])
        np.save(folder / NORMALIZER, figures, allow_pickle=False)
    # Other programs know no bfloat16 in .npy files: its bits are stored.
    stored = np.uint16 if precision == "bfloat16" else np.float32
    # The table gets its name when it is whole.
    part_path = folder / f"{TABLE}.part"
    table = np.lib.format.open_memmap(part_path, "w+", stored, (rows, env.width))
    for start in range(0, rows, STEP):
        part = np.ascontiguousarray(features[start : start + STEP])
        made = padded(part if normalizer is None else normalizer.apply(part), env, precision)
        table[start : start + STEP] = made.view(stored)
    table.flush()
    part_path.replace(folder / TABLE)


def _check_beside(rows, segments, date, symbols):
    if date is not None and (getattr(date, "dtype", None) != np.int64 or date.shape != (rows,)):
        came = f"{getattr(date, 'dtype', type(date).__name__)}{list(np.shape(date))}"
        raise ValueError(f"date must be int64[{rows}], seconds since 1970-01-01 UTC, got {came}")
    if symbols is not None and len(symbols) != segments:
        raise ValueError(
            f"symbols must name the {segments} segments that `last` ends, got {len(symbols)}"
        )


def padded(features, env, precision, out=None):
    """Features as training reads them: the element type of the precision, zeros to env.width.

    Args:
        features: float32 [N, F].
        out: array to fill, whose padding is zero; None makes one.
    """
    if out is None:
        out = np.zeros((len(features), env.width), element(precision))
    out[:, : env.table_columns] = features
    return out


def element(precision):
    """The element type of a table."""
    return (BF16 if precision == "bfloat16" else F32)[I].dtype({})


def open_table(path, env):
    """The rows of a folder that save_table wrote, or of a Parquet file.

    A Parquet file has a float32 column for each of env.series, by name, and one for each feature, in
    order; others are left alone if they are not float32, but for `date` (a date, a time, or int64
    seconds since 1970-01-01 UTC) and `symbol` (text), which training splits by and evaluation names.
    Rows of a symbol stand together, and `last` is 1 on the last of them.

    Args:
        path: the folder or the file, or a pattern of Parquet files such as "bars/*.parquet".
        env: the Env.

    Raises:
        TableFileError: it is no such table, or does not fit the Env.
        ImportError: polars is needed, for Parquet, and not installed.
    """
    if Path(path).is_dir():
        return MappedRows(Path(path), env)
    if str(path).endswith(".parquet"):
        return ParquetRows(path, env)
    raise TableFileError(f"{path} is no folder with {TABLE} and {SERIES}, and no .parquet file")


def is_table(path):
    """Whether a path is read by open_table, by its form alone; other files are bars."""
    return str(path).endswith(".parquet") or Path(path).is_dir()


class MappedRows:
    """Rows of a folder of memory-mapped arrays."""

    def __init__(self, folder, env):
        self._folder = folder
        arrays = [self._load(name) for name in (TABLE, SERIES)]
        self._table, self._series = arrays
        if self._table.dtype == np.uint16:
            self._table = self._table.view(element("bfloat16"))
        elif self._table.dtype != np.float32:
            raise TableFileError(
                f"{folder / TABLE} must hold float32 or uint16, got {self._table.dtype}"
            )
        if self._series.dtype != np.float32:
            raise TableFileError(f"{folder / SERIES} must hold float32, got {self._series.dtype}")
        self.rows = len(self._table)
        wanted = (self.rows, env.width), (len(env.series), self.rows)
        for name, array, shape in zip((TABLE, SERIES), arrays, wanted):
            if array.shape != shape:
                raise TableFileError(f"{folder / name} must have shape {shape}, got {array.shape}")
        self.dtype, self.ready, self._columns = self._table.dtype, True, env.table_columns

    def read(self, start, stop):
        """The table's rows as they are trained on, and the series of them."""
        return self._table[start:stop], self.read_series(start, stop)

    def read_series(self, start, stop):
        """The series of a range of rows."""
        return self._series[:, start:stop]

    def dates(self):
        """int64 [N], seconds since 1970-01-01 UTC; None where the folder holds none."""
        return self._beside(DATE, np.int64, (self.rows,))

    def symbols(self, firsts):
        """The names of the segments, given the first row of each."""
        names = None
        if (self._folder / SYMBOLS).exists():
            names = self._load(SYMBOLS).tolist()
        return tuple(names or map(str, range(len(firsts))))

    def figures(self):
        """float32 [2, F], means and deviations that the features were normalized by; or None."""
        return self._beside(NORMALIZER, np.float32, (2, self._columns))

    def _beside(self, name, dtype, shape):
        if not (self._folder / name).exists():
            return None
        array = self._load(name)
        if array.dtype != dtype or array.shape != shape:
            raise TableFileError(
                f"{self._folder / name} must hold {np.dtype(dtype)}{list(shape)}, got "
                f"{array.dtype}{list(array.shape)}"
            )
        return array

    def _load(self, name):
        try:
            return np.load(self._folder / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise TableFileError(f"{self._folder / name} cannot be read: {error}") from None


class ParquetRows:
    """Rows of Parquet files, whose features are as they were computed."""

    def __init__(self, path, env):
        polars = _polars()
        self._path, self._scan = path, polars.scan_parquet(path)
        try:
            columns = self._scan.collect_schema()
            self.rows = self._scan.select(polars.len()).collect().item()
        except (OSError, polars.exceptions.PolarsError) as error:
            raise TableFileError(f"{path} cannot be read: {error}") from None
        self._series = list(env.series)
        for name in self._series:
            if columns.get(name) != polars.Float32:
                came = columns.get(name, "none")
                raise TableFileError(f"{path} must have a Float32 column {name!r}, got {came}")
        self._features = [
            n for n, dtype in columns.items() if dtype == polars.Float32 and n not in self._series
        ]
        if len(self._features) != env.table_columns:
            raise TableFileError(
                f"{path} must have {env.table_columns} Float32 columns beside {self._series}, got "
                f"{len(self._features)}"
            )
        self._columns = columns
        self.dtype, self.ready = np.dtype(np.float32), False

    def read(self, start, stop):
        """The features of a range of rows, and the series of them."""
        frame = self._read(start, stop, self._features + self._series)
        return frame.select(self._features).to_numpy(), self._stacked(frame)

    def read_series(self, start, stop):
        """The series of a range of rows."""
        return self._stacked(self._read(start, stop, self._series))

    def dates(self):
        """int64 [N], seconds since 1970-01-01 UTC; None where there is no column `date`."""
        if "date" not in self._columns:
            return None
        polars, kind = _polars(), self._columns["date"]
        column = polars.col("date")
        if kind in (polars.Date, polars.Datetime):
            column = column.dt.epoch("s")
        elif kind != polars.Int64:
            raise TableFileError(f"{self._path}: date must be a date, a time or Int64, got {kind}")
        dates = self._scan.select(column.cast(polars.Int64)).collect()["date"]
        if dates.null_count():
            raise TableFileError(f"{self._path}: date has {dates.null_count()} empty values")
        return dates.to_numpy()

    def symbols(self, firsts):
        """The names of the segments, given the first row of each."""
        if "symbol" not in self._columns:
            return tuple(map(str, range(len(firsts))))
        column = _polars().col("symbol").gather(firsts.tolist())
        return tuple(map(str, self._scan.select(column).collect()["symbol"]))

    def _stacked(self, frame):
        return np.stack([frame[name].to_numpy() for name in self._series])

    def _read(self, start, stop, names):
        frame = self._scan.slice(start, stop - start).select(names).collect()
        for name, count in zip(frame.columns, frame.null_count().row(0)):
            if count:
                raise TableFileError(
                    f"{self._path}: column {name!r} has {count} empty values in rows {start} to "
                    f"{stop - 1}"
                )
        return frame


def _polars():
    # The command line keeps TA-Lib from importing polars by this mark.
    if "polars" in sys.modules and sys.modules["polars"] is None:
        del sys.modules["polars"]
    try:
        import polars
    except ImportError as error:
        raise ImportError("Parquet tables need polars: pip install polars") from error
    return polars
