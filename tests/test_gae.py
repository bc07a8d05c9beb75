"""What GAE promises beyond agreeing with its spec."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowgpu_kernels import gae


def column(*values):
    return np.array(values, "f4").reshape(-1, 1)


def flags(*values):
    return np.array(values, bool).reshape(-1, 1)


def rollout(rng, steps, envs):
    reward, value = (rng.normal(size=(steps, envs)).astype("f4") for _ in range(2))
    return reward, value, rng.normal(size=envs).astype("f4")


def test_a_time_limit_bootstraps_from_the_final_value():
    """Case A1."""
    two = column(2, 2, 2)
    got = gae(
        column(1, 1, 1), two, two[0], flags(0, 0, 0), flags(0, 0, 1), two, gamma=0.99, lam=0.95
    )
    np.testing.assert_allclose(got.advantage[:, 0], [2.76853945, 1.90169, 0.98], rtol=1e-6)


def test_a_terminated_episode_does_not_use_what_follows():
    """Case A2."""
    two = column(2, 2, 2)
    got = gae(column(1, 1, 1), two, two[0], flags(0, 0, 1), gamma=0.99, lam=0.95)
    np.testing.assert_allclose(got.advantage[:, 0], [1.01714975, 0.0395, -1.0], atol=1e-6)


def test_a_nan_behind_a_termination_stays_there():
    """Case A4: select, don't multiply."""
    nan = np.full(1, np.nan, "f4")
    got = gae(column(1, 1), column(2, 2), nan, flags(0, 1), gamma=0.99, lam=0.95)
    np.testing.assert_allclose(got.advantage[:, 0], [0.0395, -1.0], atol=1e-6)


def test_a_truncation_without_a_finite_final_value_is_refused_by_place():
    """Case A4, second half."""
    one = column(1, 1)
    with pytest.raises(ValueError, match=r"final_value\[1, 0\] is nan where truncated"):
        gae(one, one, one[0], flags(0, 0), flags(0, 1), column(1, np.nan))
    with pytest.raises(ValueError, match="truncated and final_value together"):
        gae(one, one, one[0], flags(0, 0), flags(0, 1))


def test_every_step_of_a_rollout_gets_an_advantage():
    """Case A5."""
    zeros = np.zeros((64, 1), "f4")
    got = gae(zeros + 1, zeros, zeros[0], zeros.astype(bool))
    assert got.advantage.shape == (64, 1) and got.advantage[63, 0] == 1


def test_a_terminal_step_loses_its_own_value():
    """Case A6: the mask applies to the next value, not to A - V."""
    got = gae(column(1), column(2), np.ones(1, "f4"), flags(1))
    assert got.advantage[0, 0] == -1


seeds = st.integers(0, 2**32 - 1)


@given(st.integers(1, 40), seeds)
@settings(deadline=None, max_examples=30)
@example(64, 0)
def test_returns_are_advantage_plus_value_to_one_rounding(steps, seed):
    """Case A8."""
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps, 3)
    got = gae(reward, value, last, rng.random((steps, 3)) < 0.2)
    np.testing.assert_array_equal(got.returns, got.advantage + value)


@given(st.integers(1, 40), seeds)
@settings(deadline=None, max_examples=30)
def test_lambda_one_is_the_monte_carlo_return_minus_the_value(steps, seed):
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps, 4)
    terminated = rng.random((steps, 4)) < 0.15
    truncated = rng.random((steps, 4)) < 0.15
    final = rng.normal(size=(steps, 4)).astype("f4")
    got = gae(reward, value, last, terminated, truncated, final, gamma=0.9, lam=1.0)
    discounted = last.astype("f8")
    for t in reversed(range(steps)):
        discounted = np.where(truncated[t], final[t], discounted)
        discounted = reward[t] + 0.9 * np.where(terminated[t], 0, discounted)
        np.testing.assert_allclose(got.advantage[t], discounted - value[t], atol=1e-5)


@given(st.integers(1, 40), seeds)
@settings(deadline=None, max_examples=30)
def test_lambda_zero_is_the_td_error_at_every_boundary(steps, seed):
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps, 4)
    terminated = rng.random((steps, 4)) < 0.15
    truncated = rng.random((steps, 4)) < 0.15
    final = rng.normal(size=(steps, 4)).astype("f4")
    got = gae(reward, value, last, terminated, truncated, final, gamma=0.9, lam=0.0)
    following = np.concatenate([value[1:], last[None]])
    following = np.where(truncated, final, following)
    error = reward + 0.9 * np.where(terminated, 0, following) - value
    np.testing.assert_allclose(got.advantage, error, atol=2e-6)


@given(st.integers(1, 40), st.integers(1, 9), seeds)
@settings(deadline=None, max_examples=30)
def test_an_episode_end_hides_everything_after_it(steps, cut, seed):
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps + cut, 3)
    terminated = rng.random(reward.shape) < 0.1
    terminated[steps - 1] = True
    before = gae(reward, value, last, terminated).advantage[:steps]
    reward[steps:] += 7
    after = gae(reward, value, last, terminated).advantage[:steps]
    np.testing.assert_array_equal(before, after)


def test_says_which_array_has_the_wrong_shape():
    one = np.ones((4, 3), "f4")
    with pytest.raises(ValueError, match=r"last_value must be float32\[E\] with E=3, got shape"):
        gae(one, one, np.ones(2, "f4"), one > 2)
