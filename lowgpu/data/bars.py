"""Market bars: one checked table of open, high, low, close and volume, and a strict CSV reader.

The reader guesses nothing and repairs nothing: a file is read whole, or refused with the line
that is wrong.
"""

import csv
import gzip
import os
import re
import stat
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

COLUMNS = ("date", "open", "high", "low", "close", "volume")
PRICES = ("open", "high", "low", "close")

# Between these bounds no product that a feature forms leaves float64, and every price is a normal
# float32.
PRICE_MIN, PRICE_MAX, VOLUME_MAX = 1e-18, 1e18, 1e24

# The years 1 to 9999, in seconds since 1970-01-01 UTC.
DATE_MIN, DATE_MAX = -62_135_596_800, 253_402_300_799

# A close that moves further than this in one bar is reported when there is no adjusted close.
JUMP = 0.40

# About 5,000 rows: small enough to stay in cache, large enough to hide the cost of a call.
_BLOCK_NBYTES = 1 << 18
_LINE_NBYTES = 8192
_FAULTS_COUNTED = 1000

_ALIASES = {"ticker": "symbol"}
_THOUSANDS = re.compile(r"[+-]?[0-9]+([ '’_\u00a0\u2009\u202f][0-9]+)+(\.[0-9]*)?")
_NUMBER_BYTES = b"0123456789+-.eE"
_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.0+)?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?"
)
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)


class BarsError(ValueError):
    """Bars that cannot be used: one sentence with the place, the value and what is wrong."""


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars of one or more symbols, each a segment of consecutive rows in strictly rising time.

    Segment s holds rows offsets[s] to offsets[s + 1] - 1. S counts segments, N rows.

    Args:
        symbol: the name of each segment, all different.
        offsets: the first row of each segment, then N.
        date: the time of each bar in seconds since 1970-01-01 UTC, years 1 to 9999.
        open: price in [1e-18, 1e18], as are high, low and close.
        high: at least open, close and low.
        low: at most open and close.
        close: the price that features, rewards and fills start from.
        volume: units traded, in [0, 1e24].
        line: the line of the file that each row came from; the header is line 1.

    Raises:
        TypeError: an array of another dtype.
        BarsError: shapes that differ, an empty segment, time that does not rise, no legal bar.
    """

    symbol: tuple[str, ...]  # [S]
    offsets: np.ndarray  # int64 [S + 1]
    date: np.ndarray  # int64 [N]
    open: np.ndarray  # float64 [N]
    high: np.ndarray  # float64 [N]
    low: np.ndarray  # float64 [N]
    close: np.ndarray  # float64 [N]
    volume: np.ndarray  # float64 [N]
    line: np.ndarray  # int64 [N]

    def __post_init__(self):
        for name in ("offsets", "line", *COLUMNS):
            array = getattr(self, name)
            wanted = np.int64 if name in ("offsets", "line", "date") else np.float64
            if not isinstance(array, np.ndarray) or array.dtype != wanted:
                came = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{name}: wanted a NumPy array of {wanted.__name__}, got {came}")
            rows = len(self.symbol) + 1 if name == "offsets" else len(self.date)
            if array.shape != (rows,):
                raise BarsError(f"{name}: wanted shape ({rows},), got {array.shape}")
        if not self.symbol or len(set(self.symbol)) != len(self.symbol):
            raise BarsError(f"symbol: wanted names, all different, got {self.symbol}")
        ends_fit = self.offsets[0] == 0 and self.offsets[-1] == len(self.date)
        if not ends_fit or np.any(np.diff(self.offsets) < 1):
            raise BarsError(
                f"offsets: wanted 0, then the rising end of each segment up to {len(self.date)}, "
                f"got {self.offsets.tolist()[:8]}"
            )
        faults = _Faults("bars")
        bars = {name: getattr(self, name) for name in COLUMNS}
        for row in np.flatnonzero(_broken(bars)):
            faults.add(int(self.line[row]), *_first_broken({k: v[row] for k, v in bars.items()}))
        for segment, symbol in enumerate(self.symbol):
            rows = self.rows(segment)
            _check_order(faults, symbol, self.date[rows], self.line[rows])
        faults.raise_first()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.date)

    def rows(self, segment: int) -> slice:
        """Return the rows of a segment, which is counted from 0."""
        return slice(int(self.offsets[segment]), int(self.offsets[segment + 1]))


def read_csv(path: str | os.PathLike) -> Bars:
    """Read bars from a comma-separated UTF-8 file with a header, plain or gzip-compressed.

    Columns, in any order and any case: date, open, high, low, close, volume. Two more are read
    where they are present:

    - symbol, or ticker: the segment of the row. Rows of different symbols may be interleaved; each
      symbol keeps the order of its rows, and symbols stand in order of first appearance. Without
      the column the file is one segment, named after the file.
    - adj_close, or "Adj Close": the close adjusted for splits and dividends. All four prices of a
      row are multiplied by adj_close / close, so that a split is no crash. Volume stays as it is.

    Other columns are left out, with a warning that names them.

    Dates are ISO 8601: 2020-01-31, 2020-01-31T15:30, 2020-01-31T15:30:00Z, or with an offset such
    as -05:00; a blank may stand for the T, and a fraction of a second must be zero. A date without
    an offset is UTC, whatever the time zone of the machine. Numbers are digits with an optional
    sign, point and exponent. Empty lines may only end the file. Nothing else is accepted, and
    nothing is sorted, filled or rounded.

    Without an adjusted close, a warning names the first close that moves by more than 40 % in one
    bar: a split or a real crash, which only the source of the file can tell.

    Args:
        path: a regular file named .csv or .csv.gz.

    Returns:
        The bars, with the line that each row came from.

    Raises:
        TypeError: path is not a path.
        BarsError: the first fault by line, with the number of faulty lines up to 1000.

    Source: RFC 4180 for quotes and line ends (no line break inside quotes); RFC 3339 for dates.
    """
    path = _regular_file(path)
    faults = _Faults(str(path))
    try:
        with (gzip.open if path.name.lower().endswith(".gz") else open)(path, "rb") as file:
            header, parts = _read(file, faults)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    bars = _assemble(header, parts, faults, _stem(path))
    if header.unknown:
        names = ", ".join(map(_shown, header.unknown))
        warnings.warn(f"{path}: column {names} is not read", stacklevel=2)
    if "adj_close" not in header.index:
        _warn_of_jumps(bars, path)
    return bars


def sample() -> Bars:
    """Return the built-in sample: 12,154 daily bars of five shares, 2000 to 2013, adjusted.

    Source: sample/PROVENANCE.md.
    """
    return read_csv(Path(__file__).parent / "sample" / "stocks.csv.gz")


class _Fault(Exception):
    """What is wrong with one line, and in which column where that is known."""


@dataclass
class _Faults:
    """The first fault of a source by line, and how many lines are faulty."""

    source: str
    count: int = 0
    first: tuple[int, str] | None = None

    def add(self, line: int, column: str | None, text: str, count: int = 1):
        place = f"line {line}, column {column}" if column else f"line {line}"
        if self.first is None or line < self.first[0]:
            self.first = (line, f"{self.source}, {place}: {text}")
        self.count += count
        if self.count >= _FAULTS_COUNTED:
            self.raise_first()

    def raise_first(self):
        if self.first is None:
            return
        least = "at least " if self.count >= _FAULTS_COUNTED else ""
        more = f" (the first of {least}{self.count} faulty lines)" if self.count > 1 else ""
        raise BarsError(self.first[1] + more)


@dataclass
class _Header:
    """Where each known column stands, and what is learned about the symbols while reading."""

    width: int
    index: dict[str, int]
    unknown: list[str]
    symbols: dict[str, int] = field(default_factory=dict)

    @property
    def numbers(self) -> list[str]:
        return [name for name in self.index if name not in ("date", "symbol")]

    def column_at(self, line: bytes, position: int) -> str | None:
        """Name the column of a byte of a line that cannot be parsed, counting commas."""
        at = line[:position].count(b",")
        return next((name for name, index in self.index.items() if index == at), None)


def _shown(text: str) -> str:
    """Quote a value of the file, cut to a length that fits in a message."""
    return repr(text) if len(text) <= 40 else repr(text[:40]) + "..."


def _utc(seconds: int) -> str:
    """Write epoch seconds as ISO 8601, without the time at midnight."""
    text = str(np.datetime64(int(seconds), "s"))
    return text.removesuffix("T00:00:00") if text.endswith("T00:00:00") else text + "Z"


def _stem(path: Path) -> str:
    return re.sub(r"\.csv(\.gz)?$", "", path.name, flags=re.IGNORECASE)


def _unreadable(path: Path, error: Exception) -> BarsError:
    reason = getattr(error, "strerror", None) or str(error)
    return BarsError(f"{path}: the file cannot be read: {reason}")


def _regular_file(path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: wanted str or os.PathLike, got {type(path).__name__}")
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(mode):
        raise BarsError(f"{path}: wanted a regular file, and this is none")
    if not path.name.lower().endswith((".csv", ".csv.gz")):
        raise BarsError(f"{path}: wanted a name that ends in .csv or .csv.gz")
    return path


def _rules(bar: dict) -> Iterator[tuple[str, np.ndarray, str, str | None]]:
    """Yield column, where it is broken, what is wrong and the column compared with, rule by rule.

    Works on columns and on the numbers of one bar, so both paths of the reader say the same.
    """
    outside = f"is outside [{PRICE_MIN:g}, {PRICE_MAX:g}]"
    for name in (*PRICES, "adj_close"):
        if name in bar:
            yield name, ~np.isfinite(bar[name]), "is not a finite number", None
            yield name, bar[name] <= 0, "is not above zero", None
            yield name, (bar[name] < PRICE_MIN) | (bar[name] > PRICE_MAX), outside, None
    yield "volume", ~np.isfinite(bar["volume"]), "is not a finite number", None
    yield "volume", bar["volume"] < 0, "is negative", None
    yield "volume", bar["volume"] > VOLUME_MAX, f"is above {VOLUME_MAX:g}", None
    for other in ("open", "close", "low"):
        yield "high", bar["high"] < bar[other], f"is below the {other} of its bar,", other
    for other in ("open", "close"):
        yield "low", bar["low"] > bar[other], f"is above the {other} of its bar,", other
    years = (bar["date"] < DATE_MIN) | (bar["date"] > DATE_MAX)
    yield "date", years, "is outside the years 1 to 9999", None
    if "adj_close" in bar:
        with np.errstate(all="ignore"):
            scale = bar["adj_close"] / bar["close"]
            broken = (bar["low"] * scale < PRICE_MIN) | (bar["high"] * scale > PRICE_MAX)
        yield "adj_close", broken, "scales a price out of range, the close being", "close"


def _broken(bar: dict) -> np.ndarray:
    """Say which rows break a rule."""
    broken = np.zeros(len(bar["date"]), bool)
    for _, rows, _, _ in _rules(bar):
        broken |= rows
    return broken


def _first_broken(bar: dict) -> tuple[str, str] | None:
    """Return the column and the text of the first rule that one bar breaks."""
    for column, broken, text, other in _rules(bar):
        if broken:
            compared = f" {bar[other].item()!r}" if other else ""
            return column, f"{bar[column].item()!r} {text}{compared}"
    return None


def _check_order(faults: _Faults, symbol: str, date: np.ndarray, line: np.ndarray):
    """Add the first row of a segment that is not later than the row before it."""
    step = np.diff(date)
    behind = np.flatnonzero(step <= 0) + 1
    if len(behind) == 0:
        return
    row = int(behind[0])
    same = np.flatnonzero(date[:row] == date[row])
    if len(behind) == len(step) > 1 and step.max() < 0:
        text = (
            f"{symbol} runs from the newest bar, {_utc(date[0])}, to the oldest, "
            f"{_utc(date[-1])}: sort the file by date, oldest first"
        )
    elif len(same):
        text = f"{_utc(date[row])} of {symbol} is already on line {line[same[0]]}"
    else:
        text = (
            f"{_utc(date[row])} of {symbol} comes after {_utc(date[row - 1])} "
            f"on line {line[row - 1]}: sort the file by date, oldest first"
        )
    faults.add(int(line[row]), "date", text, count=len(behind))


def _read(file, faults: _Faults) -> tuple[_Header, list[dict]]:
    """Read a file block by block into parts, each the good rows of a block by column."""
    header, parts, number, rest, empty, empty_line = None, [], 1, b"", 0, 0
    at_end = False
    while not at_end:
        block = file.read(_BLOCK_NBYTES)
        at_end = not block
        lines = (rest + block).split(b"\n")
        rest = b"" if at_end else lines.pop()
        if header is None and lines == [b""] and at_end:
            raise BarsError(f"{faults.source}: the file is empty")
        if header is None and lines:
            _check_lengths(lines[:1], number, None, faults)
            header = _read_header(lines.pop(0), faults.source)
            number += 1
        _check_lengths([*lines, rest], number, header, faults)
        used = len(lines)
        while used and lines[used - 1] in (b"", b"\r"):
            used -= 1
        if used:
            if empty:
                faults.add(empty_line, None, "the line is empty, and bars follow", count=empty)
                empty = 0
            parts.append(_read_lines(lines[:used], number, header, faults))
        if not empty:
            empty_line = number + used
        empty += len(lines) - used
        # Without an end to this, a small compressed file could hold endless empty lines.
        if empty > _FAULTS_COUNTED:
            faults.add(empty_line, None, "only empty lines follow", count=empty)
        number += len(lines)
    return header, parts


def _check_lengths(lines: list[bytes], number: int, header: _Header | None, faults: _Faults):
    """Refuse a line that is too long to be a bar, before more of it is read."""
    if max(map(len, lines)) <= _LINE_NBYTES:
        return
    for at, line in enumerate(lines):
        if len(line) > _LINE_NBYTES:
            column = header.column_at(line, _LINE_NBYTES) if header else None
            start = line[:_LINE_NBYTES].rpartition(b",")[2][:40].decode(errors="replace")
            text = f"{_shown(start)}... runs past byte {_LINE_NBYTES} of its line"
            faults.add(number + at, column, text)
            faults.raise_first()


def _read_header(line: bytes, source: str) -> _Header:
    """Find the columns in the first line."""
    place = f"{source}, line 1"
    if line.startswith(b"\x1f\x8b"):
        raise BarsError(f"{place}: the file is gzip-compressed, so its name must end in .csv.gz")
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BarsError(f"{place}: the file is UTF-16, and UTF-8 is wanted")
    try:
        cells = _cells(line.removeprefix(b"\xef\xbb\xbf"), None) or [""]
    except _Fault as fault:
        raise BarsError(f"{place}: {fault.args[1]}") from None
    names = [cell.strip().lower().replace(" ", "_") for cell in cells]
    names = [_ALIASES.get(name, name) for name in names]
    known = (*COLUMNS, "symbol", "adj_close")
    for name in known:
        if names.count(name) > 1:
            shown = ", ".join(_shown(c) for c, n in zip(cells, names) if n == name)
            raise BarsError(f"{place}, column {name}: the header names it twice, as {shown}")
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        many = "columns" if len(missing) > 1 else "column"
        shown = _shown(",".join(cells))
        hint = ""
        if len(cells) == 1 and re.search(r"[;\t|]", cells[0]):
            hint = "; fields must be separated by commas"
        raise BarsError(f"{place}: {many} {', '.join(missing)} missing from {shown}{hint}")
    unknown = [cell for cell, name in zip(cells, names) if name not in known]
    for cell in unknown:
        # Leaving out an adjusted close that is only misspelt would turn splits into crashes.
        if cell.strip().lower().startswith("adj"):
            raise BarsError(
                f"{place}, column {_shown(cell)}: an adjusted close must be named adj_close, "
                "and other adjusted columns must be removed"
            )
    index = {name: names.index(name) for name in known if name in names}
    return _Header(len(cells), index, unknown)


def _read_lines(lines: list[bytes], number: int, header: _Header, faults: _Faults) -> dict:
    """Parse the lines of a block; one by one where any is faulty, to say which."""
    part = _parse_columns(lines, header)
    if part is not None:
        part["line"] = np.arange(number, number + len(lines), dtype=np.int64)
        return part
    rows = []
    for at, line in enumerate(lines):
        try:
            rows.append({**_parse_row(line, header), "line": np.int64(number + at)})
        except _Fault as fault:
            faults.add(number + at, *fault.args)
    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _parse_columns(lines: list[bytes], header: _Header) -> dict | None:
    """Parse a block column by column; None when any line has a fault."""
    try:
        text = b"\n".join(lines).decode().replace("\r\n", "\n").removesuffix("\r")
        if "\r" in text:
            return None
        rows = list(csv.reader(text.split("\n"), strict=True))
        # A quote that is left open joins lines, which shows in the number of rows.
        if len(rows) != len(lines) or set(map(len, rows)) != {header.width}:
            return None
        columns = list(zip(*rows))
        part = {"date": np.array([_seconds(t) for t in columns[header.index["date"]]], np.int64)}
        for name in header.numbers:
            texts = columns[header.index[name]]
            # float() alone would take "nan", "1_000", blanks and the digits of other scripts.
            if "".join(texts).encode().translate(None, _NUMBER_BYTES):
                return None
            part[name] = np.array(list(map(float, texts)), np.float64)
        part["symbol"] = _symbol_numbers(columns, header, len(rows))
    except (csv.Error, ValueError, _Fault):
        return None
    return None if np.any(_broken(part)) else part


def _parse_row(line: bytes, header: _Header) -> dict:
    """Parse one line, with the same result as _parse_columns, or raise what is wrong with it."""
    cells = _cells(line, header)
    if len(cells) != header.width:
        hint = ""
        if len(cells) > header.width:
            hint = "; a number must have no decimal comma and no thousands separator"
        counts = f"{len(cells)} fields where the header has {header.width}{hint}"
        raise _Fault(None, f"{counts}, {_shown(line.decode())}")
    row = {"date": np.int64(_column(header, cells, "date", _seconds))}
    for name in header.numbers:
        row[name] = np.float64(_column(header, cells, name, _number))
    broken = _first_broken(row)
    if broken:
        raise _Fault(*broken)
    row["symbol"] = _symbol_numbers([[cell] for cell in cells], header, 1)[0]
    return row


def _cells(line: bytes, header: _Header | None) -> list[str]:
    """Split one line into its fields."""
    try:
        text = line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        column = header.column_at(line, error.start) if header else None
        text = f"byte 0x{line[error.start]:02x} at position {error.start + 1} is not UTF-8"
        raise _Fault(column, text) from None
    if "\r" in text:
        column = header.column_at(line, line.index(b"\r")) if header else None
        raise _Fault(column, "a carriage return stands inside the line; lines end in LF or CRLF")
    if header and not text:
        raise _Fault(None, "the line is empty, and bars follow")
    try:
        (cells,) = csv.reader([text], strict=True)
    except ValueError:
        return []
    except csv.Error as error:
        at = line.rfind(b'"')
        column = header.column_at(line, at) if header and at >= 0 else None
        if text.count('"') % 2:
            wrong = "a quote is not closed before the end of the line"
        else:
            wrong = f"the line is not CSV ({error})"
        raise _Fault(column, f"{wrong}, {_shown(text)}") from None
    return cells


def _column(header: _Header, cells: list[str], name: str, parse) -> int | float:
    """Parse the field of a column; what is wrong gets the name of the column."""
    text = cells[header.index[name]]
    try:
        return parse(text)
    except ValueError as error:
        # The calendar's own errors do not quote the value.
        wrong = "is empty" if not text else str(error)
        raise _Fault(name, f"{_shown(text)} {wrong}") from None


def _number(text: str) -> float:
    """Read a plain decimal number, or say what it is instead."""
    if not text.encode().translate(None, _NUMBER_BYTES):
        with suppress(ValueError):
            return float(text)
    bare = text.strip().lower().lstrip("+-")
    if bare in ("nan", "inf", "infinity"):
        raise ValueError("is not a finite number")
    if "," in text:
        raise ValueError(
            "has a comma: write the number without thousands separators and with a decimal point"
        )
    if _THOUSANDS.fullmatch(text):
        raise ValueError("has a thousands separator: write the digits without it")
    if text != text.strip():
        raise ValueError("has blanks around it")
    raise ValueError("is not a number")


def _seconds(text: str) -> int:
    """Read an ISO 8601 date as epoch seconds."""
    if not _DATE.fullmatch(text):
        raise ValueError("is not an ISO 8601 date in whole seconds, such as 2020-01-31T15:30:00Z")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"is not a date of the calendar ({error})") from None
    since = moment - (_EPOCH if moment.tzinfo is None else _EPOCH_UTC)
    return since.days * 86_400 + since.seconds


def _symbol_numbers(columns: list, header: _Header, rows: int) -> np.ndarray:
    """Number the symbols of a column in order of first appearance."""
    if "symbol" not in header.index:
        return np.zeros(rows, np.int64)
    names = columns[header.index["symbol"]]
    for name in dict.fromkeys(names):
        if name in header.symbols:
            continue
        if not name or name != name.strip() or not name.isprintable():
            raise _Fault("symbol", f"{_shown(name)} is not a name without blanks around it")
        header.symbols[name] = len(header.symbols)
    return np.array([header.symbols[name] for name in names], np.int64)


def _assemble(header: _Header, parts: list[dict], faults: _Faults, name: str) -> Bars:
    """Join the parts, group the rows by symbol, check their order and adjust their prices."""
    parts = [part for part in parts if part]
    if not parts:
        faults.raise_first()
        raise BarsError(f"{faults.source}: the file has a header and no bars")
    table = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
    parts.clear()
    if np.any(np.diff(table["symbol"]) < 0):
        order = np.argsort(table["symbol"], kind="stable")
        table = {column: values[order] for column, values in table.items()}
    numbers = table.pop("symbol")
    symbol = tuple(header.symbols) or (name,)
    offsets = np.searchsorted(numbers, np.arange(len(symbol) + 1)).astype(np.int64)
    for each, start, stop in zip(symbol, offsets, offsets[1:]):
        _check_order(faults, each, table["date"][start:stop], table["line"][start:stop])
    faults.raise_first()
    if "adj_close" in table:
        scale = table.pop("adj_close") / table["close"]
        for price in PRICES:
            table[price] *= scale
    return Bars(symbol, offsets, **table)


def _warn_of_jumps(bars: Bars, path: Path):
    """Warn of the first close that moves by more than JUMP, and of how many do."""
    first, count = None, 0
    for segment, symbol in enumerate(bars.symbol):
        rows = bars.rows(segment)
        close = bars.close[rows]
        move = close[1:] / close[:-1] - 1
        beyond = np.flatnonzero(np.abs(move) > JUMP)
        count += len(beyond)
        if len(beyond) and first is None:
            at = rows.start + int(beyond[0]) + 1
            first = (
                f"{symbol} closes {move[beyond[0]]:+.1%} on {_utc(bars.date[at])} "
                f"(line {bars.line[at]})"
            )
    if first:
        warnings.warn(
            f"{path}: {first}, the first of {count} closes that move by more than {JUMP:.0%}; "
            "if these are splits, give an adj_close column",
            stacklevel=3,
        )
