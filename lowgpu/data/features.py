"""The 51 market features: causal, unitless, finite, one table from which order and docs come."""

from dataclasses import dataclass

import numpy as np

from lowgpu.data.bars import Bars, BarsError
from lowgpu.data.feature_columns import CLIP, FEATURES, WARMUP
from lowgpu.data.normalizer import Normalizer
from lowgpu.data.segment import Segment

__all__ = ["FEATURES", "WARMUP", "Normalizer", "Table", "features"]


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
        segment = Segment(bars, bars.rows(s))
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
