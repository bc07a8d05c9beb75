"""The bars of one symbol as features see them, and the arithmetic of windows over them."""

from functools import cached_property

import numpy as np

try:
    import talib
except ImportError as error:
    raise ImportError("lowgpu.data.features needs TA-Lib: pip install 'lowgpu[data]'") from error

from lowgpu.data.bars import Bars

# A range or deviation below this share of the price is rounding, not movement: features that divide
# by it are 0.
STILL = 1e-9


class Segment:
    """The bars of one symbol, scaled, with what several features share; row i is bar i.

    Rows for which a quantity is not defined yet hold NaN.
    """

    def __init__(self, bars: Bars, rows: slice):
        # TA-Lib compares with absolute thresholds. The first close is known to every later row, and
        # a power of two scales without rounding: features do not change with the unit of the price.
        exponent = -np.frexp(bars.close[rows.start])[1]
        self.open = np.ldexp(bars.open[rows], exponent)
        self.high = np.ldexp(bars.high[rows], exponent)
        self.low = np.ldexp(bars.low[rows], exponent)
        self.close = np.ldexp(bars.close[rows], exponent)
        self.volume = np.ascontiguousarray(bars.volume[rows])
        self.date = bars.date[rows]
        self.still = STILL * self.close

    @cached_property
    def returns(self) -> np.ndarray:
        """ln(close / previous close)"""
        return since(np.log(self.close), 1)

    @cached_property
    def volatility(self) -> np.ndarray:
        """Standard deviation of the last 60 returns."""
        return np.sqrt(window_moments(self.returns, 60)[1])

    @cached_property
    def true_range(self) -> np.ndarray:
        return talib.TRANGE(self.high, self.low, self.close)

    @cached_property
    def average_range(self) -> np.ndarray:
        """Wilder's average true range over 14 bars."""
        return talib.ATR(self.high, self.low, self.close, 14)

    @cached_property
    def macd(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return talib.MACD(self.close, 12, 26, 9)

    @cached_property
    def volume_means(self) -> dict[int, np.ndarray]:
        # About the current volume, so that the mean of a constant volume is exactly that volume.
        return {n: self.volume + window_moments(self.volume, n)[0] for n in (5, 20)}

    def in_volatility(self, move: np.ndarray, bars: int = 1) -> np.ndarray:
        """Divide a log move over some bars by the volatility expected over as many."""
        return ratio(move, self.volatility * np.sqrt(bars), STILL)

    def in_ranges(self, distance: np.ndarray) -> np.ndarray:
        """Divide a distance in price by the average true range."""
        return ratio(distance, self.average_range, self.still)

    def moved(self, bars: int) -> np.ndarray:
        return self.in_volatility(since(np.log(self.close), bars), bars)

    def from_average(self, average: np.ndarray) -> np.ndarray:
        return self.in_ranges(self.close - average)

    def channel(self, window: int) -> np.ndarray:
        highest, lowest = talib.MAX(self.high, window), talib.MIN(self.low, window)
        return ratio(2 * self.close - highest - lowest, highest - lowest, self.still)

    def spread(self, window: int) -> np.ndarray:
        """Standard deviation of the last returns."""
        return np.sqrt(window_moments(self.returns, window)[1])

    def while_moving(self, values: np.ndarray) -> np.ndarray:
        """Give 0 once the price stood still so long that the average true range is rounding."""
        return np.where(self.average_range <= self.still, 0.0, values)

    def shadow(self, length: np.ndarray) -> np.ndarray:
        return ratio(length, self.high - self.low, self.still)


def late(values: np.ndarray, bars: int) -> np.ndarray:
    """Put NaN before values that start some bars late."""
    return np.concatenate([np.full(bars, np.nan), values])


def since(x: np.ndarray, bars: int) -> np.ndarray:
    """Return x minus its value some bars ago."""
    return late(x[bars:] - x[:-bars], bars)


def ratio(over: np.ndarray, under: np.ndarray, least: np.ndarray | float) -> np.ndarray:
    """Divide, giving 0 where the divisor is at most `least`; NaN stays NaN."""
    quiet = under <= least
    return np.where(quiet, 0.0, over) / np.where(quiet, 1.0, under)


def direction(move: np.ndarray, least: np.ndarray | float) -> np.ndarray:
    """Return the sign of a move, 0 for one that is rounding."""
    return np.where(np.abs(move) <= least, 0.0, np.sign(move))


def contrast(a: np.ndarray, b: np.ndarray, least: np.ndarray | float = 0.0) -> np.ndarray:
    """Compare two quantities >= 0 as (a - b) / (a + b), in [-1, 1]."""
    return ratio(a - b, a + b, least)


# Windows are summed term by term, not with a running total: a total keeps the rounding of every bar
# that ever passed, so a constant column would not come out as exactly constant. Each row takes the
# same additions in the same order whatever the length of the array.
def terms(x: np.ndarray, window: int) -> list[np.ndarray]:
    """Return the views of x that line up the values of each window, the current value first."""
    stop = len(x) + 1
    return [x[window - 1 - k : stop - 1 - k] for k in range(window)]


def window_sum(x: np.ndarray, window: int) -> np.ndarray:
    first, *others = terms(x, window)
    total = first.copy()
    for term in others:
        total += term
    return late(total, window - 1)


def window_moments(x: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean minus current value, variance and third central moment of each window.

    Taken about the current value, a constant window gives exact zeros.
    """
    first, *others = terms(x, window)
    mean = np.zeros_like(first)
    for term in others:
        mean += term - first
    mean /= window
    square, cube = mean * mean, -mean * mean * mean
    for term in others:
        apart = term - first - mean
        squared = apart * apart
        square += squared
        cube += squared * apart
    return tuple(late(moment, window - 1) for moment in (mean, square / window, cube / window))


def z_score(x: np.ndarray, window: int, least: np.ndarray | float) -> np.ndarray:
    mean, variance, _ = window_moments(x, window)
    return ratio(-mean, np.sqrt(variance), least)
