"""Acrobot is Gymnasium's, in float32."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from lowgpu.envs import acrobot, check_env
from lowgpu.envs.acrobot import accelerations, wrapped
from lowgpu_kernels import env_step, launch, observe, reset
from lowgpu_kernels.compile import ARCHITECTURES
from lowgpu_kernels.ops.mlp.network import policy_network
from lowgpu_kernels.ops.rollout import env_step as env_step_op
from lowgpu_kernels.ops.rollout.rollout import kernels_of
from lowgpu_kernels.ops.rollout.rollout_tile import rollout_tile

gymnasium = pytest.importorskip("gymnasium")

PI = math.pi
LARGEST = np.array([PI, PI, 4 * PI, 9 * PI])
HALF_ULP = 2.0**-24
TRIGONOMETRIC = 2.0**-23  # what sin_f32 and cos_f32 promise


@pytest.fixture
def reference():
    env = gymnasium.make("Acrobot-v1", disable_env_checker=True)
    env.reset(seed=0)
    yield env
    env.close()


def stepped(floats, ints, action, **options):
    floats, ints = floats.copy(), ints.copy()
    clock = np.zeros(1, "u8")
    result = env_step(floats, ints, action, None, clock, env=acrobot(**options), seed=0)
    return floats, ints, result


def reference_step(reference, state, action):
    inner = reference.unwrapped
    inner.state = state.astype("f8")
    _, reward, terminated, truncated, _ = reference.step(int(action))
    return inner.state, reward, terminated, truncated


@dataclass
class Rounded:
    """An exact number and how far float32 may be from it: the running error of Wilkinson 1963."""

    exact: np.ndarray
    error: np.ndarray

    @classmethod
    def of(cls, number):
        return (
            number if isinstance(number, cls) else cls(number, np.abs(np.float32(number) - number))
        )

    @classmethod
    def result(cls, exact, error):
        return cls(exact, error + HALF_ULP * (np.abs(exact) + error))

    def __add__(self, other):
        other = self.of(other)
        return self.result(self.exact + other.exact, self.error + other.error)

    def __mul__(self, other):
        other = self.of(other)
        error = np.abs(self.exact) * other.error + (np.abs(other.exact) + other.error) * self.error
        return self.result(self.exact * other.exact, error)

    def __neg__(self):
        return Rounded(-self.exact, self.error)

    def __sub__(self, other):
        return self + -self.of(other)

    __radd__, __rmul__ = __add__, __mul__

    def inverse(self):
        exact = 1 / self.exact
        return self.result(exact, np.abs(exact) * self.error / (np.abs(self.exact) - self.error))

    def of_angle(self, function):
        return Rounded(function(self.exact), np.minimum(self.error, 2) + TRIGONOMETRIC)


def rounded_change(state, torque):
    theta_1, theta_2, dot_1, dot_2 = state
    sine, cosine = theta_2.of_angle(np.sin), theta_2.of_angle(np.cos)
    phi_2 = 4.9 * (theta_1 + theta_2).of_angle(np.sin)
    whirl = sine * (dot_2 * (0.5 * dot_2 + dot_1))
    phi_1 = 14.7 * theta_1.of_angle(np.sin) + phi_2 - whirl
    push = Rounded.of(torque) - phi_2 - 0.5 * (sine * (dot_1 * dot_1))
    coupling = 0.5 * cosine + 1.25
    inverse = (Rounded.of(2.8125) - 0.25 * (cosine * cosine)).inverse()
    acc_1 = -(1.25 * phi_1 + coupling * push) * inverse
    return dot_1, dot_2, acc_1, ((cosine + 3.5) * push + coupling * phi_1) * inverse


def allowed(state, action):
    """[E, 4]: what float32 rounding can make of one step, against exact arithmetic.

    The error of every operation of the step is carried to its end, where fast links amplify it.
    """
    start = [Rounded.of(field) for field in state.T.astype("f8")]
    torque = action.astype("f8") - 1
    change = rounded_change(start, torque)
    total = change
    for ahead, weight in ((0.1, 2), (0.1, 2), (0.2, 1)):
        change = rounded_change([y + ahead * k for y, k in zip(start, change)], torque)
        total = [s + weight * k for s, k in zip(total, change)]
    after = [y + (0.2 / 6) * s for y, s in zip(start, total)]
    # Three subtractions wrap an angle, each with a result below 4; the clip's ends are rounded.
    last = [3 * 4, 3 * 4, 4 * PI, 9 * PI]
    return np.stack([y.error + HALF_ULP * size for y, size in zip(after, last)], -1)


def distance(after, wanted):
    apart = np.abs(after.astype("f8") - wanted)
    apart[..., :2] = np.abs((apart[..., :2] + PI) % (2 * PI) - PI)
    return apart


def height(state):
    """Of the tip above the pivot, in m."""
    return -np.cos(state[..., 0]) - np.cos(state[..., 0] + state[..., 1])


def near_the_bar(wanted, bound):
    off = 2 * bound[..., 0] + bound[..., 1] + 2 * TRIGONOMETRIC + 6 * HALF_ULP
    return np.abs(height(wanted) - 1) <= off


@pytest.mark.parametrize("share", [1, 0.2], ids=["any", "slow"])
def test_a_step_is_gymnasiums_within_float32_rounding(reference, share):
    rng, envs = np.random.default_rng(0), 1500
    state = (rng.uniform(-1, 1, (envs, 4)) * LARGEST * [1, 1, share, share]).astype("f4")
    action = rng.integers(3, size=envs).astype("i4")
    after, _, (reward, terminated, truncated) = stepped(state, np.zeros((envs, 1), "i4"), action)
    wanted, earned, flags = np.empty((envs, 4)), np.empty(envs), np.empty(envs, bool)
    reference.reset(seed=0)
    for e in range(envs):
        reference._elapsed_steps = 0
        wanted[e], earned[e], flags[e], _ = reference_step(reference, state[e], action[e])
    bound = allowed(state, action)
    assert np.median(bound) < (1e-4 if share < 1 else 1e-2), "the bound says nothing"
    apart = distance(after, wanted)
    assert (apart <= bound).all(), (apart / bound).max(0)
    # A step turns a link by 33 rad at most before its angle is wrapped.
    assert (np.abs(after) <= LARGEST + HALF_ULP * np.array([78, 78, 4 * PI, 9 * PI])).all()
    clear = ~near_the_bar(wanted, bound)
    assert clear.mean() > 0.98 and 0.1 < flags.mean() < 0.9 and not truncated.any()
    np.testing.assert_array_equal(terminated[clear], flags[clear])
    np.testing.assert_array_equal(reward[clear], earned[clear])


@pytest.mark.parametrize("policy", ["pumping", "coasting"])
def test_whole_episodes_end_as_gymnasiums_do(reference, policy):
    for seed in range(3):
        floats, ints, clock = np.empty((1, 4), "f4"), np.empty((1, 1), "i4"), np.zeros(1, "u8")
        reset(floats, ints, None, clock, env=acrobot(), seed=seed)
        reference.reset(seed=0)
        for _ in range(500):
            # A torque along the joint's velocity adds energy; without one the links just swing.
            torque = int(np.sign(floats[0, 3])) if policy == "pumping" else 0
            state, action = floats.copy(), np.array([1 + torque], "i4")
            floats, ints, (reward, terminated, truncated) = stepped(floats, ints, action)
            wanted, earned, ended, limit = reference_step(reference, state[0], action[0])
            bound = allowed(state, action)[0]
            assert (distance(floats[0], wanted) <= bound).all()
            assert not near_the_bar(wanted, bound), "choose another seed"
            assert (reward[0], terminated[0], truncated[0]) == (earned, ended, limit)
            if ended or limit:
                break
        assert ended if policy == "pumping" else limit and ints[0, 0] == 500


@pytest.mark.parametrize(
    "state, torque, worked",
    [
        # cos 1, sin 0: inertia 4.5, coupling 1.75, determinant 2.5625.
        ((0, 0, 0, 0), 0, (0, 0)),
        ((0, 0, 0, 0), 1, (-1.75 / 2.5625, 4.5 / 2.5625)),
        ((PI / 2, 0, 0, 0), 0, (-(24.5 - 8.575) / 2.5625, (34.3 - 22.05) / 2.5625)),
        # cos 0, sin 1: inertia 3.5, coupling 1.25, determinant 2.8125.
        ((-PI / 2, PI / 2, 2, 0), 0, ((18.375 + 2.5) / 2.8125, -(7 + 18.375) / 2.8125)),
        ((0, PI / 2, 1, 2), 1, ((5.5 - 1.125) / 2.8125, (1.125 - 15.4) / 2.8125)),
    ],
)
def test_accelerations_are_those_worked_by_hand(state, torque, worked):
    got = accelerations(*map(np.float32, (*state, torque)))
    # An angle's rounding turns a weight of 19.6 N m at most; the rest is a few operations of that size.
    np.testing.assert_allclose(got, worked, rtol=0, atol=19.6 * 8 * HALF_ULP)


def test_all_the_energy_that_comes_in_is_the_motors():
    rng = np.random.default_rng(2)
    state = (rng.uniform(-1, 1, (2000, 4)) * LARGEST).astype("f4")
    torque = rng.integers(-1, 2, 2000).astype("f4")
    acc = np.array([accelerations(*s, a) for s, a in zip(state, torque)])
    theta_1, theta_2, dot_1, dot_2 = state.astype("f8").T
    sine, cosine = np.sin(theta_2), np.cos(theta_2)
    momentum_1 = (3.5 + cosine) * dot_1 + (1.25 + cosine / 2) * dot_2
    momentum_2 = (1.25 + cosine / 2) * dot_1 + 1.25 * dot_2
    stiffening = -sine * dot_2 * (dot_1**2 + dot_1 * dot_2) / 2
    lifting = 14.7 * np.sin(theta_1) * dot_1 + 4.9 * np.sin(theta_1 + theta_2) * (dot_1 + dot_2)
    power = momentum_1 * acc[:, 0] + momentum_2 * acc[:, 1] + stiffening + lifting
    exact = [Rounded.of(field) for field in state.T.astype("f8")]
    error_1, error_2 = (k.error for k in rounded_change(exact, torque.astype("f8"))[2:])
    bound = np.abs(momentum_1) * error_1 + np.abs(momentum_2) * error_2 + 1e-9
    assert np.median(bound) < 0.05, "the bound says nothing"
    assert (np.abs(power - torque * dot_2) <= bound).all()


def test_links_that_hang_at_rest_stay():
    rest, ints, coasting = np.zeros((1, 4), "f4"), np.zeros((1, 1), "i4"), np.ones(1, "i4")
    after, _, (reward, terminated, _) = stepped(rest, ints, coasting)
    assert not after.any() and reward[0] == -1 and not terminated[0]


def test_an_angle_is_wrapped_without_losing_any_of_it():
    inside = np.linspace(-PI, PI, 1001).astype("f4")
    assert all(wrapped(a) == a for a in inside)
    across = np.random.default_rng(0).uniform(-40, 40, 5000).astype("f4")
    edges = [np.float32(n * PI + d * 1e-6) for n in range(-13, 14) for d in (-1, 0, 1)]
    for angle in (*across, *edges):
        got = wrapped(angle)
        # The number of turns is rounded from a product with two roundings of its own.
        assert abs(got) <= PI + (2 * abs(angle) + 3 * 4) * HALF_ULP, angle
        left = (float(got) - float(angle) + PI) % (2 * PI) - PI
        assert abs(left) <= 3 * 4 * HALF_ULP, angle


def test_velocities_stop_at_their_limits_and_an_angle_past_pi_comes_back_from_below():
    # A step of Runge-Kutta from the first state overshoots to -233 and -7059 rad/s.
    state = np.array([[-1.5, 2, 4 * PI, 9 * PI], [3.1, 0, 1, 0]], "f4")
    after, _, _ = stepped(state, np.zeros((2, 1), "i4"), np.array([2, 1], "i4"))
    np.testing.assert_array_equal(after[0, 2:], np.array([-4 * PI, -9 * PI], "f4"))
    assert -PI < after[1, 0] < -2.9


def test_mirrored_links_and_torque_move_mirrored_bit_for_bit():
    rng = np.random.default_rng(4)
    state = (rng.uniform(-1, 1, (500, 4)) * LARGEST).astype("f4")
    action, ints = rng.integers(3, size=500).astype("i4"), np.zeros((500, 1), "i4")
    after, _, result = stepped(state, ints, action)
    mirrored, _, same = stepped(-state, ints, 2 - action)
    np.testing.assert_array_equal(mirrored, -after)
    np.testing.assert_array_equal(same.reward, result.reward)


def test_a_start_is_uniform_in_the_range():
    floats, ints = np.full((20_000, 4), np.nan, "f4"), np.full((20_000, 1), 9, "i4")
    reset(floats, ints, None, np.zeros(1, "u8"), env=acrobot(), seed=3)
    assert not ints.any()
    assert np.abs(floats).max() <= np.float32(0.1)
    # Five standard errors of the mean and of the variance of a uniform distribution.
    deviation = 0.2 / np.sqrt(12)
    assert (np.abs(floats.mean(0)) < 5 * deviation / np.sqrt(20_000)).all()
    assert (np.abs(floats.var(0) / deviation**2 - 1) < 5 * np.sqrt(0.8 / 20_000)).all()
    correlated = np.abs(np.corrcoef(floats.T) - np.eye(4))
    assert correlated.max() < 5 / np.sqrt(20_000)


def test_an_observation_is_gymnasiums_and_two_zero_columns(reference):
    floats = (np.random.default_rng(0).uniform(-1, 1, (200, 4)) * LARGEST).astype("f4")
    x = observe(
        floats, np.zeros((200, 1), "i4"), env=acrobot(), out=np.full((200, 8), np.nan, "f4")
    )
    inner = reference.unwrapped
    for row, state in zip(x, floats):
        inner.state = state
        np.testing.assert_allclose(
            row[:4], inner._get_ob()[:4], rtol=0, atol=TRIGONOMETRIC + HALF_ULP
        )
        np.testing.assert_array_equal(row[4:], [*state[2:], 0, 0])


@pytest.mark.parametrize("terminates", [False, True])
def test_the_limit_truncates_unless_it_is_asked_to_terminate(terminates):
    state, action = np.zeros((1, 4), "f4"), np.zeros(1, "i4")
    options = dict(max_steps=7, limit_terminates=terminates)
    for step in (5, 6):
        _, ints, result = stepped(state, np.array([[step]], "i4"), action, **options)
        assert ints[0, 0] == step + 1 and result.reward[0] == -1
        ended = step == 6
        assert result.terminated[0] == (ended and terminates)
        assert result.truncated[0] == (ended and not terminates)


def test_swinging_up_on_the_last_step_is_a_termination_that_costs_nothing():
    up = np.array([[3, 0, 0, 0]], "f4")
    _, _, result = stepped(up, np.array([[499]], "i4"), np.ones(1, "i4"))
    assert result.terminated[0] and not result.truncated[0] and result.reward[0] == 0


def test_the_contract_is_kept_and_machine_code_has_no_call_no_float64_and_no_spill():
    checked = check_env(acrobot(max_steps=20), steps=60)
    assert checked.truncated > 0 and checked.disassembled
    assert checked.architectures == tuple(ARCHITECTURES.values())
    for architecture in ARCHITECTURES.values():
        (step,) = env_step_op.kernel_of(acrobot(max_steps=20)).binary(architecture).kernels
        assert step.spill_stores + step.spill_loads + step.stack == 0 and step.registers <= 48


@pytest.mark.parametrize("part", ("A100", "L4", "H100"))
def test_a_rollout_keeps_it_in_registers(part):
    on, env = launch.KNOWN[part], acrobot()
    network = policy_network(env.width, env.actions)
    tile = rollout_tile(network, 16384, "bfloat16", on)
    kernel = kernels_of(env, network, tile, False, "bfloat16")[0]
    resources = kernel.binary(on.architecture).kernel(kernel.entry)
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0


@pytest.mark.gpu
def test_every_step_has_the_same_bits_on_the_gpu():
    assert check_env(acrobot(max_steps=100), on="cuda", steps=200).on == "cuda"


@pytest.mark.parametrize("wrong", [dict(max_steps=0), dict(limit_terminates=1)], ids=str)
def test_an_argument_out_of_range_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        acrobot(**wrong)
