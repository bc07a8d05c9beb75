"""Levels: what products of int8 take of numbers, as specs have them, and as CPU executors do.

A number is its nearest whole number of steps, of which `levels` are a 1; sums of their products with int8
weights are exact, and a scale for each column says what a 1 of its sum is worth.
"""

import numpy as np

from lowgpu_kernels.dims import Element, Float
from lowgpu_kernels.ops.int8.gemm import EXACT_TERMS

LEVELS = Float(0, 2.0**40, above=True)  # that a 1 is
GIVEN = Element("bfloat16", "int8")  # numbers, or levels that another op made of them
APPROXIMATE = 2.0**-10  # of a sigmoid or a tangent that is one instruction of a GPU
STORED = 2.0**-8  # of a result's rounding to bfloat16
ROUNDED = 2.0**-19  # of a few of float32's roundings, and of a GPU's reciprocal root
# Of a level: what float32 and a GPU's exponential may move a unit by, of at most 128 levels.
UNSURE = 2.0**-10


def levels_of(x, levels):
    """Levels of bfloat16 or float32 numbers, as floats: the same on every device. NaN is 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.rint(x.astype(np.float32) * np.float32(levels))
    return np.nan_to_num(np.clip(scaled, -128, 127), nan=0)


def given_levels(x, levels):
    """Levels of what an op is given, which may be levels already."""
    return x.astype(np.float32) if x.dtype == np.int8 else levels_of(x, levels)


def product(levels, weight, scale):
    """Levels times int8 weights: exact sums, then float32."""
    exact = np.float32 if weight.shape[-1] <= EXACT_TERMS else np.float64
    sums = levels.astype(exact) @ weight.astype(exact).T
    return sums.astype(np.float32) * scale


def spec_levels(x, levels):
    """The same of what a spec is given: int8, or float64 that is float32 all the same."""
    if x.dtype.kind == "i":
        return x.astype(np.float64)
    scaled = np.float32(x) * np.float32(levels)
    return np.clip(np.rint(scaled), -128.0, 127.0).astype(np.float64)


def spec_product(levels, weight, scale):
    return levels @ weight.T.astype(np.float64) * scale


def weight_levels(rng, *shape):
    """int8 weights as calibration makes them: none is -128."""
    return rng.integers(-127, 128, shape)


def scale_draw(rng, shape, terms, levels):
    """Scales with which products of numbers of order 1 are of order 1."""
    return rng.uniform(0.5, 1.5, shape) / (73 * levels * np.sqrt(max(terms, 1)))


def unsure_levels(x, levels):
    """Where another level may come out of a number that was computed, not given."""
    scaled = np.abs(x * levels)
    return np.abs(scaled % 1 - 0.5) < UNSURE * (1 + scaled / 64)
