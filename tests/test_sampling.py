"""What drawing actions and orders promises beyond agreeing with the spec."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

from lowgpu_kernels.device.philox import PERMUTE, draw
from lowgpu_kernels.ops import categorical, permutation
from lowgpu_kernels.ops.stats.permutation import half_bits, place_of

# The first call compiles, and takes longer than hypothesis allows.
compiles = settings(deadline=None)
seeds = st.integers(0, 2**64 - 1)


def clock(step=0):
    return np.array([step], np.uint64)


def uniform(rows, actions):
    return np.zeros((rows, actions), "f4")


@pytest.mark.parametrize("greedy", [False, True])
def test_a_row_with_every_action_masked_is_refused_by_its_number(greedy):
    """Case C7."""
    logits = np.zeros((5, 3), "f4")
    logits[3] = -np.inf
    with pytest.raises(ValueError, match=r"logits\[3\] has no softmax"):
        categorical(logits, clock(), seed=1, greedy=greedy)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 2])
def test_a_logit_that_is_nan_or_infinite_is_refused_by_its_row(wrong, column):
    """D5: the check sees a NaN wherever it stands."""
    logits = np.zeros((4, 3), "f4")
    logits[2, column] = wrong
    with pytest.raises(ValueError, match=r"logits\[2\] has no softmax"):
        categorical(logits, clock(), seed=1)


def test_an_executor_that_is_given_such_a_row_marks_it():
    """The GPU's documented fallback, which the CPU executor shares: D5 in compiled code."""
    logits = np.array([[0, 0], [np.nan, 1], [1, np.nan], [-np.inf, -np.inf], [np.inf, 0]], "f4")
    action, log_p, entropy = np.empty(5, "i4"), np.empty(5, "f4"), np.empty(5, "f4")
    for greedy in (False, True):
        categorical.cpu(logits, clock(), np.uint64(1), greedy, action, log_p, entropy)
        assert action[0] >= 0 and (action[1:] == -1).all()
        assert np.isfinite(log_p[0]) and np.isnan(log_p[1:]).all() and np.isnan(entropy[1:]).all()


def test_no_actions_at_all_is_refused():
    with pytest.raises(ValueError, match="categorical needs A=1"):
        categorical(uniform(3, 0), clock(), seed=1)


def test_the_clock_is_read_and_left_as_it_is():
    step = clock(9)
    first = categorical(uniform(500, 6), step, seed=1)
    assert step[0] == 9
    second = categorical(uniform(500, 6), step, seed=1)
    np.testing.assert_array_equal(first.action, second.action)
    assert (categorical(uniform(500, 6), clock(10), seed=1).action != first.action).any()
    assert (categorical(uniform(500, 6), step, seed=2).action != first.action).any()


@compiles
@given(st.integers(1, 40), st.integers(1, 8), seeds, seeds)
@example(7, 3, 2**64 - 1, 2**64 - 1)
def test_a_row_draws_the_same_however_many_rows_there_are(rows, actions, seed, step):
    whole = categorical(uniform(rows, actions), clock(step), seed=seed)
    fewer = rows // 2 + 1
    part = categorical(uniform(fewer, actions), clock(step), seed=seed)
    np.testing.assert_array_equal(whole.action[:fewer], part.action)
    assert ((whole.action >= 0) & (whole.action < actions)).all()
    np.testing.assert_allclose(whole.log_probability, -math.log(actions), atol=1e-6)
    np.testing.assert_allclose(whole.entropy, math.log(actions), atol=1e-6)


def test_actions_are_independent_of_their_neighbours_and_of_the_step_before():
    """Chi-square on pairs at a fixed seed; p below 1e-4 would fail."""
    from scipy.stats import chisquare

    steps = [categorical(uniform(20_000, 4), clock(t), seed=3).action for t in range(4)]
    for a, b in [(steps[0][:-1], steps[0][1:]), *itertools.pairwise(steps)]:
        assert chisquare(np.bincount(a[: len(b)] * 4 + b, minlength=16)).pvalue > 1e-4


def test_greedy_takes_the_first_of_the_largest():
    logits = np.array([[1, 3, 3], [-np.inf, -5, -np.inf]], "f4")
    got = categorical(logits, clock(), seed=1, greedy=True)
    np.testing.assert_array_equal(got.action, [1, 1])
    assert got.log_probability[1] == 0 and got.entropy[1] == 0


def test_the_comparison_of_draws_refuses_a_wrong_action_and_a_wrong_probability():
    """It lets an action on either side of an edge pass; nothing else."""
    logits = np.log(np.array([[0.25, 0.25, 0.5]] * 50, "f4"))
    arguments = dict(logits=logits, clock=clock(), seed=1, greedy=False)
    right = categorical(**arguments)
    for name in ("action", "log_probability"):
        categorical.compare(name, getattr(right, name), getattr(right, name), arguments, 1e-6)
    with pytest.raises(AssertionError):
        categorical.compare("action", (right.action + 1) % 3, right.action, arguments, 1e-6)
    wrong = right.log_probability + np.float32(0.1)
    with pytest.raises(AssertionError):
        categorical.compare("log_probability", wrong, right.log_probability, arguments, 1e-6)


def order(count, seed=5, step=0, epoch=0):
    return permutation(clock(step), count=count, seed=seed, epoch=epoch)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 33, 1000, 65_537, 2**20])
def test_every_number_comes_once(count):
    got = order(count)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(np.sort(got), np.arange(count))


@compiles
@given(st.integers(0, 5000), seeds, seeds, st.integers(0, 2**31 - 1))
@example(4096, 2**64 - 1, 2**64 - 1, 2**31 - 1)
@example(4097, 0, 0, 0)
def test_every_number_comes_once_for_any_key(count, seed, step, epoch):
    np.testing.assert_array_equal(np.sort(order(count, seed, step, epoch)), np.arange(count))


@njit
def _some_places(count, first, places):
    keys = draw(9, PERMUTE, 0, 0)
    for i in range(len(places)):
        places[i] = place_of(first + i, count, half_bits(count), keys)


@pytest.mark.parametrize("count", [2**31 - 1, 2**30 + 1, 2**30])
def test_the_largest_orders_stay_in_range_and_do_not_repeat(count):
    places = np.empty(400_000, np.int64)
    _some_places(count, 0, places[:200_000])
    _some_places(count, count - 200_000, places[200_000:])
    assert places.min() >= 0 and places.max() < count
    assert len(np.unique(places)) == len(places)
    assert abs(places.mean() / count - 0.5) < 5 * math.sqrt(1 / 12 / len(places))


def test_another_seed_step_or_epoch_is_another_order():
    before = order(1000)
    for other in (order(1000, seed=6), order(1000, step=1), order(1000, epoch=1)):
        # Two unrelated orders agree in one place on average; 12 or more has a chance of 1e-9.
        assert (other == before).sum() < 12


@njit
def _orders(count, orders):
    for e in range(len(orders)):
        keys = draw(21, PERMUTE, e, 0)
        for i in range(count):
            orders[e, i] = place_of(i, count, half_bits(count), keys)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_every_order_of_a_few_numbers_is_equally_likely(count):
    """Chi-square over all count! orders, 200 of each wanted; p below 1e-4 would fail."""
    from scipy.stats import chisquare

    orders = np.empty((200 * math.factorial(count), count), np.int64)
    _orders(count, orders)
    counts = np.unique(orders @ count ** np.arange(count), return_counts=True)[1]
    assert len(counts) == math.factorial(count)
    assert chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("count", [16, 17, 31])
def test_odd_orders_are_as_likely_as_even_ones(count):
    """A plain Feistel network of 16 numbers makes even orders only. 5 standard deviations allowed."""
    orders = np.empty((4000, count), np.int64)
    _orders(count, orders)
    first, second = np.triu_indices(count, 1)
    odd = (orders[:, first] > orders[:, second]).sum(axis=1) % 2
    assert abs(odd.mean() - 0.5) < 5 * 0.5 / math.sqrt(len(orders))


@pytest.mark.parametrize("count", [31, 64, 100])
def test_the_first_number_lands_in_every_place_equally_often(count):
    """Chi-square at fixed keys; p below 1e-4 would fail."""
    from scipy.stats import chisquare

    first = [order(count, seed=11, step=s)[0] for s in range(60 * count)]
    assert chisquare(np.bincount(first, minlength=count)).pvalue > 1e-4


@pytest.mark.parametrize("count", [1000, 4096, 65_537])
def test_neighbours_are_uncorrelated_and_numbers_move_a_third_of_the_way(count):
    """Against the mean and spread of random orders, 5 standard deviations allowed."""
    got = order(count).astype("f8")
    i = np.arange(count)
    # |i - p(i)| has mean n / 3 and variance n^2 / 18; the correlation of neighbours has 1 / n.
    displacement = np.abs(got - i).mean() / count
    assert abs(displacement - 1 / 3) < 5 / math.sqrt(18 * count)
    for correlation in (np.corrcoef(got, i), np.corrcoef(got[:-1], got[1:])):
        assert abs(correlation[0, 1]) < 5 / math.sqrt(count)


TWO_THREADS = """
import threading
import numpy as np
from numba import threading_layer
from lowgpu_kernels.ops import categorical, permutation

logits = np.random.default_rng(0).normal(size=(64, 5)).astype("f4")
steps = [np.array([t], np.uint64) for t in range(1000)]
want = [categorical(logits, s, seed=3).action.copy() for s in steps]
orders = [permutation(s, count=100, seed=3) for s in steps]
wrong = []

def work():
    for step, action, order in zip(steps, want, orders):
        same = (categorical(logits, step, seed=3).action == action).all()
        if not (same and (permutation(step, count=100, seed=3) == order).all()):
            wrong.append(step)

threads = [threading.Thread(target=work) for _ in range(2)]
for t in threads: t.start()
for t in threads: t.join()
assert threading_layer() == "workqueue"
assert not wrong
"""


def test_two_threads_may_call_the_cpu_executors_at_once():
    """Case D6: numba's workqueue layer aborts the process unless calls take turns."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS],
        env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
