"""Products of rows with a weight matrix: projections inside the transformer, and its quantile head."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, REAL
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.tft.rows import (
    THREADS,
    all_whole,
    rows_grid,
    rows_macros,
    source_macros,
    whole,
)
from lowgpu_kernels.ops.tft.sizes import INPUTS, OUTPUTS, ROWS, weight_draw

# Terms are summed in float32, in an order of their own; the result's rounding is half an eps.
SETTINGS = {
    "error": lambda inputs, **_: 1 + np.sqrt(inputs),
    "bench": (
        "rows=196608 inputs=128 outputs=512",
        "rows=196608 inputs=128 outputs=160",
        "rows=24576 inputs=128 outputs=7",
    ),
    "flops": lambda rows, inputs, outputs, **_: 2 * rows * inputs * outputs,
}


@op(**SETTINGS)
def linear(
    x: REAL[ROWS, INPUTS],
    weight: REAL[OUTPUTS, INPUTS],
    bias: F32[OUTPUTS] | None = None,
) -> REAL[ROWS, OUTPUTS]:
    """Every row times a weight matrix.

        out[r, o] = sum over i of x[r, i] weight[o, i] + bias[o]

    Sums are float32; a row's result depends on no other row.

    Args:
        x: rows, any unit of order 1.
        weight: one row an output.
        bias: of each output; zeros where left out.

    Returns:
        [rows, outputs] in the precision of x.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, rows too wide for its shared memory.

    Source: Rumelhart, Hinton & Williams 1986, Learning representations by back-propagating errors.
    """
    return x @ weight.T + (0 if bias is None else bias)


@op(**SETTINGS)
def linear_float32(
    x: REAL[ROWS, INPUTS],
    weight: REAL[OUTPUTS, INPUTS],
    bias: F32[OUTPUTS] | None = None,
) -> F32[ROWS, OUTPUTS]:
    """Every row times a weight matrix, stored in float32 in either precision: the quantile head.

        out[r, o] = sum over i of x[r, i] weight[o, i] + bias[o]

    Sums are float32; a row's result depends on no other row.

    Args:
        x: rows, any unit of order 1.
        weight: one row an output.
        bias: of each output; zeros where left out.

    Returns:
        [rows, outputs], float32.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, rows too wide for its shared memory.

    Source: Lim et al. 2021, equation 23 (arXiv:1912.09363).
    """
    return x @ weight.T + (0 if bias is None else bias)


def _draw(rng, sizes, params):
    return {"weight": weight_draw(rng, sizes[OUTPUTS], sizes[INPUTS])}


def _cpu(x, weight, bias, out):
    total = x.astype(np.float32) @ weight.astype(np.float32).T
    out[:] = total if bias is None else total + bias


def _launch(x, weight, bias, out, stream):
    (rows, inputs), outputs = x.shape, len(weight)
    precision, on = x.dtype.name, launch.device()
    macros = rows_macros("linear", (inputs,), outputs, rows, precision, on)
    flags = whole(inputs, x), whole(inputs, weight), whole(outputs, out)
    result = out.dtype.name == "float32"
    own = {"result": result, "whole": all_whole(flags, macros)}
    kernel = cuda_c("tft/linear", "linear", **own, **source_macros(macros))
    sizes = map(np.int32, (rows, inputs, outputs, *flags))
    args = x, weight, None, bias, out, *sizes, np.float32(1)
    launch.launch(kernel, rows_grid(rows, macros), THREADS, args, stream, macros["nbytes"])


for product in (linear, linear_float32):
    product.draws(_draw)
    product.on_cpu(_cpu)
    product.on_cuda(_launch)
