"""Samples made of random words: a pair of normals, an action. Twin of include/draws.cuh."""

import math

from numba.extending import register_jitable

from lowgpu_kernels import launch
from lowgpu_kernels.device import f32, i32, scalar
from lowgpu_kernels.device.maths import INFINITY, NAN, cos_f32, exp_f32, log_f32, sin_f32
from lowgpu_kernels.device.philox import unit

TWO_PI = f32(6.283185307179586)

# In the simulator a kernel's arrays are Python objects, which compiled code cannot take: there the
# functions that read a row stay Python, and only compiled callers get them compiled.
over_a_row = register_jitable if launch.SIMULATED else scalar


@scalar
def normal_pair(a, b):
    """Two independent standard normal float32 from two words.

    Args:
        a: word the radius is made of, uint32.
        b: word the angle is made of, uint32.

    Returns:
        Two values, at most sqrt(48 ln 2) = 5.77 in size: 24-bit uniforms reach no further.

    Source: Box & Muller 1958.
    """
    # 1 - unit is exact and in (0, 1], so the logarithm is finite.
    radius = math.sqrt(f32(-2) * log_f32(f32(1) - unit(a)))
    angle = TWO_PI * unit(b)
    return radius * cos_f32(angle), radius * sin_f32(angle)


@over_a_row
def softmax(logits, row, actions):
    """What is needed of a row's softmax: largest logit, sum of e^(logit - largest), entropy.

    The largest is NaN where the row has no softmax: a NaN, a +inf, or nothing but -inf.

    Args:
        logits: float32 [rows, >= actions].
        row: the row to read.
        actions: number of leading columns that are logits.
    """
    largest = -INFINITY
    valid = True
    for a in range(actions):
        logit = logits[row, a]
        # Written so that NaN, which compares false, is refused as well.
        valid = valid and logit < INFINITY
        if logit > largest:
            largest = logit
    if not valid or largest == -INFINITY:
        return NAN, NAN, NAN
    total, weighted = f32(0), f32(0)
    for a in range(actions):
        below = logits[row, a] - largest
        weight = exp_f32(below)
        # A weight of zero has below = -inf or nearly: 0 * -inf would be NaN.
        if weight > f32(0):
            total += weight
            weighted += weight * below
    return largest, total, log_f32(total) - weighted / total


@over_a_row
def categorical(logits, row, actions, u):
    """An action drawn from softmax(logits[row, :actions]), its log-probability, and the entropy.

    The action is the first whose cumulative probability exceeds u. Rounding can leave u past the
    last edge: then it is the last action that can occur at all. One of probability zero is never
    drawn. Where there is no softmax the action is -1 and the other two are NaN.

    Args:
        logits: float32 [rows, >= actions]; -inf masks an action.
        row: the row to draw for.
        actions: number of leading columns that are logits.
        u: float32 in [0, 1).

    Returns:
        action (int32), log_probability and entropy (float32, nats).
    """
    largest, total, entropy = softmax(logits, row, actions)
    if largest != largest:
        return i32(-1), NAN, NAN
    target = f32(u) * total
    reached, chosen = f32(0), i32(-1)
    for a in range(actions):
        if reached <= target:
            weight = exp_f32(logits[row, a] - largest)
            if weight > f32(0):
                reached += weight
                chosen = i32(a)
    return chosen, (logits[row, chosen] - largest) - log_f32(total), entropy


@over_a_row
def greedy(logits, row, actions):
    """The first action of the largest logit, its log-probability, and the entropy.

    Arguments, results and the row without a softmax are as for `categorical`.
    """
    largest, total, entropy = softmax(logits, row, actions)
    if largest != largest:
        return i32(-1), NAN, NAN
    chosen = i32(actions - 1)
    for a in range(actions - 1, -1, -1):
        if logits[row, a] == largest:
            chosen = i32(a)
    return chosen, -log_f32(total), entropy
