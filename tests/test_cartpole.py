"""CartPole is Gymnasium's, in float32."""

import numpy as np
import pytest

from lowgpu.envs import cartpole
from lowgpu_kernels import env_step, observe, reset

gymnasium = pytest.importorskip("gymnasium")

TRACK, LARGEST_ANGLE = 2.4, 12 * 2 * np.pi / 360
HALF_ULP = 2.0**-24


@pytest.fixture
def reference():
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    env.reset(seed=0)
    yield env
    env.close()


def stepped(floats, ints, action, **options):
    floats, ints = floats.copy(), ints.copy()
    clock = np.zeros(1, "u8")
    result = env_step(floats, ints, action, None, clock, env=cartpole(**options), seed=0)
    return floats, ints, result


def allowed(state, after):
    """What float32 rounding can make of one step, against exact arithmetic from the same state.

    Counting half ulps: sine and cosine 2, every operation and every constant 1, relative errors of
    factors add. temp takes 9, theta_acc 13 for its numerator, 5 for its denominator and 1; x_acc
    26 for its larger term and 1; times tau 2 more. Terms that could cancel are counted by magnitude.
    """
    x_dot, theta, theta_dot = state.T[1:]
    sine, cosine = np.abs(np.sin(theta)), np.abs(np.cos(theta))
    temp = (10 + 0.05 * theta_dot**2 * sine) / 1.1
    theta_acc = (9.8 * sine + cosine * temp) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    x_acc = temp + 0.05 * theta_acc * cosine / 1.1
    moved = [2 * 0.02 * np.abs(x_dot), 29 * 0.02 * x_acc]
    moved += [2 * 0.02 * np.abs(theta_dot), 21 * 0.02 * theta_acc]
    return HALF_ULP * (np.abs(after) + np.stack(moved, -1))


def reference_step(reference, state, action):
    inner = reference.unwrapped
    inner.state, inner.steps_beyond_terminated = state.astype("f8"), None
    _, reward, terminated, truncated, _ = reference.step(int(action))
    return inner.state, reward, terminated, truncated


def near_a_threshold(after):
    distance = np.minimum(
        np.abs(np.abs(after[..., 0]) - TRACK), np.abs(np.abs(after[..., 2]) - LARGEST_ANGLE)
    )
    return distance < 1e-6


def test_a_step_is_gymnasiums_within_float32_rounding(reference):
    rng, envs = np.random.default_rng(0), 5000
    state = (rng.uniform(-1, 1, (envs, 4)) * [2.5, 4, 0.22, 4]).astype("f4")
    action = rng.integers(2, size=envs).astype("i4")
    after, _, (reward, terminated, truncated) = stepped(state, np.zeros((envs, 1), "i4"), action)
    wanted, flags = np.empty((envs, 4)), np.empty(envs, bool)
    for e in range(envs):
        reference.reset(seed=0)
        wanted[e], earned, flags[e], limit = reference_step(reference, state[e], action[e])
        assert earned == reward[e] == 1 and not limit and not truncated[e]
    bound = allowed(state.astype("f8"), wanted)
    assert (np.abs(after - wanted) <= bound).all(), (np.abs(after - wanted) / bound).max(0)
    clear = ~near_a_threshold(wanted)
    assert clear.mean() > 0.99 and 0.1 < flags.mean() < 0.9
    np.testing.assert_array_equal(terminated[clear], flags[clear])


@pytest.mark.parametrize("policy", ["balancing", "random"])
def test_whole_episodes_end_as_gymnasiums_do(reference, policy):
    rng = np.random.default_rng(1)
    for seed in range(3 if policy == "balancing" else 30):
        floats, ints, clock = np.empty((1, 4), "f4"), np.empty((1, 1), "i4"), np.zeros(1, "u8")
        reset(floats, ints, None, clock, env=cartpole(), seed=seed)
        reference.reset(seed=0)
        for _ in range(500):
            push = rng.integers(2)
            if policy == "balancing":
                push = floats[0] @ np.array([0.1, 0.2, 1, 0.5], "f4") > 0
            state = floats.copy()
            action = np.array([push], "i4")
            floats, ints, (reward, terminated, truncated) = stepped(floats, ints, action)
            wanted, earned, ended, limit = reference_step(reference, state[0], push)
            assert (np.abs(floats[0] - wanted) <= allowed(state.astype("f8"), wanted)[0]).all()
            assert not near_a_threshold(wanted), "choose another seed"
            assert (reward[0], terminated[0], truncated[0]) == (earned, ended, limit)
            if ended or limit:
                break
        assert (limit and ints[0, 0] == 500) if policy == "balancing" else ended


def test_a_start_is_uniform_in_the_range():
    floats, ints = np.full((20_000, 4), np.nan, "f4"), np.full((20_000, 1), 9, "i4")
    reset(floats, ints, None, np.zeros(1, "u8"), env=cartpole(), seed=3)
    assert not ints.any()
    assert np.abs(floats).max() <= np.float32(0.05)
    # Five standard errors of the mean and of the variance of a uniform distribution.
    deviation = 0.1 / np.sqrt(12)
    assert (np.abs(floats.mean(0)) < 5 * deviation / np.sqrt(20_000)).all()
    assert (np.abs(floats.var(0) / deviation**2 - 1) < 5 * np.sqrt(0.8 / 20_000)).all()
    correlated = np.abs(np.corrcoef(floats.T) - np.eye(4))
    assert correlated.max() < 5 / np.sqrt(20_000)


def test_an_observation_is_the_state_and_four_zero_columns():
    floats = np.random.default_rng(0).normal(size=(7, 4)).astype("f4")
    x = observe(floats, np.zeros((7, 1), "i4"), env=cartpole())
    np.testing.assert_array_equal(x, np.pad(floats, ((0, 0), (0, 4))))


@pytest.mark.parametrize("terminates", [False, True])
def test_the_limit_truncates_unless_it_is_asked_to_terminate(terminates):
    state, action = np.zeros((1, 4), "f4"), np.zeros(1, "i4")
    options = dict(max_steps=7, limit_terminates=terminates)
    for step in (5, 6):
        _, ints, result = stepped(state, np.array([[step]], "i4"), action, **options)
        assert ints[0, 0] == step + 1
        ended = step == 6
        assert result.terminated[0] == (ended and terminates)
        assert result.truncated[0] == (ended and not terminates)


def test_falling_on_the_last_step_is_a_termination():
    fallen = np.array([[0, 0, 0.3, 0]], "f4")
    _, _, result = stepped(fallen, np.array([[499]], "i4"), np.zeros(1, "i4"))
    assert result.terminated[0] and not result.truncated[0]


@pytest.mark.parametrize("wrong", [dict(max_steps=0), dict(limit_terminates=1)], ids=str)
def test_an_argument_out_of_range_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        cartpole(**wrong)
