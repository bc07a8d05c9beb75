"""Random numbers of the host: functions of (seed, number, step), like those of the device."""

import numpy as np

from lowgpu_kernels.device.philox import PERMUTE, numpy_draw

# A permutation's epoch is below this: counters from here on are drawn by nobody else.
_OWN = 2**31


def draws(seed, count, step):
    """Uniform 64-bit numbers, uint64 [count].

    Args:
        seed: in [0, 2^64).
        count: in [0, 2^31).
        step: in [0, 2^64).
    """
    words = numpy_draw(seed, PERMUTE, np.arange(_OWN, _OWN + count), step)
    return words[0] << np.uint64(32) | words[1]


def shuffled(seed, count, step):
    """The numbers 0..count-1 in an order of (seed, step), int64 [count]."""
    return np.argsort(draws(seed, count, step), kind="stable")
