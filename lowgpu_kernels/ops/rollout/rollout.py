"""Experience: a policy acts in many environments for T steps, in one launch."""

import functools

import numpy as np

from lowgpu_kernels.device import draws as scalar_draws
from lowgpu_kernels.device import f32, i32, njit
from lowgpu_kernels.device.philox import ACTION, RESET, STEP, draw, unit
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
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from lowgpu_kernels.ops.rollout import example
from lowgpu_kernels.ops.rollout.acting import (
    act_on_cpu,
    acting_kernels,
    acting_sizes,
    draw_acting,
    launch_acting,
    require_heads,
    spec_outputs,
    spec_units,
)
from lowgpu_kernels.ops.rollout.linked import env_functions, rows_of
from lowgpu_kernels.ops.rollout.reset import flat_spec
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
    wide, flat_series, world = len(floats), flat_spec(series), (table, series, env, network)
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
    for e in range(wide):
        state = floats[e], ints[e]
        for t in range(steps):
            out["state_floats"][t, e], out["state_ints"][t, e] = state
            y = spec_outputs(parameters, *state, *world)
            logits = y[: env.actions]
            below = logits - logits.max()
            log_probability = below - np.log(np.exp(below).sum())
            reached = np.cumsum(np.exp(log_probability))
            u = spec_units(seed, ACTION, e, start + t)[0, 0]
            action = int(logits.argmax() if greedy else min((reached <= u).sum(), env.actions - 1))
            u, reward = spec_units(seed, STEP, e, start + t)[:, 0], np.zeros(1)
            ended = functions["step"](*state, i32(action), u, flat_series, rows, reward)
            out["action"][t, e], out["log_probability"][t, e] = action, log_probability[action]
            out["value"][t, e], out["reward"][t, e] = y[env.actions], reward[0]
            out["terminated"][t, e] = ended == TERMINATED
            out["truncated"][t, e] = ended == TRUNCATED
            if ended == TRUNCATED:
                y = spec_outputs(parameters, *state, *world)
                out["final_value"][t, e] = y[env.actions]
            if ended:
                u = spec_units(seed, RESET, e, start + t + 1)[:, 0]
                functions["reset"](*state, u, flat_series, rows)
        out["last_value"][e] = spec_outputs(parameters, *state, *world)[env.actions]
    clock[0] += np.uint64(steps)
    return tuple(out[name] for name in rollout.outputs)


def require_policy(env, network):
    """Refuse a network that does not read the env's rows or does not give its logits and a value."""
    require_heads(env, network, (env.actions + 1,), f"{env.actions} logits and a value")


def _sizes(params, sizes):
    require_policy(params["env"], params["network"])
    return acting_sizes(params, sizes)


rollout.draws(draw_acting)
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
def _cpu(*args):
    given, (greedy, precision) = args[:10], args[10:12]
    env, seed = given[6], given[9]
    out = dict(zip(rollout.outputs, args[12:]))

    def act(t, now, y):
        out["value"][t] = y[:, env.actions]
        _act(y, env.actions, seed, now, greedy, out["action"][t], out["log_probability"][t])

    def reach(t, outputs):
        limit = out["truncated"][t]
        final = np.where(limit, outputs()[:, env.actions], f32(0)) if limit.any() else f32(0)
        out["final_value"][t] = final

    outputs = act_on_cpu(act, reach, given, precision, out)
    out["last_value"][:] = outputs()[:, env.actions]


@functools.cache
def kernels_of(env, network, tile, greedy, precision):
    """The rollout as a RolloutTile says, and what advances the clock after it."""
    about = env, network, tile, precision
    return acting_kernels("rollout/rollout", "rollout_kernel", *about, greedy=greedy)


@rollout.on_cuda
def _launch(*args):
    given, (greedy, precision) = args[:10], args[10:12]
    *outputs, stream = args[12:]

    def kernels(tile):
        return kernels_of(*given[6:8], tile, greedy, precision)

    launch_acting(kernels, given, (), precision, outputs, stream)
