"""What rollout and experience share: a network acts in many environments, step after step."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import f32, i32, u64
from lowgpu_kernels.device.philox import numpy_draw
from lowgpu_kernels.dims import E, G, I, P, R, T
from lowgpu_kernels.env import TERMINATED, TRUNCATED
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.rollout.cpu_env import NO_TABLE, batches, flat
from lowgpu_kernels.ops.rollout.linked import env_functions, env_links, env_macros, require, rows_of
from lowgpu_kernels.ops.rollout.reset import draw_series, env_sizes, flat_spec
from lowgpu_kernels.ops.rollout.rollout_tile import rollout_tile


def require_heads(env, network, wanted, named):
    """Refuse a network that does not read the env's rows or gives none of the `wanted` outputs."""
    if network.inputs != env.width:
        raise ValueError(f"network reads {network.inputs} columns, {env} gives {env.width}")
    heads = sum(t[-1] for t in network.towers)
    if heads not in wanted:
        raise ValueError(f"network must give {named} for {env}, gives {heads} outputs")


def acting_sizes(params, sizes):
    """The sizes that follow from an env, a network and a number of steps."""
    env, network = params["env"], params["network"]
    known = {I: env.width, P: network.parameters, T: int(params["steps"])}
    return env_sizes(env, sizes) | known


def draw_acting(rng, sizes, params):
    """Inputs for tests: a network, states, a clock and what an env reads."""
    env = params["env"]
    drawn = {
        "parameters": draw_parameters(rng, params["network"]),
        "ints": rng.integers(min(5, sizes[R]), size=(sizes[E], sizes[G])),
        # Early as often as not: what changes with the clock is then still changing.
        "clock": rng.integers(2 ** (5 if rng.random() < 0.5 else 40), size=1),
    }
    if not env.table_columns:
        drawn["table"] = None
    return drawn | draw_series(rng, sizes, env)


def spec_units(seed, purpose, index, step):
    """The unit floats [4, n] drawn for environments `index` at a step, in float64."""
    words = numpy_draw(seed, purpose, np.atleast_1d(index), step)
    return (words >> np.uint64(8)) * 2.0**-24


def spec_outputs(parameters, floats, ints, table, series, env, network):
    """A network's output row for one state, in float64."""
    functions = env_functions(env)
    x = np.zeros((1, env.width))
    if env.table_columns:
        row = functions["table_row"](floats, ints)
        x[0, : env.table_columns] = table[row, : env.table_columns]
    tail = x[0, env.table_columns :]
    functions["observe"](floats, ints, flat_spec(series), i32(rows_of(series)), tail)
    return mlp_forward.spec(x, parameters, network=network)[0][0]


def act_on_cpu(act, reach, given, precision, out):
    """Steps environments, and writes what both ops report of each step to `out`.

    Args:
        act: (t, now, y) writes out["action"][t], given the network's outputs for the states.
        reach: (t, outputs) writes what is reported of the states that step t led to, before any reset;
            outputs() runs the network over them.
        given: parameters, floats, ints, clock, table, series, env, network, steps and seed.

    Returns:
        outputs, which now runs the network over the states after the last step.
    """
    parameters, floats, ints, clock, table, series, env, network, steps, seed = given
    require(env, table=table, series=series)
    loops, wide = batches(env, precision), len(floats)
    every, (flat_series, rows) = np.arange(wide, dtype="i4"), flat(series)
    x = np.empty((wide, env.width), precision)
    y, hidden = np.empty((wide, network.outputs), f32), np.empty((wide, network.hidden), precision)
    bits = "u2" if precision == "bfloat16" else "f4"
    bare_table = NO_TABLE.astype(bits) if table is None else table.view(bits)
    ended = np.empty(wide, "i4")

    def outputs():
        loops.observe(floats, ints, every, bare_table, flat_series, rows, x.view(bits))
        mlp_forward.cpu(x, parameters, network, y, hidden)
        return y

    for t in range(int(steps)):
        now = clock[0] + u64(t)
        out["state_floats"][t], out["state_ints"][t] = floats, ints
        act(t, now, outputs())
        action, reward = out["action"][t], out["reward"][t]
        loops.step(floats, ints, action, flat_series, rows, seed, now, reward, ended)
        out["terminated"][t], out["truncated"][t] = ended == TERMINATED, ended == TRUNCATED
        reach(t, outputs)
        if ended.any():
            loops.reset(floats, ints, ended != 0, flat_series, rows, seed, now + u64(1))
    clock[0] += u64(steps)
    return outputs


def acting_kernels(path, entry, env, network, tile, precision, **macros):
    """The kernel of a .cu as a RolloutTile says, and what advances the clock after it."""
    macros |= {**env_macros(env), **tile.macros(network, precision), "series": len(env.series)}
    return [
        cuda_c(path, entry, env_links(env), **macros),
        cuda_c("rollout/advance_clock", "advance_clock"),
    ]


def launch_acting(kernels_of, given, more, precision, outputs, stream):
    """Queue both kernels: `kernels_of` a RolloutTile, `given` as to act_on_cpu, `more` of the op's own."""
    parameters, floats, ints, clock, table, series, env, network, steps, seed = given
    require(env, table=table, series=series)
    envs = len(floats)
    tile = rollout_tile(network, envs, precision, launch.device())
    kernel, advance = kernels_of(tile)
    table_count = i32(0 if table is None else len(table))
    numbers = i32(rows_of(series)), seed, i32(envs), steps, *more
    args = parameters, floats, ints, clock, table, table_count, series, *numbers, *outputs
    launch.launch(kernel, tile.grid(envs), tile.threads, args, stream, tile.nbytes)
    launch.launch(advance, 1, 32, (clock, steps), stream)
