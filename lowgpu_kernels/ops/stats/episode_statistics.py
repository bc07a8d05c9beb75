"""How the episodes that ended in a rollout went."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, f32, i32, njit
from lowgpu_kernels.device.reduce import block_sum
from lowgpu_kernels.dims import BOOL, F32, I32, E, T
from lowgpu_kernels.op import blocks, op

THREADS = 128  # environments a block. Untuned.


@op(
    # A return is a sum of T rewards, each term off by T roundings, and its square by twice that.
    # Then a sum of T squares, THREADS of them as a tree, and the blocks' sums.
    error=lambda T, E, **_: 2 * (T + 1) * (T + 2) + T + E / THREADS / THREADS + 16,
    changes=("running_return", "running_length"),
    scratch={"partials": ("float32", lambda sizes, params: (blocks(sizes["E"], THREADS), 4))},
    bench=("T=128 E=4096", "T=128 E=131072"),
    flops=lambda T, E, **_: 2 * T * E,
)
def episode_statistics(
    reward: F32[T, E],
    terminated: BOOL[T, E],
    truncated: BOOL[T, E],
    running_return: F32[E],
    running_length: I32[E],
) -> F32[4]:
    """Sums over the episodes that ended within a rollout, and the state of those still going.

        running_return[e] += reward[t, e];  running_length[e] += 1
        where terminated[t, e] or truncated[t, e]: the episode counts, and both start again at 0

    Mean return, mean length and standard error follow from the sums; sums of several rollouts add.

    Args:
        reward: reward of step t, in the environment's own unit.
        terminated: whether step t ended the episode for good.
        truncated: whether step t ended the episode by a limit.
        running_return: undiscounted return so far of the episode each environment is in.
        running_length: its steps so far.

    Changes: running_return, running_length.

    Returns:
        (episodes, sum of returns, sum of lengths in steps, sum of squared returns). Counts are exact
        up to 2^24.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that disagree on T or E.

    Source: the statistics that gymnasium's RecordEpisodeStatistics gives of each episode, summed.
    """
    sums = np.zeros(4)
    for e in range(len(running_return)):
        for t in range(len(reward)):
            running_return[e] += reward[t, e]
            running_length[e] += 1
            if terminated[t, e] or truncated[t, e]:
                g = running_return[e]
                sums += (1, g, running_length[e], g * g)
                running_return[e], running_length[e] = 0, 0
    return sums


@episode_statistics.draws
def _draw(rng, sizes, params):
    # Within [-1, 1], so that squares stay within the error's scale.
    return {
        "reward": rng.uniform(-1, 1, (sizes[T], sizes[E])),
        "running_return": rng.uniform(-1, 1, sizes[E]),
    }


@episode_statistics.on_cpu
def _cpu(reward, terminated, truncated, running_return, running_length, out, partials):
    sums = np.zeros((reward.shape[1], 4))
    _cpu_loop(reward, terminated, truncated, running_return, running_length, sums)
    out[:] = sums.sum(axis=0)


@njit(parallel=True)
def _cpu_loop(reward, terminated, truncated, running_return, running_length, sums):
    steps, envs = reward.shape
    for e in prange(envs):
        total, length = running_return[e], running_length[e]
        for t in range(steps):
            total += reward[t, e]
            length += i32(1)
            if terminated[t, e] or truncated[t, e]:
                sums[e, 0] += 1
                sums[e, 1] += total
                sums[e, 2] += length
                sums[e, 3] += float(total) * total
                total, length = f32(0), i32(0)
        running_return[e], running_length[e] = total, length


@launch.kernel(threads=THREADS)
def episode_statistics_partial_kernel(
    reward, terminated, truncated, running_return, running_length, partials
):
    # A thread owns an environment and walks its steps; a warp reads neighbours of one step. A block
    # leaves four partial sums.
    shared = cuda.shared.array(THREADS, f32)
    steps, envs = reward.shape
    e = cuda.grid(1)
    episodes, returns, lengths, squares = f32(0), f32(0), f32(0), f32(0)
    if e < envs:
        total, length = running_return[e], running_length[e]
        for t in range(steps):
            total += reward[t, e]
            length = i32(length + i32(1))
            if terminated[t, e] or truncated[t, e]:
                episodes += f32(1)
                returns += total
                lengths += f32(length)
                squares += total * total
                total, length = f32(0), i32(0)
        running_return[e], running_length[e] = total, length
    block = cuda.blockIdx.x
    episodes, returns = block_sum(shared, episodes), block_sum(shared, returns)
    lengths, squares = block_sum(shared, lengths), block_sum(shared, squares)
    if cuda.threadIdx.x == 0:
        partials[block, 0], partials[block, 1] = episodes, returns
        partials[block, 2], partials[block, 3] = lengths, squares


@launch.kernel(threads=THREADS)
def episode_statistics_kernel(partials, out):
    # One block: a thread adds every blockDim-th partial sum, then the threads add.
    shared = cuda.shared.array(THREADS, f32)
    for k in range(4):
        value = f32(0)
        for i in range(cuda.threadIdx.x, partials.shape[0], THREADS):
            value += partials[i, k]
        value = block_sum(shared, value)
        if cuda.threadIdx.x == 0:
            out[k] = value


@episode_statistics.on_cuda
def _launch(reward, terminated, truncated, running_return, running_length, out, partials, stream):
    envs = len(running_return)
    episode_statistics_partial_kernel[blocks(envs, THREADS), THREADS, stream](
        reward, terminated, truncated, running_return, running_length, partials
    )
    episode_statistics_kernel[1, THREADS, stream](partials, out)
