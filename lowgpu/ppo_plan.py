"""What PPO needs before its first step: every buffer, every op's parameters, and their bytes."""

import numpy as np

from lowgpu.initialize import network_of
from lowgpu.pools import Declared, Plan
from lowgpu.training import EPISODE
from lowgpu_kernels import (
    episode_statistics,
    gae,
    minibatch_moments,
    permutation,
    ppo_update,
    rollout,
)
from lowgpu_kernels.dims import (
    BF16,
    BOOL,
    F32,
    I32,
    U64,
    B,
    E,
    F,
    G,
    I,
    M,
    N,
    P,
    R,
    S,
    T,
)
from lowgpu_kernels.ops.ppo.ppo_loss import STATISTICS

# What a checkpoint holds: everything an iteration reads that the one before it wrote.
STATE = (
    "parameters",
    "m",
    "v",
    "step",
    "clock",
    "floats",
    "ints",
    "running_return",
    "running_length",
)

_MORE_PARTS = "more ppo.minibatches or ppo.accumulate"


def sizes_of(config, env, network, rows):
    """{Dim: size} of everything in a trainer. `rows` counts the table's, 0 without one."""
    return {
        E: config.envs,
        T: config.rollout_steps,
        N: config.batch,
        M: config.minibatches,
        B: config.minibatch,
        F: len(env.floats),
        G: len(env.ints),
        I: network.inputs,
        P: network.parameters,
        R: rows,
        S: len(env.series),
    }


def buffers(config, env):
    """Every buffer of a trainer: {name: (Spec, meaning)}.

    Args:
        config: a PPOConfig.
        env: an Env.
    """
    real = BF16 if config.precision == "bfloat16" else F32
    updates = config.updates
    made = {
        "parameters": (F32[P], "policy and value network"),
        "m": (F32[P], "Adam's mean of gradients"),
        "v": (F32[P], "Adam's mean of squared gradients"),
        "step": (I32[1], "Adam steps done"),
        "clock": (U64[1], "env steps of each environment, for random draws"),
        "floats": (F32[E, F], "environments now, float fields"),
        "ints": (I32[E, G], "environments now, integer fields"),
        "running_return": (F32[E], "return so far of the episode under way"),
        "running_length": (I32[E], "steps so far of the episode under way"),
        "state_floats": (F32[T, E, F], "states acted in, float fields"),
        "state_ints": (I32[T, E, G], "states acted in, integer fields"),
        "action": (I32[T, E], "actions taken"),
        "log_probability": (F32[T, E], "of each action when it was taken"),
        "value": (F32[T, E], "V of each state when it was acted in"),
        "reward": (F32[T, E], "rewards"),
        "terminated": (BOOL[T, E], "whether the step ended the episode for good"),
        "truncated": (BOOL[T, E], "whether the step ended the episode by a limit"),
        "final_value": (F32[T, E], "V of the state where a limit ended the episode"),
        "last_value": (F32[E], "V of the state after the last step"),
        "advantage": (F32[T, E], "advantages"),
        "returns": (F32[T, E], "targets of the value"),
        "rollout_moments": (F32[2], "mean and deviation of the rollout's advantages"),
        "index": (I32[N], "the rollout's rows in the order of an epoch"),
        "moments": (F32[M, 2], "mean and deviation of each minibatch's advantages"),
        "gradient": (F32[P], "gradient of the loss by the parameters"),
        "report": (F32[len(EPISODE) + updates * (len(STATISTICS) + 1)], "figures for the host"),
    }
    if env.table_columns:
        made["table"] = (real[R, I], "features of every bar")
    if env.series:
        made["series"] = (F32[S, R], "series that the environment reads")
    return made


def settings_of(config, env, network):
    """The parameters of every op of an iteration: {op: {name: value}}."""
    return {
        rollout: {
            "env": env,
            "network": network,
            "steps": config.rollout_steps,
            "seed": config.seed,
            "precision": config.precision,
        },
        gae: {"gamma": config.gamma, "lam": config.lam},
        episode_statistics: {},
        permutation: {"count": config.batch, "seed": config.seed},
        minibatch_moments: {"minibatch": config.minibatch},
        ppo_update: {
            "env": env,
            "network": network,
            "precision": config.precision,
            "accumulate": config.accumulate,
            "clip": config.clip,
            "value_clip": config.value_clip,
            "value_weight": config.value_weight,
            "entropy_weight": config.entropy_weight,
            "lr": config.lr,
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
            "max_norm": config.max_norm,
            "decay_updates": config.iterations * config.updates if config.anneal else 0,
            "decay_every": config.updates,
        },
    }


def plan_of(config, env, rows, kind):
    """The Plan of a trainer: its buffers, and its ops' working memory on a GPU.

    Args:
        config: a PPOConfig.
        env: an Env.
        rows: rows of its table and series.
        kind: "cpu" or "cuda"; for "cuda" launches are planned for the current device.
    """
    network = network_of(config, env)
    sizes = sizes_of(config, env, network, rows)
    declared = {
        name: Declared(spec.resolve(sizes), spec.dtype({}), meaning, _shrink(spec))
        for name, (spec, meaning) in buffers(config, env).items()
    }
    if kind == "cuda":
        by_name = {dim.name: size for dim, size in sizes.items()}
        for op, params in settings_of(config, env, network).items():
            checked = op.checked_params({"epoch": 0, **params} if op is permutation else params)
            for name, (shape, dtype) in op.scratch_specs(
                by_name, checked, config.precision
            ).items():
                declared[f"{op}.{name}"] = Declared(
                    shape, np.dtype(dtype), f"working memory of {op}", _MORE_PARTS
                )
    return Plan(declared)


def expected_arrays(config, env):
    """{name: (shape, dtype)} of a trainer's arrays in a checkpoint."""
    sizes = sizes_of(config, env, network_of(config, env), 0)
    specs = buffers(config, env)
    return {n: (specs[n][0].resolve(sizes), specs[n][0].dtype({})) for n in STATE}


def _shrink(spec):
    dims = spec.dims()
    if R in dims:
        return "fewer bars, or fewer stream.rows"
    if E in dims or N in dims:
        return "fewer ppo.envs or ppo.rollout_steps"
    return "smaller ppo.hidden" if P in dims else ""
