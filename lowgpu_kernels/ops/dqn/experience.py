"""Experience for a replay ring: epsilon-greedy steps in many environments, in one launch."""

import functools

import numpy as np

from lowgpu_kernels.device import f32, i32, njit, scalar, u32, u64
from lowgpu_kernels.device.philox import EXPLORE, RESET, STEP, draw, numpy_draw, unit
from lowgpu_kernels.dims import (
    BOOL,
    F32,
    I32,
    REAL,
    SEED,
    U64,
    Choice,
    E,
    F,
    Float,
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
from lowgpu_kernels.ops.dqn.action_values import best_action, require_values
from lowgpu_kernels.ops.dqn.experience_verify import verify_experience
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.rollout import example
from lowgpu_kernels.ops.rollout.acting import (
    act_on_cpu,
    acting_kernels,
    acting_sizes,
    draw_acting,
    launch_acting,
    spec_outputs,
    spec_units,
)
from lowgpu_kernels.ops.rollout.linked import env_functions, rows_of
from lowgpu_kernels.ops.rollout.reset import flat_spec


def pairs():
    """Envs with networks for them: action values alone; advantages and a value in two towers."""
    walk, drift = example.examples()
    return (
        {"env": walk, "network": Network(walk.width, ((32, 16, walk.actions),))},
        {"env": drift, "network": Network(drift.width, ((16, drift.actions), (16, 1)), "tanh")},
    )


@op(
    # What verifies allows is worked out element by element; this is for readers.
    error=lambda network, **_: 64 * network.inputs,
    changes=("floats", "ints", "clock"),
    sizes=lambda params, sizes: _sizes(params, sizes),
    bench=("E=4096 R=1000000 steps=1", "E=16384 R=1000000 steps=64"),
    flops=lambda T, E, P, **_: 2 * T * E * P,
    examples=pairs,
)
def experience(
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
    epsilon_start: Float(0, 1) = 1.0,
    epsilon_end: Float(0, 1) = 0.05,
    epsilon_steps: Int(0, 2**63 - 1, np.uint64) = 0,
    precision: Choice("float32", "bfloat16") = "float32",
) -> Outputs(
    state_floats=F32[T, E, F],
    state_ints=I32[T, E, G],
    action=I32[T, E],
    reward=F32[T, E],
    terminated=BOOL[T, E],
    truncated=BOOL[T, E],
    next_floats=F32[T, E, F],
    next_ints=I32[T, E, G],
):
    """What happens when E environments are explored for `steps` steps; what `replay_write` takes.

        epsilon = start + (end - start) * now / epsilon_steps   while now < epsilon_steps, else end
        action  = uniform in [0, env.actions)   with probability epsilon
                  argmax_a network(observation)[a]   else

    with now = clock + t. An episode that ends starts anew at once. States are stored, not
    observations: `observe` makes those again.

    Changes:
        floats, ints: the states the next call goes on from.
        clock: advanced by `steps`, so that a replayed graph never draws the same numbers.

    Args:
        parameters: of the network, flat.
        floats, ints: state of each environment.
        clock: global step of the first step.
        table: rows of env.width columns in the precision; left out where the env has none.
        series: what the env's functions read; left out where env.series is empty.
        env: the environment.
        network: reads env.width columns; its heads hold env.actions action values, or that many
            advantages and then the state's value, which makes no action better than another.
        steps: steps of each environment, T.
        seed: of the draws; env e at step t uses counter (e, clock + t), whatever the launch.
        epsilon_start, epsilon_end: probability of a uniform action, at clock 0 and from
            epsilon_steps on.
        epsilon_steps: steps of the clock, each a step of every environment; 0 gives the end at once.
        precision: "float32" computes exactly; "bfloat16" on tensor cores, accumulating in float32.

    Returns:
        state_floats, state_ints: the state each action was taken in.
        action: in [0, env.actions); the first of the largest action value, which a NaN never is, and
            0 where no value is above -inf.
        reward: as the env gives it.
        terminated, truncated: how the episode ended at this step, if it did.
        next_floats, next_ints: the state the step led to, before any reset.

    Raises:
        ValueError: a network that is not the env's; arrays whose sizes are not the env's; table or
            series missing, or given and not read.

    Source: Mnih et al. 2015, algorithm 1 (doi:10.1038/nature14236); advantages, Wang et al. 2016,
    eq. 9 (arXiv:1511.06581).
    """
    functions, rows = env_functions(env), i32(rows_of(series))
    wide, flat_series = len(floats), flat_spec(series)
    action = np.zeros((steps, wide), "i4")
    reward, terminated, truncated = np.zeros((3, steps, wide))
    state_floats, next_floats = np.zeros((2, steps, *floats.shape))
    state_ints, next_ints = np.zeros((2, steps, *ints.shape), "i4")
    start = int(clock[0])
    for e in range(wide):
        for t in range(steps):
            now, state = start + t, (floats[e], ints[e])
            state_floats[t, e], state_ints[t, e] = state
            if now < epsilon_steps:
                epsilon = epsilon_start + (epsilon_end - epsilon_start) * now / epsilon_steps
            else:
                epsilon = epsilon_end
            if spec_units(seed, EXPLORE, e, now)[0, 0] < epsilon:
                word = int(numpy_draw(seed, EXPLORE, [e], now)[1, 0])
                action[t, e] = word * env.actions // 2**32
            else:
                y = spec_outputs(parameters, *state, table, series, env, network)
                action[t, e] = np.where(np.isnan(y), -np.inf, y)[: env.actions].argmax()
            u, into = spec_units(seed, STEP, e, now)[:, 0], reward[t, e : e + 1]
            ended = functions["step"](*state, i32(action[t, e]), u, flat_series, rows, into)
            next_floats[t, e], next_ints[t, e] = state
            terminated[t, e], truncated[t, e] = ended == TERMINATED, ended == TRUNCATED
            if ended:
                u = spec_units(seed, RESET, e, now + 1)[:, 0]
                functions["reset"](*state, u, flat_series, rows)
    clock[0] += np.uint64(steps)
    ends = terminated.astype(bool), truncated.astype(bool)
    return state_floats, state_ints, action, reward, *ends, next_floats, next_ints


def _sizes(params, sizes):
    require_values(params["env"], params["network"])
    return acting_sizes(params, sizes)


experience.draws(draw_acting)
experience.verifies(verify_experience)


@scalar
def epsilon_at(now, start, end, duration):
    """Probability of a uniform action at a step of the clock: from start to end, linear, then end.

    Exactly `start` at 0 and exactly `end` from `duration` on, which may be 0.

    Args:
        now, duration: steps, uint64.
        start, end: float32 in [0, 1].
    """
    if now >= duration:
        return end
    return start + (end - start) * (f32(now) / f32(duration))


@scalar
def uniform_action(word, actions):
    """An action of which none is likelier than another by more than actions / 2^32 of itself."""
    return i32((u64(u32(word)) * u64(actions)) >> u64(32))


@njit
def _act(y, actions, seed, now, epsilon, action):
    for e in range(y.shape[0]):
        words = draw(seed, EXPLORE, e, now)
        explores = unit(words[0]) < epsilon
        action[e] = uniform_action(words[1], actions) if explores else best_action(y, e, actions)


@experience.on_cpu
def _cpu(*args):
    given, (*schedule, precision) = args[:10], args[10:14]
    floats, ints, env, seed = given[1], given[2], given[6], given[9]
    out = dict(zip(experience.outputs, args[14:]))

    def act(t, now, y):
        _act(y, env.actions, seed, now, epsilon_at(now, *schedule), out["action"][t])

    def reach(t, _outputs):
        out["next_floats"][t], out["next_ints"][t] = floats, ints

    act_on_cpu(act, reach, given, precision, out)


@functools.cache
def kernels_of(env, network, tile, precision):
    """The kernel as a RolloutTile says, and what advances the clock after it."""
    return acting_kernels("dqn/experience", "experience_kernel", env, network, tile, precision)


@experience.on_cuda
def _launch(*args):
    given, (*schedule, precision) = args[:10], args[10:14]
    *outputs, stream = args[14:]

    def kernels(tile):
        return kernels_of(*given[6:8], tile, precision)

    launch_acting(kernels, given, schedule, precision, outputs, stream)
