"""Generalised advantage estimation over a rollout."""

import numpy as np
from numba import njit, prange

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import absent
from lowgpu_kernels.device import cuda, f32, i32, scalar
from lowgpu_kernels.dims import BOOL, F32, E, Float, Outputs, T
from lowgpu_kernels.op import blocks, op

ENVS = 32  # environments a block: one warp reads one 128 B line of each array a step
THREADS = 512  # so time is cut into 16 chunks, more where there are fewer environments. Untuned.


@op(
    error=lambda T, **_: 8 * (T + 1),
    bench=("T=128 E=4096", "T=64 E=16384", "T=128 E=131072", "T=65536 E=4"),
    flops=lambda T, E, **_: 9 * T * E,
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
) -> Outputs(advantage=F32[T, E], returns=F32[T, E]):
    """Advantage of each action over the value estimate, and the return the value is trained on.

        next_value[t] = 0                 where terminated[t]
                        final_value[t]    where truncated[t]
                        value[t+1]        elsewhere; value[T] is last_value
        delta[t]      = reward[t] + gamma * next_value[t] - value[t]
        advantage[t]  = delta[t] + gamma * lam * advantage[t+1]   cut where either flag is set
        returns[t]    = advantage[t] + value[t]

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
    return advantage, advantage + value


@gae.draws
def _draw(rng, sizes, params):
    shape = sizes[T], sizes[E]
    truncated = rng.random(shape) < 0.1
    final = rng.normal(size=shape).astype("f4")
    final[~truncated] = np.nan  # must not be read there
    return {"terminated": rng.random(shape) < 0.1, "truncated": truncated, "final_value": final}


@gae.checks
def _check(truncated, final_value, **_):
    if (truncated is None) != (final_value is None):
        raise ValueError("gae needs truncated and final_value together")
    if truncated is not None and not np.isfinite(final_value[truncated]).all():
        t, e = np.argwhere(truncated & ~np.isfinite(final_value))[0]
        raise ValueError(
            f"final_value[{t}, {e}] is {final_value[t, e]} where truncated: give V of the state "
            "the step led to"
        )


@scalar
def ahead_of(ended, ahead):
    return f32(0) if ended else ahead


@scalar
def delta_of(reward, value, next_value, terminated, gamma):
    # Select, not multiply: 0 * NaN is NaN.
    return reward + (f32(0) if terminated else gamma * next_value) - value


@gae.on_cpu
def _cpu(reward, value, last_value, terminated, truncated, final_value, gamma, lam, *outputs):
    if truncated is None:
        truncated, final_value = absent(terminated, 2), absent(reward, 2)
    _cpu_loop(reward, value, last_value, terminated, truncated, final_value, gamma, lam, *outputs)


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
    length,
    advantage,
    returns,
):
    # A block owns blockDim.x environments and cuts time into blockDim.y chunks of `length` steps,
    # one thread each.
    # Lanes of a warp hold neighbouring environments, so every load is one coalesced row. A chunk is
    # an affine map of the advantage that follows it, ahead -> offset + slope * ahead: each thread
    # works out its own map, walks the maps behind it in shared memory, then fills its chunk in.
    offsets = cuda.shared.array(THREADS, f32)
    slopes = cuda.shared.array(THREADS, f32)
    steps, envs = reward.shape
    lanes = cuda.blockDim.x
    lane, chunk = cuda.threadIdx.x, cuda.threadIdx.y
    e = cuda.blockIdx.x * lanes + lane
    first = min(chunk * length, steps)
    last = min(first + length, steps)
    limits = truncated.shape[0] > 0
    decay = gamma * lam
    offset, slope = f32(0), f32(1)
    if e < envs:
        next_value = value[last, e] if last < steps else last_value[e]
        for t in range(last - 1, first - 1, -1):
            limit = limits and truncated[t, e]
            if limit:
                next_value = final_value[t, e]
            ended = limit or terminated[t, e]
            delta = delta_of(reward[t, e], value[t, e], next_value, terminated[t, e], gamma)
            offset = delta + decay * ahead_of(ended, offset)
            slope = decay * ahead_of(ended, slope)
            next_value = value[t, e]
        offsets[chunk * lanes + lane] = offset
        slopes[chunk * lanes + lane] = slope
    cuda.syncthreads()
    if e < envs:
        ahead = f32(0)
        for c in range(cuda.blockDim.y - 1, chunk, -1):
            ahead = offsets[c * lanes + lane] + slopes[c * lanes + lane] * ahead
        next_value = value[last, e] if last < steps else last_value[e]
        for t in range(last - 1, first - 1, -1):
            limit = limits and truncated[t, e]
            if limit:
                next_value = final_value[t, e]
            delta = delta_of(reward[t, e], value[t, e], next_value, terminated[t, e], gamma)
            ahead = delta + decay * ahead_of(limit or terminated[t, e], ahead)
            next_value = value[t, e]
            advantage[t, e] = ahead
            returns[t, e] = ahead + next_value


@gae.on_cuda
def _launch(
    reward, value, last_value, terminated, truncated, final_value, gamma, lam, *outputs_and_stream
):
    advantage, returns, stream = outputs_and_stream
    steps, envs = reward.shape
    if truncated is None:
        truncated, final_value = absent(terminated, 2), absent(reward, 2)
    lanes = min(ENVS, 1 << max(envs - 1, 0).bit_length())  # few environments: more chunks instead
    chunks = THREADS // lanes
    gae_kernel[blocks(envs, lanes), (lanes, chunks), stream](
        reward,
        value,
        last_value,
        terminated,
        truncated,
        final_value,
        gamma,
        lam,
        i32(blocks(steps, chunks)),
        advantage,
        returns,
    )
