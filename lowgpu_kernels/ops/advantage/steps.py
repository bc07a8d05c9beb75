"""The recursion of GAE: a step of it, and a group of steps in the registers of a kernel's thread.

A group is a few steps of one environment, the latest first: element k of its arrays is k + 1 rows of
`envs` before `end` in the flat arrays. `held` of them are there. The arrays' length is known to the
compiler, which unrolls the loops over them; where `held` is that length it drops the comparisons.
"""

from lowgpu_kernels.device import f32, for_kernels, scalar, u64
from lowgpu_kernels.device.reduce import merge_moments


@scalar
def ahead_of(ended, ahead):
    return f32(0) if ended else ahead


@scalar
def delta_of(reward, value, next_value, terminated, gamma):
    # Select, not multiply: 0 * NaN is NaN.
    return reward + (f32(0) if terminated else gamma * next_value) - value


@for_kernels
def read_group(inputs, end, envs, held, next_value, gamma, group):
    """Fills a group in and gives its earliest value. `next_value` is that of the step after it."""
    reward, value, terminated, truncated, final_value = inputs
    deltas, values, ends, limits, finals = group
    timed = truncated.shape[0] > 0
    some = False
    # No load here waits for another: past `held` the earliest step is read again, since a branch
    # would split them up. Final values come after all the rest, in the few groups that have any.
    for k in range(len(deltas)):
        at = end - u64(min(k + 1, held)) * envs
        deltas[k], values[k], ends[k] = reward[at], value[at], terminated[at]
        limits[k] = truncated[at] if timed else 0
    for k in range(len(deltas)):
        some = some or limits[k] != 0
        finals[k] = f32(0)
    if some:
        for k in range(len(deltas)):
            if limits[k] != 0:
                finals[k] = final_value[end - u64(min(k + 1, held)) * envs]
    for k in range(len(deltas)):
        following = finals[k] if limits[k] != 0 else next_value
        deltas[k] = delta_of(deltas[k], values[k], following, ends[k] != 0, gamma)
        ends[k] |= limits[k]
        next_value = values[k]
    return next_value


@for_kernels
def fill_group(outputs, end, envs, held, ahead, decay, group):
    """Writes a group and gives its earliest advantage. Leaves the advantages in `deltas`."""
    advantage, returns = outputs
    deltas, values, ends, _, _ = group
    for k in range(len(deltas)):
        if k < held:
            at = end - u64(k + 1) * envs
            ahead = deltas[k] + decay * ahead_of(ends[k] != 0, ahead)
            deltas[k] = ahead
            advantage[at] = ahead
            returns[at] = ahead + values[k]
    return ahead


@for_kernels
def add_group(count, mean, m2, x, held):
    """Moments with those of the first `held` of x; one division where adding each takes as many."""
    # Distances from one of them: equal values then have a mean without rounding.
    away = f32(0)
    for k in range(1, len(x)):
        if k < held:
            away += x[k] - x[0]
    middle = x[0] + away / f32(held)
    squares = f32(0)
    for k in range(len(x)):
        if k < held:
            squares += (x[k] - middle) * (x[k] - middle)
    return merge_moments(count, mean, m2, f32(held), middle, squares)
