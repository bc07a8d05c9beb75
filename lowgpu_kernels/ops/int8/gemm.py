"""Products of int8 matrices with exact int32 sums, alone or scaled in the same kernel.

Both factors are stored with what is summed over along their rows: a activations, b weights.
"""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, I8, I32, REAL, Choice, Float, X, Y, Z
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.int8.gemm_tile import WarpgroupTile, gemm_tile, splits_of
from lowgpu_kernels.tensor_map import TensorMap

MOST_TERMS = 131_071  # (-128)^2 times one more is 2^31, past int32
MOST_ROWS = 2**31 - 1 - 256  # so that a tile's last row is an int
EXACT_TERMS = 1024  # of products up to 2^14, whose sums float32 holds
CPU_ROWS = 4096  # multiplied at once, which bounds the float32 copies
FINISH_THREADS = 256
ACTIVATION = Choice("none", "relu")
SCALE = Float(0, np.inf, above=True)
RESULTS = {"int32": "int", "float32": "float", "bfloat16": "Bf16", "int8": "Int8"}


def _limits(params, known):
    """No dimension follows from another; those that are too large are refused."""
    terms = known.get(Z, 0)
    if terms > MOST_TERMS:
        raise ValueError(
            f"a and b must have at most {MOST_TERMS} columns, got {terms}: sums of products may "
            "not fit int32; split the columns and add the results in int64"
        )
    for dim, name in ((X, "a"), (Y, "b")):
        if known.get(dim, 0) > MOST_ROWS:
            raise ValueError(f"{name} must have at most {MOST_ROWS} rows, got {known[dim]}")
    return {}


def _shares(sizes, params):
    """Sums of each share of the terms, where a product of few rows splits them."""
    splits = splits_of(sizes["X"], sizes["Y"], sizes["Z"], launch.device())
    return (splits * sizes["X"] * sizes["Y"] if splits > 1 else 0,)


COMMON = {
    "sizes": _limits,
    "scratch": {"shares": ("int32", _shares)},
    "flops": lambda X, Y, Z, **_: 2 * X * Y * Z,
}
BENCH = ("X=4096 Y=4096 Z=4096", "X=1048576 Y=128 Z=256", "X=16 Y=4096 Z=4096")


@op(error=lambda **_: 0, bench=BENCH, **COMMON)
def int8_gemm(a: I8[X, Z], b: I8[Y, Z]) -> I32[X, Y]:
    """The product of two int8 matrices, exactly.

        out[x, y] = sum over z of a[x, z] b[y, z]

    Rows of a multiple of 16 bytes, in arrays that start at one, are the fastest way in on a GPU; 8
    and 4 are slower, others slowest.

    Args:
        a: rows of the result, any int8.
        b: columns of the result, one a row.

    Returns:
        the int32 sums.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: rows of different lengths, or of more than 131,071.

    Source: Jacob et al. 2018, Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, section 2.2.
    """
    return (a.astype(np.int64) @ b.astype(np.int64).T).astype(np.int32)


@op(error=lambda **_: 0.5, bench=BENCH, **COMMON)  # half an eps: the rounding to the result's type
def int8_gemm_scaled(
    a: I8[X, Z],
    b: I8[Y, Z],
    row_scale: F32[X] | None = None,
    column_scale: F32[Y] | None = None,
    bias: F32[Y] | None = None,
    *,
    scale: SCALE = 1.0,
    activation: ACTIVATION = "none",
    precision: Choice("float32", "bfloat16") = "float32",
) -> REAL[X, Y]:
    """The product of two int8 matrices as real numbers.

        out[x, y] = activation(sum[x, y] * (scale * row_scale[x]) * column_scale[y] + bias[y])

    Each operation rounds to float32 in the order written, the sum first, so every device gives the
    same bits. A row's result does not depend on the other rows.

    Args:
        a: quantized activations, one a row.
        b: quantized weights, one row an output.
        row_scale: what a step of a's row is worth; ones where left out.
        column_scale: what a step of b's row is worth; ones where left out.
        bias: of each output, in the result's unit; zeros where left out.
        scale: one for all, above 0.
        activation: "none" or "relu".
        precision: element type of the result.

    Returns:
        [X, Y] in the precision.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: sizes that do not go together, or rows of more than 131,071.

    Source: Jacob et al. 2018, equation 4, with zero points of 0.
    """
    return _scaled(a, b, row_scale, column_scale, bias, scale, activation).astype(np.float64)


@op(error=lambda **_: 0, bench=BENCH, **COMMON)
def int8_gemm_requantized(
    a: I8[X, Z],
    b: I8[Y, Z],
    row_scale: F32[X] | None = None,
    column_scale: F32[Y] | None = None,
    bias: F32[Y] | None = None,
    *,
    scale: SCALE = 1.0,
    activation: ACTIVATION = "none",
) -> I8[X, Y]:
    """The product of two int8 matrices, scaled and rounded to int8 for the next product.

        out[x, y] = int8(activation(sum[x, y] * (scale * row_scale[x]) * column_scale[y] + bias[y]))

    Each operation rounds to float32 in the order written, the sum first; int8 rounds to the nearest,
    ties to even, and takes what is past -128 or 127 to that end. NaN gives 0. Every device gives the
    same bits.

    Args:
        a: quantized activations, one a row.
        b: quantized weights, one row an output.
        row_scale: what a step of a's row is worth in steps of the result; ones where left out.
        column_scale: what a step of b's row is worth; ones where left out.
        bias: of each output, in steps of the result; zeros where left out.
        scale: one for all, above 0.
        activation: "none" or "relu".

    Returns:
        [X, Y], int8.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: sizes that do not go together, or rows of more than 131,071.

    Source: Jacob et al. 2018, section 2.4; rounding and limits as ONNX QuantizeLinear.
    """
    value = _scaled(a, b, row_scale, column_scale, bias, scale, activation)
    return np.where(np.isnan(value), 0, np.clip(np.rint(value), -128, 127)).astype(np.int8)


def _scaled(a, b, row_scale, column_scale, bias, scale, activation):
    """What both specs say of the value before it is stored, in float32 whatever they are given."""
    f4 = np.float32
    rows = f4(scale) * (np.ones(len(a), f4) if row_scale is None else row_scale.astype(f4))
    columns = np.ones(len(b), f4) if column_scale is None else column_scale.astype(f4)
    sums = a.astype(np.int64) @ b.astype(np.int64).T
    with np.errstate(all="ignore"):
        value = sums.astype(f4) * rows[:, None] * columns
        if bias is not None:
            value = value + bias.astype(f4)
    return np.where(value < 0, f4(0), value) if activation == "relu" else value


def _draw(rng, sizes, params):
    """All of int8 with its ends, and scales that bring most of the result into int8's range."""
    terms = sizes[Z]
    a, b = (rng.integers(-128, 128, (sizes[d], terms)) for d in (X, Y))
    for factor in (a, b):
        factor[rng.random(len(factor)) < 0.1] = -128
    if "scale" not in params:
        return {"a": a, "b": b}
    typical = 40 / (5500 * np.sqrt(max(terms, 1)) * params["scale"])
    return {
        "a": a,
        "b": b,
        "row_scale": typical * rng.uniform(0.5, 1.5, sizes[X]),
        "column_scale": rng.uniform(0.5, 1.5, sizes[Y]) if rng.random() < 0.8 else None,
        "bias": rng.normal(size=sizes[Y]) * 20 if rng.random() < 0.8 else None,
    }


for product in (int8_gemm, int8_gemm_scaled, int8_gemm_requantized):
    product.draws(_draw)


def exact_sums(a, b):
    """int32 sums by float32 products of as many terms as float32 adds exactly, which BLAS does fast."""
    sums = np.zeros((len(a), len(b)), np.int32)
    for first in range(0, a.shape[1], EXACT_TERMS):
        terms = slice(first, first + EXACT_TERMS)
        right = b[:, terms].astype(np.float32).T
        for row in range(0, len(a), CPU_ROWS):
            rows = slice(row, row + CPU_ROWS)
            sums[rows] += (a[rows, terms].astype(np.float32) @ right).astype(np.int32)
    return sums


def _values(a, b, row_scale, column_scale, bias, scale, activation):
    """float32 values before they are stored."""
    value = exact_sums(a, b).astype(np.float32)
    with np.errstate(all="ignore"):
        value *= (scale if row_scale is None else scale * row_scale[:, None]).astype(np.float32)
        if column_scale is not None:
            value *= column_scale
        if bias is not None:
            value += bias
    if activation == "relu":
        value[value < 0] = 0
    return value


@int8_gemm.on_cpu
def _cpu(a, b, out, shares):
    out[:] = exact_sums(a, b)


@int8_gemm_scaled.on_cpu
def _cpu_scaled(a, b, row_scale, column_scale, bias, scale, activation, precision, out, shares):
    out[:] = _values(a, b, row_scale, column_scale, bias, scale, activation)


@int8_gemm_requantized.on_cpu
def _cpu_requantized(a, b, row_scale, column_scale, bias, scale, activation, out, shares):
    value = _values(a, b, row_scale, column_scale, bias, scale, activation)
    np.rint(value, out=value)
    np.clip(value, -128, 127, out=value)
    value[np.isnan(value)] = 0
    out[:] = value


@int8_gemm.on_cuda
def _launch(a, b, out, shares, stream):
    _launch_gemm(a, b, (None, None, None, np.float32(1)), "none", out, shares, stream)


@int8_gemm_scaled.on_cuda
def _launch_scaled(
    a, b, row_scale, column_scale, bias, scale, activation, precision, out, shares, stream
):
    scales = row_scale, column_scale, bias, scale
    _launch_gemm(a, b, scales, activation, out, shares, stream)


@int8_gemm_requantized.on_cuda
def _launch_requantized(
    a, b, row_scale, column_scale, bias, scale, activation, out, shares, stream
):
    scales = row_scale, column_scale, bias, scale
    _launch_gemm(a, b, scales, activation, out, shares, stream)


def _launch_gemm(a, b, scales, activation, out, shares, stream):
    (rows, terms), columns, on = a.shape, len(b), launch.device()
    if rows == 0 or columns == 0:
        return
    tile = gemm_tile(rows, columns, terms, width_of(a, b), on)
    sizes = np.int32(rows), np.int32(columns)
    made = {"result": RESULTS[out.dtype.name], "relu": activation == "relu", "whole": _whole(out)}
    if tile.splits > 1:
        summed = {"result": "int", "relu": False, "whole": _whole(shares, columns)}
        into, none = shares, (None, None, None, np.float32(1))
    else:
        summed, into, none = made, out, scales
    kernel = cuda_c(tile.path, tile.path.rpartition("/")[2], **tile.macros, **summed)
    if isinstance(tile, WarpgroupTile):
        factors = TensorMap(a, 128), TensorMap(b, tile.columns // tile.cluster)
    else:
        factors = a, b
    args = (*factors, *none, into, *sizes, np.int32(terms))
    launch.launch(
        kernel, tile.grid(rows, columns, on), tile.threads, args, stream, shared=tile.nbytes
    )
    if tile.splits > 1:
        del made["whole"]
        kernel = cuda_c(
            "int8/gemm_finish", "gemm_finish", threads=FINISH_THREADS, whole=False, **made
        )
        args = (shares, *scales, out, *sizes, np.int32(tile.splits))
        launch.launch(kernel, blocks(rows * columns, FINISH_THREADS), FINISH_THREADS, args, stream)


def width_of(*factors):
    """The largest of 16, 8, 4 and 1 bytes that all rows of the factors start at multiples of."""
    return next(
        width
        for width in (16, 8, 4, 1)
        if all(f.shape[1] % width == 0 and _address(f) % width == 0 for f in factors)
    )


def _whole(result, columns=None):
    """Whether rows of the result start at multiples of what a lane stores at once."""
    nbytes = result.dtype.itemsize
    chunk = 8 if nbytes == 1 else 4
    columns = result.shape[1] if columns is None else columns
    return columns % chunk == 0 and _address(result) % (chunk * nbytes) == 0


def _address(array):
    """Where an array starts; tests run launchers on NumPy arrays."""
    return array.address if isinstance(array, Buffer) else array.ctypes.data
