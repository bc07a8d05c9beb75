"""Normals and actions drawn from words: twins, edges, and statistics."""

import ctypes
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

from lowgpu_kernels.device import f32, scalar, u32
from lowgpu_kernels.device.draws import categorical, greedy, normal_pair
from lowgpu_kernels.device.philox import INIT, draw, unit
from tests.headers import address, compiled

# The first call compiles, and takes longer than hypothesis allows.
compiles = settings(deadline=None)

word = st.integers(0, 2**32 - 1)
BELOW_ONE = float(np.nextafter(f32(1), f32(0)))
units = st.integers(0, 2**24 - 1).map(lambda n: n / 2**24)
logit = st.one_of(st.floats(-200, 200, width=32), st.just(-math.inf))
rows = st.lists(logit, min_size=1, max_size=12)


@pytest.fixture(scope="module")
def header():
    return compiled("""
        #include "draws.cuh"
        extern "C" void normals(unsigned a, unsigned b, float* out) {
            const float2 pair = normal_pair(a, b);
            out[0] = pair.x; out[1] = pair.y;
        }
        extern "C" int drawn(const float* logits, int actions, float u, int best, float* out) {
            const Action a = best ? greedy(logits, actions) : categorical(logits, actions, u);
            out[0] = a.log_probability; out[1] = a.entropy;
            return a.action;
        }
    """)


def row_of(values):
    return np.array([values], "f4")


def header_drawn(header, logits, u, best):
    out = np.empty(2, "f4")
    action = header.drawn(address(logits), logits.shape[1], ctypes.c_float(u), best, address(out))
    return action, *out


@compiles
@given(word, word)
@example(0, 0)
@example(2**32 - 1, 2**32 - 1)
def test_normals_are_the_same_in_python_and_cuda_c(header, a, b):
    out = np.empty(2, "f4")
    header.normals(ctypes.c_uint32(a), ctypes.c_uint32(b), address(out))
    np.testing.assert_array_equal(out, np.array(normal_pair(u32(a), u32(b)), "f4"))
    assert np.isfinite(out).all() and np.abs(out).max() < 5.78


@compiles
@given(rows, units)
@example([0.0], BELOW_ONE)
@example([-math.inf] * 3, 0.5)
@example([0.0, math.nan], 0.5)
@example([0.0, math.inf], 0.5)
def test_actions_are_the_same_in_python_and_cuda_c(header, values, u):
    logits = row_of(values)
    for best, python in ((0, categorical(logits, 0, len(values), f32(u))),
                         (1, greedy(logits, 0, len(values)))):  # fmt: skip
        np.testing.assert_array_equal(header_drawn(header, logits, u, best), python)


@njit
def _normals(seed, count):
    out = np.empty(4 * count)
    for i in range(count):
        words = draw(seed, INIT, i, 0)
        out[4 * i], out[4 * i + 1] = normal_pair(words[0], words[1])
        out[4 * i + 2], out[4 * i + 3] = normal_pair(words[2], words[3])
    return out


def test_normals_are_normal_and_a_pair_is_uncorrelated():
    """Kolmogorov-Smirnov and correlation at a fixed seed; p below 1e-4 would fail."""
    from scipy.stats import kstest, pearsonr

    x = _normals(np.uint64(7), 100_000)
    assert kstest(x, "norm").pvalue > 1e-4
    assert pearsonr(x[::2], x[1::2]).pvalue > 1e-4
    assert pearsonr(x[::2] ** 2, x[1::2] ** 2).pvalue > 1e-4


@compiles
@given(rows, units)
def test_an_action_of_probability_zero_is_never_drawn(values, u):
    if max(values) == -math.inf:
        values = [*values, 0.0]
    action, log_probability, entropy = categorical(row_of(values), 0, len(values), f32(u))
    assert 0 <= action < len(values) and values[action] - max(values) > -104
    assert -104 < log_probability <= 0
    assert -1e-5 <= entropy <= math.log(len(values)) + 1e-5


@pytest.mark.parametrize("u", [0.0, 0.5, BELOW_ONE])
def test_a_mask_holds_at_both_ends_of_the_range(u):
    masked = -math.inf
    assert categorical(row_of([masked, 0, masked]), 0, 3, f32(u)) == (1, 0, 0)


def test_rounding_past_the_last_edge_gives_the_last_action_that_can_occur():
    """Case C9: the float32 sum of ten tenths is not one."""
    tenths = row_of([math.log(0.1)] * 10)
    assert categorical(tenths, 0, 10, f32(BELOW_ONE))[0] == 9
    masked = row_of([math.log(0.1)] * 10 + [-math.inf] * 2)
    assert categorical(masked, 0, 12, f32(BELOW_ONE))[0] == 9


@compiles
@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40), st.data())
def test_u_below_one_never_falls_off_the_end(values, data):
    """The kind behind C9, for sums that round either way."""
    u = f32(data.draw(st.sampled_from([BELOW_ONE, 1 - 2**-23, 1 - 2**-22])))
    action, log_probability, _ = categorical(row_of(values), 0, len(values), u)
    x = np.array(values, "f8")
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    # What lies past the action may only be what rounding can hide: an eps a term, plus 1 - u.
    assert p[action + 1 :].sum() <= (len(values) + 4) * 2.0**-23
    assert log_probability == pytest.approx(math.log(p[action]), abs=1e-4)


@pytest.mark.parametrize(
    "values", [[-math.inf] * 3, [math.nan, 1], [1, math.nan], [0, math.inf], [math.nan] * 2]
)
def test_a_row_without_a_softmax_gives_minus_one_and_nan(values):
    """Case C7, and D5: the NaN test is alive in compiled code."""
    for action, *rest in (
        categorical(row_of(values), 0, len(values), f32(0.5)),
        greedy(row_of(values), 0, len(values)),
    ):
        assert action == -1 and np.isnan(rest).all()


def test_scalar_functions_are_compiled_without_fast_math():
    """Case D5: fastmath=True would delete `x != x`."""
    assert not scalar(lambda x: x).targetoptions.get("fastmath", False)


def test_greedy_takes_the_first_of_equals():
    assert greedy(row_of([0, 2, 2, -math.inf]), 0, 4)[0] == 1


@compiles
@given(rows)
def test_greedy_agrees_with_argmax(values):
    if max(values) > -math.inf:
        action, log_probability, _ = greedy(row_of(values), 0, len(values))
        assert action == int(np.argmax(values))
        x = np.array(values, "f8")
        exact = -math.log(np.exp(x - x.max()).sum())
        assert log_probability == pytest.approx(exact, abs=1e-5)


def test_columns_after_the_actions_are_not_read():
    logits = np.array([[0, 0, math.nan], [0, 1, math.nan]], "f4")
    assert categorical(logits, 1, 2, f32(0.9))[0] == 1 and greedy(logits, 1, 2)[0] == 1


@njit
def _frequencies(logits, count):
    counts = np.zeros(logits.shape[1], np.int64)
    for i in range(count):
        counts[categorical(logits, 0, logits.shape[1], unit(draw(11, 0, i, 0)[0]))[0]] += 1
    return counts


def test_actions_come_as_often_as_their_probabilities():
    """Chi-square at a fixed seed; p below 1e-4 would fail."""
    from scipy.stats import chisquare

    p = np.array([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    counts = _frequencies(row_of(np.log(p)), 200_000)
    assert chisquare(counts, p * counts.sum()).pvalue > 1e-4
