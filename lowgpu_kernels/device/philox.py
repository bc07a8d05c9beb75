"""Philox4x32-10, the counter-based generator of Salmon et al., SC'11. Twin of include/philox.cuh."""

import numpy as np

from lowgpu_kernels.device import f32, scalar, u32, u64

# What a draw is for. Two purposes never share a counter, so adding a draw to one leaves the other.
ACTION, RESET, STEP, PERMUTE, INIT, SAMPLE, EXPLORE = 0, 1, 2, 3, 4, 5, 6

LOW = u64(0xFFFFFFFF)
WORD = u64(32)


@scalar
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four words of randomness of a counter and a key.

    Args:
        c0, c1, c2, c3: counter, uint32 words.
        k0, k1: key, uint32 words.

    Returns:
        Four uint32 words, uniform.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Philox4x32 with ten
    rounds; the known answers of its reference implementation are in the tests.
    """
    c0, c1, c2, c3, k0, k1 = u32(c0), u32(c1), u32(c2), u32(c3), u32(k0), u32(k1)
    for _ in range(10):
        a = u64(0xD2511F53) * u64(c0)
        b = u64(0xCD9E8D57) * u64(c2)
        c0, c1, c2, c3 = (
            u32(u32(b >> WORD) ^ c1 ^ k0),
            u32(b & LOW),
            u32(u32(a >> WORD) ^ c3 ^ k1),
            u32(a & LOW),
        )
        k0 = u32(k0 + u32(0x9E3779B9))
        k1 = u32(k1 + u32(0xBB67AE85))
    return c0, c1, c2, c3


@scalar
def draw(seed, purpose, index, step):
    """The four words that belong to one thing at one step; the same wherever they are asked for.

    Args:
        seed: uint64.
        purpose: ACTION, RESET, STEP, PERMUTE, INIT, SAMPLE or EXPLORE.
        index: environment, row or epoch, uint32.
        step: global step, uint64.

    Returns:
        Four uint32 words, uniform.
    """
    seed, step = u64(seed), u64(step)
    return philox4x32(
        u32(index),
        u32(step & LOW),
        u32(step >> WORD),
        u32(purpose),
        u32(seed & LOW),
        u32(seed >> WORD),
    )


@scalar
def unit(word):
    """The top 24 bits of a word as a float32 in [0, 1): a multiple of 2^-24, so 1 cannot come out."""
    return f32(u32(word) >> u32(8)) * f32(2.0**-24)


def numpy_draw(seed, purpose, index, step):
    """`draw` as a spec uses it: NumPy, no code shared with the executors.

    Args:
        index: int array [n].

    Returns:
        uint64 array [4, n]; every value is below 2^32.
    """
    seed, step, index = int(seed), int(step), np.asarray(index, np.uint64)
    low = np.uint64(2**32 - 1)
    counter = [index & low, *(np.full_like(index, w % 2**32) for w in (step, step >> 32, purpose))]
    for i in range(10):
        first, third = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        key_low = np.uint64((seed + i * 0x9E3779B9) % 2**32)
        key_high = np.uint64(((seed >> 32) + i * 0xBB67AE85) % 2**32)
        counter = [
            (third >> np.uint64(32)) ^ counter[1] ^ key_low,
            third & low,
            (first >> np.uint64(32)) ^ counter[3] ^ key_high,
            first & low,
        ]
    return np.stack(counter)
