"""The replay ring: its layout, and the scalar steps that read it. Twin of include/replay.cuh.

Arrays `kept_*` are time-major, [slots, envs]: the transition of environment e that lies in slot k has
index k * envs + e. Slots are filled in order and then again from slot 0. A transition holds the state
its action was taken in and the state the action led to, before any reset, so that the newest one and
the last one of an episode are as complete as the others: every slot written can be sampled.
"""

import numpy as np

from lowgpu_kernels.device import f32, i32, scalar, u32, u64
from lowgpu_kernels.ops.replay.tree import leaves_of, sums_of

TERMINATED_BIT, TRUNCATED_BIT, END_BITS, ACTION_SHIFT = 1, 2, 3, 2
MOST_ACTIONS = 64  # what a byte holds above the two flags


def ring_arrays(slots, envs, floats, ints, prioritized=False):
    """Every array of a ring: {name: (shape, dtype)}. All start as zeros, `highest` as one.

    Args:
        slots: steps kept of each environment.
        envs: environments.
        floats, ints: float32 and int32 fields of a state.
        prioritized: whether a tree of priorities goes with it.

    Raises:
        ValueError: more transitions than an int32 index tells apart.
    """
    if slots * envs >= 2**31:
        raise ValueError(f"slots * envs must be below 2^31, got {slots} * {envs}; give fewer slots")
    made = {
        "head": ((3,), "int32"),
        "kept_floats": ((slots, envs, floats), "float32"),
        "kept_ints": ((slots, envs, ints), "int32"),
        "kept_next_floats": ((slots, envs, floats), "float32"),
        "kept_next_ints": ((slots, envs, ints), "int32"),
        "kept_reward": ((slots, envs), "float32"),
        "kept_mark": ((slots, envs), "uint8"),
    }
    if prioritized:
        leaves = leaves_of(slots * envs)
        made["priority"] = (leaves,), "float32"
        made["sums"] = (sums_of(leaves),), "uint64"
        made["highest"] = (1,), "float32"
    return made


def ring_nbytes(slots, envs, floats, ints, prioritized=False):
    """Bytes of all arrays of a ring."""
    made = ring_arrays(slots, envs, floats, ints, prioritized).values()
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in made)


@scalar
def mark_of(action, terminated, truncated):
    """A transition's action and flags in a byte."""
    ends = (TERMINATED_BIT if terminated else 0) | (TRUNCATED_BIT if truncated else 0)
    return np.uint8((i32(action) << ACTION_SHIFT) | ends)


@scalar
def steps_ahead(slot, head, slots):
    """Steps of an environment from `slot` to the newest one, both counted."""
    ahead = i32(head) - i32(slot)
    return ahead if ahead > 0 else ahead + i32(slots)


@scalar
def add_step(reward, discount, step_reward, mark, gamma):
    """(reward, discount) of a window with one more step; nothing follows a termination."""
    reward = reward + discount * step_reward
    # Select, not multiply: what nothing follows is exactly 0.
    return reward, f32(0) if mark & TERMINATED_BIT else discount * gamma


@scalar
def uniform_of(high, low, count):
    """An integer in [0, count) of two random words; count is below 2^32.

    The words as a 64-bit number, times count, over 2^64: no integer's probability is off by more than
    count / 2^64 of itself, where one word alone would be off by count / 2^32.
    """
    low_part = (u64(u32(low)) * u64(count)) >> u64(32)
    return (u64(u32(high)) * u64(count) + low_part) >> u64(32)
