"""Mean and standard deviation of a vector."""

import math

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, f32, i32, njit
from lowgpu_kernels.device.reduce import (
    add_to_moments,
    block_moments,
    deviation_of,
    merge_moments,
)
from lowgpu_kernels.dims import F32, FLAG, N
from lowgpu_kernels.op import blocks, op

THREADS = 256
VALUES = 4  # values a thread takes at least, so that merging is the smaller part
# Fixed, not from the SM count: the result then has the same bits on every GPU. Untuned.
MOST_BLOCKS = 1024


def grid_of(count):
    return min(max(blocks(count, THREADS * VALUES), 1), MOST_BLOCKS)


@op(
    # Values one thread takes in turn, then the merges, which are logarithmic but for the last.
    error=lambda N, **_: 4 * (N / THREADS / MOST_BLOCKS + VALUES + 24),
    scratch={"partials": ("float32", lambda sizes, params: (grid_of(sizes["N"]), 3))},
    bench=("N=524288", "N=8388608"),
    flops=lambda N, **_: 6 * N,
)
def moments(x: F32[N], *, unbiased: FLAG = False) -> F32[2]:
    """Mean and standard deviation.

        mean = sum(x) / N
        std  = sqrt(sum((x - mean)^2) / (N - unbiased))

    Values that are all equal give exactly their value and 0. One value gives a deviation of 0, also
    when unbiased (torch.std gives NaN); no values give (0, 0). A value that is not finite gives NaN.

    Args:
        x: values, at most 2^31.
        unbiased: divide by N - 1, as torch.std does.

    Returns:
        (mean, std), in the unit of x.

    Raises:
        TypeError: an array of another element type.

    Source: Chan, Golub & LeVeque 1979, eq. 2.1; no sum of squares, which would cancel.
    """
    if len(x) == 0:
        return np.zeros(2)
    left = len(x) - 1 if unbiased and len(x) > 1 else len(x)
    mean = np.sum(x) / len(x)
    return np.array([mean, np.sqrt(np.sum((x - mean) ** 2) / left)])


@moments.on_cpu
@njit
def _cpu(x, unbiased, out, partials):
    out[0], out[1] = 0, 0
    if len(x) > 0:
        # Distances from one of the values: equal values then have a mean without rounding.
        away = 0.0
        for i in range(len(x)):
            away += float(x[i]) - float(x[0])
        mean = float(x[0]) + away / len(x)
        squares = 0.0
        for i in range(len(x)):
            squares += (float(x[i]) - mean) ** 2
        out[0] = mean
        out[1] = math.sqrt(squares / max(len(x) - int(unbiased), 1))


@launch.kernel(threads=THREADS)
def moments_partial_kernel(x, passes, partials):
    # A thread takes every gridDim * blockDim-th value, so a warp reads neighbours; a block leaves
    # one partial result.
    counts = cuda.shared.array(THREADS, f32)
    means = cuda.shared.array(THREADS, f32)
    m2s = cuda.shared.array(THREADS, f32)
    count, mean, m2 = f32(0), f32(0), f32(0)
    # `passes` is counted on the host: a step that is no constant costs a 64-bit division here.
    i = cuda.grid(1)
    for _ in range(passes):
        if i < x.shape[0]:
            count, mean, m2 = add_to_moments(count, mean, m2, x[i])
        i += cuda.gridsize(1)
    count, mean, m2 = block_moments(counts, means, m2s, count, mean, m2)
    if cuda.threadIdx.x == 0:
        block = cuda.blockIdx.x
        partials[block, 0], partials[block, 1], partials[block, 2] = count, mean, m2


@launch.kernel(threads=THREADS)
def moments_kernel(partials, fewer, out):
    # One block: a thread merges every blockDim-th partial result, then the threads merge.
    counts = cuda.shared.array(THREADS, f32)
    means = cuda.shared.array(THREADS, f32)
    m2s = cuda.shared.array(THREADS, f32)
    count, mean, m2 = f32(0), f32(0), f32(0)
    for i in range(cuda.threadIdx.x, partials.shape[0], THREADS):
        count, mean, m2 = merge_moments(
            count, mean, m2, partials[i, 0], partials[i, 1], partials[i, 2]
        )
    count, mean, m2 = block_moments(counts, means, m2s, count, mean, m2)
    if cuda.threadIdx.x == 0:
        out[0] = mean
        out[1] = deviation_of(count, m2, fewer)


@moments.on_cuda
def _launch(x, unbiased, out, partials, stream):
    grid = grid_of(len(x))
    passes = i32(blocks(len(x), grid * THREADS))
    moments_partial_kernel[grid, THREADS, stream](x, passes, partials)
    moments_kernel[1, THREADS, stream](partials, f32(unbiased), out)
