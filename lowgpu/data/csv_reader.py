"""A strict CSV reader of bars.

It guesses nothing and repairs nothing: a file is read whole, or refused with the line that is
wrong.
"""

import csv
import gzip
import os
import re
import stat
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lowgpu.data.bars import (
    COLUMNS,
    FAULTS_COUNTED,
    PRICES,
    Bars,
    BarsError,
    Faults,
    broken_rows,
    check_order,
    first_broken,
    utc,
)
from lowgpu.data.csv_fields import NUMBER_BYTES, number_of, quoted, seconds_of

# A close that moves further than this in one bar is reported when there is no adjusted close.
JUMP = 0.40

# About 5,000 rows: small enough to stay in cache, large enough to hide the cost of a call.
_BLOCK_NBYTES = 1 << 18
_LINE_NBYTES = 8192

_ALIASES = {"ticker": "symbol"}


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
    faults = Faults(str(path))
    try:
        with (gzip.open if path.name.lower().endswith(".gz") else open)(path, "rb") as file:
            header, parts = _read(file, faults)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    bars = _assemble(header, parts, faults, _stem(path))
    if header.unknown:
        names = ", ".join(map(quoted, header.unknown))
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


def _read(file, faults: Faults) -> tuple[_Header, list[dict]]:
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
        if empty > FAULTS_COUNTED:
            faults.add(empty_line, None, "only empty lines follow", count=empty)
        number += len(lines)
    return header, parts


def _check_lengths(lines: list[bytes], number: int, header: _Header | None, faults: Faults):
    """Refuse a line that is too long to be a bar, before more of it is read."""
    if max(map(len, lines)) <= _LINE_NBYTES:
        return
    for at, line in enumerate(lines):
        if len(line) > _LINE_NBYTES:
            column = header.column_at(line, _LINE_NBYTES) if header else None
            start = line[:_LINE_NBYTES].rpartition(b",")[2][:40].decode(errors="replace")
            text = f"{quoted(start)}... runs past byte {_LINE_NBYTES} of its line"
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
            shown = ", ".join(quoted(c) for c, n in zip(cells, names) if n == name)
            raise BarsError(f"{place}, column {name}: the header names it twice, as {shown}")
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        many = "columns" if len(missing) > 1 else "column"
        shown = quoted(",".join(cells))
        hint = ""
        if len(cells) == 1 and re.search(r"[;\t|]", cells[0]):
            hint = "; fields must be separated by commas"
        raise BarsError(f"{place}: {many} {', '.join(missing)} missing from {shown}{hint}")
    unknown = [cell for cell, name in zip(cells, names) if name not in known]
    for cell in unknown:
        # Leaving out an adjusted close that is only misspelt would turn splits into crashes.
        if cell.strip().lower().startswith("adj"):
            raise BarsError(
                f"{place}, column {quoted(cell)}: an adjusted close must be named adj_close, "
                "and other adjusted columns must be removed"
            )
    index = {name: names.index(name) for name in known if name in names}
    return _Header(len(cells), index, unknown)


def _read_lines(lines: list[bytes], number: int, header: _Header, faults: Faults) -> dict:
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
        part = {"date": np.array([seconds_of(t) for t in columns[header.index["date"]]], np.int64)}
        for name in header.numbers:
            texts = columns[header.index[name]]
            # float() alone would take "nan", "1_000", blanks and the digits of other scripts.
            if "".join(texts).encode().translate(None, NUMBER_BYTES):
                return None
            part[name] = np.array(list(map(float, texts)), np.float64)
        part["symbol"] = _symbol_numbers(columns, header, len(rows))
    except (csv.Error, ValueError, _Fault):
        return None
    return None if np.any(broken_rows(part)) else part


def _parse_row(line: bytes, header: _Header) -> dict:
    """Parse one line, with the same result as _parse_columns, or raise what is wrong with it."""
    cells = _cells(line, header)
    if len(cells) != header.width:
        hint = ""
        if len(cells) > header.width:
            hint = "; a number must have no decimal comma and no thousands separator"
        counts = f"{len(cells)} fields where the header has {header.width}{hint}"
        raise _Fault(None, f"{counts}, {quoted(line.decode())}")
    row = {"date": np.int64(_column(header, cells, "date", seconds_of))}
    for name in header.numbers:
        row[name] = np.float64(_column(header, cells, name, number_of))
    broken = first_broken(row)
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
        raise _Fault(column, f"{wrong}, {quoted(text)}") from None
    return cells


def _column(header: _Header, cells: list[str], name: str, parse) -> int | float:
    """Parse the field of a column; what is wrong gets the name of the column."""
    text = cells[header.index[name]]
    try:
        return parse(text)
    except ValueError as error:
        # The calendar's own errors do not quote the value.
        wrong = "is empty" if not text else str(error)
        raise _Fault(name, f"{quoted(text)} {wrong}") from None


def _symbol_numbers(columns: list, header: _Header, rows: int) -> np.ndarray:
    """Number the symbols of a column in order of first appearance."""
    if "symbol" not in header.index:
        return np.zeros(rows, np.int64)
    names = columns[header.index["symbol"]]
    for name in dict.fromkeys(names):
        if name in header.symbols:
            continue
        if not name or name != name.strip() or not name.isprintable():
            raise _Fault("symbol", f"{quoted(name)} is not a name without blanks around it")
        header.symbols[name] = len(header.symbols)
    return np.array([header.symbols[name] for name in names], np.int64)


def _assemble(header: _Header, parts: list[dict], faults: Faults, name: str) -> Bars:
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
        check_order(faults, each, table["date"][start:stop], table["line"][start:stop])
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
                f"{symbol} closes {move[beyond[0]]:+.1%} on {utc(bars.date[at])} "
                f"(line {bars.line[at]})"
            )
    if first:
        warnings.warn(
            f"{path}: {first}, the first of {count} closes that move by more than {JUMP:.0%}; "
            "if these are splits, give an adj_close column",
            stacklevel=3,
        )
