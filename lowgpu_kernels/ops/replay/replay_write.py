"""Steps of a rollout into the replay ring."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import i32, njit, u64
from lowgpu_kernels.dims import BOOL, F32, I32, U8, U64, E, F, G, K, L, T, W
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.replay.ring import MOST_ACTIONS, mark_of
from lowgpu_kernels.ops.replay.tree import FAN, UNIT, leaves_of, sums_of, units_of, widths_of

THREADS = 128  # a warp a group of leaves; little work each, so many blocks. Untuned.
CHANGES = (
    *("head", "kept_floats", "kept_ints", "kept_next_floats", "kept_next_ints"),
    *("kept_reward", "kept_mark", "priority", "sums"),
)


@op(
    error=lambda **_: 0,  # copies, and integers
    changes=CHANGES,
    sizes=lambda params, sizes: ring_sizes(sizes),
    bench=("T=1 E=4096 K=256 F=2 G=2", "T=64 E=16384 K=64 F=2 G=2"),
)
def replay_write(
    state_floats: F32[T, E, F],
    state_ints: I32[T, E, G],
    action: I32[T, E],
    reward: F32[T, E],
    terminated: BOOL[T, E],
    truncated: BOOL[T, E],
    next_floats: F32[T, E, F],
    next_ints: I32[T, E, G],
    head: I32[3],
    kept_floats: F32[K, E, F],
    kept_ints: I32[K, E, G],
    kept_next_floats: F32[K, E, F],
    kept_next_ints: I32[K, E, G],
    kept_reward: F32[K, E],
    kept_mark: U8[K, E],
    priority: F32[L] | None = None,
    sums: U64[W] | None = None,
    highest: F32[1] | None = None,
):
    """Append T steps of E environments to a ring of K steps, over the oldest ones.

        slot              = (head[0] + t) mod K                        for the last K of the T steps
        kept_x[slot]      = x[t]
        kept_mark[slot]   = action[t] << 2 | truncated[t] << 1 | terminated[t]
        priority[slot, e] = highest;  sums follow
        head              = (head[0] + T) mod K, min(head[1] + T, K), 0

    Data may be sampled by what is queued behind this call on the same stream, or waits for an event
    recorded behind it.

    Args:
        state_floats, state_ints: the state each action was taken in.
        action: in [0, 64).
        reward: in the environment's own unit.
        terminated, truncated: how the episode ended at this step, if it did.
        next_floats, next_ints: the state the step led to, before any reset.
        head: slot the next step goes to, slots filled, and a count that is 0 between calls.
        kept_floats, kept_ints, kept_next_floats, kept_next_ints, kept_reward, kept_mark: the ring.
        priority: leaves of its tree, index k * E + e; 0 where nothing is.
        sums: of the leaves, all levels.
        highest: priority of a new transition; `priority_update` raises it.

    Changes: head, the ring, priority, sums.

    Raises:
        ValueError: shapes that disagree; some of priority, sums and highest without the others; on
            the CPU, an action out of range.

    Source: the order of a ring is ours; new transitions at the highest priority seen, Schaul et al.
    2016, algorithm 1 (arXiv:1511.05952).
    """
    _refuse_half_a_tree(priority, sums, highest)
    (steps, envs), slots = action.shape, len(kept_mark)
    for t in range(steps):
        slot = (int(head[0]) + t) % slots
        kept_floats[slot], kept_ints[slot] = state_floats[t], state_ints[t]
        kept_next_floats[slot], kept_next_ints[slot] = next_floats[t], next_ints[t]
        kept_reward[slot] = reward[t]
        kept_mark[slot] = 4 * action[t] + 2 * truncated[t] + terminated[t]
        if priority is not None:
            priority[slot * envs : (slot + 1) * envs] = highest[0]
    if priority is not None:
        sums[:] = spec_sums(priority)
    head[:] = (int(head[0]) + steps) % slots, min(int(head[1]) + steps, slots), 0


def spec_sums(priority):
    """Every level of sums of leaves, as a spec adds them up: from nothing."""
    below = np.rint(priority / UNIT).astype(np.uint64)
    levels = []
    for width in widths_of(len(priority)):
        whole = np.zeros(width, np.uint64)
        whole[: len(below) // FAN] = below.reshape(-1, FAN).sum(1, dtype=np.uint64)
        levels.append(whole)
        below = whole
    return np.concatenate(levels)


def ring_sizes(sizes):
    """The dimensions of a ring and its tree: there is at least one transition, of something."""
    at_least_one = {d: max(1, sizes.get(d, 1)) for d in (E, K, F, G)}
    leaves = leaves_of(at_least_one[E] * at_least_one[K])
    return at_least_one | {L: leaves, W: sums_of(leaves)}


@replay_write.draws
def _draw(rng, sizes, params):
    wide, slots = sizes[E], sizes[K]
    full = rng.random() < 0.5
    head = rng.integers(slots)
    priority = np.zeros(sizes[L])
    filled = wide * (slots if full else head)
    priority[:filled] = rng.integers(1, 2**22, size=filled) * UNIT
    return {
        "action": rng.integers(MOST_ACTIONS, size=(sizes[T], wide)),
        "head": [head, slots if full else head, 0],
        "priority": priority,
        "sums": spec_sums(priority),
        "highest": [rng.integers(1, 2**24) * UNIT],
    }


def _refuse_half_a_tree(priority, sums, highest):
    given = [array is not None for array in (priority, sums, highest)]
    if any(given) and not all(given):
        raise ValueError("replay_write needs priority, sums and highest together")


@replay_write.checks
def _check(action, **_):
    wrong = np.argwhere((action < 0) | (action >= MOST_ACTIONS))
    if len(wrong):
        t, e = wrong[0]
        raise ValueError(f"action[{t}, {e}] must be in [0, {MOST_ACTIONS}), got {action[t, e]}")


@replay_write.on_cpu
def _cpu(*arrays):
    priority, sums, highest = arrays[-3:]
    _refuse_half_a_tree(priority, sums, highest)
    head, marks = arrays[8], arrays[14]
    slots, envs = marks.shape
    steps = len(arrays[2])
    first = max(0, steps - slots)
    _copy(*arrays[:15], first)
    if priority is not None:
        widths = widths_of(len(priority))
        for t in range(first, steps):
            slot = (int(head[0]) + t) % slots
            _raise_leaves(priority, sums, widths, slot * envs, (slot + 1) * envs, highest[0])
    if steps:
        head[:] = (int(head[0]) + steps) % slots, min(int(head[1]) + steps, slots), 0


@njit
def _copy(
    state_floats,
    state_ints,
    action,
    reward,
    terminated,
    truncated,
    next_floats,
    next_ints,
    head,
    kept_floats,
    kept_ints,
    kept_next_floats,
    kept_next_ints,
    kept_reward,
    kept_mark,
    first,
):
    steps, envs = action.shape
    slots = len(kept_mark)
    for t in range(first, steps):
        slot = (int(head[0]) + t) % slots
        kept_floats[slot], kept_ints[slot] = state_floats[t], state_ints[t]
        kept_next_floats[slot], kept_next_ints[slot] = next_floats[t], next_ints[t]
        kept_reward[slot] = reward[t]
        for e in range(envs):
            kept_mark[slot, e] = mark_of(action[t, e], terminated[t, e], truncated[t, e])


@njit
def _raise_leaves(priority, sums, widths, start, end, highest):
    for leaf in range(start, end):
        # Unsigned, so a difference below zero wraps around and the sum wraps back.
        more = u64(units_of(highest) - units_of(priority[leaf]))
        priority[leaf] = highest
        place, level = leaf, 0
        for width in widths:
            place //= FAN
            sums[level + place] += more
            level += width


@replay_write.on_cuda
def _launch(*arrays):
    *arrays, stream = arrays
    priority, sums, highest = arrays[-3:]
    _refuse_half_a_tree(priority, sums, highest)
    (slots, envs), steps = arrays[14].shape, arrays[2].shape[0]
    fields = {"floats": arrays[0].shape[2], "ints": arrays[1].shape[2]}
    leaves = leaves_of(slots * envs)
    kernel = cuda_c(
        "replay/replay_write",
        "replay_write_kernel",
        threads=THREADS,
        levels=len(widths_of(leaves)),
        prioritized=priority is not None,
        **fields,
    )
    # A step's first leaf lies anywhere in its group, so its groups may start before it.
    grid = blocks(envs + FAN - 1, THREADS) * min(steps, slots)
    args = *arrays, i32(steps), i32(slots), i32(envs), i32(leaves // FAN)
    launch.launch(kernel, grid, THREADS, args, stream)
