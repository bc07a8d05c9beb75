"""What a rollout's outputs are held to: every transition on its own, element by element."""

import numpy as np

from lowgpu_kernels.device import i32
from lowgpu_kernels.device.philox import ACTION, RESET, STEP, numpy_draw
from lowgpu_kernels.env import TERMINATED, TRUNCATED
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, SUM, assert_within, forward_deviations
from lowgpu_kernels.ops.rollout.linked import env_functions, rows_of
from lowgpu_kernels.ops.rollout.reset import flat_spec


def verify_transitions(got, inputs, params, _eps=None):
    """Hold every transition to the spec on its own: a rounding that flips one action is no excuse for
    the next step, and does not condemn it.

    What a network gives is held to what rounding explains (mlp/rounding.py), whatever the precision;
    what an env gives, to a few roundings.

    Args:
        got: outputs and what the op changed, by name.
        inputs, params: of the call, by name; inputs as they were before it.
    """
    env, seed = params["env"], int(params["seed"])
    functions, flat_series = env_functions(env), flat_spec(inputs["series"])
    rows, start = i32(rows_of(inputs["series"])), int(inputs["clock"][0])
    steps, envs = got["action"].shape
    floats, ints = inputs["floats"].copy(), inputs["ints"].copy()

    def units(purpose, step):
        words = numpy_draw(seed, purpose, np.arange(envs), step)
        return ((words >> np.uint64(8)) * 2.0**-24).astype("f4")

    for t in range(steps):
        at = f"step {t}"
        np.testing.assert_allclose(got["state_floats"][t], floats, 1e-6, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["state_ints"][t], ints, err_msg=at)
        floats = got["state_floats"][t].copy()
        y, deviation = _policy(floats, ints, inputs, params)
        assert_within(f"value, {at}", got["value"][t], y[:, -1], deviation[:, -1])
        _verify_action(got, t, y[:, :-1], deviation[:, :-1], units(ACTION, start + t)[0], params)
        reward, ended, u = np.zeros((envs, 1), "f4"), np.zeros(envs, int), units(STEP, start + t)
        for e, action in enumerate(got["action"][t]):
            state = floats[e], ints[e]
            ended[e] = functions["step"](*state, i32(action), u[:, e], flat_series, rows, reward[e])
        np.testing.assert_allclose(got["reward"][t], reward[:, 0], 1e-5, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["terminated"][t], ended == TERMINATED, err_msg=at)
        np.testing.assert_array_equal(got["truncated"][t], ended == TRUNCATED, err_msg=at)
        limit = ended == TRUNCATED
        y, deviation = _policy(floats, ints, inputs, params)
        final = got["final_value"][t]
        assert_within(f"final_value, {at}", final, y[:, -1] * limit, deviation[:, -1] * limit)
        u = units(RESET, start + t + 1)
        for e in np.flatnonzero(ended):
            functions["reset"](floats[e], ints[e], u[:, e], flat_series, rows)
    np.testing.assert_allclose(got["floats"], floats, 1e-6, 1e-6)
    np.testing.assert_array_equal(got["ints"], ints)
    y, deviation = _policy(got["floats"], ints, inputs, params)
    assert_within("last_value", got["last_value"], y[:, -1], deviation[:, -1])
    assert got["clock"][0] == start + steps


def _policy(floats, ints, inputs, params):
    """Logits and values of states in float64, and how far rounding may take each of them."""
    env, network = params["env"], params["network"]
    functions, flat_series = env_functions(env), flat_spec(inputs["series"])
    x = np.zeros((len(floats), env.width), params["precision"])
    for e, state in enumerate(zip(floats, ints)):
        if env.table_columns:
            row = functions["table_row"](*state)
            x[e, : env.table_columns] = inputs["table"][row, : env.table_columns]
        tail = np.zeros(env.width - env.table_columns, "f4")
        functions["observe"](*state, flat_series, i32(rows_of(inputs["series"])), tail)
        x[e, env.table_columns :] = tail
    parameters = inputs["parameters"]
    wide = x.astype(np.float64), parameters.astype(np.float64)
    y, _ = mlp_forward.spec(*wide, network=network)
    deviation, _ = forward_deviations(x, parameters, network)
    return y[:, : env.actions + 1], deviation[:, : env.actions + 1]


def _verify_action(got, t, logits, deviation, u, params):
    """Hold step t's actions and their log-probabilities to logits that may move by rounding."""
    every, action = np.arange(len(logits)), got["action"][t]
    assert ((action >= 0) & (action < params["env"].actions)).all(), f"action, step {t}"
    # No log-probability moves further than two logits do; exp and log round in float32.
    moves = 2 * deviation.max(1, initial=0)
    below = logits - logits.max(1, keepdims=True)
    probability = np.exp(below) / np.exp(below).sum(1, keepdims=True)
    chosen = probability[every, action]
    want = np.log(chosen)
    rounding = moves + 4 * SUM * (1 + abs(want))
    assert_within(f"log_probability, step {t}", got["log_probability"][t], want, rounding)
    if params["greedy"]:
        assert (below[every, action] >= -DEVIATIONS * moves).all(), f"greedy action, step {t}"
        return
    edge, allowed = np.cumsum(probability, 1)[every, action], DEVIATIONS * (moves + 4 * SUM)
    assert (u <= edge + allowed).all(), f"action, step {t}"
    assert (u >= edge - chosen - allowed).all(), f"action, step {t}"
