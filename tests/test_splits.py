"""The splits: cut at the same dates for every symbol, no row twice, segments ended by their flag."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowgpu.data import sample
from lowgpu.data.features import Table, features
from lowgpu.data.splits import split_by_time


def table_of(*dates, symbol=None):
    """A table with a segment for each list of dates; feature and price of a row are its number."""
    rows = sum(map(len, dates))
    number = np.arange(rows, dtype=np.float32)
    last = np.zeros(rows, np.float32)
    if rows:
        last[np.cumsum([len(d) for d in dates]) - 1] = 1
    return Table(
        symbol=symbol or tuple("abcdefgh"[: len(dates)]),
        features=number[:, None].repeat(2, axis=1),
        price=number + 100,
        last=last,
        date=np.concatenate([np.asarray(d, np.int64) for d in dates]),
        segment=np.repeat(np.arange(len(dates), dtype=np.int32), [len(d) for d in dates]),
        row=np.arange(rows) + 1000,
    )


def split_quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return split_by_time(*args, **kwargs)


def test_two_symbols_are_cut_at_the_same_dates_with_the_values_worked_by_hand():
    table = table_of(range(10), range(5, 15))
    # Twenty rows: row 10 and row 15 of the sorted dates 0-4, 5 5 ... 9 9, 10-14 are 7 and 10.
    train, validation, test = split_by_time(table, (0.5, 0.25, 0.25))
    assert train.date.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6]
    assert validation.date.tolist() == [7, 8, 9, 7, 8, 9]
    assert test.date.tolist() == [10, 11, 12, 13, 14]
    assert train.segment.tolist() == [0] * 7 + [1] * 2
    assert validation.segment.tolist() == [0] * 3 + [1] * 3
    assert test.segment.tolist() == [1] * 5
    assert train.last.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert validation.last.tolist() == [0, 0, 1, 0, 0, 1]
    assert test.last.tolist() == [0, 0, 0, 0, 1]
    assert train.row.tolist() == [1000, 1001, 1002, 1003, 1004, 1005, 1006, 1010, 1011]
    assert validation.price.tolist() == [107, 108, 109, 112, 113, 114]
    assert test.features[:, 0].tolist() == [15, 16, 17, 18, 19]
    assert train.symbol == validation.symbol == test.symbol == ("a", "b")
    assert table.last.tolist() == [0] * 9 + [1] + [0] * 9 + [1]


def test_the_embargo_leaves_out_bars_of_each_symbol_after_each_cut():
    table = table_of(range(10), range(5, 15))
    train, validation, test = split_by_time(table, (0.5, 0.25, 0.25), embargo=1)
    assert train.date.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6]
    assert validation.date.tolist() == [8, 9, 8, 9]
    assert validation.last.tolist() == [0, 1, 0, 1]
    assert test.date.tolist() == [11, 12, 13, 14]


def test_a_symbol_with_one_row_in_a_split_is_left_out_of_it_with_a_warning():
    table = table_of(range(20), (5, 15), symbol=("long", "short"))
    with pytest.warns(UserWarning) as caught:
        train, validation, test = split_by_time(table, (0.6, 0.2, 0.2))
    messages = [str(warning.message) for warning in caught]
    assert [message.split(",")[0] for message in messages] == [
        "short has 1 of the 2 rows it needs in the train split",
        "short has 1 of the 2 rows it needs in the validation split",
    ]
    assert all(warning.filename == __file__ for warning in caught)
    assert set(train.segment) == set(validation.segment) == set(test.segment) == {0}


SPLIT_CASES = dict(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    shares=st.tuples(*[st.integers(1, 8)] * 3),
    embargo=st.integers(0, 3),
)


@given(**SPLIT_CASES)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_every_split_keeps_its_promises_for_any_table(lengths, seed, shares, embargo):
    rng = np.random.default_rng(seed)
    dates = [rng.integers(50) + np.cumsum(rng.integers(1, 4, n)) for n in lengths]
    table = table_of(*dates)
    fractions = tuple(share / sum(shares) for share in shares)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            splits = split_by_time(table, fractions, embargo)
        except ValueError as error:
            assert "no symbol has 2 rows in the" in str(error)
            return
    rows = np.concatenate([split.row for split in splits])
    assert len(set(rows.tolist())) == len(rows)
    for earlier, later in pairwise(splits):
        assert earlier.date.max() < later.date.min()
    for split in splits:
        assert split.last.dtype == np.float32 and split.segment.dtype == np.int32
        for name in ("features", "price", "date", "segment"):
            assert np.array_equal(getattr(split, name), getattr(table, name)[split.row - 1000])
        ends = np.append(np.diff(split.segment) != 0, True)
        assert split.last.tolist() == ends.astype(float).tolist()
        counts = np.bincount(split.segment, minlength=len(lengths))
        assert not np.any(counts == 1)
        # Rows of a segment within a split follow each other in the table.
        inside = ~ends[:-1]
        assert np.all(np.diff(split.row)[inside] == 1)
        if embargo == 0:
            bounds = split.date.min(), split.date.max()
            between = (table.date >= bounds[0]) & (table.date <= bounds[1])
            all_counts = np.bincount(table.segment[between], minlength=len(lengths))
            assert np.all((counts == all_counts) | ((counts == 0) & (all_counts == 1)))


def test_the_sample_splits_by_the_default_fractions_without_a_warning():
    table = features(sample())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splits = split_by_time(table)
    assert sum(map(len, splits)) == len(table)
    for split, share in zip(splits, (0.7, 0.15, 0.15)):
        # A cut keeps the up to five rows of its date together.
        assert abs(len(split) - share * len(table)) <= 5
    assert [split.last.sum() for split in splits] == [4, 4, 5]


@pytest.mark.parametrize(
    "fractions, error, words",
    [
        ((0.7, 0.3), ValueError, "wanted three numbers above 0"),
        ((0.7, 0.3, 0.0), ValueError, "wanted three numbers above 0"),
        ((0.7, 0.4, -0.1), ValueError, "wanted three numbers above 0"),
        ((0.7, 0.2, float("nan")), ValueError, "wanted three numbers above 0"),
        ((0.7, 0.2, 0.2), ValueError, "wanted the sum 1"),
        ((0.7, 0.2, float("inf")), ValueError, "wanted the sum 1"),
        ("abc", TypeError, "wanted three numbers, got 'abc'"),
        (0.7, TypeError, "wanted three numbers, got 0.7"),
    ],
)
def test_fractions_that_are_not_three_shares_of_one_are_refused(fractions, error, words):
    with pytest.raises(error, match=f"fractions: {words}"):
        split_by_time(table_of(range(100)), fractions)


def test_a_table_too_small_to_split_is_refused_with_the_split_and_the_remedy():
    with pytest.raises(
        ValueError, match=r"no symbol has 2 rows in the validation split of 10 rows"
    ):
        split_quietly(table_of(range(10)), (0.8, 0.1, 0.1))
    with pytest.raises(ValueError, match="smaller embargo"):
        split_quietly(table_of(range(100)), (0.8, 0.1, 0.1), embargo=9)
    with pytest.raises(ValueError, match="table: wanted rows to split, got none"):
        split_by_time(table_of([]))
    with pytest.raises(ValueError, match="no symbol has 2 rows in the train split"):
        split_by_time(table_of([5], [5], [5]))


def test_arguments_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError, match="table: wanted a Table, got list"):
        split_by_time([])
    with pytest.raises(TypeError, match="embargo: wanted an integer, got float"):
        split_by_time(table_of(range(100)), embargo=1.5)
    with pytest.raises(ValueError, match="embargo: wanted bars >= 0, got -1"):
        split_by_time(table_of(range(100)), embargo=-1)
