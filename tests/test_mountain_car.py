"""Mountain Car is Gymnasium's, in float32."""

import numpy as np
import pytest

from lowgpu.envs import check_env, mountain_car
from lowgpu_kernels import env_step, observe, reset
from lowgpu_kernels.compile import ARCHITECTURES
from lowgpu_kernels.ops.rollout import env_step as env_step_op

gymnasium = pytest.importorskip("gymnasium")

HALF_ULP = 2.0**-24


@pytest.fixture
def reference():
    env = gymnasium.make("MountainCar-v0", disable_env_checker=True)
    env.reset(seed=0)
    yield env
    env.close()


def stepped(floats, ints, action, **options):
    floats, ints = floats.copy(), ints.copy()
    clock = np.zeros(1, "u8")
    result = env_step(floats, ints, action, None, clock, env=mountain_car(**options), seed=0)
    return floats, ints, result


def one_step(position, velocity, action, step=0, **options):
    """(position, velocity, reward, terminated, truncated) after one step."""
    state, ints = np.array([[position, velocity]], "f4"), np.array([[step]], "i4")
    after, _, result = stepped(state, ints, np.array([action], "i4"), **options)
    return *after[0], *(array[0] for array in result)


def reference_step(reference, state, action):
    reference.unwrapped.state = state.astype("f8")
    _, reward, terminated, truncated, _ = reference.step(int(action))
    return np.array(reference.unwrapped.state), reward, terminated, truncated


def allowed(state):
    """What float32 rounding can make of one step, against exact arithmetic from the same state.

    In half ulps: the force's constant 1; gravity's 1, its product 1, the cosine 2 and its argument 1;
    their difference and the new velocity 1 each, of 0.0035 and 0.0735 at most before the clip. The
    position has the velocity's error and 1 of its own, of 1.27 at most before the clip.
    """
    argument = 3 * np.abs(state[:, 0].astype("f8"))
    velocity = 0.001 + 0.0025 * (4 + argument) + 0.0035 + 0.0735
    return HALF_ULP * np.stack([velocity + 1.27, velocity], -1)


def near_a_threshold(state, action, bound):
    """Whether rounding decides on the goal, on the wall, or on which way a car at the goal rolls."""
    position, velocity = state.T.astype("f8")
    velocity = velocity + (action - 1) * 0.001 - 0.0025 * np.cos(3 * position)
    velocity = np.clip(velocity, -0.07, 0.07)
    position = position + velocity
    near = (np.abs(position[:, None] - [-1.2, 0.5]) <= bound[:, :1]).any(1)
    return near | ((np.abs(velocity) <= bound[:, 1]) & (position >= 0.5))


def test_a_step_is_gymnasiums_within_float32_rounding(reference):
    rng, envs = np.random.default_rng(0), 5000
    state = (rng.uniform(-1, 1, (envs, 2)) * [0.9, 0.07] - [0.3, 0]).astype("f4")
    action = rng.integers(3, size=envs).astype("i4")
    after, _, (reward, terminated, truncated) = stepped(state, np.zeros((envs, 1), "i4"), action)
    wanted, flags = np.empty((envs, 2)), np.empty(envs, bool)
    reference.reset(seed=0)
    for e in range(envs):
        reference._elapsed_steps = 0
        wanted[e], earned, flags[e], _ = reference_step(reference, state[e], action[e])
        assert earned == reward[e] == -1 and not truncated[e]
    bound = allowed(state)
    clear = ~near_a_threshold(state, action, bound)
    assert clear.mean() > 0.99 and 0.03 < flags.mean() < 0.3
    assert (wanted[:, 0] == -1.2).sum() > 20 and (np.abs(wanted[:, 1]) == 0.07).sum() > 20
    apart = np.abs(after - wanted)
    assert (apart <= bound)[clear].all(), (apart / bound)[clear].max(0)
    np.testing.assert_array_equal(terminated[clear], flags[clear])


@pytest.mark.parametrize("policy", ["pumping", "random"])
def test_whole_episodes_end_as_gymnasiums_do(reference, policy):
    rng = np.random.default_rng(1)
    for seed in range(10):
        floats, ints, clock = np.empty((1, 2), "f4"), np.empty((1, 1), "i4"), np.zeros(1, "u8")
        reset(floats, ints, None, clock, env=mountain_car(), seed=seed)
        reference.reset(seed=0)
        for _ in range(200):
            # Driving the way the car already rolls adds energy.
            drive = rng.integers(3) if policy == "random" else 2 * int(floats[0, 1] >= 0)
            state, action = floats.copy(), np.array([drive], "i4")
            floats, ints, (reward, terminated, truncated) = stepped(floats, ints, action)
            wanted, earned, ended, limit = reference_step(reference, state[0], drive)
            bound = allowed(state)
            assert not near_a_threshold(state, action, bound), "choose another seed"
            assert (np.abs(floats - wanted) <= bound).all()
            assert (reward[0], terminated[0], truncated[0]) == (earned, ended, limit)
            if ended or limit:
                break
        assert ended if policy == "pumping" else limit and ints[0, 0] == 200


@pytest.mark.parametrize(
    "state, action, worked",
    [
        # cos(0) = 1: gravity alone, with the motor, against it.
        ((0, 0), 1, (-0.0025, -0.0025)),
        ((0, 0), 0, (-0.0035, -0.0035)),
        ((0, 0), 2, (-0.0015, -0.0015)),
        # cos(pi / 2) = 0: the bottom of the valley, where only the motor counts.
        ((-np.pi / 6, 0), 2, (-np.pi / 6 + 0.001, 0.001)),
        ((-np.pi / 6, 0.02), 1, (-np.pi / 6 + 0.02, 0.02)),
        # cos(pi) = -1: the top of the left slope.
        ((-np.pi / 3, 0), 1, (-np.pi / 3 + 0.0025, 0.0025)),
    ],
)
def test_a_step_is_the_one_worked_by_hand(state, action, worked):
    bound = allowed(np.array([state]))[0] + 0.0025 * 3 * HALF_ULP
    assert (np.abs(np.subtract(one_step(*state, action)[:2], worked)) <= bound).all()


def test_the_velocity_is_limited_and_the_wall_takes_it():
    fastest = np.float32(0.07)
    assert one_step(-np.pi / 3, 0.07, 2)[1] == fastest
    assert one_step(0, -0.07, 0)[1] == -fastest
    assert one_step(-1.19, -0.07, 0)[:2] == (np.float32(-1.2), 0)
    # A car at the wall that moves away from it keeps its velocity, and the right end takes none.
    assert one_step(-1.2, 0, 2)[1] > 0.003
    assert one_step(0.59, 0.07, 2)[0] == np.float32(0.6) and one_step(0.59, 0.07, 2)[1] > 0.06


def test_the_goal_is_reached_at_one_half_and_forwards_only():
    # The top of the right hill, cos(pi / 2) = 0, where only the motor counts.
    top = np.pi / 6
    assert one_step(0.45, 0.06, 1)[3] and one_step(0.45, 0.06, 1)[2] == -1
    assert not one_step(0.45, 0.04, 1)[3]
    position, velocity, _, terminated, _ = one_step(top, -0.02, 1)
    assert position > 0.5 and velocity < 0 and not terminated
    assert one_step(top, 0.001, 2)[3]


def test_a_start_is_at_rest_and_uniform_in_the_range():
    floats, ints = np.full((20_000, 2), np.nan, "f4"), np.full((20_000, 1), 9, "i4")
    reset(floats, ints, None, np.zeros(1, "u8"), env=mountain_car(), seed=3)
    assert not ints.any() and not floats[:, 1].any()
    position = floats[:, 0]
    assert position.min() >= np.float32(-0.6) and position.max() <= np.float32(-0.4)
    # Five standard errors of the mean and of the variance of a uniform distribution.
    deviation = 0.2 / np.sqrt(12)
    assert abs(position.mean() + 0.5) < 5 * deviation / np.sqrt(20_000)
    assert abs(position.var() / deviation**2 - 1) < 5 * np.sqrt(0.8 / 20_000)


def test_an_observation_is_the_state_and_six_zero_columns():
    floats = np.random.default_rng(0).normal(size=(7, 2)).astype("f4")
    out = np.full((7, 8), np.nan, "f4")
    x = observe(floats, np.zeros((7, 1), "i4"), env=mountain_car(), out=out)
    np.testing.assert_array_equal(x, np.pad(floats, ((0, 0), (0, 6))))


@pytest.mark.parametrize("terminates", [False, True])
def test_the_limit_truncates_unless_it_is_asked_to_terminate(terminates):
    for step in (5, 6):
        ended = step == 6
        options = dict(max_steps=7, limit_terminates=terminates)
        *_, terminated, truncated = one_step(-0.5, 0, 1, step, **options)
        assert terminated == (ended and terminates)
        assert truncated == (ended and not terminates)


def test_reaching_the_goal_on_the_last_step_is_a_termination():
    *_, terminated, truncated = one_step(0.45, 0.06, 1, 199)
    assert terminated and not truncated


def test_the_contract_is_kept_and_machine_code_has_no_call_no_float64_and_no_spill():
    checked = check_env(mountain_car(max_steps=20), steps=60)
    assert checked.truncated > 0 and checked.disassembled
    assert checked.architectures == tuple(ARCHITECTURES.values())
    for architecture in ARCHITECTURES.values():
        (step,) = env_step_op.kernel_of(mountain_car(max_steps=20)).binary(architecture).kernels
        assert step.spill_stores + step.spill_loads + step.stack == 0 and step.registers <= 32


@pytest.mark.gpu
def test_every_step_has_the_same_bits_on_the_gpu():
    assert check_env(mountain_car(max_steps=100), on="cuda", steps=200).on == "cuda"


@pytest.mark.parametrize("wrong", [dict(max_steps=0), dict(limit_terminates=1)], ids=str)
def test_an_argument_out_of_range_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        mountain_car(**wrong)
