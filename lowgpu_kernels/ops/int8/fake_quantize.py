"""float32 values as int8 levels would have them, and the gradient that passes straight through."""

import numpy as np
from numba import prange

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import absent
from lowgpu_kernels.device import cuda, f32, i32, njit, scalar, u64
from lowgpu_kernels.device.maths import ROUNDER
from lowgpu_kernels.dims import F32, I32, Int, X, Y
from lowgpu_kernels.op import blocks, op

THREADS = 256  # Untuned.
LANES = 32  # a warp's threads take neighbouring columns of a row
FARTHEST = f32(1024)  # past every level from every zero point, and small enough to round by adding
BENCH = ("X=65536 Y=56", "X=256 Y=56")
LOW, HIGH = Int(-128, 0), Int(1, 127)
TINY = np.finfo(np.float32).tiny


@op(error=lambda **_: 0, bench=BENCH, flops=lambda X, Y, **_: 8 * X * Y)
def fake_quantize(
    x: F32[X, Y],
    row_scale: F32[X] | None = None,
    column_scale: F32[Y] | None = None,
    column_zero: I32[Y] | None = None,
    *,
    low: LOW = -128,
    high: HIGH = 127,
) -> F32[X, Y]:
    """Values moved to the nearest of their int8 levels, still as float32.

        step  = row_scale[x] * column_scale[y]
        level = clamp(rint(x[x, y] * (1 / step)) + column_zero[y], low, high)
        out   = (level - column_zero[y]) * step

    Each operation rounds to float32, ties of rint go to even, and every device gives the same bits.
    So a network trained on `out`, with `fake_quantize_gradient` for its gradient, learns with the
    rounding that int8 will do: rows for weights (low = -127), columns for inputs, one value in all
    columns for a hidden layer.

    Args:
        x: weights, one row an output, or activations, one row an observation.
        row_scale: what a step of a row is worth, a normal number above 0; ones where left out.
        column_scale: the same of a column.
        column_zero: level of 0 of each column, in [-128, 127]; zeros where left out.
        low, high: ends of the levels.

    Returns:
        float32 values; NaN stays NaN.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: sizes that do not go together; on the CPU, a scale that is no normal number above
            0, or a zero point past int8.

    Source: Jacob et al. 2018, Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, section 3, equation 12.
    """
    level, zero, step = _levels(x, row_scale, column_scale, column_zero)
    return ((np.clip(level, low, high) - zero) * step).astype(np.float64)


@op(error=lambda **_: 0, bench=BENCH, flops=lambda X, Y, **_: 6 * X * Y)
def fake_quantize_gradient(
    x: F32[X, Y],
    out_gradient: F32[X, Y],
    row_scale: F32[X] | None = None,
    column_scale: F32[Y] | None = None,
    column_zero: I32[Y] | None = None,
    *,
    low: LOW = -128,
    high: HIGH = 127,
) -> F32[X, Y]:
    """The gradient of `fake_quantize` as if it did not round: straight through, between its ends.

        out = out_gradient[x, y] where low <= rint(x[x, y] * (1 / step)) + column_zero[y] <= high
              0 elsewhere

    Args:
        x, row_scale, column_scale, column_zero, low, high: as `fake_quantize` had them.
        out_gradient: d loss / d out of it.

    Returns:
        d loss / d x; 0 where x is NaN.

    Raises:
        TypeError, ValueError: as `fake_quantize`.

    Source: Bengio, Leonard & Courville 2013 (arXiv:1308.3432), the straight-through estimator.
    """
    level, _, _ = _levels(x, row_scale, column_scale, column_zero)
    return np.where((level >= low) & (level <= high), out_gradient, 0.0)


def _levels(x, row_scale, column_scale, column_zero):
    """What both specs say of levels before they are clamped, in float32 whatever they are given."""
    f4 = np.float32
    rows = np.ones(len(x), f4) if row_scale is None else row_scale.astype(f4)
    columns = np.ones(x.shape[1], f4) if column_scale is None else column_scale.astype(f4)
    zero = np.zeros(x.shape[1], f4) if column_zero is None else column_zero.astype(f4)
    step = rows[:, None] * columns
    return np.rint(x.astype(f4) * (f4(1) / step)) + zero, zero, step


def _draw(rng, sizes, params):
    """Values of which some are past the ends, some are ties and some are missing."""
    rows, columns = sizes[X], sizes[Y]
    row, column = (2.0 ** rng.integers(-6, 3, n) for n in (rows, columns))
    if rng.random() < 0.5:
        row, column = row * rng.uniform(0.5, 1, rows), column * rng.uniform(0.5, 1, columns)
    row, column = (scale if rng.random() < 0.8 else None for scale in (row, column))
    step = (np.ones(rows) if row is None else row)[:, None]
    step = step * (np.ones(columns) if column is None else column)
    level = np.where(
        rng.random((rows, columns)) < 0.3,
        rng.integers(-300, 300, (rows, columns)) + 0.5,
        rng.normal(size=(rows, columns)) * 100,
    )
    level[rng.random((rows, columns)) < 0.02] = np.nan
    return {
        "x": level * step,
        "row_scale": row,
        "column_scale": column,
        "column_zero": rng.integers(-128, 128, columns) if rng.random() < 0.7 else None,
    }


def _check(row_scale, column_scale, column_zero, **_):
    for name, scale in (("row_scale", row_scale), ("column_scale", column_scale)):
        if scale is not None and not ((scale >= TINY) & np.isfinite(scale)).all():
            at = int(np.argmin((scale >= TINY) & np.isfinite(scale)))
            raise ValueError(f"{name} must be normal numbers above 0, got {scale[at]} at {at}")
    if column_zero is not None and ((column_zero < -128) | (column_zero > 127)).any():
        at = int(np.argmax((column_zero < -128) | (column_zero > 127)))
        raise ValueError(f"column_zero must be in -128..127, got {column_zero[at]} at {at}")


for each in (fake_quantize, fake_quantize_gradient):
    each.draws(_draw)
    each.checks(_check)


@scalar
def level_of(x, step, zero):
    """The level of a value before it is clamped, as a float32 whole number; NaN stays NaN."""
    steps = x * (f32(1) / step)
    # Comparisons, not min and max: those may drop a NaN.
    if steps > FARTHEST:
        steps = FARTHEST
    elif steps < -FARTHEST:
        steps = -FARTHEST
    return ((steps + ROUNDER) - ROUNDER) + zero


@scalar
def fake_of(x, step, zero, low, high):
    level = level_of(x, step, zero)
    if level > high:
        level = high
    elif level < low:
        level = low
    return (level - zero) * step


@scalar
def passed_of(x, gradient, step, zero, low, high):
    level = level_of(x, step, zero)
    return gradient if level >= low and level <= high else f32(0)


@njit(parallel=True)
def _fake_loop(x, row_scale, column_scale, column_zero, low, high, out):
    rows, columns, zeros = row_scale.shape[0], column_scale.shape[0], column_zero.shape[0]
    for row in prange(x.shape[0]):
        factor = row_scale[row] if rows > 0 else f32(1)
        for y in range(x.shape[1]):
            step = factor * column_scale[y] if columns > 0 else factor
            zero = f32(column_zero[y]) if zeros > 0 else f32(0)
            out[row, y] = fake_of(x[row, y], step, zero, low, high)


@njit(parallel=True)
def _gradient_loop(x, gradient, row_scale, column_scale, column_zero, low, high, out):
    rows, columns, zeros = row_scale.shape[0], column_scale.shape[0], column_zero.shape[0]
    for row in prange(x.shape[0]):
        factor = row_scale[row] if rows > 0 else f32(1)
        for y in range(x.shape[1]):
            step = factor * column_scale[y] if columns > 0 else factor
            zero = f32(column_zero[y]) if zeros > 0 else f32(0)
            out[row, y] = passed_of(x[row, y], gradient[row, y], step, zero, low, high)


def _scales(x, *given):
    """The scales and zero points, without elements where they were left out."""
    return tuple(absent(x, 1) if array is None else array for array in given)


@fake_quantize.on_cpu
def _cpu(x, row_scale, column_scale, column_zero, low, high, out):
    scales = _scales(x, row_scale, column_scale, column_zero)
    _fake_loop(x, *scales, f32(low), f32(high), out)


@fake_quantize_gradient.on_cpu
def _cpu_gradient(x, out_gradient, row_scale, column_scale, column_zero, low, high, out):
    scales = _scales(x, row_scale, column_scale, column_zero)
    _gradient_loop(x, out_gradient, *scales, f32(low), f32(high), out)


@launch.kernel(threads=THREADS)
def fake_quantize_kernel(x, row_scale, column_scale, column_zero, low, high, trips, out):
    # A warp owns a row, its lanes neighbouring columns, so a warp reads and writes whole lines.
    row = u64(cuda.blockIdx.x) * u64(THREADS // LANES) + u64(cuda.threadIdx.x // LANES)
    if row < u64(x.shape[0]):
        factor = row_scale[row] if row_scale.shape[0] > 0 else f32(1)
        for trip in range(trips):
            y = trip * LANES + cuda.threadIdx.x % LANES
            if y < x.shape[1]:
                step = factor * column_scale[y] if column_scale.shape[0] > 0 else factor
                zero = f32(column_zero[y]) if column_zero.shape[0] > 0 else f32(0)
                out[row, y] = fake_of(x[row, y], step, zero, low, high)


@launch.kernel(threads=THREADS)
def fake_quantize_gradient_kernel(
    x, gradient, row_scale, column_scale, column_zero, low, high, trips, out
):
    # As fake_quantize_kernel.
    row = u64(cuda.blockIdx.x) * u64(THREADS // LANES) + u64(cuda.threadIdx.x // LANES)
    if row < u64(x.shape[0]):
        factor = row_scale[row] if row_scale.shape[0] > 0 else f32(1)
        for trip in range(trips):
            y = trip * LANES + cuda.threadIdx.x % LANES
            if y < x.shape[1]:
                step = factor * column_scale[y] if column_scale.shape[0] > 0 else factor
                zero = f32(column_zero[y]) if column_zero.shape[0] > 0 else f32(0)
                out[row, y] = passed_of(x[row, y], gradient[row, y], step, zero, low, high)


def _launched(kernel, arrays, scales, low, high, out, stream):
    rows, columns = out.shape
    if rows and columns:
        grid, trips = blocks(rows, THREADS // LANES), i32(blocks(columns, LANES))
        scales = _scales(arrays[0], *scales)
        kernel[grid, THREADS, stream](*arrays, *scales, f32(low), f32(high), trips, out)


@fake_quantize.on_cuda
def _launch(x, row_scale, column_scale, column_zero, low, high, out, stream):
    scales = row_scale, column_scale, column_zero
    _launched(fake_quantize_kernel, (x,), scales, low, high, out, stream)


@fake_quantize_gradient.on_cuda
def _launch_gradient(x, out_gradient, row_scale, column_scale, column_zero, low, high, out, stream):
    arrays, scales = (x, out_gradient), (row_scale, column_scale, column_zero)
    _launched(fake_quantize_gradient_kernel, arrays, scales, low, high, out, stream)
