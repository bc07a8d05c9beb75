"""Experience: a policy acts in many environments for T steps, in one launch."""

import functools

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import draws as scalar_draws
from lowgpu_kernels.device import f32, i32, njit, u64
from lowgpu_kernels.device.philox import ACTION, RESET, STEP, draw, numpy_draw, unit
from lowgpu_kernels.dims import (
    BOOL,
    F32,
    FLAG,
    I32,
    REAL,
    SEED,
    U64,
    Choice,
    E,
    F,
    G,
    I,
    Int,
    Outputs,
    P,
    R,
    S,
    Static,
    T,
)
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from lowgpu_kernels.ops.rollout import example
from lowgpu_kernels.ops.rollout.cpu_env import NO_TABLE, batches, flat
from lowgpu_kernels.ops.rollout.linked import env_functions, env_links, env_macros, require, rows_of
from lowgpu_kernels.ops.rollout.reset import draw_series, env_sizes, flat_spec
from lowgpu_kernels.ops.rollout.rollout_tile import rollout_tile
from lowgpu_kernels.ops.rollout.rollout_verify import verify_transitions


def pairs():
    """Envs with policies for them: a shared trunk; an actor and a critic."""
    walk, drift = example.examples()
    return (
        {"env": walk, "network": policy_network(walk.width, walk.actions, (32, 16))},
        {"env": drift, "network": policy_network(drift.width, drift.actions, (16,), "tanh", False)},
    )


@op(
    error=lambda network, **_: 64 * network.inputs,
    changes=("floats", "ints", "clock"),
    sizes=lambda params, sizes: _sizes(params, sizes),
    bench=("E=16384 R=1000000 steps=64",),
    flops=lambda T, E, P, **_: 2 * T * E * P,
    examples=pairs,
)
def rollout(
    parameters: F32[P],
    floats: F32[E, F],
    ints: I32[E, G],
    clock: U64[1],
    table: REAL[R, I] | None = None,
    series: F32[S, R] | None = None,
    *,
    env: Static(Env, lambda: [p["env"] for p in pairs()]),
    network: Static(Network, lambda: [p["network"] for p in pairs()]),
    steps: Int(0, 1 << 24),
    seed: SEED = 0,
    greedy: FLAG = False,
    precision: Choice("float32", "bfloat16") = "float32",
) -> Outputs(
    state_floats=F32[T, E, F],
    state_ints=I32[T, E, G],
    action=I32[T, E],
    log_probability=F32[T, E],
    value=F32[T, E],
    reward=F32[T, E],
    terminated=BOOL[T, E],
    truncated=BOOL[T, E],
    final_value=F32[T, E],
    last_value=F32[E],
):
    """What happens when a policy acts in E environments for `steps` steps.

    Each step observes the state, runs the network, draws an action from the softmax of its first
    env.actions outputs (the value is the next one), and steps the environment. An episode that
    ends starts anew at once. States are stored, not observations: `observe` makes those again.

    Changes:
        floats, ints: the states the next rollout goes on from.
        clock: advanced by `steps`, so that a replayed graph never draws the same numbers.

    Args:
        parameters: of the network, flat.
        floats, ints: state of each environment.
        clock: global step of the first step.
        table: rows of env.width columns in the precision; left out where the env has none.
        series: what the env's functions read; left out where env.series is empty.
        env: the environment.
        network: reads env.width columns; its heads hold env.actions logits, then a value.
        steps: steps of each environment, T.
        seed: of the draws; env e at step t uses counter (e, clock + t), whatever the launch.
        greedy: take the first most probable action instead of drawing one.
        precision: "float32" computes exactly; "bfloat16" on tensor cores, accumulating in float32.

    Returns:
        state_floats, state_ints: the state each action was taken in.
        action: in [0, env.actions); 0 where the logits are not finite, and then
            log_probability is NaN.
        log_probability: of the action, nats.
        value: V of the state, in the reward's unit.
        reward: as the env gives it.
        terminated, truncated: how the episode ended at this step, if it did.
        final_value: V of the state a truncated step led to; 0 elsewhere.
        last_value: V of the state after the last step.

    Raises:
        ValueError: a network that is not the env's; arrays whose sizes are not the env's; table or
            series missing, or given and not read.
    """
    functions, rows = env_functions(env), i32(rows_of(series))
    wide, flat_series = len(floats), flat_spec(series)
    out = {
        "state_floats": np.zeros((steps, *floats.shape)),
        "state_ints": np.zeros((steps, *ints.shape), "i4"),
        "action": np.zeros((steps, wide), "i4"),
        "terminated": np.zeros((steps, wide), bool),
        "truncated": np.zeros((steps, wide), bool),
        "last_value": np.zeros(wide),
    }
    reals = ("log_probability", "value", "reward", "final_value")
    out |= {name: np.zeros((steps, wide)) for name in reals}
    start = int(clock[0])

    def units(purpose, e, step):
        return (numpy_draw(seed, purpose, [e], step)[:, 0] >> np.uint64(8)) * 2.0**-24

    for e in range(wide):
        for t in range(steps):
            out["state_floats"][t, e], out["state_ints"][t, e] = floats[e], ints[e]
            logits, value = _policy(parameters, floats[e], ints[e], table, series, env, network)
            below = logits - logits.max()
            log_probability = below - np.log(np.exp(below).sum())
            reached = np.cumsum(np.exp(log_probability))
            u = units(ACTION, e, start + t)[0]
            action = int(logits.argmax() if greedy else min((reached <= u).sum(), env.actions - 1))
            reward = np.zeros(1)
            ended = functions["step"](
                floats[e],
                ints[e],
                i32(action),
                units(STEP, e, start + t),
                flat_series,
                rows,
                reward,
            )
            out["action"][t, e], out["log_probability"][t, e] = action, log_probability[action]
            out["value"][t, e], out["reward"][t, e] = value, reward[0]
            out["terminated"][t, e] = ended == TERMINATED
            out["truncated"][t, e] = ended == TRUNCATED
            if ended == TRUNCATED:
                out["final_value"][t, e] = _policy(
                    parameters, floats[e], ints[e], table, series, env, network
                )[1]
            if ended:
                u = units(RESET, e, start + t + 1)
                functions["reset"](floats[e], ints[e], u, flat_series, rows)
        out["last_value"][e] = _policy(parameters, floats[e], ints[e], table, series, env, network)[
            1
        ]
    clock[0] += np.uint64(steps)
    return tuple(out[name] for name in rollout.outputs)


def _policy(parameters, floats, ints, table, series, env, network):
    """Logits and value of one state, in float64."""
    functions = env_functions(env)
    x = np.zeros(env.width)
    if env.table_columns:
        row = functions["table_row"](floats, ints)
        x[: env.table_columns] = table[row, : env.table_columns]
    tail = x[env.table_columns :]
    functions["observe"](floats, ints, flat_spec(series), i32(rows_of(series)), tail)
    heads, source = [], x
    for layer, weight, bias in network.views(parameters):
        source = x if layer.source < 0 else source
        source = weight @ source + bias
        if layer.head:
            heads.append(source)
        else:
            source = np.maximum(source, 0) if network.activation == "relu" else np.tanh(source)
    y = np.concatenate(heads)
    return y[: env.actions], y[env.actions]


def require_policy(env, network):
    """Refuse a network that does not read the env's rows or does not give its logits and a value."""
    if network.inputs != env.width:
        raise ValueError(f"network reads {network.inputs} columns, {env} gives {env.width}")
    heads = sum(t[-1] for t in network.towers)
    if heads != env.actions + 1:
        raise ValueError(
            f"network must give {env.actions} logits and a value for {env}, gives {heads} outputs"
        )


def _sizes(params, sizes):
    env, network = params["env"], params["network"]
    require_policy(env, network)
    known = {P: network.parameters, T: int(params["steps"])}
    return env_sizes(env, sizes) | {I: env.width} | known


@rollout.draws
def _draw(rng, sizes, params):
    env, network = params["env"], params["network"]
    parameters = np.zeros(network.parameters, "f4")
    for layer, weight, bias in network.views(parameters):
        weight[:] = rng.normal(size=weight.shape) / np.sqrt(layer.fan_in)
        bias[:] = 0.1 * rng.normal(size=bias.shape)
    drawn = {
        "parameters": parameters,
        "ints": rng.integers(min(5, sizes[R]), size=(sizes[E], sizes[G])),
        "clock": rng.integers(2**40, size=1),
    }
    if not env.table_columns:
        drawn["table"] = None
    return drawn | draw_series(rng, sizes, env)


rollout.verifies(verify_transitions)


@njit
def _act(y, actions, seed, clock, greedy, action, log_probability):
    for e in range(y.shape[0]):
        if greedy:
            chosen, logp, _ = scalar_draws.greedy(y, e, actions)
        else:
            u = unit(draw(seed, ACTION, e, clock)[0])
            chosen, logp, _ = scalar_draws.categorical(y, e, actions, u)
        action[e], log_probability[e] = max(chosen, i32(0)), logp


@rollout.on_cpu
def _cpu(
    parameters,
    floats,
    ints,
    clock,
    table,
    series,
    env,
    network,
    steps,
    seed,
    greedy,
    precision,
    *outputs,
):
    require(env, table=table, series=series)
    out = dict(zip(rollout.outputs, outputs))
    loops, wide = batches(env, precision), len(floats)
    every, (flat_series, rows) = np.arange(wide, dtype="i4"), flat(series)
    x = np.empty((wide, env.width), precision)
    y, hidden = np.empty((wide, network.outputs), f32), np.empty((wide, network.hidden), precision)
    bits = "u2" if precision == "bfloat16" else "f4"
    bare_table = NO_TABLE.astype(bits) if table is None else table.view(bits)
    ended = np.empty(wide, "i4")

    def values():
        loops.observe(floats, ints, every, bare_table, flat_series, rows, x.view(bits))
        mlp_forward.cpu(x, parameters, network, y, hidden)
        return y[:, env.actions]

    for t in range(int(steps)):
        now = clock[0] + u64(t)
        out["state_floats"][t], out["state_ints"][t] = floats, ints
        out["value"][t] = values()
        action = out["action"][t]
        _act(y, env.actions, seed, now, greedy, action, out["log_probability"][t])
        reward = out["reward"][t]
        loops.step(floats, ints, action, flat_series, rows, seed, now, reward, ended)
        out["terminated"][t], out["truncated"][t] = ended == TERMINATED, ended == TRUNCATED
        limit = out["truncated"][t]
        out["final_value"][t] = np.where(limit, values(), f32(0)) if limit.any() else f32(0)
        if ended.any():
            loops.reset(floats, ints, ended != 0, flat_series, rows, seed, now + u64(1))
    out["last_value"][:] = values()
    clock[0] += u64(steps)


@functools.cache
def kernels_of(env, network, tile, greedy, precision):
    """The rollout as a RolloutTile says, and what advances the clock after it."""
    macros = {**env_macros(env), **tile.macros(network, precision)}
    macros |= {"greedy": greedy, "series": len(env.series)}
    return [
        cuda_c("rollout/rollout", entry, env_links(env), **macros)
        for entry in ("rollout_kernel", "advance_clock")
    ]


@rollout.on_cuda
def _launch(
    parameters,
    floats,
    ints,
    clock,
    table,
    series,
    env,
    network,
    steps,
    seed,
    greedy,
    precision,
    *outputs_and_stream,
):
    require(env, table=table, series=series)
    *outputs, stream = outputs_and_stream
    envs = len(floats)
    tile = rollout_tile(network, envs, precision, launch.device())
    kernel, advance = kernels_of(env, network, tile, greedy, precision)
    args = (
        parameters,
        floats,
        ints,
        clock,
        table,
        i32(0 if table is None else len(table)),
        series,
        i32(rows_of(series)),
        seed,
        i32(envs),
        steps,
    )
    launch.launch(kernel, tile.grid(envs), tile.threads, (*args, *outputs), stream, tile.nbytes)
    launch.launch(advance, 1, 32, (clock, steps), stream)
