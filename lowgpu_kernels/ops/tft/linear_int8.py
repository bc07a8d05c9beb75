"""A product of rows with int8 weights: projections inside the transformer."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import BF16, F32, I8
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.tft.levels import (
    LEVELS,
    levels_of,
    product,
    scale_draw,
    spec_levels,
    spec_product,
    weight_levels,
)
from lowgpu_kernels.ops.tft.rows import (
    THREADS,
    all_whole,
    rows_grid,
    rows_macros,
    source_macros,
    whole,
)
from lowgpu_kernels.ops.tft.sizes import INPUTS, OUTPUTS, ROWS


@op(
    # In float32's eps: the result is rounded to bfloat16; the sums are exact.
    error=lambda **_: 2.0**15 + 4,
    bench=("rows=196608 inputs=128 outputs=160",),
    flops=lambda rows, inputs, outputs, **_: 2 * rows * inputs * outputs,
    examples=lambda: [{"levels": 30.0}, {"levels": 0.7}],
)
def linear_int8(
    x: BF16[ROWS, INPUTS],
    weight: I8[OUTPUTS, INPUTS],
    scale: F32[OUTPUTS],
    bias: F32[OUTPUTS] | None = None,
    *,
    levels: LEVELS,
) -> BF16[ROWS, OUTPUTS]:
    """Every row, as int8 levels, times an int8 weight matrix.

        l[r, i]   = x[r, i] levels, the nearest whole number, ends at -128 and 127
        out[r, o] = scale[o] (sum over i of l[r, i] weight[o, i]) + bias[o]

    Sums are int32 and exact; a row's result depends on no other row.

    Args:
        x: rows, any unit of order 1.
        weight: one row an output.
        scale: what a 1 of an output's sum is worth.
        bias: of each output; zeros where left out.
        levels: that a 1 of x is, in (0, 2^40].

    Returns:
        [rows, outputs].

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, rows too wide for its shared memory.

    Source: Jacob et al. 2018, equation 4 without zero points (arXiv:1712.05877).
    """
    found = spec_product(spec_levels(x, levels), weight, scale)
    return found + (0 if bias is None else bias)


@linear_int8.draws
def _draw(rng, sizes, params):
    return {
        "weight": weight_levels(rng, sizes[OUTPUTS], sizes[INPUTS]),
        "scale": scale_draw(rng, sizes[OUTPUTS], sizes[INPUTS], params["levels"]),
    }


@linear_int8.on_cpu
def _cpu(x, weight, scale, bias, levels, out):
    total = product(levels_of(x, levels), weight, scale)
    out[:] = total if bias is None else total + bias


@linear_int8.on_cuda
def _launch(x, weight, scale, bias, levels, out, stream):
    (rows, inputs), outputs = x.shape, len(weight)
    macros = rows_macros("linear", (inputs,), outputs, rows, "int8", launch.device())
    flags = whole(inputs, x), whole(inputs, weight), whole(outputs, out)
    own = {"result": False, "whole": all_whole(flags, macros)}
    kernel = cuda_c("tft/linear", "linear", **own, **source_macros(macros))
    sizes = map(np.int32, (rows, inputs, outputs, *flags))
    args = x, weight, scale, bias, out, *sizes, levels
    launch.launch(kernel, rows_grid(rows, macros), THREADS, args, stream, macros["nbytes"])
