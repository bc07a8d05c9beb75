"""Market bars: one checked table of open, high, low, close and volume, and what makes a bar legal."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

COLUMNS = ("date", "open", "high", "low", "close", "volume")
PRICES = ("open", "high", "low", "close")

# Between these bounds no product that a feature forms leaves float64, and every price is a normal
# float32.
PRICE_MIN, PRICE_MAX, VOLUME_MAX = 1e-18, 1e18, 1e24

# The years 1 to 9999, in seconds since 1970-01-01 UTC.
DATE_MIN, DATE_MAX = -62_135_596_800, 253_402_300_799

FAULTS_COUNTED = 1000


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
        faults = Faults("bars")
        bars = {name: getattr(self, name) for name in COLUMNS}
        for row in np.flatnonzero(broken_rows(bars)):
            faults.add(int(self.line[row]), *first_broken({k: v[row] for k, v in bars.items()}))
        for segment, symbol in enumerate(self.symbol):
            rows = self.rows(segment)
            check_order(faults, symbol, self.date[rows], self.line[rows])
        faults.raise_first()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.date)

    def rows(self, segment: int) -> slice:
        """Return the rows of a segment, which is counted from 0."""
        return slice(int(self.offsets[segment]), int(self.offsets[segment + 1]))


@dataclass
class Faults:
    """The first fault of a source by line, and how many lines are faulty."""

    source: str
    count: int = 0
    first: tuple[int, str] | None = None

    def add(self, line: int, column: str | None, text: str, count: int = 1):
        place = f"line {line}, column {column}" if column else f"line {line}"
        if self.first is None or line < self.first[0]:
            self.first = (line, f"{self.source}, {place}: {text}")
        self.count += count
        if self.count >= FAULTS_COUNTED:
            self.raise_first()

    def raise_first(self):
        if self.first is None:
            return
        least = "at least " if self.count >= FAULTS_COUNTED else ""
        more = f" (the first of {least}{self.count} faulty lines)" if self.count > 1 else ""
        raise BarsError(self.first[1] + more)


def utc(seconds: int) -> str:
    """Write epoch seconds as ISO 8601, without the time at midnight."""
    text = str(np.datetime64(int(seconds), "s"))
    return text.removesuffix("T00:00:00") if text.endswith("T00:00:00") else text + "Z"


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


def broken_rows(bar: dict) -> np.ndarray:
    """Say which rows break a rule."""
    broken = np.zeros(len(bar["date"]), bool)
    for _, rows, _, _ in _rules(bar):
        broken |= rows
    return broken


def first_broken(bar: dict) -> tuple[str, str] | None:
    """Return the column and the text of the first rule that one bar breaks."""
    for column, broken, text, other in _rules(bar):
        if broken:
            compared = f" {bar[other].item()!r}" if other else ""
            return column, f"{bar[column].item()!r} {text}{compared}"
    return None


def check_order(faults: Faults, symbol: str, date: np.ndarray, line: np.ndarray):
    """Add the first row of a segment that is not later than the row before it."""
    step = np.diff(date)
    behind = np.flatnonzero(step <= 0) + 1
    if len(behind) == 0:
        return
    row = int(behind[0])
    same = np.flatnonzero(date[:row] == date[row])
    if len(behind) == len(step) > 1 and step.max() < 0:
        text = (
            f"{symbol} runs from the newest bar, {utc(date[0])}, to the oldest, "
            f"{utc(date[-1])}: sort the file by date, oldest first"
        )
    elif len(same):
        text = f"{utc(date[row])} of {symbol} is already on line {line[same[0]]}"
    else:
        text = (
            f"{utc(date[row])} of {symbol} comes after {utc(date[row - 1])} "
            f"on line {line[row - 1]}: sort the file by date, oldest first"
        )
    faults.add(int(line[row]), "date", text, count=len(behind))
