"""Training, validation and test rows, cut at the same dates for every symbol."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from operator import index

import numpy as np

from lowgpu.data.features import Table

# One row to act on and one whose price settles the action.
ROWS_MIN = 2


def split_by_time(
    table: Table, fractions: Sequence[float] = (0.7, 0.15, 0.15), embargo: int = 0
) -> tuple[Table, Table, Table]:
    """Cut a table at two dates into training, validation and test rows, the oldest first.

    The dates are those at which the given share of all rows, over all symbols, has passed. Rows of
    one date are never parted: train < first cut <= validation < second cut <= test. A symbol that is
    left with one row in a split is dropped from that split, with a warning. Every split keeps the
    names and numbers of all symbols, and `last` is 1 on the final row of each segment in each split.

    Features look back up to WARMUP bars, so the first rows after a cut were made with bars from
    before it. That is history, not look-ahead; an embargo removes it where that matters.

    Args:
        table: the rows of any number of segments.
        fractions: shares of train, validation and test, each above 0, with the sum 1.
        embargo: bars left out of each symbol after each cut, >= 0.

    Returns:
        train, validation, test.

    Raises:
        TypeError: table is not a Table, fractions are not numbers, embargo is not an integer.
        ValueError: fractions or embargo out of range, or a split in which no symbol has 2 rows.
    """
    if not isinstance(table, Table):
        raise TypeError(f"table: wanted a Table, got {type(table).__name__}")
    fractions = _checked_fractions(fractions)
    try:
        embargo = index(embargo)
    except TypeError:
        raise TypeError(f"embargo: wanted an integer, got {type(embargo).__name__}") from None
    if embargo < 0:
        raise ValueError(f"embargo: wanted bars >= 0, got {embargo}")
    if len(table) == 0:
        raise ValueError("table: wanted rows to split, got none")
    dates = np.sort(table.date)
    shares = (fractions[0], fractions[0] + fractions[1])
    cuts = [dates[min(round(share * len(dates)), len(dates) - 1)] for share in shares]
    split = np.searchsorted(cuts, table.date, side="right")
    train = _split(table, split == 0, "train", 0)
    validation = _split(table, split == 1, "validation", embargo)
    return train, validation, _split(table, split == 2, "test", embargo)


def _checked_fractions(fractions: Sequence[float]) -> tuple[float, float, float]:
    try:
        shares = tuple(float(share) for share in fractions)
    except (TypeError, ValueError):
        raise TypeError(f"fractions: wanted three numbers, got {fractions!r}") from None
    if len(shares) != 3 or not all(share > 0 for share in shares):
        raise ValueError(f"fractions: wanted three numbers above 0, got {shares}")
    if not math.isclose(sum(shares), 1, abs_tol=1e-9):
        raise ValueError(f"fractions: wanted the sum 1, got {shares} with the sum {sum(shares)}")
    return shares


def _split(table: Table, chosen: np.ndarray, name: str, embargo: int) -> Table:
    """Return the chosen rows, less the embargo and the segments that are too short."""
    rows = np.flatnonzero(chosen)
    bounds = np.searchsorted(table.segment[rows], np.arange(len(table.symbol) + 1))
    kept = []
    for symbol, start, stop in zip(table.symbol, bounds, bounds[1:]):
        left = rows[start:stop][embargo:]
        if len(left) >= ROWS_MIN:
            kept.append(left)
        elif stop > start:
            warnings.warn(
                f"{symbol} has {len(left)} of the {ROWS_MIN} rows it needs in the {name} split, "
                "and is left out of it",
                stacklevel=3,
            )
    if not kept:
        raise ValueError(
            f"table: no symbol has {ROWS_MIN} rows in the {name} split of {len(table)} rows in all; "
            "give more data, a larger fraction or a smaller embargo"
        )
    rows = np.concatenate(kept)
    last = np.zeros(len(rows), np.float32)
    last[np.cumsum([len(left) for left in kept]) - 1] = 1
    return replace(
        table,
        features=table.features[rows],
        price=table.price[rows],
        last=last,
        date=table.date[rows],
        segment=table.segment[rows],
        row=table.row[rows],
    )
