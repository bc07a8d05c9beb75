"""A random order of 0..N-1, worked out place by place."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda, i32, njit, scalar, u32, u64
from lowgpu_kernels.device.philox import PERMUTE, draw, numpy_draw
from lowgpu_kernels.dims import I32, SEED, U64, Int, N
from lowgpu_kernels.op import blocks, op

THREADS = 256  # Untuned.
ROUNDS = 12  # at 8 the orders of five numbers are not equally likely; a multiple of 4 for the keys


@op(
    error=lambda **_: 0,  # integers
    sizes=lambda params, sizes: {N: int(params["count"])},
    bench=("count=262144", "count=8388608"),
)
def permutation(clock: U64[1], *, count: Int(0), seed: SEED, epoch: Int(0) = 0) -> I32[N]:
    """The numbers 0..count-1 in an order that depends on seed, epoch and clock alone.

        out[i] = walk(i):  x = i;  repeat x = feistel(x) until x < count

    `feistel` is a bijection of [0, 4^h), the smallest such range that holds `count`, made of twelve
    rounds (left, right) -> (right, left ^ mix(right, round key)) on h-bit halves. It is a bijection
    for any `mix`, so every number comes once; nothing is sorted and no place waits for another. Such
    rounds make even permutations only, so half of the keys exchange 0 and 1 in the result. The keys
    come of Philox(seed; PERMUTE, epoch, clock). The clock is read and not advanced.

    Args:
        clock: global step the order belongs to.
        count: numbers to order, in [0, 2^31).
        seed: in [0, 2^64).
        epoch: which order of this step, at least 0.

    Returns:
        A permutation of 0..count-1.

    Raises:
        ValueError: an output that is not `count` long; a parameter out of range.

    Source: cycle walking of Black & Rogaway 2002, "Ciphers with arbitrary finite domains", on a
    Luby-Rackoff network; the mix is the finalizer of MurmurHash3. Not for secrets.
    """
    keys = [int(w) for w in numpy_draw(seed, PERMUTE, [epoch], clock[0])[:, 0]]
    half = max(1, -(-max(count - 1, 0).bit_length() // 2))

    def mixed(h):
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
        return h ^ (h >> 16)

    def feistel(x):
        left, right = divmod(x, 2**half)
        for i in range(ROUNDS):
            key = keys[i % 4] + i * 0x9E3779B9
            left, right = right, left ^ (mixed((right + key) % 2**32) % 2**half)
        return left << half | right

    exchange = count > 1 and mixed(keys[0] ^ keys[3]) >= 2**31
    out = np.empty(count, np.int32)
    for i in range(count):
        x = feistel(i)
        while x >= count:
            x = feistel(x)
        out[i] = 1 - x if exchange and x < 2 else x
    return out


@scalar
def half_bits(count):
    """Bits of half a number of the smallest range [0, 4^h) that holds `count` numbers."""
    half = u32(1)
    while u64(1) << u64(u32(2) * half) < u64(count):
        half = u32(half + u32(1))
    return half


@scalar
def mix(x):
    x = u32(u32(x ^ (x >> u32(16))) * u32(0x85EBCA6B))
    x = u32(u32(x ^ (x >> u32(13))) * u32(0xC2B2AE35))
    return u32(x ^ (x >> u32(16)))


@scalar
def place_of(i, count, half, keys):
    """Where the walk from `i` ends. `keys` are four uint32 words."""
    count, half = u32(count), u32(half)
    mask = u32(u32(u32(1) << half) - u32(1))
    k0, k1, k2, k3 = u32(keys[0]), u32(keys[1]), u32(keys[2]), u32(keys[3])
    exchange = count > u32(1) and mix(u32(k0 ^ k3)) >= u32(0x80000000)
    x = u32(i)
    walking = True
    # It ends: a bijection is made of cycles, and this one starts below count.
    while walking:
        left, right = u32(x >> half), u32(x & mask)
        more = u32(0)
        for _ in range(ROUNDS // 2):
            # Two rounds without swapping halves; the keys go round once in two passes.
            left = u32(left ^ (mix(u32(u32(right + k0) + more)) & mask))
            more = u32(more + u32(0x9E3779B9))
            right = u32(right ^ (mix(u32(u32(left + k1) + more)) & mask))
            more = u32(more + u32(0x9E3779B9))
            k0, k1, k2, k3 = k2, k3, k0, k1
        x = u32(u32(left << half) | right)
        walking = x >= count
    return i32(u32(1) - x) if exchange and x < u32(2) else i32(x)


@permutation.on_cpu
def _cpu(clock, count, seed, epoch, out):
    _cpu_loop(draw(seed, PERMUTE, epoch, clock[0]), half_bits(count), out)


@njit(parallel=True)
def _cpu_loop(keys, half, out):
    for i in prange(len(out)):
        out[i] = place_of(i, len(out), half, keys)


@launch.kernel(threads=THREADS)
def permutation_kernel(clock, seed, epoch, out):
    # A thread owns a place, and a warp writes whole lines. Each works the keys out for itself: ten
    # rounds of Philox cost less than fetching them.
    i = cuda.grid(1)
    if i < out.shape[0]:
        keys = draw(seed, PERMUTE, epoch, clock[0])
        out[i] = place_of(i, out.shape[0], half_bits(out.shape[0]), keys)


@permutation.on_cuda
def _launch(clock, count, seed, epoch, out, stream):
    permutation_kernel[blocks(len(out), THREADS), THREADS, stream](clock, seed, epoch, out)
