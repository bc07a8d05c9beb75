"""What a rollout promises beyond agreeing with its spec at every transition."""

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import mlp_forward, observe, reset, rollout
from lowgpu_kernels.device import f32, i32
from lowgpu_kernels.env import TERMINATED, Env
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network, policy_network

ENV = make("cartpole")
NETWORK = policy_network(8, 2, (16, 16), "tanh", shared=False)


def play(envs, steps, *, parts=1, first=0, seed=5, env=ENV, network=NETWORK, **params):
    """`steps` steps of environments [first, first + envs), in `parts` calls one after another."""
    rng = np.random.default_rng(0)
    parameters = draw_parameters(rng, network)
    floats = np.empty((envs, len(env.floats)), "f4")
    ints = np.empty((envs, len(env.ints)), "i4")
    clock = np.zeros(1, "u8")
    reset(floats, ints, None, clock, env=env, seed=seed)
    made = [
        rollout(
            parameters,
            floats,
            ints,
            clock,
            env=env,
            network=network,
            steps=steps // parts,
            seed=seed,
            **params,
        )
        for _ in range(parts)
    ]
    joined = {n: np.concatenate([getattr(m, n) for m in made]) for n in rollout.outputs}
    return joined | {"floats": floats, "ints": ints, "clock": clock}


def test_two_short_rollouts_are_one_long_one():
    whole, halves = play(3, 64), play(3, 64, parts=2)
    for name in whole:
        if name != "last_value":
            np.testing.assert_array_equal(whole[name], halves[name], err_msg=name)
    assert whole["clock"][0] == 64


def test_an_environment_does_not_depend_on_how_many_stand_beside_it():
    few, many = play(2, 40), play(7, 40)
    for name in ("action", "reward", "terminated", "state_floats"):
        np.testing.assert_array_equal(few[name], many[name][:, :2], err_msg=name)


def test_another_seed_gives_another_trajectory():
    assert not np.array_equal(play(3, 40)["action"], play(3, 40, seed=6)["action"])


def test_greedy_draws_nothing():
    first, second = (play(3, 10, seed=5, greedy=True) for _ in range(2))
    np.testing.assert_array_equal(first["action"], second["action"])


def test_no_steps_leave_the_state_and_give_the_value_of_it():
    got = play(3, 0)
    assert got["action"].shape == (0, 3) and np.isfinite(got["last_value"]).all()


def _count_reset(floats, ints, u, series, rows):
    floats[0] = f32(100) + u[0]
    ints[0] = i32(0)
    return 0


def _count_step(floats, ints, action, u, series, rows, reward):
    floats[0] = floats[0] + f32(10)
    ints[0] = ints[0] + i32(1)
    reward[0] = f32(1)
    return TERMINATED if ints[0] == i32(3) else 0


def _count_observe(floats, ints, series, rows, out):
    out[0] = floats[0]
    return 0


def test_no_transition_crosses_the_end_of_an_episode():
    """Case A9. Episodes start anew at once, so all of 8 steps are transitions: 3 + 3 + 2."""
    env = Env(
        "count",
        1,
        2,
        ("place",),
        ("step",),
        _count_reset,
        _count_step,
        _count_observe,
    )
    got = play(1, 8, env=env, network=policy_network(8, 2, (8,)))
    np.testing.assert_array_equal(got["terminated"][:, 0], [0, 0, 1, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(got["state_ints"][:, 0, 0], [0, 1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(got["reward"], 1)
    starts = got["state_floats"][[0, 3, 6], 0, 0]
    assert len(set(starts)) == 3 and ((starts >= 100) & (starts < 101)).all()


@pytest.mark.parametrize("rows", [1, 7, 100, 127, 129, 255, 257])
def test_any_number_of_rows_is_right_and_rows_do_not_depend_on_each_other(rows):
    """Case F1, for 54 -> 64 -> 3."""
    network = Network(56, ((64, 3),))
    rng = np.random.default_rng(rows)
    parameters = draw_parameters(rng, network)
    x = np.zeros((rows, 56), "f4")
    x[:, :54] = rng.normal(size=(rows, 54))
    y, _ = mlp_forward(x, parameters, network=network)
    (_, w1, b1), (_, w2, b2) = network.views(parameters.astype("f8"))
    want = np.maximum(x @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(y[:, :3], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[:, 3:], 0)


def test_what_lies_in_padding_is_never_read():
    """Case F2: NaN in the table's pad columns and in the gaps between parameters."""
    env, network = make("market"), policy_network(56, 3, (32,))
    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 56)).astype("f4")
    series = np.stack([np.exp(rng.normal(size=50) / 50), np.arange(50) == 49]).astype("f4")
    floats, ints = np.array([[1, 1], [0, 1]], "f4"), np.array([[3, 0], [7, 2]], "i4")
    parameters = draw_parameters(rng, network)
    clean = observe(floats, ints, table, series, env=env)
    table[:, 51:] = np.nan
    np.testing.assert_array_equal(observe(floats, ints, table, series, env=env), clean)
    np.testing.assert_array_equal(clean[:, 54:], 0)
    want = mlp_forward(clean, parameters, network=network).y
    used = np.zeros(network.parameters, bool)
    for _, weight, bias in network.views(used):
        weight[:], bias[:] = True, True
    assert not used.all()
    parameters[~used] = np.nan
    np.testing.assert_array_equal(mlp_forward(clean, parameters, network=network).y, want)


def test_a_network_for_another_env_is_refused_with_both_numbers():
    """Case F11."""
    with pytest.raises(ValueError, match=r"network reads 16 columns, Env\(cartpole\) gives 8"):
        play(1, 1, network=policy_network(16, 2, (8,)))
    with pytest.raises(ValueError, match=r"2 logits and a value .* gives 4 outputs"):
        play(1, 1, network=policy_network(8, 3, (8,)))


def test_logits_that_are_not_finite_show_as_nan_log_probabilities():
    rng = np.random.default_rng(0)
    parameters = draw_parameters(rng, NETWORK)
    parameters[:8] = np.nan
    floats, ints, clock = np.zeros((2, 4), "f4"), np.zeros((2, 1), "i4"), np.zeros(1, "u8")
    got = rollout(parameters, floats, ints, clock, env=ENV, network=NETWORK, steps=2)
    assert np.isnan(got.log_probability).all()
    np.testing.assert_array_equal(got.action, 0)
