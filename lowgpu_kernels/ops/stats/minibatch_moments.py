"""Mean and standard deviation of every minibatch of an epoch, in one launch."""

import math

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, f32, i32, njit
from lowgpu_kernels.device.reduce import add_to_moments, block_moments, deviation_of
from lowgpu_kernels.dims import F32, FLAG, I32, Int, M, N
from lowgpu_kernels.op import blocks, op

# The largest block there is: there are few minibatches, so few blocks. Untuned.
THREADS = 1024
WARP = 32


@op(
    # Values one thread takes in turn, then ten merges.
    error=lambda minibatch, **_: 4 * (minibatch / THREADS + 24),
    sizes=lambda params, sizes: {M: blocks(sizes[N], params["minibatch"])},
    bench=("N=262144 minibatch=8192", "N=8388608 minibatch=262144"),
    flops=lambda N, **_: 6 * N,
)
def minibatch_moments(
    x: F32[N], index: I32[N], *, minibatch: Int(1), unbiased: FLAG = False
) -> F32[M, 2]:
    """Mean and standard deviation of x over each run of `minibatch` indices.

        group[m] = x[index[m * minibatch : (m + 1) * minibatch]]
        out[m]   = mean and standard deviation of group[m];  (0, 1) where the group is one value

    M is N / minibatch, rounded up; the last group holds what is left. (0, 1) for a group of one
    makes `(x - mean) / (std + eps)` leave the value as it is, where a deviation of 0 or NaN would
    destroy it. Values that are all equal give exactly their value and 0.

    Args:
        x: values, such as the advantages of a rollout.
        index: order the values are taken in, each in [0, N).
        minibatch: values in a group, at least 1.
        unbiased: divide by one less than the group's size, as torch.std does.

    Returns:
        (mean, std) of each group, in the unit of x.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: on the CPU, an index out of range. On a GPU it is undefined.

    Source: Chan, Golub & LeVeque 1979, eq. 2.1; a single value as in Stable-Baselines3's PPO.
    """
    groups = [x[index[i : i + minibatch]] for i in range(0, len(x), minibatch)]
    return np.array(
        [(0, 1) if len(g) == 1 else (g.mean(), g.std(ddof=int(unbiased))) for g in groups]
    ).reshape(-1, 2)


@minibatch_moments.draws
def _draw(rng, sizes, params):
    return {"index": rng.permutation(sizes[N])}


@minibatch_moments.checks
def _check(index, **_):
    wrong = np.flatnonzero((index < 0) | (index >= len(index)))
    if len(wrong):
        i = wrong[0]
        raise ValueError(f"index[{i}] must be in [0, {len(index)}), got {index[i]}")


@minibatch_moments.on_cpu
@njit(parallel=True)
def _cpu(x, index, minibatch, unbiased, out):
    for m in prange(out.shape[0]):
        first = m * int(minibatch)
        last = min(first + int(minibatch), len(index))
        if last - first == 1:
            out[m, 0], out[m, 1] = 0, 1
        else:
            # Distances from one of the values: equal values then have a mean without rounding.
            base = float(x[index[first]])
            away = 0.0
            for i in range(first, last):
                away += float(x[index[i]]) - base
            mean = base + away / (last - first)
            squares = 0.0
            for i in range(first, last):
                squares += (float(x[index[i]]) - mean) ** 2
            out[m, 0] = mean
            out[m, 1] = math.sqrt(squares / (last - first - int(unbiased)))


@launch.kernel(threads=THREADS)
def minibatch_moments_kernel(x, index, minibatch, passes, fewer, out):
    # A block owns a group. A warp reads 32 neighbouring indices; the values they name lie anywhere.
    counts = cuda.shared.array(THREADS, f32)
    means = cuda.shared.array(THREADS, f32)
    m2s = cuda.shared.array(THREADS, f32)
    group, thread = cuda.blockIdx.x, cuda.threadIdx.x
    first = group * int(minibatch)
    last = min(first + int(minibatch), index.shape[0])
    count, mean, m2 = f32(0), f32(0), f32(0)
    # `passes` is counted on the host: a step that is no constant costs a 64-bit division here.
    i = first + thread
    for _ in range(passes):
        if i < last:
            count, mean, m2 = add_to_moments(count, mean, m2, x[index[i]])
        i += cuda.blockDim.x
    count, mean, m2 = block_moments(counts, means, m2s, count, mean, m2)
    if thread == 0:
        alone = last - first == 1
        out[group, 0] = f32(0) if alone else mean
        out[group, 1] = f32(1) if alone else deviation_of(count, m2, fewer)


@minibatch_moments.on_cuda
def _launch(x, index, minibatch, unbiased, out, stream):
    # A power of two, as block_moments needs; no more threads than a group has values.
    threads = min(max(1 << (int(minibatch) - 1).bit_length(), WARP), THREADS)
    passes = i32(blocks(minibatch, threads))
    minibatch_moments_kernel[len(out), threads, stream](
        x, index, minibatch, passes, f32(unbiased), out
    )
