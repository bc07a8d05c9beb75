"""Trading one instrument on bars, with a fixed size: short, flat or long."""

import functools

from lowgpu_kernels.device import f32, i32
from lowgpu_kernels.dims import FLAG, Choice, Float, Int
from lowgpu_kernels.env import TERMINATED, TRUNCATED, Env

_COST = Float(0, 1)
_SCALE = Float(0, above=True)
_EPISODE = Int(1)
_FEATURES = Int(1, 509)
_START = Choice("random", "first")


def market(
    cost=1e-4,
    reward_scale=100.0,
    episode=512,
    episode_terminates=False,
    start="random",
    features=51,
):
    """An environment that holds a position of -1, 0 or +1 in the instrument of a price series.

        reward = (new * (price[t+1] / price[t] - 1) - cost * |new - old|) * reward_scale

    The action at row t is filled at the close of bar t, which the observation of row t already
    shows, and earns the move from that close to the next. Nothing of bar t+1 is seen before.

    Actions 0, 1, 2 are the positions -1, 0, +1. An observation is the features of row t, then the
    position, its unrealised return since entry (position * (price / entry - 1), 0 when flat) and
    the share of the episode that is over (step / episode). Entry is the price at which the present
    position was taken; holding on keeps it.

    Series are `price` (above 0) and `last` (1 on the last row of a symbol's segment, the last row
    of all included, else 0; a segment has at least two rows). Reaching a `last` row truncates the
    episode, as the data ends there and not the market. No episode crosses from one symbol to the
    next.

    The size of a position is fixed, so a loss does not shrink the next trade and the environment
    has no equity that could reach 0. Evaluation compounds the returns; where 1 + return reaches 0
    it is evaluation that calls the account ruined.

    Args:
        cost: of changing the position by 1, as a share of the price, in [0, 1].
        reward_scale: factor on the reward, above 0; 100 makes rewards percent.
        episode: most steps in an episode, from 1.
        episode_terminates: whether the end of an episode counts as a termination, with nothing
            after it. False truncates: the value of the state reached goes on.
        start: "random" for a row drawn anywhere, with the resolution of 24 bits; "first" for row 0,
            to evaluate from start to end with an episode longer than the data.
        features: columns of the table that are features, 1 to 509.

    Returns:
        An Env; equal arguments give the same one, so it is compiled once.

    Raises:
        TypeError, ValueError: an argument out of range, by name.

    Source: for the fill rule, ours; with episode_terminates and features=51 it is the workload that
    bench/peers runs.
    """
    return _market(
        _COST("cost", cost),
        _SCALE("reward_scale", reward_scale),
        _EPISODE("episode", episode),
        FLAG("episode_terminates", episode_terminates),
        _START("start", start),
        int(_FEATURES("features", features)),
    )


@functools.cache
def _market(cost, reward_scale, episode, episode_terminates, start, features):
    from_first_row = start == "first"
    steps = f32(episode)
    at_episode_end = i32(TERMINATED if episode_terminates else TRUNCATED)

    def reset(floats, ints, u, series, rows):
        row = i32(0)
        if not from_first_row:
            # The last row cannot be stepped from; rounding can reach it in a table past 2^24 rows.
            row = min(i32(u[0] * f32(rows - i32(1))), rows - i32(2))
            if series[rows + row] != f32(0):
                row = row - i32(1)
        floats[0] = f32(0)
        floats[1] = f32(1)
        ints[0] = row
        ints[1] = i32(0)
        return 0

    def step(floats, ints, action, u, series, rows, reward):
        row = ints[0]
        old, new = floats[0], f32(action - i32(1))
        price = series[row]
        move = series[row + i32(1)] / price - f32(1)
        reward[0] = (new * move - cost * abs(new - old)) * reward_scale
        floats[0] = new
        if new != old:
            floats[1] = price
        ints[0] = row + i32(1)
        ints[1] = ints[1] + i32(1)
        if ints[1] >= episode:
            return at_episode_end
        if series[rows + row + i32(1)] != f32(0):
            return TRUNCATED
        return 0

    def observe(floats, ints, series, rows, out):
        position = floats[0]
        out[0] = position
        out[1] = f32(0)
        if position != f32(0):
            out[1] = position * (series[ints[0]] / floats[1] - f32(1))
        out[2] = f32(ints[1]) / steps
        return 0

    def table_row(floats, ints):
        return ints[0]

    return Env(
        name="market",
        observation=features + 3,
        actions=3,
        floats=("position", "entry"),
        ints=("row", "step"),
        reset=reset,
        step=step,
        observe=observe,
        table_columns=features,
        table_row=table_row,
        series=("price", "last"),
    )
