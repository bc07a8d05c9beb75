"""Whole rounds of DQN from a uniform replay: steps of environments, and the updates after them."""

import numpy as np

from lowgpu_kernels.dims import (
    BOOL,
    F32,
    FLAG,
    I32,
    REAL,
    SEED,
    U8,
    U64,
    B,
    Choice,
    E,
    F,
    Float,
    G,
    I,
    Int,
    K,
    M,
    Outputs,
    P,
    R,
    S,
    Static,
    T,
)
from lowgpu_kernels.env import Env
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.dqn.action_values import require_values
from lowgpu_kernels.ops.dqn.dqn_rounds_launch import NEVER, WORK, launch_rounds, run_on_cpu, work_of
from lowgpu_kernels.ops.dqn.dqn_rounds_verify import verify_rounds
from lowgpu_kernels.ops.dqn.dqn_update import dqn_update
from lowgpu_kernels.ops.dqn.experience import experience, pairs
from lowgpu_kernels.ops.dqn.target_move import target_move
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.optim.adam import BELOW_ONE
from lowgpu_kernels.ops.replay.replay_gather import replay_gather
from lowgpu_kernels.ops.replay.replay_sample import replay_sample
from lowgpu_kernels.ops.replay.replay_write import replay_write, ring_sizes
from lowgpu_kernels.ops.replay.ring import MOST_ACTIONS
from lowgpu_kernels.ops.rollout.reset import draw_series, env_sizes

MOST_UPDATES = 1 << 20  # of a call


def examples():
    """Experience's pairs: a round; and one that only fills the replay before one that learns."""
    first, second = pairs()
    return (
        {**first, "rounds": 1, "warm": 0, "steps": 2, "updates": 1, "batch": 33},
        {**second, "rounds": 2, "warm": 1, "steps": 1, "updates": 2, "batch": 7},
    )


def _work(name):
    return lambda sizes, params: work_of(sizes, params)[name]


@op(
    # What verifies allows is worked out element by element; this is the share of the largest.
    error=lambda network, **_: 64 * network.inputs,
    changes=(
        *("parameters", "target", "m", "v", "step", "floats", "ints", "clock", "head"),
        *("kept_floats", "kept_ints", "kept_next_floats", "kept_next_ints"),
        *("kept_reward", "kept_mark", "draws"),
    ),
    sizes=lambda params, sizes: _sizes(params, sizes),
    scratch={name: (dtype, _work(name)) for name, dtype in WORK.items()},
    bench=(
        "E=4096 K=256 R=1000000 rounds=8 updates=8 batch=8192",
        "E=256 K=4096 R=1000000 rounds=8 updates=1 batch=230",
    ),
    flops=lambda T, E, M, B, P, **_: 2 * T * E * P + 10 * M * B * P,
    examples=examples,
)
def dqn_rounds(
    parameters: F32[P],
    target: F32[P],
    m: F32[P],
    v: F32[P],
    step: I32[1],
    floats: F32[E, F],
    ints: I32[E, G],
    clock: U64[1],
    head: I32[3],
    kept_floats: F32[K, E, F],
    kept_ints: I32[K, E, G],
    kept_next_floats: F32[K, E, F],
    kept_next_ints: I32[K, E, G],
    kept_reward: F32[K, E],
    kept_mark: U8[K, E],
    draws: U64[2],
    table: REAL[R, I] | None = None,
    series: F32[S, R] | None = None,
    *,
    env: Static(Env, lambda: [p["env"] for p in examples()]),
    network: Static(Network, lambda: [p["network"] for p in examples()]),
    lr: Float(0, above=True),
    rounds: Int(1, 1 << 16) = 1,
    warm: Int(0, 1 << 16) = 0,
    steps: Int(1, 1 << 16) = 1,
    updates: Int(1, 1 << 16) = 1,
    batch: Int(1) = 32,
    seed: SEED = 0,
    epsilon_start: Float(0, 1) = 1.0,
    epsilon_end: Float(0, 1) = 0.05,
    epsilon_steps: Int(0, 2**63 - 1, np.uint64) = 0,
    n_steps: Int(1, 16) = 1,
    gamma: Float(0, 1) = 0.99,
    double: FLAG = True,
    delta: Float(0) = 1.0,
    tau: Float(0, 1, above=True) = 0.005,
    target_every: Int(0, 2**50, np.uint64) = 0,
    beta1: Float(0, BELOW_ONE) = 0.9,
    beta2: Float(0, BELOW_ONE) = 0.999,
    eps: Float(0, above=True) = 1e-8,
    max_norm: Float(0) = 0.0,
    precision: Choice("float32", "bfloat16") = "float32",
    accumulate: Int(1, 1024) = 1,
) -> Outputs(
    gradient=F32[P],
    reward=F32[T, E],
    terminated=BOOL[T, E],
    truncated=BOOL[T, E],
    statistics=F32[M, 4],
    norm=F32[M],
):
    """Rounds of deep Q-learning from a uniform replay.

    Each round is these ops one after another:

        experience(parameters, floats, ints, clock)           steps of every environment
        replay_write(what came of them, head, kept_*)
        replay_sample(head, draws)                            updates * batch transitions
        replay_gather(their indices, head, kept_*)            windows of up to n_steps
        dqn_update(parameters, target, m, v, step, windows)   `updates` minibatches
        target_move(parameters, target, clock)                where target_every is above 0

    The first `warm` rounds only fill the replay and move the target. Draws, the ring and what is
    learned are those of these ops, bit for bit where `experience` and `dqn_update` multiply by
    warpgroups too. There (sm_90a, bfloat16, a network that a block holds) all rounds are one launch;
    elsewhere the ops are launched in turn.

    Changes: parameters, target, m, v and step as `dqn_update`; floats, ints and clock as `experience`;
        head and the ring as `replay_write`; draws as `replay_sample`.

    Args:
        parameters: of the network, flat; the float32 master copy.
        target: those the goals are worked out with.
        m, v: Adam's running means of the gradient and of its square, zeros at first.
        step: updates done so far.
        floats, ints: state of each environment.
        clock: steps of each environment so far.
        head: slot the next step goes to, slots filled, and a count that is 0 between calls.
        kept_floats, kept_ints, kept_next_floats, kept_next_ints, kept_reward, kept_mark: the ring.
        draws: rounds' draws so far, and a count that is 0 between calls.
        table: rows of env.width columns in the precision; left out where the env has none.
        series: what the env's functions read; left out where env.series is empty.
        env: the environment, of at most 64 actions.
        network: reads env.width columns; its heads hold action values, or advantages and a value.
        lr: learning rate, in parameter units a step, above 0.
        rounds: rounds of a call, at least 1.
        warm: rounds at first without updates; all of them, where there are as many.
        steps: steps of each environment in a round.
        updates: minibatches of a round.
        batch: rows of a minibatch.
        seed: of the run, for all draws.
        epsilon_start, epsilon_end: probability of a uniform action, at clock 0 and from
            epsilon_steps on.
        epsilon_steps: steps of the clock; 0 gives the end at once.
        n_steps: most steps of a return, in [1, 16].
        gamma: discount per step, in [0, 1].
        double: choose the next action by the parameters rather than by the target.
        delta: error where the loss turns linear, in the reward's unit; 0 for a loss that never does.
        tau: share of the way that the target goes, in (0, 1]; 1 copies the parameters.
        target_every: env steps of all environments between two moves of the target; 0 moves it after
            every update.
        beta1: decay of m per step, in [0, 0.999999].
        beta2: decay of v per step, in [0, 0.999999].
        eps: added to the root of v, in gradient units, above 0.
        max_norm: largest norm a gradient is let through with; 0 is no clipping.
        precision: "float32" computes exactly; "bfloat16" on tensor cores, accumulating in float32.
        accumulate: parts of a minibatch, as in `dqn_update`; without effect where all is one launch.

    Returns:
        gradient: of the last minibatch's loss by the parameters; left as it was without an update.
        reward: of every step, as the env gives it.
        terminated, truncated: how the episode ended at a step, if it did.
        statistics: of each minibatch, as `dqn_update`.
        norm: of each minibatch's gradient.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: a network that is not the env's; shapes that disagree; table or series missing,
            or given and not read; more than 2^20 updates; on a GPU, a network whose activations do
            not fit its shared memory.

    Source: Mnih et al. 2015, algorithm 1 (doi:10.1038/nature14236); for the rest see the ops.
    """
    world, about = (table, series), {"env": env, "network": network, "precision": precision}
    ring = kept_floats, kept_ints, kept_next_floats, kept_next_ints, kept_reward, kept_mark
    ends = {"epsilon_start": epsilon_start, "epsilon_end": epsilon_end}
    ends |= {"epsilon_steps": epsilon_steps}
    moments = {"beta1": beta1, "beta2": beta2, "eps": eps, "max_norm": max_norm}
    soft, wide, gradient = target_every == 0, len(floats), np.full(len(parameters), np.nan)
    logs, statistics, norms = ([], [], []), [], []
    for r in range(rounds):
        given = parameters, floats, ints, clock, *world
        played = experience.spec(*given, **about, steps=steps, seed=seed, **ends)
        for log, one in zip(logs, played[3:6]):
            log.append(one)
        replay_write.spec(*played, head, *ring)
        if r >= warm:
            index = replay_sample.spec(head, draws, envs=wide, batch=updates * batch, seed=seed)
            rows = replay_gather.spec(index, head, *ring, steps=n_steps, gamma=gamma)
            rows = [a.reshape(updates, batch, *a.shape[1:]) for a in rows[:-1]]
            how = {"lr": lr, "double": double, "delta": delta, "tau": tau, **moments, **about}
            given = parameters, target, m, v, step, *rows, None, *world
            gradient, _, of_loss, norm = dqn_update.spec(
                *given, **how, target_every=1 if soft else NEVER
            )
            statistics.append(of_loss)
            norms.append(norm)
        if not soft:
            when = {"envs": wide, "ahead": steps * wide, "every": target_every, "tau": tau}
            target_move.spec(parameters, target, clock, **when)
    logs = [np.concatenate(log) for log in logs]
    statistics = np.array(statistics).reshape(-1, 4)
    return gradient, *logs, statistics, np.array(norms).reshape(-1)


def _sizes(params, sizes):
    env, network = params["env"], params["network"]
    require_values(env, network)
    rounds, learning = int(params["rounds"]), max(0, int(params["rounds"]) - int(params["warm"]))
    minibatches = learning * int(params["updates"])
    if env.actions > MOST_ACTIONS:
        raise ValueError(f"env must have at most {MOST_ACTIONS} actions, {env} has {env.actions}")
    if minibatches > MOST_UPDATES:
        raise ValueError(
            f"rounds * updates must be at most {MOST_UPDATES}, got {minibatches}; give fewer rounds"
        )
    known = {I: env.width, P: network.parameters, B: int(params["batch"]), M: minibatches}
    known |= {T: rounds * int(params["steps"])} | env_sizes(env, sizes)
    return known | {d: ring_sizes(sizes | known)[d] for d in (E, K)}


@dqn_rounds.draws
def _draw(rng, sizes, params):
    env, network, rows = params["env"], params["network"], sizes[R]
    slots, wide = sizes[K], sizes[E]
    filled = slots if rng.random() < 0.5 else rng.integers(slots + 1)
    ends = rng.choice(4, p=(0.7, 0.1, 0.1, 0.1), size=(slots, wide))
    states = {
        n: rng.integers(min(5, rows), size=(slots, wide, sizes[G]))
        for n in ("kept_ints", "kept_next_ints")
    }
    return states | {
        "parameters": draw_parameters(rng, network),
        "target": draw_parameters(rng, network),
        "m": 0.1 * rng.normal(size=sizes[P]),
        "v": 0.1 * rng.normal(size=sizes[P]) ** 2,
        "step": rng.integers(0, 70, 1),
        "ints": rng.integers(min(5, rows), size=(wide, sizes[G])),
        "clock": rng.integers(2 ** (5 if rng.random() < 0.5 else 40), size=1),
        "head": [rng.integers(slots) if filled == slots else filled, filled, 0],
        "kept_mark": 4 * rng.integers(env.actions, size=(slots, wide)) + ends,
        "draws": [rng.integers(2**62), 0],
        "table": rng.normal(size=(rows, env.width)) if env.table_columns else None,
        **draw_series(rng, sizes, env),
    }


@dqn_rounds.checks
def _check(step, head, kept_mark, **_):
    slots = len(kept_mark)
    if not (0 <= head[0] < slots and 0 <= head[1] <= slots):
        raise ValueError(f"head must hold a slot below {slots} and slots filled, got {head[:2]}")
    if step[0] < 0:
        raise ValueError(f"step must be 0 or more, the updates done so far, got {step[0]}")


dqn_rounds.verifies(verify_rounds)


def _named(args):
    """The arguments of an executor by name."""
    return dict(zip((*dqn_rounds.inputs, *dqn_rounds.params, *dqn_rounds.outputs, *WORK), args))


@dqn_rounds.on_cpu
def _cpu(*args):
    run_on_cpu(_named(args))


@dqn_rounds.on_cuda
def _launch(*args):
    launch_rounds(_named(args), args[-1])
