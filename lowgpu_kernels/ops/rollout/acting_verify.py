"""What rollout's and experience's outputs are held to: every transition on its own, element by element."""

import numpy as np

from lowgpu_kernels.device import i32
from lowgpu_kernels.device.philox import RESET, STEP
from lowgpu_kernels.env import TERMINATED, TRUNCATED
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.rounding import forward_deviations
from lowgpu_kernels.ops.rollout.acting import spec_units
from lowgpu_kernels.ops.rollout.linked import env_functions, rows_of
from lowgpu_kernels.ops.rollout.reset import flat_spec


def verify_acting(got, inputs, params, act, reach):
    """Hold every transition to the env on its own: a rounding that flips one action is no excuse for the
    next step, and does not condemn it.

    What an env gives is held to a few roundings, what ends an episode and what starts the next to the
    last bit.

    Args:
        got: outputs and what the op changed, by name.
        inputs, params: of the call, by name; inputs as they were before it.
        act: (t, now, floats, ints) holds the actions of step t to the states they were taken in.
        reach: (t, floats, ints, ended) holds what is reported of the states that step t led to.
    """
    env, seed = params["env"], int(params["seed"])
    functions, flat_series = env_functions(env), flat_spec(inputs["series"])
    rows, start = i32(rows_of(inputs["series"])), int(inputs["clock"][0])
    steps, envs = got["action"].shape
    floats, ints = inputs["floats"].copy(), inputs["ints"].copy()
    for t in range(steps):
        at, now = f"step {t}", start + t
        np.testing.assert_allclose(got["state_floats"][t], floats, 1e-6, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["state_ints"][t], ints, err_msg=at)
        floats = got["state_floats"][t].copy()
        act(t, now, floats, ints)
        reward, ended = np.zeros((envs, 1), "f4"), np.zeros(envs, int)
        u = spec_units(seed, STEP, np.arange(envs), now).astype("f4")
        for e, action in enumerate(got["action"][t]):
            state = floats[e], ints[e]
            ended[e] = functions["step"](*state, i32(action), u[:, e], flat_series, rows, reward[e])
        np.testing.assert_allclose(got["reward"][t], reward[:, 0], 1e-5, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["terminated"][t], ended == TERMINATED, err_msg=at)
        np.testing.assert_array_equal(got["truncated"][t], ended == TRUNCATED, err_msg=at)
        reach(t, floats, ints, ended)
        u = spec_units(seed, RESET, np.arange(envs), now + 1).astype("f4")
        for e in np.flatnonzero(ended):
            functions["reset"](floats[e], ints[e], u[:, e], flat_series, rows)
    np.testing.assert_allclose(got["floats"], floats, 1e-6, 1e-6)
    np.testing.assert_array_equal(got["ints"], ints)
    assert got["clock"][0] == start + steps


def outputs_of(floats, ints, inputs, params):
    """Heads of states in float64, and how far rounding may take each of them (mlp/rounding.py)."""
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
    heads = sum(t[-1] for t in network.towers)
    return y[:, :heads], deviation[:, :heads]
