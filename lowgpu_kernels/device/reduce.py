"""Reductions across a block, in an order that never changes, and moments that merge.

Shared memory only, no shuffles, so that the simulator runs them. Blocks are one-dimensional and a
power of two of threads, and every thread of the block calls. Twin in purpose, not in bits, of
include/block.cuh.
"""

import math

from lowgpu_kernels.device import cuda, f32, for_kernels, scalar


@for_kernels
def block_sum(shared, value):
    """The sum of every thread's `value`, given to every thread. `shared` holds one slot a thread."""
    thread = cuda.threadIdx.x
    shared[thread] = value
    cuda.syncthreads()
    gap = cuda.blockDim.x >> 1
    while gap > 0:
        if thread < gap:
            shared[thread] += shared[thread + gap]
        cuda.syncthreads()
        gap >>= 1
    total = shared[0]
    # Nobody may write the next value before everybody has read this one.
    cuda.syncthreads()
    return total


@scalar
def add_to_moments(count, mean, m2, x):
    """Count, mean and sum of squared distances from the mean, with one more value.

    Source: Welford 1962, "Note on a method for calculating corrected sums of squares".
    """
    count, mean, m2, x = f32(count), f32(mean), f32(m2), f32(x)
    count += f32(1)
    away = x - mean
    mean += away / count
    return count, mean, m2 + away * (x - mean)


@scalar
def merge_moments(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Count, mean and sum of squared distances of two sets together; either may be empty.

    Source: Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
    sample variances", eq. 2.1.
    """
    count_a, mean_a, m2_a = f32(count_a), f32(mean_a), f32(m2_a)
    count_b, mean_b, m2_b = f32(count_b), f32(mean_b), f32(m2_b)
    if count_b == f32(0):
        return count_a, mean_a, m2_a
    if count_a == f32(0):
        return count_b, mean_b, m2_b
    count = count_a + count_b
    part = count_b / count
    away = mean_b - mean_a
    return count, mean_a + away * part, m2_a + m2_b + away * away * (count_a * part)


@scalar
def deviation_of(count, m2, fewer):
    """The standard deviation, dividing by count - fewer; 0 where that leaves nothing."""
    left = f32(count) - f32(fewer)
    return math.sqrt(f32(m2) / left) if left > f32(0) else f32(0)


@for_kernels
def block_moments(counts, means, m2s, count, mean, m2):
    """Merges every thread's moments. The result is that of thread 0 and means nothing to others."""
    thread = cuda.threadIdx.x
    counts[thread], means[thread], m2s[thread] = count, mean, m2
    cuda.syncthreads()
    gap = cuda.blockDim.x >> 1
    while gap > 0:
        if thread < gap:
            other = thread + gap
            count, mean, m2 = merge_moments(
                count, mean, m2, counts[other], means[other], m2s[other]
            )
            counts[thread], means[thread], m2s[thread] = count, mean, m2
        cuda.syncthreads()
        gap >>= 1
    return count, mean, m2
