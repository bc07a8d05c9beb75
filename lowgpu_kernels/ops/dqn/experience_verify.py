"""What experience is held to: every transition on its own, element by element."""

import numpy as np

from lowgpu_kernels.device import i32
from lowgpu_kernels.device.philox import EXPLORE, RESET, STEP, numpy_draw
from lowgpu_kernels.env import TERMINATED, TRUNCATED
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, forward_deviations
from lowgpu_kernels.ops.rollout.linked import env_functions, rows_of
from lowgpu_kernels.ops.rollout.reset import flat_spec

# Epsilon takes four roundings of numbers of at most 1 in float32.
EPSILON_ROUNDING = 4 * 2.0**-24


def verify_experience(got, inputs, params, _eps=None):
    """Hold every transition to the spec on its own: a rounding that flips one action is no excuse for
    the next step, and does not condemn it.

    A greedy action may be one whose value rounding makes the largest (mlp/rounding.py); what an env
    gives is held to a few roundings; what is drawn, to the draw.

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
        at, now = f"step {t}", start + t
        np.testing.assert_allclose(got["state_floats"][t], floats, 1e-6, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["state_ints"][t], ints, err_msg=at)
        floats = got["state_floats"][t].copy()
        _verify_action(got["action"][t], floats, ints, now, inputs, params)
        reward, ended, u = np.zeros((envs, 1), "f4"), np.zeros(envs, int), units(STEP, now)
        for e, action in enumerate(got["action"][t]):
            state = floats[e], ints[e]
            ended[e] = functions["step"](*state, i32(action), u[:, e], flat_series, rows, reward[e])
        np.testing.assert_allclose(got["reward"][t], reward[:, 0], 1e-5, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["terminated"][t], ended == TERMINATED, err_msg=at)
        np.testing.assert_array_equal(got["truncated"][t], ended == TRUNCATED, err_msg=at)
        np.testing.assert_allclose(got["next_floats"][t], floats, 1e-6, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["next_ints"][t], ints, err_msg=at)
        u = units(RESET, now + 1)
        for e in np.flatnonzero(ended):
            functions["reset"](floats[e], ints[e], u[:, e], flat_series, rows)
    np.testing.assert_allclose(got["floats"], floats, 1e-6, 1e-6)
    np.testing.assert_array_equal(got["ints"], ints)
    assert got["clock"][0] == start + steps


def _verify_action(action, floats, ints, now, inputs, params):
    """Hold a step's actions to the draw where it explores, and else to the largest action value."""
    actions, every = params["env"].actions, np.arange(len(action))
    assert ((action >= 0) & (action < actions)).all(), f"action at {now}: {action}"
    words = numpy_draw(int(params["seed"]), EXPLORE, every, now)
    ahead = (words[0] >> np.uint64(8)) * 2.0**-24 - _epsilon(now, params)
    drawn = (words[1] * np.uint64(actions)) >> np.uint64(32)
    values, deviation = _values(floats, ints, inputs, params)
    moves = 2 * DEVIATIONS * deviation.max(1, initial=0)
    best = values[every, action] >= values.max(1, initial=-np.inf) - moves
    explores, exploits = ahead < EPSILON_ROUNDING, ahead >= -EPSILON_ROUNDING
    right = (explores & (action == drawn)) | (exploits & best)
    assert right.all(), f"action at {now} of environments {np.flatnonzero(~right)}: {action}"


def _epsilon(now, params):
    start, end = float(params["epsilon_start"]), float(params["epsilon_end"])
    steps = int(params["epsilon_steps"])
    return start + (end - start) * (now / steps) if now < steps else end


def _values(floats, ints, inputs, params):
    """Action values of states in float64, and how far rounding may take each of them."""
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
    return y[:, : env.actions], deviation[:, : env.actions]
