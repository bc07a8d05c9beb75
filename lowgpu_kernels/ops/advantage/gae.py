"""Generalised advantage estimation over a rollout."""

import math

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer, absent
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import cuda, f32, i32, njit, u64
from lowgpu_kernels.device.reduce import block_moments
from lowgpu_kernels.dims import BOOL, F32, E, Float, Outputs, T
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.advantage.steps import (
    add_group,
    ahead_of,
    delta_of,
    fill_group,
    read_group,
)
from lowgpu_kernels.ops.stats.moments import THREADS as MOMENTS_THREADS
from lowgpu_kernels.ops.stats.moments import moments as moments_of
from lowgpu_kernels.ops.stats.moments import moments_kernel

THREADS = 128  # environments a block of gae_kernel; 64 is 20 % slower (H200, 2026-12-01)
# Steps whose loads gae_kernel has in flight at once. With 4 an SM of 65536 registers holds 1024
# threads, so 131072 environments run in one wave on 132 SMs; with 8 it does not, and takes 13 % longer
# (H200, 2026-12-01).
GROUP = 4
# Of gae.cu's kernels, for few environments. Measured beside five other shapes: docs/decisions.md.
SCAN_THREADS = 256  # threads a block of gae_scan_kernel at most
SCAN_GROUP = 16  # steps a thread of it holds in registers
LANES = 32  # environments a block of it: one warp reads one 128 B line of each array a step
MERGE_THREADS = 128  # threads of gae_merge_kernel
# Environments an SM from which gae_kernel is the faster of the two. With limits that is between 16384 on
# 132 SMs, where the scan takes 11 % less, and 32768, where it takes 10 to 17 % more; without limits it is
# at 65536 (H200, 2026-12-01).
WIDE_ENVS = 186


def shape_of(steps, envs, sms):
    """Environments a block, and how many parts of their time it works on at once.

    1 part is gae_kernel's, for many environments or too few steps to cut; gae.cu's kernels have more.
    """
    if steps <= SCAN_GROUP or envs >= WIDE_ENVS * sms:
        return THREADS, 1
    lanes = min(LANES, _power_of_two(envs))
    most = SCAN_THREADS // lanes
    # A power of two of threads, and a warp at least.
    return lanes, min(max(_power_of_two(blocks(steps, SCAN_GROUP)), launch.WARP // lanes), most)


def _power_of_two(count):
    return 1 << max(count - 1, 0).bit_length()


def _partials_shape(sizes, params):
    lanes, _ = shape_of(sizes["T"], sizes["E"], launch.device().sms)
    return blocks(sizes["E"], lanes), 3


@op(
    # The recursion's roundings, a few a step, and those of merging moments: a thread's groups one
    # after the other, threads and blocks' results few by few.
    error=lambda T, E, **_: 8 * (T + 1) + 4 * (24 + E / LANES / MERGE_THREADS),
    scratch={"partials": ("float32", _partials_shape)},
    bench=("T=128 E=4096", "T=64 E=16384", "T=128 E=131072", "T=65536 E=4"),
    flops=lambda T, E, **_: 15 * T * E,
)
def gae(
    reward: F32[T, E],
    value: F32[T, E],
    last_value: F32[E],
    terminated: BOOL[T, E],
    truncated: BOOL[T, E] | None = None,
    final_value: F32[T, E] | None = None,
    *,
    gamma: Float(0, 1) = 0.99,
    lam: Float(0, 1) = 0.95,
) -> Outputs(advantage=F32[T, E], returns=F32[T, E], moments=F32[2]):
    """Advantage of each action over the value estimate, and the return the value is trained on.

        next_value[t] = 0                 where terminated[t]
                        final_value[t]    where truncated[t]
                        value[t+1]        elsewhere; value[T] is last_value
        delta[t]      = reward[t] + gamma * next_value[t] - value[t]
        advantage[t]  = delta[t] + gamma * lam * advantage[t+1]   cut where either flag is set
        returns[t]    = advantage[t] + value[t]
        moments       = mean and population standard deviation of advantage, over all T * E

    The same call repeats bit for bit on one GPU; GPUs that cut time or environments otherwise round
    otherwise.

    Args:
        reward: reward of step t, in the environment's own unit.
        value: V(s[t]), same unit as reward.
        last_value: V(s[T]), the bootstrap after the last step; not read where step T-1 ended.
        terminated: whether step t ended the episode for good; nothing follows.
        truncated: whether step t ended the episode by a limit; its value goes on.
        final_value: V of the state step t led to, read where truncated and nowhere else. Needed
            with truncated.
        gamma: discount per step, in [0, 1].
        lam: mixing of n-step returns, in [0, 1]; 0 is TD(0), 1 is Monte Carlo.

    Returns:
        advantage: not normalised, same unit as reward.
        returns: advantage + value, to one rounding.
        moments: (mean, std), same unit as reward, as `moments` and `normalize` have them: advantages
            that are all equal give exactly their value and 0, no advantages give (0, 0).

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that disagree on T or E; truncated without final_value, or the reverse;
            on the CPU, a final_value that is not finite where truncated. On a GPU nothing can be
            raised without waiting: the NaN comes out in the advantage.

    Source: Schulman et al. 2016, eq. 16 (arXiv:1506.02438); time limits as in Pardo et al. 2018
    (arXiv:1712.00378).
    """
    steps, envs = reward.shape
    advantage = np.zeros((steps, envs), reward.dtype)
    for e in range(envs):
        ahead, next_value = 0.0, last_value[e]
        for t in reversed(range(steps)):
            if terminated[t, e]:
                ahead, next_value = 0.0, 0.0
            elif truncated is not None and truncated[t, e]:
                ahead, next_value = 0.0, final_value[t, e]
            ahead = reward[t, e] + gamma * next_value - value[t, e] + gamma * lam * ahead
            advantage[t, e] = ahead
            next_value = value[t, e]
    both = (advantage.mean(), advantage.std()) if advantage.size else (0, 0)
    return advantage, advantage + value, np.array(both)


@gae.draws
def _draw(rng, sizes, params):
    shape = sizes[T], sizes[E]
    truncated = rng.random(shape) < 0.1
    final = rng.normal(size=shape).astype("f4")
    final[~truncated] = np.nan  # must not be read there
    return {"terminated": rng.random(shape) < 0.1, "truncated": truncated, "final_value": final}


def _refuse_one_without_the_other(truncated, final_value):
    if (truncated is None) != (final_value is None):
        raise ValueError("gae needs truncated and final_value together")


@gae.checks
def _check(truncated, final_value, **_):
    _refuse_one_without_the_other(truncated, final_value)
    if truncated is not None and not np.isfinite(final_value[truncated]).all():
        t, e = np.argwhere(truncated & ~np.isfinite(final_value))[0]
        raise ValueError(
            f"final_value[{t}, {e}] is {final_value[t, e]} where truncated: give V of the state "
            "the step led to"
        )


@gae.on_cpu
def _cpu(reward, value, last_value, terminated, truncated, final_value, gamma, lam, *outputs):
    advantage, returns, moments, partials = outputs
    if truncated is None:
        truncated, final_value = absent(terminated, 2), absent(reward, 2)
    inputs = reward, value, last_value, terminated, truncated, final_value
    _cpu_loop(*inputs, gamma, lam, advantage, returns)
    moments_of.cpu(advantage.reshape(-1), False, moments, partials)


@njit(parallel=True)
def _cpu_loop(
    reward, value, last_value, terminated, truncated, final_value, gamma, lam, advantage, returns
):
    steps, envs = reward.shape
    limits = truncated.shape[0] > 0
    for e in prange(envs):
        ahead, next_value = f32(0), last_value[e]
        for t in range(steps - 1, -1, -1):
            limit = limits and truncated[t, e]
            if limit:
                next_value = final_value[t, e]
            delta = delta_of(reward[t, e], value[t, e], next_value, terminated[t, e], gamma)
            ahead = delta + gamma * lam * ahead_of(limit or terminated[t, e], ahead)
            next_value = value[t, e]
            advantage[t, e] = ahead
            returns[t, e] = ahead + next_value


@launch.kernel(threads=THREADS)
def gae_kernel(
    reward,
    value,
    last_value,
    terminated,
    truncated,
    final_value,
    gamma,
    lam,
    steps,
    advantage,
    returns,
    partials,
):
    # A thread owns an environment and walks back through its steps, a group at a time, so several
    # steps' loads are in flight before the first is used. Lanes of a warp hold neighbouring
    # environments: every load is one coalesced row, and memory is passed over once.
    counts = cuda.shared.array(THREADS, f32)
    means = cuda.shared.array(THREADS, f32)
    m2s = cuda.shared.array(THREADS, f32)
    deltas = cuda.local.array(GROUP, f32)
    values = cuda.local.array(GROUP, f32)
    ends = cuda.local.array(GROUP, np.uint8)
    limits = cuda.local.array(GROUP, np.uint8)
    finals = cuda.local.array(GROUP, f32)
    group = deltas, values, ends, limits, finals
    inputs = reward, value, terminated, truncated, final_value
    outputs = advantage, returns
    e, envs = u64(cuda.grid(1)), u64(last_value.shape[0])
    count, mean, m2 = f32(0), f32(0), f32(0)
    # Threads without an environment stay for the block's moments.
    if e < envs:
        ahead, next_value, decay = f32(0), last_value[e], gamma * lam
        end = u64(steps) * envs + e
        for _ in range(steps // GROUP):
            next_value = read_group(inputs, end, envs, GROUP, next_value, gamma, group)
            ahead = fill_group(outputs, end, envs, GROUP, ahead, decay, group)
            count, mean, m2 = add_group(count, mean, m2, deltas, GROUP)
            end -= u64(GROUP) * envs
        held = steps % GROUP
        if held > 0:
            read_group(inputs, end, envs, held, next_value, gamma, group)
            fill_group(outputs, end, envs, held, ahead, decay, group)
            count, mean, m2 = add_group(count, mean, m2, deltas, held)
    count, mean, m2 = block_moments(counts, means, m2s, count, mean, m2)
    if cuda.threadIdx.x == 0:
        block = cuda.blockIdx.x
        partials[block, 0], partials[block, 1], partials[block, 2] = count, mean, m2


@gae.on_cuda
def _launch(reward, value, last_value, terminated, truncated, final_value, gamma, lam, *outputs):
    advantage, returns, moments, partials, stream = outputs
    _refuse_one_without_the_other(truncated, final_value)
    steps, envs = reward.shape
    lanes, chunks = shape_of(steps, envs, launch.device().sms)
    inputs = reward, value, last_value, terminated, truncated, final_value
    results = advantage, returns, partials
    if chunks == 1:
        _launch_wide(inputs, gamma, lam, i32(steps), results, stream)
        moments_kernel[1, MOMENTS_THREADS, stream](partials, f32(0), moments)
        return
    scan, merge = (scan_kernel(name, truncated is not None) for name in ("scan", "merge"))
    early = launch.from_the_wait()
    grid, bits = len(partials), i32(lanes.bit_length() - 1)
    args = *inputs, gamma, lam, i32(steps), i32(envs), bits, *results
    launch.launch(scan, grid, lanes * chunks, args, stream, early=early)
    launch.launch(merge, 1, MERGE_THREADS, (partials, i32(grid), moments), stream, early=early)


def scan_kernel(name, limits):
    """One of gae.cu's kernels, "scan" or "merge"."""
    sizes = {"threads": SCAN_THREADS, "group": SCAN_GROUP, "merge_threads": MERGE_THREADS}
    # With final values, registers for two blocks an SM are not enough.
    choices = {"limits": limits, "resident": 1 if limits else 2}
    return cuda_c("advantage/gae", f"gae_{name}_kernel", **sizes, **choices)


def _launch_wide(inputs, gamma, lam, steps, results, stream):
    reward, value, last_value, terminated, truncated, final_value = inputs
    advantage, returns, partials = results
    if truncated is None:
        truncated, final_value = absent(terminated, 1), absent(reward, 1)
    flags = (_flat(array, np.uint8) for array in (terminated, truncated))
    inputs = _flat(reward), _flat(value), last_value, *flags, _flat(final_value)
    results = _flat(advantage), _flat(returns), partials
    gae_kernel[len(partials), THREADS, stream](*inputs, gamma, lam, steps, *results)


def _flat(array, dtype=None):
    """The same memory as a vector, read as another type of the same width."""
    dtype = array.dtype if dtype is None else np.dtype(dtype)
    if isinstance(array, np.ndarray):
        return array.reshape(-1).view(dtype)
    return Buffer(array.address, (math.prod(array.shape),), dtype)
