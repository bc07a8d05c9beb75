"""The 51 market features: causal, unitless, finite, one table from which order and docs come."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

try:
    import talib
except ImportError as error:
    raise ImportError("lowgpu.data.features needs TA-Lib: pip install 'lowgpu[data]'") from error

from lowgpu.data.bars import Bars, BarsError

CLIP = 10.0

# A range or deviation below this share of the price is rounding, not movement: features that divide
# by it are 0.
STILL = 1e-9


class _Segment:
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
        return _since(np.log(self.close), 1)

    @cached_property
    def volatility(self) -> np.ndarray:
        """Standard deviation of the last 60 returns."""
        return np.sqrt(_moments(self.returns, 60)[1])

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
        return {n: self.volume + _moments(self.volume, n)[0] for n in (5, 20)}

    def in_volatility(self, move: np.ndarray, bars: int = 1) -> np.ndarray:
        """Divide a log move over some bars by the volatility expected over as many."""
        return _ratio(move, self.volatility * np.sqrt(bars), STILL)

    def in_ranges(self, distance: np.ndarray) -> np.ndarray:
        """Divide a distance in price by the average true range."""
        return _ratio(distance, self.average_range, self.still)

    def moved(self, bars: int) -> np.ndarray:
        return self.in_volatility(_since(np.log(self.close), bars), bars)

    def from_average(self, average: np.ndarray) -> np.ndarray:
        return self.in_ranges(self.close - average)

    def channel(self, window: int) -> np.ndarray:
        highest, lowest = talib.MAX(self.high, window), talib.MIN(self.low, window)
        return _ratio(2 * self.close - highest - lowest, highest - lowest, self.still)

    def spread(self, window: int) -> np.ndarray:
        """Standard deviation of the last returns."""
        return np.sqrt(_moments(self.returns, window)[1])

    def while_moving(self, values: np.ndarray) -> np.ndarray:
        """Give 0 once the price stood still so long that the average true range is rounding."""
        return np.where(self.average_range <= self.still, 0.0, values)

    def shadow(self, length: np.ndarray) -> np.ndarray:
        return _ratio(length, self.high - self.low, self.still)


def _late(values: np.ndarray, bars: int) -> np.ndarray:
    """Put NaN before values that start some bars late."""
    return np.concatenate([np.full(bars, np.nan), values])


def _since(x: np.ndarray, bars: int) -> np.ndarray:
    """Return x minus its value some bars ago."""
    return _late(x[bars:] - x[:-bars], bars)


def _ratio(over: np.ndarray, under: np.ndarray, least: np.ndarray | float) -> np.ndarray:
    """Divide, giving 0 where the divisor is at most `least`; NaN stays NaN."""
    quiet = under <= least
    return np.where(quiet, 0.0, over) / np.where(quiet, 1.0, under)


def _direction(move: np.ndarray, least: np.ndarray | float) -> np.ndarray:
    """Return the sign of a move, 0 for one that is rounding."""
    return np.where(np.abs(move) <= least, 0.0, np.sign(move))


def _contrast(a: np.ndarray, b: np.ndarray, least: np.ndarray | float = 0.0) -> np.ndarray:
    """Compare two quantities >= 0 as (a - b) / (a + b), in [-1, 1]."""
    return _ratio(a - b, a + b, least)


# Windows are summed term by term, not with a running total: a total keeps the rounding of every bar
# that ever passed, so a constant column would not come out as exactly constant. Each row takes the
# same additions in the same order whatever the length of the array.
def _terms(x: np.ndarray, window: int) -> list[np.ndarray]:
    """Return the views of x that line up the values of each window, the current value first."""
    stop = len(x) + 1
    return [x[window - 1 - k : stop - 1 - k] for k in range(window)]


def _sum(x: np.ndarray, window: int) -> np.ndarray:
    first, *others = _terms(x, window)
    total = first.copy()
    for term in others:
        total += term
    return _late(total, window - 1)


def _moments(x: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean minus current value, variance and third central moment of each window.

    Taken about the current value, a constant window gives exact zeros.
    """
    first, *others = _terms(x, window)
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
    return tuple(_late(moment, window - 1) for moment in (mean, square / window, cube / window))


def _z_score(x: np.ndarray, window: int, least: np.ndarray | float) -> np.ndarray:
    mean, variance, _ = _moments(x, window)
    return _ratio(-mean, np.sqrt(variance), least)


def _slope_20(s: _Segment) -> np.ndarray:
    return s.in_ranges(10 * talib.LINEARREG_SLOPE(s.close, 20))


def _directional_14(s: _Segment) -> np.ndarray:
    up = talib.PLUS_DI(s.high, s.low, s.close, 14)
    down = talib.MINUS_DI(s.high, s.low, s.close, 14)
    return s.while_moving((up - down) / 50)


def _efficiency_20(s: _Segment) -> np.ndarray:
    path = _sum(np.abs(_since(s.close, 1)), 20)
    return _ratio(_since(s.close, 20), path, s.still)


def _range_volatility_20(s: _Segment) -> np.ndarray:
    span = np.log(s.high / s.low)
    parkinson = np.sqrt(_sum(span * span, 20) / (20 * 4 * np.log(2.0)))
    return _contrast(parkinson, s.spread(20), STILL)


def _skew_60(s: _Segment) -> np.ndarray:
    _, variance, cube = _moments(s.returns, 60)
    deviation = np.sqrt(variance)
    return _ratio(_ratio(cube, variance, STILL**2), deviation, STILL)


def _autocorrelation_60(s: _Segment) -> np.ndarray:
    # The sum needs each window's own mean, so the terms are taken about it as in _moments.
    first, *others = _terms(s.returns, 60)
    mean, variance, _ = (moment[59:] for moment in _moments(s.returns, 60))
    later, total = -mean, np.zeros_like(first)
    for term in others:
        apart = term - first - mean
        total += later * apart
        later = apart
    return _late(_ratio(total, 60 * variance, STILL**2), 59)


def _money_flow_14(s: _Segment) -> np.ndarray:
    # TA-Lib's MFI is 0 both when all flow is out and when there is none; here no flow is the middle.
    typical = (s.high + s.low + s.close) / 3
    flow = typical * s.volume
    side = _direction(_since(typical, 1), s.still)
    return _ratio(_sum(side * flow, 14), _sum(np.abs(side) * flow, 14), 0.0)


def _signed_volume_20(s: _Segment) -> np.ndarray:
    return _ratio(_sum(_direction(s.returns, STILL) * s.volume, 20), _sum(s.volume, 20), 0.0)


def _accumulation_20(s: _Segment) -> np.ndarray:
    place = s.shadow(2 * s.close - s.high - s.low)
    return _ratio(_sum(place * s.volume, 20), _sum(s.volume, 20), 0.0)


def _vwap_20(s: _Segment) -> np.ndarray:
    typical = (s.high + s.low + s.close) / 3
    volume = _sum(s.volume, 20)
    average = _ratio(_sum(typical * s.volume, 20), volume, 0.0)
    return s.in_ranges(np.where(volume == 0, 0.0, s.close - average))


def _elapsed_20(s: _Segment) -> np.ndarray:
    elapsed = _late(np.diff(s.date).astype(np.float64), 1)
    return _contrast(elapsed, _sum(elapsed, 20) / 20)


def _circle(index: np.ndarray, size: int, wave) -> np.ndarray:
    """Place an integer on a circle, from a table so that equal integers give equal bits."""
    return wave(2 * np.pi * np.arange(size) / size)[index]


def _day(s: _Segment, wave) -> np.ndarray:
    return _circle(s.date % 86_400, 86_400, wave)


def _week(s: _Segment, wave) -> np.ndarray:
    # 1970-01-01 was a Thursday, day 3 of a week that starts on Monday.
    return _circle((s.date // 86_400 + 3) % 7, 7, wave)


def _year(s: _Segment, wave) -> np.ndarray:
    day = s.date.astype("datetime64[s]").astype("datetime64[D]")
    since_new_year = (day - day.astype("datetime64[Y]").astype("datetime64[D]")).astype(np.int64)
    return _circle(since_new_year, 366, wave)


@dataclass(frozen=True)
class Feature:
    """One column of the table.

    Args:
        name: its name; a number in it is a count of bars.
        formula: what it is, in words.
        lookback: bars before the current one that must exist for it to be defined.
        compute: the column for one segment, NaN on the first `lookback` rows.
    """

    name: str
    formula: str
    lookback: int
    compute: Callable[[_Segment], np.ndarray]


FEATURES: tuple[Feature, ...] = (
    # Moves of the close, in volatilities: the standard deviation of the last 60 log returns.
    Feature("return_1", "log return over 1 bar / volatility", 60, lambda s: s.moved(1)),
    Feature("return_2", "log return over 2 bars / (volatility √2)", 60, lambda s: s.moved(2)),
    Feature("return_5", "log return over 5 bars / (volatility √5)", 60, lambda s: s.moved(5)),
    Feature("return_10", "log return over 10 bars / (volatility √10)", 60, lambda s: s.moved(10)),
    Feature("return_20", "log return over 20 bars / (volatility √20)", 60, lambda s: s.moved(20)),
    Feature("return_60", "log return over 60 bars / (volatility √60)", 60, lambda s: s.moved(60)),
    Feature(
        "return_before",
        "log return of the bar before / volatility",
        60,
        lambda s: s.in_volatility(_late(s.returns[:-1], 1)),
    ),
    Feature(
        "gap",
        "ln(open / close of the bar before) / volatility",
        60,
        lambda s: s.in_volatility(_late(np.log(s.open[1:] / s.close[:-1]), 1)),
    ),
    Feature(
        "body",
        "ln(close / open) / volatility",
        60,
        lambda s: s.in_volatility(np.log(s.close / s.open)),
    ),
    # The shape of the bar.
    Feature(
        "upper_shadow",
        "(high − larger of open and close) / (high − low)",
        0,
        lambda s: s.shadow(s.high - np.maximum(s.open, s.close)),
    ),
    Feature(
        "lower_shadow",
        "(smaller of open and close − low) / (high − low)",
        0,
        lambda s: s.shadow(np.minimum(s.open, s.close) - s.low),
    ),
    Feature(
        "close_place",
        "place of the close between low (−1) and high (1)",
        0,
        lambda s: s.shadow(2 * s.close - s.high - s.low),
    ),
    Feature(
        "true_range",
        "(true range − ATR) / (true range + ATR), ATR being Wilder's average over 14 bars",
        14,
        lambda s: _contrast(s.true_range, s.average_range, s.still),
    ),
    # Trend; distances in ATR, Wilder's average true range over 14 bars.
    Feature(
        "sma_10",
        "(close − mean of 10 closes) / ATR",
        14,
        lambda s: s.from_average(talib.SMA(s.close, 10)),
    ),
    Feature(
        "sma_20",
        "(close − mean of 20 closes) / ATR",
        19,
        lambda s: s.from_average(talib.SMA(s.close, 20)),
    ),
    Feature(
        "sma_50",
        "(close − mean of 50 closes) / (2 ATR)",
        49,
        lambda s: s.from_average(talib.SMA(s.close, 50)) / 2,
    ),
    Feature(
        "ema_12",
        "(close − exponential mean of span 12) / ATR",
        14,
        lambda s: s.from_average(talib.EMA(s.close, 12)),
    ),
    Feature("macd", "MACD line (12, 26) / ATR", 33, lambda s: s.in_ranges(s.macd[0])),
    Feature(
        "macd_histogram", "MACD histogram (12, 26, 9) / ATR", 33, lambda s: s.in_ranges(s.macd[2])
    ),
    Feature("slope_20", "10 × slope of the line through 20 closes / ATR", 19, _slope_20),
    Feature(
        "adx_14",
        "average directional index over 14 bars / 50",
        27,
        lambda s: s.while_moving(talib.ADX(s.high, s.low, s.close, 14) / 50),
    ),
    Feature("directional_14", "(+DI − −DI) over 14 bars / 50", 14, _directional_14),
    Feature(
        "aroon_25",
        "Aroon oscillator over 25 bars / 100",
        25,
        lambda s: s.while_moving(talib.AROONOSC(s.high, s.low, 25) / 100),
    ),
    Feature(
        "parabolic",
        "(close − parabolic SAR (0.02, 0.2)) / ATR",
        14,
        lambda s: s.from_average(talib.SAR(s.high, s.low, 0.02, 0.2)),
    ),
    # Oscillators, 0 in the middle. Wilder's CMO is 2 RSI − 100, and is 0 where nothing moved.
    Feature(
        "rsi_7",
        "(RSI over 7 bars − 50) / 50",
        7,
        lambda s: s.while_moving(talib.CMO(s.close, 7) / 100),
    ),
    Feature(
        "rsi_14",
        "(RSI over 14 bars − 50) / 50",
        14,
        lambda s: s.while_moving(talib.CMO(s.close, 14) / 100),
    ),
    Feature(
        "channel_14",
        "place of the close between the lowest low (−1) and highest high (1) of 14 bars",
        13,
        lambda s: s.channel(14),
    ),
    Feature(
        "channel_60",
        "place of the close between the lowest low (−1) and highest high (1) of 60 bars",
        59,
        lambda s: s.channel(60),
    ),
    Feature(
        "cci_20",
        "commodity channel index over 20 bars / 100",
        19,
        lambda s: s.while_moving(talib.CCI(s.high, s.low, s.close, 20) / 100),
    ),
    Feature(
        "close_z_20",
        "(close − mean of 20 closes) / their standard deviation",
        19,
        lambda s: _z_score(s.close, 20, s.still),
    ),
    Feature(
        "efficiency_20",
        "change of the close over 20 bars / sum of its absolute changes",
        20,
        _efficiency_20,
    ),
    # Volatility.
    Feature(
        "natr_14",
        "20 ATR / close",
        14,
        lambda s: s.while_moving(talib.NATR(s.high, s.low, s.close, 14) / 5),
    ),
    Feature(
        "volatility_5_60",
        "(a − b) / (a + b), a and b being the deviations of 5 and of 60 log returns",
        60,
        lambda s: _contrast(s.spread(5), s.volatility, STILL),
    ),
    Feature(
        "volatility_20_60",
        "(a − b) / (a + b), a and b being the deviations of 20 and of 60 log returns",
        60,
        lambda s: _contrast(s.spread(20), s.volatility, STILL),
    ),
    Feature(
        "range_volatility_20",
        "(a − b) / (a + b), a being Parkinson's deviation from high and low, b that of log returns",
        20,
        _range_volatility_20,
    ),
    Feature("skew_60", "skewness of 60 log returns", 60, _skew_60),
    Feature(
        "autocorrelation_60",
        "correlation of 60 log returns with the ones before them",
        60,
        _autocorrelation_60,
    ),
    # Volume; 0 where there is none.
    Feature(
        "volume_1_20",
        "(a − b) / (a + b), a being the volume, b its mean over 20 bars",
        19,
        lambda s: _contrast(s.volume, s.volume_means[20]),
    ),
    Feature(
        "volume_5_20",
        "(a − b) / (a + b), a and b being the mean volumes of 5 and of 20 bars",
        19,
        lambda s: _contrast(s.volume_means[5], s.volume_means[20]),
    ),
    Feature(
        "volume_z_20",
        "(volume − its mean over 20 bars) / its standard deviation",
        19,
        lambda s: _z_score(s.volume, 20, STILL * s.volume_means[20]),
    ),
    Feature(
        "money_flow_14",
        "(MFI − 50) / 50: money flow of 14 bars, rising less falling, as a share of both",
        14,
        _money_flow_14,
    ),
    Feature(
        "signed_volume_20",
        "volume of rising less falling bars / volume, over 20 bars",
        20,
        _signed_volume_20,
    ),
    Feature(
        "accumulation_20",
        "Chaikin money flow: close_place weighted by volume, over 20 bars",
        19,
        _accumulation_20,
    ),
    Feature(
        "vwap_20",
        "(close − mean of (high + low + close) / 3 weighted by volume, 20 bars) / ATR",
        19,
        _vwap_20,
    ),
    # Time, in UTC.
    Feature(
        "elapsed_20",
        "(a − b) / (a + b), a being the time since the bar before, b its mean over 20 bars",
        20,
        _elapsed_20,
    ),
    Feature("day_sin", "sine of the time of day", 0, lambda s: _day(s, np.sin)),
    Feature("day_cos", "cosine of the time of day", 0, lambda s: _day(s, np.cos)),
    Feature(
        "week_sin", "sine of the day of the week, Monday 0 of 7", 0, lambda s: _week(s, np.sin)
    ),
    Feature("week_cos", "cosine of the day of the week", 0, lambda s: _week(s, np.cos)),
    Feature("year_sin", "sine of the day of the year, 0 of 366", 0, lambda s: _year(s, np.sin)),
    Feature("year_cos", "cosine of the day of the year", 0, lambda s: _year(s, np.cos)),
)

# Bars at the start of every segment that have no row in the table.
WARMUP = max(feature.lookback for feature in FEATURES)


@dataclass(frozen=True, eq=False)
class Table:
    """What an environment reads: one row a bar, the segments one after the other.

    N counts rows, F features, S symbols.

    Args:
        symbol: the name of each symbol.
        features: unitless, in [-10, 10], in the order of FEATURES.
        price: the close of the bar.
        last: 1 on the last row of a segment, where there is no next price, else 0.
        date: the time of the bar in seconds since 1970-01-01 UTC.
        segment: the index into `symbol`, which never falls from one row to the next.
        row: the row of the bars that each row was made from.
    """

    symbol: tuple[str, ...]  # [S]
    features: np.ndarray  # float32 [N, F]
    price: np.ndarray  # float32 [N]
    last: np.ndarray  # float32 [N]
    date: np.ndarray  # int64 [N]
    segment: np.ndarray  # int32 [N]
    row: np.ndarray  # int64 [N]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.date)


def features(bars: Bars) -> Table:
    """Compute the 51 features of every bar from that bar and the ones before it in its segment.

    Row i depends on bars up to i of the same segment only, bit for bit: adding later bars or other
    segments changes nothing. Each value is clipped to [-10, 10] and finite for every legal input;
    what is undefined because nothing moved or nothing traded is 0. The first WARMUP bars of each
    segment, for which some look-back is not filled, are left out. Indicators with a memory that
    fades, such as exponential means, start with the segment.

    Args:
        bars: at least WARMUP + 2 bars in each segment.

    Returns:
        The table, N being the number of bars less WARMUP in each segment.

    Raises:
        TypeError: bars is not a Bars.
        BarsError: a segment is too short.

    Source: TA-Lib for SMA, EMA, MACD, ATR, ADX, DI, Aroon, SAR, CMO, CCI and the regression slope;
    Parkinson (1980) for the range volatility; Kaufman (1995) for the efficiency ratio.
    """
    if not isinstance(bars, Bars):
        raise TypeError(f"bars: wanted Bars, got {type(bars).__name__}")
    for symbol, length in zip(bars.symbol, np.diff(bars.offsets)):
        if length < WARMUP + 2:
            raise BarsError(
                f"bars: {symbol} has {length} bars, and {WARMUP + 2} are wanted: {WARMUP} to warm "
                "up the features and 2 to use; remove the symbol or give more of its history"
            )
    kept = [slice(bars.rows(s).start + WARMUP, bars.rows(s).stop) for s in range(len(bars.symbol))]
    row = np.concatenate([np.arange(rows.start, rows.stop) for rows in kept])
    lengths = [rows.stop - rows.start for rows in kept]
    stops = np.cumsum(lengths)
    # By column first: a column is written in one sweep, and transposed once.
    columns = np.full((len(FEATURES), len(row)), np.nan, np.float32)
    for s, stop in enumerate(stops):
        segment = _Segment(bars, bars.rows(s))
        for feature, column in zip(FEATURES, columns):
            values = feature.compute(segment)[WARMUP:]
            np.clip(values, -CLIP, CLIP, out=column[stop - lengths[s] : stop], casting="same_kind")
    assert np.isfinite(columns).all(), "a feature is not finite after the warm-up"
    last = np.zeros(len(row), np.float32)
    last[stops - 1] = 1
    return Table(
        symbol=bars.symbol,
        features=np.ascontiguousarray(columns.T),
        price=bars.close[row].astype(np.float32),
        last=last,
        date=bars.date[row],
        segment=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        row=row,
    )


@dataclass(frozen=True, eq=False)
class Normalizer:
    """Subtract the mean and divide by the standard deviation of the rows it was fitted on.

    out = clip((features − mean) / std, −10, 10), and 0 in a column whose std is 0.

    Args:
        mean: of each column.
        std: standard deviation of each column, 0 where the column was constant.

    Raises:
        TypeError: not float32 arrays.
        ValueError: shapes that differ, a value that is not finite, a negative std.
    """

    mean: np.ndarray  # float32 [F]
    std: np.ndarray  # float32 [F]

    def __post_init__(self):
        for name in ("mean", "std"):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != np.float32:
                came = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{name}: wanted a NumPy array of float32, got {came}")
            if array.ndim != 1 or array.shape != self.mean.shape:
                raise ValueError(f"{name}: wanted shape [F] = {self.mean.shape}, got {array.shape}")
            if not np.isfinite(array).all():
                column = int(np.flatnonzero(~np.isfinite(array))[0])
                raise ValueError(f"{name}: wanted finite values, got {array[column]} at {column}")
        if np.any(self.std < 0):
            raise ValueError(f"std: wanted values >= 0, got {self.std.min()}")

    @classmethod
    def fit(cls, features: np.ndarray) -> "Normalizer":
        """Measure mean and standard deviation of each column of float32 [N, F].

        Fit on the training split only; a constant column is named in one warning.

        Args:
            features: finite values, at least one row.

        Returns:
            The normalizer; sums are taken in float64.

        Raises:
            TypeError: features is not a float32 array.
            ValueError: not two dimensions, no rows, or a column with a value that is not finite.
        """
        _check_features(features)
        if len(features) == 0:
            raise ValueError("features: wanted at least one row, got none")
        bad = np.flatnonzero(~np.isfinite(features).all(axis=0))
        if len(bad):
            raise ValueError(f"features: wanted finite values, got others in {_named(bad)}")
        # Float64 adds up to 2^29 equal float32 values without rounding, so a constant column has
        # itself as its mean and a deviation of exactly 0.
        mean = features.mean(axis=0, dtype=np.float64)
        square = np.zeros_like(mean)
        # In steps, so that the float64 copy stays small.
        for start in range(0, len(features), 16_384):
            apart = features[start : start + 16_384] - mean
            square += (apart * apart).sum(axis=0)
        std = np.sqrt(square / len(features)).astype(np.float32)
        if np.any(std == 0):
            warnings.warn(
                f"features: {_named(np.flatnonzero(std == 0))} constant, and normalized to 0",
                stacklevel=2,
            )
        return cls(mean.astype(np.float32), std)

    def apply(self, features: np.ndarray) -> np.ndarray:
        """Return the normalized copy of float32 [N, F], float32 [N, F].

        Args:
            features: rows of any split, in the column order of the fit.

        Raises:
            TypeError: features is not a float32 array.
            ValueError: another number of columns.
        """
        _check_features(features)
        if features.shape[1] != len(self.mean):
            raise ValueError(f"features: wanted {len(self.mean)} columns, got {features.shape[1]}")
        constant = self.std == 0
        out = features - self.mean
        out /= np.where(constant, np.float32(1), self.std)
        np.clip(out, -CLIP, CLIP, out=out)
        out[:, constant] = 0
        return out

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the arrays by name, for a checkpoint."""
        return {"mean": self.mean.copy(), "std": self.std.copy()}

    @classmethod
    def from_dict(cls, arrays: dict[str, np.ndarray]) -> "Normalizer":
        """Make the normalizer that to_dict described.

        Raises:
            TypeError: not float32 arrays.
            ValueError: a name missing or unknown, or arrays that __init__ refuses.
        """
        if set(arrays) != {"mean", "std"}:
            raise ValueError(f"arrays: wanted the names mean and std, got {sorted(arrays)}")
        return cls(arrays["mean"].copy(), arrays["std"].copy())


def _check_features(features: np.ndarray):
    if not isinstance(features, np.ndarray) or features.dtype != np.float32:
        came = getattr(features, "dtype", type(features).__name__)
        raise TypeError(f"features: wanted a NumPy array of float32, got {came}")
    if features.ndim != 2:
        raise ValueError(f"features: wanted shape [N, F], got {features.shape}")


def _named(columns: np.ndarray) -> str:
    """Name columns by number, and by feature where there is one; the verb follows."""
    names = [FEATURES[c].name if c < len(FEATURES) else str(c) for c in columns]
    return ", ".join(names) + (" is" if len(names) == 1 else " are")
