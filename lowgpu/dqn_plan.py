"""What DQN needs before its first step: every buffer, every op's parameters, and their bytes."""

import numpy as np

from lowgpu.initialize import values_network_of
from lowgpu.pools import Declared, Plan
from lowgpu.training import EPISODE
from lowgpu_kernels import (
    anneal_weights,
    dqn_rounds,
    dqn_update,
    episode_statistics,
    experience,
    priority_gather,
    priority_update,
    replay_write,
    target_move,
)
from lowgpu_kernels.dims import BF16, F32
from lowgpu_kernels.ops.dqn.dqn_update import STATISTICS
from lowgpu_kernels.ops.replay.ring import ring_arrays

# What an iteration reads that the one before it wrote, beside the replay.
STATE = (
    "parameters",
    "target",
    "m",
    "v",
    "step",
    "clock",
    "draws",
    "floats",
    "ints",
    "running_return",
    "running_length",
)
NEVER = 2**31 - 1  # updates between two moves: more than a run has
_FEWER_ENVS, _SMALLER_BATCH = "fewer dqn.envs", "a smaller dqn.batch"
_MORE_PARTS = "a smaller dqn.batch or a larger dqn.accumulate"
_FEWER_BARS = "fewer bars, or fewer stream.rows"
_SHORTER = "fewer dqn.rounds or dqn.train_every"


def ring_of(config, env):
    """Every array of the replay: {name: (shape, dtype)}."""
    fields = len(env.floats), len(env.ints)
    return ring_arrays(config.slots, config.envs, *fields, config.prioritized)


def state_names(config):
    """The arrays of a checkpoint."""
    if not config.save_replay:
        return STATE
    tree = ("priority", "sums", "highest") if config.prioritized else ()
    kept = ("floats", "ints", "next_floats", "next_ints", "reward", "mark")
    return (*STATE, "head", *(f"kept_{name}" for name in kept), *tree)


def _learner(parameters):
    shrink = "smaller dqn.hidden"
    return {
        "parameters": ((parameters,), "float32", "action values", shrink),
        "target": ((parameters,), "float32", "action values that goals are of", shrink),
        "m": ((parameters,), "float32", "Adam's mean of gradients", shrink),
        "v": ((parameters,), "float32", "Adam's mean of squared gradients", shrink),
        "step": ((1,), "int32", "Adam steps done", ""),
        "gradient": ((parameters,), "float32", "gradient of the loss by the parameters", shrink),
    }


def _acting(config, env):
    """The environments now, and how an iteration's steps went."""
    envs, log = config.envs, config.steps * config.rounds
    return {
        "clock": ((1,), "uint64", "env steps of each environment, for random draws", ""),
        "floats": ((envs, len(env.floats)), "float32", "environments now, floats", _FEWER_ENVS),
        "ints": ((envs, len(env.ints)), "int32", "environments now, integers", _FEWER_ENVS),
        "running_return": ((envs,), "float32", "return so far of the episode", _FEWER_ENVS),
        "running_length": ((envs,), "int32", "steps so far of the episode", _FEWER_ENVS),
        "reward": ((log, envs), "float32", "rewards of an iteration", _SHORTER),
        "terminated": ((log, envs), "bool", "whether a step ended the episode", _SHORTER),
        "truncated": ((log, envs), "bool", "whether a limit ended the episode", _SHORTER),
        "draws": ((2,), "uint64", "minibatches drawn, for random draws", ""),
        "report": (
            (len(EPISODE) + config.rounds * config.updates * (len(STATISTICS) + 1),),
            "float32",
            "figures for the host",
            "",
        ),
    }


def _between_ops(config, env):
    """What one op of a round hands to the next, where rounds are not one op."""
    steps, rows = (config.steps, config.envs), (config.updates, config.batch)
    floats, ints = len(env.floats), len(env.ints)
    shrink = "fewer dqn.train_every"
    return {
        "state_floats": ((*steps, floats), "float32", "states acted in", shrink),
        "state_ints": ((*steps, ints), "int32", "states acted in, integer fields", shrink),
        "action": (steps, "int32", "actions taken", shrink),
        "next_floats": ((*steps, floats), "float32", "states that followed", shrink),
        "next_ints": ((*steps, ints), "int32", "states that followed, integer fields", shrink),
        "index": (rows, "int32", "transitions drawn", _SMALLER_BATCH),
        "row_floats": ((*rows, floats), "float32", "states acted in, drawn", _SMALLER_BATCH),
        "row_ints": ((*rows, ints), "int32", "their integer fields", _SMALLER_BATCH),
        "row_action": (rows, "int32", "actions taken", _SMALLER_BATCH),
        "row_reward": (rows, "float32", "returns of up to n steps", _SMALLER_BATCH),
        "row_discount": (rows, "float32", "what the state after counts", _SMALLER_BATCH),
        "row_next_floats": ((*rows, floats), "float32", "states after", _SMALLER_BATCH),
        "row_next_ints": ((*rows, ints), "int32", "their integer fields", _SMALLER_BATCH),
        "row_weight": (rows, "float32", "importance weights", _SMALLER_BATCH),
        "error": (rows, "float32", "temporal-difference errors", _SMALLER_BATCH),
    }


def buffers(config, env, rows=0):
    """Every buffer of a trainer but its ops' working memory: {name: Declared}.

    Args:
        config: a DQNConfig.
        env: an Env.
        rows: rows of its table and series.
    """
    made = {
        **_learner(values_network_of(config, env).parameters),
        **_acting(config, env),
        **(_between_ops(config, env) if config.prioritized else {}),
        **{
            name: (shape, dtype, "replay", "a smaller dqn.capacity")
            for name, (shape, dtype) in ring_of(config, env).items()
        },
    }
    real = (BF16 if config.precision == "bfloat16" else F32)[1].dtype({})
    if env.table_columns:
        made["table"] = (rows, env.width), real, "features of every bar", _FEWER_BARS
    if env.series:
        shape = len(env.series), rows
        made["series"] = shape, "float32", "series that the environment reads", _FEWER_BARS
    return {
        name: Declared(tuple(shape), np.dtype(dtype), meaning, shrink)
        for name, (shape, dtype, meaning, shrink) in made.items()
    }


def settings_of(config, env, network):
    """The parameters of every op of an iteration: {op: {name: value}}."""
    about = {"env": env, "network": network, "precision": config.precision, "seed": config.seed}
    acts = {
        "steps": config.steps,
        "epsilon_start": config.epsilon_start,
        "epsilon_end": config.epsilon_end,
        "epsilon_steps": config.clock(config.epsilon_steps),
    }
    learns = {
        "accumulate": config.accumulate,
        "lr": config.lr,
        "double": config.double,
        "delta": config.huber,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
        "max_norm": config.max_norm,
    }
    if config.prioritized:
        return _prioritized(config, about, acts, learns) | {episode_statistics: {}}
    drawn = {"updates": config.updates, "batch": config.batch}
    drawn |= {"n_steps": config.n_steps, "gamma": config.gamma}
    moves = {"tau": config.tau, "target_every": config.target_every}
    rounds = about | acts | learns | drawn | moves | {"rounds": config.rounds}
    return {dqn_rounds: rounds, episode_statistics: {}}


def _prioritized(config, about, acts, learns):
    soft, seed = config.target_every == 0, {"seed": about["seed"]}
    # dqn_update counts updates; moves due by env steps are target_move's.
    moves = {"tau": config.tau if soft else 1.0, "target_every": 1 if soft else NEVER}
    update = {n: a for n, a in about.items() if n != "seed"} | learns | moves
    made = {experience: about | acts, replay_write: {}, dqn_update: update}
    if not soft:
        intervals = {"ahead": config.train_every, "every": config.target_every}
        made[target_move] = {"envs": config.envs, "tau": config.tau} | intervals
    window = {"steps": config.n_steps, "gamma": config.gamma}
    beta = 1.0 if config.anneals else config.beta_end
    made[priority_gather] = {"batch": config.batch, "beta": beta} | window | seed
    ordered = {"in_order": config.updates == 1}
    made[priority_update] = {"alpha": config.alpha, "eps": config.priority_eps} | ordered
    if config.anneals:
        ends = {"beta_start": config.beta_start, "beta_end": config.beta_end}
        made[anneal_weights] = ends | {"beta_steps": config.clock(config.total_steps)}
    return made


def plan_of(config, env, rows, kind):
    """The Plan of a trainer: its buffers, and its ops' working memory on a GPU.

    Args:
        config: a DQNConfig.
        env: an Env.
        rows: rows of its table and series.
        kind: "cpu" or "cuda"; for "cuda" launches are planned for the current device.
    """
    declared = buffers(config, env, rows)
    if kind == "cuda":
        network = values_network_of(config, env)
        sizes = {"E": config.envs, "T": config.steps * config.rounds, "P": network.parameters}
        sizes |= {"M": config.updates, "B": config.batch, "R": rows, "I": network.inputs}
        sizes |= {"F": len(env.floats), "G": len(env.ints), "S": len(env.series)}
        for op, params in settings_of(config, env, network).items():
            specs = op.scratch_specs(sizes, op.checked_params(params), config.precision)
            for name, (shape, dtype) in specs.items():
                meaning = f"working memory of {op}"
                declared[f"{op}.{name}"] = Declared(shape, np.dtype(dtype), meaning, _MORE_PARTS)
    return Plan(declared)


def expected_arrays(config, env):
    """{name: (shape, dtype)} of a trainer's arrays in a checkpoint."""
    declared = buffers(config, env)
    return {n: (declared[n].shape, declared[n].dtype) for n in state_names(config)}
