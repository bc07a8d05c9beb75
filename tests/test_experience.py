"""What experience promises beyond agreeing with its spec at every transition."""

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import experience, replay_gather, replay_write, reset
from lowgpu_kernels.device import f32, i32, u64
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env
from lowgpu_kernels.ops.dqn.experience import epsilon_at, uniform_action
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.replay.ring import ring_arrays

ENV = make("cartpole")
NETWORK = Network(8, ((16, 16, 2),), "tanh")


def play(envs, steps, *, parts=1, seed=5, env=ENV, network=NETWORK, parameters=None, **params):
    """`steps` steps of `envs` environments, in `parts` calls one after another."""
    if parameters is None:
        parameters = draw_parameters(np.random.default_rng(0), network)
    floats = np.empty((envs, len(env.floats)), "f4")
    ints = np.empty((envs, len(env.ints)), "i4")
    clock = np.zeros(1, "u8")
    reset(floats, ints, None, clock, env=env, seed=seed)
    given = {"env": env, "network": network, "steps": steps // parts, "seed": seed, **params}
    made = [experience(parameters, floats, ints, clock, **given) for _ in range(parts)]
    joined = {n: np.concatenate([getattr(m, n) for m in made]) for n in experience.outputs}
    return joined | {"floats": floats, "ints": ints, "clock": clock}


def epsilons(start, end, duration, steps):
    return [epsilon_at(u64(t), f32(start), f32(end), u64(duration)) for t in steps]


def test_epsilon_is_linear_and_ends_at_once_without_a_duration():
    """Case C2."""
    found = epsilons(1, 0.05, 10, (0, 1, 5, 9, 10, 11))
    np.testing.assert_allclose(found, [1, 0.905, 0.525, 0.145, 0.05, 0.05], rtol=3e-7)
    assert found[0] == 1 and found[-2] == found[-1] == f32(0.05)
    assert epsilons(1, 0.05, 0, (0, 1, 2**63)) == [f32(0.05)] * 3


def test_epsilon_goes_on_where_a_float32_count_of_steps_would_stand_still():
    found = epsilons(1, 0, 2**40, (2**39 - 2**20, 2**39, 2**39 + 2**20, 2**40 - 1, 2**40))
    assert found[0] > found[1] == f32(0.5) > found[2] and found[4] == 0


@pytest.mark.parametrize("actions", (1, 2, 3, 64, 512))
def test_a_uniform_action_is_in_range_and_as_likely_as_the_others(actions):
    words = np.linspace(0, 2**32 - 1, 4096 * actions).astype("u4")
    found = np.array([uniform_action(w, i32(actions)) for w in words])
    counts = np.bincount(found, minlength=actions)
    assert len(counts) == actions and abs(counts - 4096).max() <= 1


def test_the_share_of_random_actions_follows_epsilon():
    steps, envs = 8, 4096
    parameters = np.zeros(NETWORK.parameters, "f4")  # action 0 where it does not explore
    got = play(
        envs, steps, parameters=parameters, epsilon_start=0.8, epsilon_end=0.2, epsilon_steps=4
    )
    want = np.array([0.8, 0.65, 0.5, 0.35, 0.2, 0.2, 0.2, 0.2]) / 2  # half of them are 0 too
    sigma = np.sqrt(want * (1 - want) / envs)
    assert (abs(got["action"].mean(1) - want) < 4 * sigma).all()


def test_two_short_calls_are_one_long_one_while_epsilon_falls():
    """Case C6: what resumes at a clock has the epsilon and the draws of that clock."""
    schedule = {"epsilon_steps": 48}
    whole, halves = play(3, 64, **schedule), play(3, 64, parts=4, **schedule)
    for name in whole:
        np.testing.assert_array_equal(whole[name], halves[name], err_msg=name)
    assert whole["clock"][0] == 64


def test_an_environment_does_not_depend_on_how_many_stand_beside_it():
    few, many = (play(n, 40, epsilon_steps=40) for n in (2, 7))
    for name in experience.outputs:
        np.testing.assert_array_equal(few[name], many[name][:, :2], err_msg=name)


def test_a_value_beside_the_advantages_changes_no_action():
    advantages = Network(8, ((16, 2),))
    duel = Network(8, ((16, 2), (16, 1)))
    parameters = draw_parameters(np.random.default_rng(1), duel)
    # Larger weights, so that no action is the best in every state.
    parameters[: 16 * 8] *= 4
    one, other = (
        play(5, 40, network=n, parameters=parameters[: n.parameters].copy(), epsilon_end=0.0)
        for n in (advantages, duel)
    )
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert len(np.unique(one["action"])) == 2


def _count_reset(floats, ints, u, series, rows):
    floats[0] = f32(100) + u[0]
    ints[0] = i32(0)
    return 0


def _count_step(floats, ints, action, u, series, rows, reward):
    floats[0] = floats[0] + f32(10)
    ints[0] = ints[0] + i32(1)
    reward[0] = f32(ints[0])
    if ints[0] < i32(3):
        return 0
    return TERMINATED if action == i32(1) else TRUNCATED


def _count_observe(floats, ints, series, rows, out):
    out[0] = floats[0]
    return 0


COUNT = Env("count", 1, 2, ("place",), ("step",), _count_reset, _count_step, _count_observe)


def test_a_step_leads_to_the_state_before_the_reset_and_the_next_starts_after_it():
    got = play(64, 7, env=COUNT, network=Network(8, ((8, 2),)), epsilon_end=1.0)
    np.testing.assert_array_equal(got["state_ints"][:, 0, 0], [0, 1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(got["next_ints"][:, 0, 0], [1, 2, 3, 1, 2, 3, 1])
    np.testing.assert_array_equal(got["reward"], got["next_ints"][..., 0])
    np.testing.assert_array_equal(got["next_floats"], got["state_floats"] + f32(10))
    ends = np.zeros((7, 64), bool)
    ends[[2, 5]] = True
    np.testing.assert_array_equal(got["terminated"], ends & (got["action"] == 1))
    np.testing.assert_array_equal(got["truncated"], ends & (got["action"] == 0))
    assert len(np.unique(got["state_floats"][[0, 3, 6]])) == 3 * 64


def test_a_ring_takes_it_as_it_comes_and_gives_windows_that_stop_at_the_end_of_an_episode():
    """Case B4."""
    got = play(3, 6, env=COUNT, network=Network(8, ((8, 2),)), epsilon_end=1.0)
    ring = {n: np.zeros(*made) for n, made in ring_arrays(8, 3, 1, 1).items()}
    replay_write(**{n: got[n] for n in experience.outputs}, **ring)
    index = np.arange(18, dtype="i4")
    rows = replay_gather(index, **ring, steps=3, gamma=0.5)
    # Rewards 1, 2, 3 in every episode; from each of its steps on.
    windows = np.repeat([1 + 1 + 0.75, 2 + 1.5, 3, 1 + 1 + 0.75, 2 + 1.5, 3], 3)
    np.testing.assert_array_equal(rows.reward, windows)
    np.testing.assert_array_equal(rows.next_ints[:, 0], 3)
    cut = np.repeat([0.125, 0.25, 0.5] * 2, 3)
    last = got["terminated"][np.repeat([2, 5], 9), index % 3]
    np.testing.assert_array_equal(rows.discount, np.where(last, 0, cut))


def test_a_network_that_is_not_the_envs_is_refused_with_both_numbers():
    for network, said in (
        (Network(16, ((2,),)), r"network reads 16 columns, .* gives 8"),
        (Network(8, ((16, 4),)), r"network must give 2 action values .* gives 4 outputs"),
    ):
        with pytest.raises(ValueError, match=said):
            play(1, 1, network=network)


def test_a_table_that_is_not_read_is_refused():
    arrays = np.zeros(NETWORK.parameters, "f4"), np.zeros((1, 4), "f4"), np.zeros((1, 1), "i4")
    table, params = np.zeros((3, 8), "f4"), {"env": ENV, "network": NETWORK, "steps": 1}
    with pytest.raises(ValueError, match="table must be left out: cartpole reads no table"):
        experience(*arrays, np.zeros(1, "u8"), table, **params)
