"""Greedy play on the CPU by whatever decides: the same loop for a float32 and a quantized policy."""

from typing import NamedTuple

import numpy as np

from lowgpu.evaluate import CLOCK
from lowgpu_kernels import env_step, observe, reset


class Played(NamedTuple):
    """What happened at each step of each environment, [steps, envs] each."""

    observation: np.ndarray | None  # [steps * envs, width], where it was asked for
    action: np.ndarray
    reward: np.ndarray
    ended: np.ndarray


def starts(env, count, series, seed):
    """(floats, ints) of environments at the start of an episode."""
    floats = np.zeros((count, len(env.floats)), np.float32)
    ints = np.zeros((count, len(env.ints)), np.int32)
    reset(floats, ints, series, np.full(1, CLOCK, np.uint64), env=env, seed=seed)
    return floats, ints


def play(env, decide, floats, ints, steps, *, table=None, series=None, seed=0, keep=False):
    """Play environments from given states; one that ends starts anew.

    Args:
        env: the Env.
        decide: float32 [envs, env.width] -> int32 [envs].
        floats, ints: states, changed in place.
        steps: of each environment.
        table, series: the env's data, float32.
        seed: of the draws.
        keep: whether to return the observations too.
    """
    count = len(floats)
    action = np.zeros((steps, count), np.int32)
    reward = np.zeros((steps, count), np.float32)
    ended = np.zeros((steps, count), bool)
    rows = np.zeros((steps, count, env.width), np.float32) if keep else None
    clock = np.full(1, CLOCK, np.uint64)
    new = floats.copy(), ints.copy()
    for t in range(steps):
        x = observe(floats, ints, table, series, env=env)
        if keep:
            rows[t] = x
        action[t] = decide(x)
        reward[t], terminated, truncated = env_step(
            floats, ints, action[t], series, clock, env=env, seed=seed
        )
        clock += np.uint64(1)
        ended[t] = terminated | truncated
        if ended[t].any():
            reset(*new, series, clock, env=env, seed=seed)
            floats[ended[t]], ints[ended[t]] = new[0][ended[t]], new[1][ended[t]]
    kept = rows.reshape(-1, env.width) if keep else None
    return Played(kept, action, reward, ended)


def market_positions(env, decide, segments, episode, table, series, keep=False):
    """The position on every bar of every symbol but the last, as `evaluate.greedy_positions` plays.

    Returns:
        (positions, observations): a float64 array a symbol, and the rows they were taken on.
    """
    floats, ints = starts(env, len(segments.symbols), series, 0)
    row, step = env.ints.index("row"), env.ints.index("step")
    ints[:, row] = segments.starts
    most, parts = int(segments.lengths.max()) - 1, []
    for first in range(0, most, episode - 1):
        # Short of a whole episode, so no limit ends it. A symbol that has run out starts anew at
        # row 0, where nobody looks.
        ints[:, step] = 0
        steps = min(episode - 1, most - first)
        parts.append(play(env, decide, floats, ints, steps, table=table, series=series, keep=keep))
    position = np.concatenate([part.action for part in parts]) - 1.0
    positions = [position[: length - 1, s] for s, length in enumerate(segments.lengths)]
    if not keep:
        return positions, None
    rows = np.concatenate([part.observation for part in parts]).reshape(most, -1, env.width)
    return positions, np.concatenate(
        [rows[: length - 1, s] for s, length in enumerate(segments.lengths)]
    )


def episode_returns(env, decide, count, most_steps, seed, keep=False):
    """The returns of whole episodes that each end within `most_steps`.

    Returns:
        (returns float64 [count], observations): the rows up to each episode's end.
    """
    floats, ints = starts(env, count, None, seed)
    played = play(env, decide, floats, ints, most_steps, seed=seed, keep=keep)
    assert played.ended.any(axis=0).all(), "an episode did not end within its limit"
    before_end = np.cumsum(played.ended, axis=0) - played.ended == 0
    returns = np.where(before_end, played.reward, 0).sum(axis=0, dtype=np.float64)
    return returns, played.observation[before_end.ravel()] if keep else None
