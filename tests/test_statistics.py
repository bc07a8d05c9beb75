"""What moments, normalising and episode statistics promise beyond agreeing with their specs."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import f32, maths
from lowgpu_kernels.device.reduce import add_to_moments, deviation_of, merge_moments
from lowgpu_kernels.ops import (
    episode_statistics,
    minibatch_moments,
    moments,
    normalize,
    permutation,
)

# The first call compiles, and takes longer than hypothesis allows.
compiles = settings(deadline=None)
EPS = 2.0**-23
values = st.floats(-1000, 1000, width=32)
vectors = hnp.arrays(np.float32, st.integers(0, 200), elements=values)


def welford(x):
    state = f32(0), f32(0), f32(0)
    for value in x:
        state = add_to_moments(*state, value)
    return state


@compiles
@given(vectors, st.integers(0, 200))
@example(np.full(65, 3.7, "f4"), 64)
def test_merged_moments_are_those_of_the_whole(x, cut):
    count, mean, m2 = merge_moments(*welford(x[:cut]), *welford(x[cut:]))
    assert count == len(x)
    if len(x):
        size = max(1, np.abs(x).max())
        exact = x.astype("f8")
        assert abs(mean - exact.mean()) <= (len(x) + 8) * EPS * size
        deviation = deviation_of(f32(count), f32(m2), f32(0))
        assert abs(deviation - exact.std()) <= 2 * (len(x) + 8) * EPS * size


@compiles
@given(values, st.integers(1, 50), st.integers(1, 50))
def test_merging_equal_values_stays_exact(value, a, b):
    got = merge_moments(*welford([f32(value)] * a), *welford([f32(value)] * b))
    assert got == (a + b, f32(value), 0)


@pytest.mark.parametrize("unbiased", [False, True])
def test_moments_of_no_value_and_of_one(unbiased):
    np.testing.assert_array_equal(moments(np.empty(0, "f4"), unbiased=unbiased), [0, 0])
    np.testing.assert_array_equal(moments(f32([3.7]), unbiased=unbiased), f32([3.7, 0]))


def test_moments_of_far_away_values_do_not_cancel():
    """A sum of squares in float32 would give a deviation of 0, or the root of a negative number."""
    x = (100_000 + np.arange(1000) % 2).astype("f4")
    np.testing.assert_allclose(moments(x), [100_000.5, 0.5], rtol=1e-6)
    count, _, m2 = welford(x)
    assert deviation_of(f32(count), f32(m2), f32(0)) == pytest.approx(0.5, rel=0.01)


def test_a_nan_comes_out():
    assert np.isnan(moments(f32([1, np.nan, 2]))).all()


def test_unbiased_divides_by_one_less():
    np.testing.assert_allclose(moments(f32([1, 2, 3]), unbiased=True), [2, 1])


@compiles
@given(vectors, values)
@example(f32([3.7]), 3.7)
@example(np.full(65, 3.7, "f4"), 3.7)
def test_normalised_values_are_finite_whatever_came(x, value):
    """Case A7 and the kind behind it."""
    for given_values in (x, np.full_like(x, value)):
        out = normalize(given_values, moments(given_values))
        assert np.isfinite(out).all()
        if len(x) == 1:
            np.testing.assert_array_equal(out, given_values)
    if len(x) > 1:
        assert not normalize(np.full_like(x, value), moments(np.full_like(x, value))).any()


def test_normalised_values_have_mean_zero_and_deviation_one():
    x = np.random.default_rng(0).normal(5, 3, 4097).astype("f4")
    out = normalize(x, moments(x)).astype("f8")
    assert abs(out.mean()) < 1e-6 and abs(out.std() - 1) < 1e-6


def test_normalising_in_place_is_the_same():
    x = np.random.default_rng(1).normal(size=100).astype("f4")
    want = normalize(x, moments(x))
    assert normalize(x, moments(x), out=x) is x
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_last_minibatch_of_one_is_left_as_it_is(unbiased):
    """Case A7: a rollout of 65 with minibatches of 64."""
    x = np.random.default_rng(2).normal(size=65).astype("f4")
    order = permutation(np.zeros(1, np.uint64), count=65, seed=1)
    groups = minibatch_moments(x, order, minibatch=64, unbiased=unbiased)
    first = x[order[:64]].astype("f8")
    np.testing.assert_allclose(groups[0], [first.mean(), first.std(ddof=unbiased)], rtol=1e-6)
    np.testing.assert_array_equal(groups[1], [0, 1])
    last = x[order[64]]
    assert (last - groups[1, 0]) / (groups[1, 1] + f32(1e-8)) == last


def test_equal_minibatches_have_an_exact_mean_and_no_deviation():
    x = np.full(10, 0.1, "f4")
    got = minibatch_moments(x, np.arange(10, dtype="i4"), minibatch=4)
    np.testing.assert_array_equal(got, [[f32(0.1), 0]] * 3)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_index_out_of_range_is_refused_by_its_place(wrong):
    index = np.array([0, 1, wrong, 3], "i4")
    with pytest.raises(ValueError, match=r"index\[2\] must be in \[0, 4\), got"):
        minibatch_moments(np.zeros(4, "f4"), index, minibatch=2)


def test_episodes_are_counted_by_hand():
    reward = f32([[1, 10], [2, 20], [4, 40]])
    terminated = np.array([[0, 1], [1, 0], [0, 0]], bool)
    truncated = np.array([[0, 0], [0, 0], [0, 1]], bool)
    returns, lengths = f32([100, 0]), np.array([7, 0], "i4")
    got = episode_statistics(reward, terminated, truncated, returns, lengths)
    # Ended: 103 after 9 steps; 10 after 1; 60 after 2.
    np.testing.assert_array_equal(got, [3, 173, 12, 103**2 + 10**2 + 60**2])
    np.testing.assert_array_equal(returns, [4, 0])
    np.testing.assert_array_equal(lengths, [1, 0])


def test_a_step_that_sets_both_flags_is_one_episode():
    one = np.ones((1, 1), bool)
    got = episode_statistics(f32([[5]]), one, one, np.zeros(1, "f4"), np.zeros(1, "i4"))
    np.testing.assert_array_equal(got, [1, 5, 1, 25])


@compiles
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1), st.data())
def test_two_rollouts_in_a_row_count_what_one_long_rollout_counts(steps, envs, seed, data):
    rng = np.random.default_rng(seed)
    # Whole numbers: sums are then exact in any order.
    reward = rng.integers(-5, 6, (steps, envs)).astype("f4")
    ends = [rng.random((steps, envs)) < 0.2 for _ in range(2)]
    cut = data.draw(st.integers(0, steps))

    def run(*parts):
        state = np.zeros(envs, "f4"), np.zeros(envs, "i4")
        total = sum(
            episode_statistics(*(np.ascontiguousarray(a[p]) for a in (reward, *ends)), *state)
            for p in parts
        )
        return total, *state

    for whole, halves in zip(run(slice(None)), run(slice(cut), slice(cut, None))):
        np.testing.assert_array_equal(whole, halves)


MANY_BLOCKS = """
import numpy as np
from lowgpu_kernels import launch
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops import episode_statistics, moments
from lowgpu_kernels.ops.stats.moments import grid_of

assert launch.SIMULATED
x = np.random.default_rng(0).normal(3, 2, 2100).astype("f4")
out, partials = np.empty(2, "f4"), np.empty((grid_of(len(x)), 3), "f4")
assert len(partials) == 3
moments.cuda(x, True, out, partials, 0)
np.testing.assert_allclose(out, [x.mean(), x.std(ddof=1)], rtol=1e-5)

envs = 300
reward, ended = np.ones((2, envs), "f4"), np.ones((2, envs), bool)
running = np.zeros(envs, "f4"), np.zeros(envs, "i4")
out, partials = np.empty(4, "f4"), np.full((blocks(envs, 128), 4), np.nan, "f4")
assert len(partials) == 3
episode_statistics.cuda(reward, ended, ended, *running, out, partials, 0)
np.testing.assert_array_equal(out, [600, 600, 600, 600])
"""


def test_several_blocks_merge_in_the_simulator():
    done = subprocess.run(
        [sys.executable, "-c", MANY_BLOCKS],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def reductions(entry):
    return cuda_c("../../tests/kernels/reductions", entry)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a"])
def test_reductions_compile_without_spills(architecture):
    for kernel in reductions("reductions").binary(architecture).kernels:
        assert kernel.spill_stores == 0 and kernel.stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
def test_block_reductions_agree_with_numpy(threads):
    import cupy

    x = np.random.default_rng(threads).normal(size=threads).astype("f4")
    out = _run_reductions(cupy.asarray(x)).get()
    wide = x.astype("f8")
    allowed = (5 + threads // 32) * EPS * np.abs(wide).sum()
    np.testing.assert_allclose(out[0], wide.sum(), rtol=0, atol=allowed)
    np.testing.assert_allclose(out[2], (wide**2).sum(), rtol=1e-5)
    assert out[1] == x.max()
    assert (out[3:] == out[0]).all()
    x[threads // 2] = np.nan
    assert np.isnan(_run_reductions(cupy.asarray(x)).get()).all()


def _run_reductions(x):
    import cupy

    out = cupy.empty(3 + len(x), "f4")
    launch.launch(reductions("reductions"), 1, len(x), (_buffer(x), _buffer(out)), 0)
    return out


def _buffer(array):
    from lowgpu_kernels.arrays import Buffer

    return Buffer(array.data.ptr, array.shape, array.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["exp_f32", "log_f32", "sin_f32", "cos_f32", "tanh_f32"])
def test_the_gpu_gives_the_same_bits(name):
    """The promise that maths.py makes; the host compiler's half of it is in test_maths."""
    import cupy
    from numba import njit

    from lowgpu_kernels.device import cuda

    function = getattr(maths, name)

    def apply(x, y):
        i = cuda.grid(1)
        if i < x.shape[0]:
            y[i] = function(x[i])

    @njit
    def on_cpu(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    words = np.random.default_rng(3).integers(0, 2**32, 500_000, dtype=np.uint32)
    near = np.random.default_rng(4).uniform(-110, 110, 500_000).astype("f4")
    x = np.concatenate([words.view("f4"), near])
    want = np.empty_like(x)
    on_cpu(x, want)
    there, got = cupy.asarray(x), cupy.empty(len(x), "f4")
    kernel = launch.kernel(threads=256)(apply)
    kernel[-(-len(x) // 256), 256, 0](_buffer(there), _buffer(got))
    got = got.get()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    kept = ~np.isnan(want)
    np.testing.assert_array_equal(got[kept].view("u4"), want[kept].view("u4"))
