"""Rows of a minibatch out of the replay ring: n-step returns, the states to bootstrap from, weights."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import absent
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import f32, i32, njit
from lowgpu_kernels.device.maths import NAN
from lowgpu_kernels.dims import F32, I32, U8, B, D, E, F, Float, G, Int, K, Outputs
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.replay.priority_sample import GROUP
from lowgpu_kernels.ops.replay.replay_write import ring_sizes
from lowgpu_kernels.ops.replay.ring import ACTION_SHIFT, END_BITS, add_step, steps_ahead
from lowgpu_kernels.ops.replay.tree import weight_of

THREADS = 64  # few rows a block, so that a small batch spreads over the SMs. Untuned.


@op(
    # A product and a sum for each of at most 16 steps; a weight is exp(beta log x), |log x| <= 22.
    error=lambda **_: 64,
    sizes=lambda params, sizes: _sizes(sizes),
    bench=("B=8192 E=4096 K=256 F=2 G=2", "B=262144 E=4096 K=256 F=2 G=2"),
)
def replay_gather(
    index: I32[B],
    head: I32[3],
    kept_floats: F32[K, E, F],
    kept_ints: I32[K, E, G],
    kept_next_floats: F32[K, E, F],
    kept_next_ints: I32[K, E, G],
    kept_reward: F32[K, E],
    kept_mark: U8[K, E],
    drawn: F32[B] | None = None,
    least: F32[D] | None = None,
    *,
    steps: Int(1, 16) = 1,
    gamma: Float(0, 1) = 0.99,
    beta: Float(0, 1) = 0.4,
) -> Outputs(
    state_floats=F32[B, F],
    state_ints=I32[B, G],
    action=I32[B],
    reward=F32[B],
    discount=F32[B],
    next_floats=F32[B, F],
    next_ints=I32[B, G],
    weight=F32[B],
):
    """The n-step transitions that start at indices of a ring, with importance weights.

        n         = the fewest of: steps; steps up to the end of the episode; up to the newest one
        reward    = sum over k < n of gamma^k * r[k]
        discount  = gamma^n, or 0 where the last of them terminated
        state     = where the first action was taken;  next = where the last one led, before a reset
        target    = reward + discount * V(next)         is what a learner makes of it
        weight    = (min(least) / drawn)^beta           is (N * P)^-beta over the batch's largest

    The newest transition follows its environment's others in the ring; a window never goes on to the
    oldest ones behind it. Index -1 (drawn from nothing) gives zeros, and NaN for every float of one
    column.

    Args:
        index: k * E + e of transitions that have been written, or -1.
        head: of the ring; see `replay_write`.
        kept_floats, kept_ints, kept_next_floats, kept_next_ints, kept_reward, kept_mark: the ring.
        drawn: priority each row was drawn by, above 0; left out where draws were uniform.
        least: smallest priority drawn of each group of 64 rows; needed with drawn.
        steps: most steps of a return, n, in [1, 16].
        gamma: discount per step, in [0, 1].
        beta: how far weights make up for uneven draws, in [0, 1]; 1 does wholly.

    Returns:
        state_floats, state_ints: state the action was taken in.
        action: in [0, 64).
        reward: n-step return without the bootstrap, in the reward's unit.
        discount: what the value of the next state counts for, in [0, 1].
        next_floats, next_ints: state to bootstrap from; the final one where the episode was cut.
        weight: in (0, 1], 1 for the row least likely to be drawn; 1 everywhere without drawn.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that disagree; drawn without least, or the reverse; on the CPU, an index
            that has not been written.

    Source: Sutton & Barto 2018, eq. 7.1, as Hessel et al. 2018 bootstrap it (arXiv:1710.02298);
    weights, Schaul et al. 2016, section 3.4 (arXiv:1511.05952).
    """
    _refuse_one_without_the_other(drawn, least)
    slots, envs = kept_mark.shape
    oldest, newest = (int(head[0]) - int(head[1])) % slots, int(head[1]) - 1
    fields = kept_floats.shape[2], kept_ints.shape[2]
    rows = len(index)
    floats, next_floats = np.zeros((2, rows, fields[0]))
    ints, next_ints = np.zeros((2, rows, fields[1]), "i4")
    action = np.zeros(rows, "i4")
    reward, discount, weight = np.full((3, rows), np.nan)
    for b, i in enumerate(index):
        if i < 0:
            continue
        slot, e = divmod(int(i), envs)
        age = (slot - oldest) % slots
        reward[b], discount[b] = 0, 1
        floats[b], ints[b], action[b] = (
            kept_floats[slot, e],
            kept_ints[slot, e],
            kept_mark[slot, e] // 4,
        )
        for k in range(steps):
            at = (slot + k) % slots, e
            ends = kept_mark[at] % 4
            reward[b] += gamma**k * kept_reward[at]
            discount[b] = 0 if ends % 2 else gamma ** (k + 1)
            next_floats[b], next_ints[b] = kept_next_floats[at], kept_next_ints[at]
            if ends or age + k == newest:
                break
        weight[b] = 1 if drawn is None else (least.min() / drawn[b]) ** beta
    return floats, ints, action, reward, discount, next_floats, next_ints, weight


def _sizes(sizes):
    known = ring_sizes(sizes)
    return {d: known[d] for d in (E, K, F, G)} | {D: blocks(sizes.get(B, 0), GROUP)}


@replay_gather.draws
def _draw(rng, sizes, params):
    slots, wide, rows = sizes[K], sizes[E], sizes[B]
    filled = slots if rng.random() < 0.5 else rng.integers(slots + 1)
    head = rng.integers(slots) if filled == slots else filled
    ends = rng.choice(4, p=(0.7, 0.1, 0.1, 0.1), size=(slots, wide))
    drawn = rng.integers(1, 2**22, size=rows) * 2.0**-20
    least = [drawn[i : i + GROUP].min() for i in range(0, rows, GROUP)]
    weighted = rng.random() < 0.7
    return {
        "index": rng.integers(-1, max(filled * wide, 0), size=rows),
        "head": [head, filled, 0],
        "kept_mark": 4 * rng.integers(64, size=(slots, wide)) + ends,
        "drawn": drawn if weighted else None,
        "least": np.array(least) if weighted else None,
    }


def _refuse_one_without_the_other(drawn, least):
    if (drawn is None) != (least is None):
        raise ValueError("replay_gather needs drawn and least together")


@replay_gather.checks
def _check(index, head, kept_mark, **_):
    written = int(head[1]) * kept_mark.shape[1]
    wrong = np.flatnonzero((index < -1) | (index >= written))
    if len(wrong):
        b = wrong[0]
        raise ValueError(f"index[{b}] must be in [-1, {written}), got {index[b]}")


@replay_gather.on_cpu
def _cpu(index, head, *arrays):
    *ring, drawn, least, steps, gamma, beta = arrays[:11]
    floats, ints, action, reward, discount, next_floats, next_ints, weight = arrays[11:]
    _refuse_one_without_the_other(drawn, least)
    kept_floats, kept_ints, kept_next_floats, kept_next_ints, kept_reward, kept_mark = ring
    slots, envs = kept_mark.shape
    last = np.empty_like(index)
    _windows(index, head, kept_reward, kept_mark, steps, gamma, action, reward, discount, last)
    there = index >= 0
    for kept, found, out in (
        (kept_floats, index, floats),
        (kept_ints, index, ints),
        (kept_next_floats, last, next_floats),
        (kept_next_ints, last, next_ints),
    ):
        out[:] = 0
        out[there] = kept.reshape(slots * envs, -1)[found[there]]
    drawn = absent(reward, 1) if drawn is None else drawn
    _weights(index, drawn, f32(1) if least is None else least.min(initial=np.inf), beta, weight)


@njit(parallel=True)
def _windows(index, head, kept_reward, kept_mark, steps, gamma, action, reward, discount, last):
    slots, envs = kept_mark.shape
    for b in prange(len(index)):
        action[b], reward[b], discount[b], last[b] = 0, NAN, NAN, -1
        if index[b] < 0:
            continue
        slot, e = index[b] // envs, index[b] % envs
        action[b] = kept_mark[slot, e] >> ACTION_SHIFT
        made, left = f32(0), f32(1)
        for _ in range(min(steps, steps_ahead(slot, head[0], slots))):
            mark = kept_mark[slot, e]
            made, left = add_step(made, left, kept_reward[slot, e], mark, gamma)
            last[b] = slot * envs + e
            slot = (slot + 1) % slots
            if mark & END_BITS:
                break
        reward[b], discount[b] = made, left


@njit(parallel=True)
def _weights(index, drawn, least, beta, weight):
    for b in prange(len(index)):
        if index[b] < 0:
            weight[b] = NAN
        else:
            weight[b] = weight_of(drawn[b], least, beta) if len(drawn) > 0 else f32(1)


@replay_gather.on_cuda
def _launch(index, head, *arrays):
    *ring, drawn, least, steps, gamma, beta = arrays[:11]
    _refuse_one_without_the_other(drawn, least)
    *outputs, stream = arrays[11:]
    slots, envs, floats = ring[0].shape
    kernel = cuda_c(
        "replay/replay_gather",
        "replay_gather_kernel",
        threads=THREADS,
        steps=int(steps),
        floats=floats,
        ints=ring[1].shape[2],
    )
    rows = len(index)
    sizes = (i32(n) for n in (rows, blocks(rows, GROUP), slots, envs))
    args = index, head, *ring, drawn, least, *sizes, gamma, beta, *outputs
    launch.launch(kernel, blocks(rows, THREADS), THREADS, args, stream)
