"""The 51 columns of the feature table: name, formula, look-back and function of each, in order."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# TA-Lib comes from the module that says what to install where it is missing.
from lowgpu.data.segment import (
    STILL,
    Segment,
    contrast,
    direction,
    late,
    ratio,
    since,
    talib,
    terms,
    window_moments,
    window_sum,
    z_score,
)

# Every value of the table lies between minus this and this.
CLIP = 10.0


def _slope_20(s: Segment) -> np.ndarray:
    return s.in_ranges(10 * talib.LINEARREG_SLOPE(s.close, 20))


def _directional_14(s: Segment) -> np.ndarray:
    up = talib.PLUS_DI(s.high, s.low, s.close, 14)
    down = talib.MINUS_DI(s.high, s.low, s.close, 14)
    return s.while_moving((up - down) / 50)


def _efficiency_20(s: Segment) -> np.ndarray:
    path = window_sum(np.abs(since(s.close, 1)), 20)
    return ratio(since(s.close, 20), path, s.still)


def _range_volatility_20(s: Segment) -> np.ndarray:
    span = np.log(s.high / s.low)
    parkinson = np.sqrt(window_sum(span * span, 20) / (20 * 4 * np.log(2.0)))
    return contrast(parkinson, s.spread(20), STILL)


def _skew_60(s: Segment) -> np.ndarray:
    _, variance, cube = window_moments(s.returns, 60)
    deviation = np.sqrt(variance)
    return ratio(ratio(cube, variance, STILL**2), deviation, STILL)


def _autocorrelation_60(s: Segment) -> np.ndarray:
    # The sum needs each window's own mean, so the terms are taken about it as in window_moments.
    first, *others = terms(s.returns, 60)
    mean, variance, _ = (moment[59:] for moment in window_moments(s.returns, 60))
    later, total = -mean, np.zeros_like(first)
    for term in others:
        apart = term - first - mean
        total += later * apart
        later = apart
    return late(ratio(total, 60 * variance, STILL**2), 59)


def _money_flow_14(s: Segment) -> np.ndarray:
    # TA-Lib's MFI is 0 both when all flow is out and when there is none; here no flow is the middle.
    typical = (s.high + s.low + s.close) / 3
    flow = typical * s.volume
    side = direction(since(typical, 1), s.still)
    return ratio(window_sum(side * flow, 14), window_sum(np.abs(side) * flow, 14), 0.0)


def _signed_volume_20(s: Segment) -> np.ndarray:
    return ratio(
        window_sum(direction(s.returns, STILL) * s.volume, 20), window_sum(s.volume, 20), 0.0
    )


def _accumulation_20(s: Segment) -> np.ndarray:
    place = s.shadow(2 * s.close - s.high - s.low)
    return ratio(window_sum(place * s.volume, 20), window_sum(s.volume, 20), 0.0)


def _vwap_20(s: Segment) -> np.ndarray:
    typical = (s.high + s.low + s.close) / 3
    volume = window_sum(s.volume, 20)
    average = ratio(window_sum(typical * s.volume, 20), volume, 0.0)
    return s.in_ranges(np.where(volume == 0, 0.0, s.close - average))


def _elapsed_20(s: Segment) -> np.ndarray:
    elapsed = late(np.diff(s.date).astype(np.float64), 1)
    return contrast(elapsed, window_sum(elapsed, 20) / 20)


def _circle(index: np.ndarray, size: int, wave) -> np.ndarray:
    """Place an integer on a circle, from a table so that equal integers give equal bits."""
    return wave(2 * np.pi * np.arange(size) / size)[index]


def _day(s: Segment, wave) -> np.ndarray:
    return _circle(s.date % 86_400, 86_400, wave)


def _week(s: Segment, wave) -> np.ndarray:
    # 1970-01-01 was a Thursday, day 3 of a week that starts on Monday.
    return _circle((s.date // 86_400 + 3) % 7, 7, wave)


def _year(s: Segment, wave) -> np.ndarray:
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
    compute: Callable[[Segment], np.ndarray]


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
        lambda s: s.in_volatility(late(s.returns[:-1], 1)),
    ),
    Feature(
        "gap",
        "ln(open / close of the bar before) / volatility",
        60,
        lambda s: s.in_volatility(late(np.log(s.open[1:] / s.close[:-1]), 1)),
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
        lambda s: contrast(s.true_range, s.average_range, s.still),
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
        lambda s: z_score(s.close, 20, s.still),
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
        lambda s: contrast(s.spread(5), s.volatility, STILL),
    ),
    Feature(
        "volatility_20_60",
        "(a − b) / (a + b), a and b being the deviations of 20 and of 60 log returns",
        60,
        lambda s: contrast(s.spread(20), s.volatility, STILL),
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
        lambda s: contrast(s.volume, s.volume_means[20]),
    ),
    Feature(
        "volume_5_20",
        "(a − b) / (a + b), a and b being the mean volumes of 5 and of 20 bars",
        19,
        lambda s: contrast(s.volume_means[5], s.volume_means[20]),
    ),
    Feature(
        "volume_z_20",
        "(volume − its mean over 20 bars) / its standard deviation",
        19,
        lambda s: z_score(s.volume, 20, STILL * s.volume_means[20]),
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
