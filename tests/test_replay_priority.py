"""Prioritized replay: what is drawn, how often, with what weight, and sums that never drift."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from lowgpu_kernels import priority_sample, priority_update
from lowgpu_kernels.ops.replay.replay_write import spec_sums
from lowgpu_kernels.ops.replay.tree import LARGEST, UNIT, leaves_of, sums_of, widths_of
from tests.replay_model import Dense, call, each_executor, empty_ring
from tests.test_replay import clock_of, gathered

few = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))


def tree_of(priority):
    """A tree whose first leaves are these."""
    leaves = np.zeros(leaves_of(len(priority)), "f4")
    leaves[: len(priority)] = priority
    assert (leaves / UNIT % 1 == 0).all()
    highest = np.array([max(1, leaves.max(initial=0))], "f4")
    return {"priority": leaves, "sums": spec_sums(leaves.astype("f8")), "highest": highest}


def drawn_from(executor, made, batch, clock=0, seed=0):
    return call(
        priority_sample, executor, made | {"clock": clock_of(clock)}, batch=batch, seed=seed
    )


def update(executor, made, index, error, **params):
    arrays = {"index": np.asarray(index, "i4"), "error": np.asarray(error, "f4")}
    call(priority_update, executor, arrays | made, **params)


def weights_of(executor, got, beta):
    """Importance weights of a batch, by a ring in which every row's index is written."""
    slots = int(got["index"].max()) + 1
    ring = empty_ring(slots, 1)
    Dense(1, np.random.default_rng(0)).write("cpu", ring, slots)
    rows = {name: got[name] for name in ("drawn", "least")}
    return gathered(executor, ring | rows, got["index"], beta=beta)["weight"]


@each_executor
def test_errors_of_zero_are_as_likely_as_each_other_with_weights_of_one(executor):
    """Case B5: no division by zero, no infinity."""
    made = tree_of(np.ones(4))
    update(executor, made, range(4), np.zeros(4), alpha=0.6, eps=1e-6)
    assert (made["priority"][:4] == made["priority"][0]).all() and made["priority"][0] > 0
    assert (made["priority"][4:] == 0).all()
    got = drawn_from(executor, made, 400)
    assert np.bincount(got["index"], minlength=4).tolist() == [100] * 4
    np.testing.assert_array_equal(weights_of(executor, got, 0.4), 1)


@each_executor
def test_the_sign_of_an_error_does_not_count(executor):
    """Case B6."""
    made = tree_of(np.ones(3))
    update(executor, made, range(3), [-2, 0.5, 2], alpha=0.5, eps=1e-30)
    np.testing.assert_allclose(made["priority"][:3], np.sqrt([2, 0.5, 2]), atol=2e-6)
    assert made["priority"][0] == made["priority"][2]


@each_executor
def test_weights_are_those_of_the_case(executor):
    """Case B7: over the largest of the batch, so of 1, 1, 0.7579, 0.5743 by construction."""
    made = tree_of([1, 1, 2, 4])
    got = drawn_from(executor, made, 800)
    counts = np.bincount(got["index"], minlength=4)
    assert counts.tolist() == [100, 100, 200, 400]
    weight = weights_of(executor, got, 0.4)
    want = np.array([1, 1, 0.75785828, 0.57434918])[got["index"]]
    np.testing.assert_allclose(weight, want, rtol=5e-7)


@each_executor
@few
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.floats(0, 1, width=32))
def test_weights_are_n_times_p_to_the_minus_beta_over_the_largest(executor, seed, leaves, beta):
    rng = np.random.default_rng(seed)
    units = rng.integers(1, 2 ** rng.integers(1, 25), size=leaves)
    made = tree_of(units * UNIT)
    got = drawn_from(executor, made, 130, seed=seed)
    chance = np.array([float(Fraction(int(units[i]), int(units.sum()))) for i in got["index"]])
    want = (leaves * chance) ** -float(beta)
    np.testing.assert_allclose(weights_of(executor, got, beta), want / want.max(), rtol=1e-5)
    np.testing.assert_array_equal(got["drawn"], made["priority"][got["index"]])


def test_draws_are_as_often_as_priorities_say():
    """Chi-square at a fixed seed over one draw a batch, which is plain proportional sampling."""
    rng = np.random.default_rng(3)
    priority = rng.integers(1, 2**22, size=100) * UNIT
    priority[rng.random(100) < 0.2] = 0
    made, clock, counts = tree_of(priority), clock_of(0), np.zeros(128)
    for _ in range(20_000):
        counts[priority_sample(made["priority"], made["sums"], clock, batch=1, seed=7).index] += 1
    alive = made["priority"] > 0
    assert (counts[~alive] == 0).all()
    want = made["priority"][alive].astype("f8")
    assert chisquare(counts[alive], want * counts.sum() / want.sum()).pvalue > 1e-4


def test_rows_of_a_stratum_are_spread_evenly_within_it():
    """Where in its stratum a row's draw falls: chi-square over 64 cells, all rows of many batches."""
    cells, batch = 64, 16
    made, clock = tree_of(np.ones(cells * batch)), clock_of(0)
    counts = np.zeros(cells)
    for _ in range(2000):
        index = priority_sample(made["priority"], made["sums"], clock, batch=batch).index
        assert (index // cells == np.arange(batch)).all()
        counts += np.bincount(index % cells, minlength=cells)
    assert chisquare(counts).pvalue > 1e-4


@each_executor
@few
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.sampled_from([1, 63, 65, 500]))
def test_a_batch_holds_each_leaf_as_often_as_its_share_to_within_two(executor, seed, leaves, batch):
    rng = np.random.default_rng(seed)
    units = rng.integers(0, 2 ** rng.integers(1, 31), size=leaves).astype("f4").astype("f8")
    units[rng.integers(leaves)] = 3  # not all zero
    got = drawn_from(executor, tree_of(units * UNIT), batch, clock=seed)
    counts = np.bincount(got["index"], minlength=leaves)
    assert (np.abs(counts - units * batch / units.sum()) <= 2).all()
    assert (counts[units == 0] == 0).all() and (np.diff(got["index"]) >= 0).all()


@each_executor
@pytest.mark.parametrize("last", (0, 31, 32, 40_000))
def test_one_leaf_that_is_not_zero_is_the_only_one_drawn(executor, last):
    priority = np.zeros(40_001)
    priority[last] = UNIT
    got = drawn_from(executor, tree_of(priority), 100)
    assert (got["index"] == last).all() and (got["least"] == np.float32(UNIT)).all()


@each_executor
def test_a_tree_of_nothing_draws_nothing(executor):
    got = drawn_from(executor, tree_of(np.zeros(70)), 65)
    assert (got["index"] == -1).all() and (got["drawn"] == 0).all()


def test_a_hundred_thousand_updates_leave_no_trace_in_the_sums():
    """At 2^20 leaves, over priorities from 2e-5 to 2000: sums are those of the leaves, to the unit."""
    rng = np.random.default_rng(0)
    made = tree_of(rng.integers(1, 2**30, size=2**20).astype("f4").astype("f8") * UNIT)
    for _ in range(25):
        index = rng.integers(2**20, size=4096)
        update("cpu", made, index, rng.normal(size=4096) * 10.0 ** rng.integers(-7, 5), alpha=1)
    np.testing.assert_array_equal(made["sums"], spec_sums(made["priority"].astype("f8")))
    total = sum((made["priority"].astype("f8") / UNIT).astype("u8").tolist())
    assert int(made["sums"][-1024:].sum()) == total


@each_executor
@few
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_of_rows_with_one_index_the_last_counts(executor, seed, in_order):
    rng = np.random.default_rng(seed)
    index, error = rng.integers(7, size=150), rng.normal(size=150)
    index = np.sort(index) if in_order else index
    made = tree_of(np.full(40, 2.0))
    update(executor, made, index, error, alpha=1, in_order=in_order)
    for i in set(index.tolist()):
        row = np.flatnonzero(index == i)[-1]
        want = abs(np.float32(error[row])) + np.float32(1e-6)
        assert abs(made["priority"][i] - want) <= 4e-6, f"leaf {i}: not that of row {row}"
    np.testing.assert_array_equal(made["sums"], spec_sums(made["priority"].astype("f8")))


@each_executor
def test_the_order_of_other_rows_changes_no_bit(executor):
    """Rows that count, last; those that do not, in any order before them."""
    rng = np.random.default_rng(1)
    index, error = np.repeat(np.arange(50), 4), rng.normal(size=200)
    counts = np.arange(200) % 4 == 3
    results = []
    for _ in range(4):
        order = np.concatenate(
            [rng.permutation(np.flatnonzero(~counts)), rng.permutation(np.flatnonzero(counts))]
        )
        made = tree_of(np.ones(64))
        update(executor, made, index[order], error[order])
        results.append(made)
    for other in results[1:]:
        for name in ("priority", "sums"):
            np.testing.assert_array_equal(other[name], results[0][name], err_msg=name)


@each_executor
def test_every_error_gives_a_priority_that_is_finite_and_above_zero(executor):
    error = np.array([0, -0.0, 1e-38, 1e38, -1e38, np.inf, -np.inf, np.nan, 4096, 1], "f4")
    for alpha in (0, 0.6, 1):
        made = tree_of(np.ones(len(error)))
        update(executor, made, range(len(error)), error, alpha=alpha, eps=1e-30)
        found = made["priority"][: len(error)]
        assert (found >= np.float32(UNIT)).all() and (found <= np.float32(LARGEST)).all()
        assert made["highest"][0] == found.max()
        if alpha:
            assert (found[[5, 6, 7]] == np.float32(LARGEST)).all()
        np.testing.assert_array_equal(made["sums"], spec_sums(made["priority"].astype("f8")))


@each_executor
def test_new_transitions_get_the_highest_priority_there_was(executor):
    dense, ring = Dense(5, np.random.default_rng(0)), empty_ring(6, 5, True)
    dense.write(executor, ring, 4)
    made = {name: ring[name] for name in ("priority", "sums", "highest")}
    update(executor, made, [3, 7], [9.0, 0.1], alpha=1)
    assert abs(ring["highest"][0] - 9) < 2e-6
    update(executor, made, [3], [0.5], alpha=1)
    dense.write(executor, ring, 3)
    written_again = [*range(0, 5), *range(20, 30)]
    assert (ring["priority"][written_again] == ring["highest"][0]).all()
    assert abs(ring["priority"][7] - 0.1) < 2e-6 and (ring["priority"][8:20] == 1).all()
    np.testing.assert_array_equal(ring["sums"], spec_sums(ring["priority"].astype("f8")))


@each_executor
def test_a_tree_of_four_levels_finds_its_leaves(executor):
    """More than 2^25 leaves, three of them above zero."""
    leaves, index = 2**25 + 4096, np.array([5, 2**25 + 1, 2**25 + 4095], "i4")
    assert len(widths_of(leaves)) == 4
    tree = {
        "priority": np.zeros(leaves, "f4"),
        "sums": np.zeros(sums_of(leaves), "u8"),
        "highest": np.ones(1, "f4"),
    }
    update(executor, tree, index, [1, 2, 1], alpha=1, eps=1e-30, in_order=True)
    got = drawn_from(executor, tree, 100)
    np.testing.assert_array_equal(got["index"], np.repeat(index, [25, 50, 25]))
    assert np.unique(tree["sums"][tree["sums"] > 0]).tolist() == [2**20, 2**21, 3 * 2**20]


def test_bad_input_is_refused_by_name():
    made = tree_of(np.ones(40))
    with pytest.raises(ValueError, match=r"index\[1\] must be in \[-1, 64\), got 64"):
        update("cpu", made, [0, 64], [1, 1])
    with pytest.raises(ValueError, match=r"in_order was promised, got index\[0\]=3 before 2"):
        update("cpu", made, [3, 2], [1, 1], in_order=True)
    with pytest.raises(ValueError, match="priority_sample needs L=64"):
        priority_sample(np.ones(40, "f4"), made["sums"], clock_of(0), batch=3)
    with pytest.raises(ValueError, match="priority_sample needs W=2"):
        priority_sample(made["priority"], np.ones(3, "u8"), clock_of(0), batch=3)
