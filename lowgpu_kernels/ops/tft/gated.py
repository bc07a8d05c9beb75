"""Gates with a residual and a norm: the blocks that the Temporal Fusion Transformer is made of."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, REAL, Float
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.tft.norm import (
    EPSILON,
    assert_normed,
    elu,
    gated_linear,
    layer_norm,
    spec_elu,
    spec_glu,
    spec_norm,
    widened,
)
from lowgpu_kernels.ops.tft.rows import (
    THREADS,
    all_whole,
    fours,
    rows_grid,
    rows_macros,
    source_macros,
    whole,
)
from lowgpu_kernels.ops.tft.sizes import GATES, HIDDEN, INPUTS, ROWS, SEQUENCES, UNITS, weight_draw


@op(
    error=lambda inputs, **_: 4 * (1 + np.sqrt(inputs)),
    sizes=lambda params, known: {GATES: 2 * known.get(HIDDEN, 0)},
    bench=("rows=196608 inputs=128 hidden=128", "rows=24576 inputs=32 hidden=128"),
    flops=lambda rows, inputs, gates, **_: 2 * rows * inputs * gates,
)
def gated_norm(
    x: REAL[ROWS, INPUTS],
    residual: REAL[ROWS, HIDDEN],
    gate: REAL[GATES, INPUTS],
    gate_bias: F32[GATES],
    norm_weight: F32[HIDDEN],
    norm_bias: F32[HIDDEN],
    *,
    epsilon: Float(0, 1, above=True) = EPSILON,
) -> REAL[ROWS, HIDDEN]:
    """A gated linear unit, added to a residual and normed: GLU, add and LayerNorm in one kernel.

        [a, b] = x gate^T + gate_bias                    the values' columns, then the gates'
        s      = residual + a * sigmoid(b)
        out    = (s - mean(s)) / sqrt(var(s) + epsilon) * norm_weight + norm_bias

    Sums and the norm are float32; a row's result depends on no other row.

    Args:
        x: rows that are gated, any unit of order 1.
        residual: rows that are added.
        gate: weights, the values' rows before the gates'.
        gate_bias: of each of them.
        norm_weight, norm_bias: scale and shift of each normed column.
        epsilon: added to the variance, in (0, 1].

    Returns:
        [rows, hidden] in the precision of x.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, rows too wide for its shared memory.

    Source: Lim et al. 2021, equations 2 and 5 (arXiv:1912.09363).
    """
    return spec_norm(residual + spec_glu(x, gate, gate_bias), norm_weight, norm_bias, epsilon)


@op(
    # As above, and the units' rounding on the way.
    error=lambda hidden, units, **_: 6 * (1 + np.sqrt(hidden) + np.sqrt(units)),
    sizes=lambda params, known: {GATES: 2 * known.get(HIDDEN, 0)},
    bench=(
        "rows=196608 hidden=128 units=128 sequences=1024",
        "rows=24576 hidden=128 units=128 sequences=1024",
        "rows=1024 hidden=128 units=128 sequences=1024",
    ),
    flops=lambda rows, hidden, units, gates, **_: 2 * rows * units * (hidden + gates),
)
def gated_residual(
    x: REAL[ROWS, HIDDEN],
    context: F32[SEQUENCES, UNITS] | None,
    first: REAL[UNITS, HIDDEN],
    first_bias: F32[UNITS],
    gate: REAL[GATES, UNITS],
    gate_bias: F32[GATES],
    norm_weight: F32[HIDDEN],
    norm_bias: F32[HIDDEN],
    *,
    epsilon: Float(0, 1, above=True) = EPSILON,
) -> REAL[ROWS, HIDDEN]:
    """A gated residual network whose second layer is folded into its gate, in one kernel.

        h      = ELU(x first^T + first_bias + context[r mod sequences])
        [a, b] = h gate^T + gate_bias                    the values' columns, then the gates'
        s      = x + a * sigmoid(b)
        out    = (s - mean(s)) / sqrt(var(s) + epsilon) * norm_weight + norm_bias

    The network's second layer has no activation, so its weight times the gate's is one matrix. Sums
    and the norm are float32; h is rounded to the precision of x.

    Args:
        x: rows, time-major: row r is of sequence r mod sequences.
        context: what each sequence adds to the units before ELU; nothing where left out.
        first, first_bias: the first layer.
        gate: the gate's weight times the second layer's, the values' rows before the gates'.
        gate_bias: of each of them.
        norm_weight, norm_bias: scale and shift of each normed column.
        epsilon: added to the variance, in (0, 1].

    Returns:
        [rows, hidden] in the precision of x.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, rows too wide for its shared memory.

    Source: Lim et al. 2021, equations 2 to 5 (arXiv:1912.09363).
    """
    total = x @ first.T + first_bias
    if context is not None:
        for r in range(len(x)):
            total[r] += context[r % len(context)]
    gated = spec_glu(spec_elu(total), gate, gate_bias)
    return spec_norm(x + gated, norm_weight, norm_bias, epsilon)


@gated_norm.draws
def _draw_norm(rng, sizes, params):
    return {"gate": weight_draw(rng, sizes[GATES], sizes[INPUTS])}


@gated_residual.draws
def _draw_residual(rng, sizes, params):
    given = {
        "first": weight_draw(rng, sizes[UNITS], sizes[HIDDEN]),
        "gate": weight_draw(rng, sizes[GATES], sizes[UNITS]),
    }
    if sizes[SEQUENCES] == 0 or rng.random() < 0.3:
        given["context"] = None
    return given


@gated_norm.compares
def _compare_norm(name, found, expected, arguments, allowed):
    # What rounding moved is what the norm takes.
    wide = widened(arguments)
    sums = wide["residual"] + spec_glu(wide["x"], wide["gate"], wide["gate_bias"])
    assert_normed(f"gated_norm.{name}", found, expected, sums, arguments, allowed)


@gated_residual.compares
def _compare_residual(name, found, expected, arguments, allowed):
    wide = widened(arguments)
    hidden = wide["x"] @ wide["first"].T + wide["first_bias"]
    if wide["context"] is not None:
        hidden += wide["context"][np.arange(len(hidden)) % len(wide["context"])]
    sums = wide["x"] + spec_glu(spec_elu(hidden), wide["gate"], wide["gate_bias"])
    assert_normed(f"gated_residual.{name}", found, expected, sums, arguments, allowed)


@gated_norm.on_cpu
def _cpu_norm(x, residual, gate, gate_bias, norm_weight, norm_bias, epsilon, out):
    gated = gated_linear(x.astype(np.float32), gate, gate_bias)
    out[:] = layer_norm(residual.astype(np.float32) + gated, norm_weight, norm_bias, epsilon)


@gated_residual.on_cpu
def _cpu_residual(
    x, context, first, first_bias, gate, gate_bias, norm_weight, norm_bias, epsilon, out
):
    wide = x.astype(np.float32)
    total = wide @ first.astype(np.float32).T + first_bias
    if context is not None and len(x):
        total += context[np.arange(len(x)) % len(context)]
    hidden = elu(total).astype(x.dtype).astype(np.float32)
    gated = gated_linear(hidden, gate, gate_bias)
    out[:] = layer_norm(wide + gated, norm_weight, norm_bias, epsilon)


@gated_norm.on_cuda
def _launch_norm(x, residual, gate, gate_bias, norm_weight, norm_bias, epsilon, out, stream):
    none = None, None, None, None
    given = x, residual, *none, gate, None, gate_bias, norm_weight, norm_bias, out
    launch_gated(given, 1, epsilon, x.dtype.name, stream)


@gated_residual.on_cuda
def _launch_residual(
    x, context, first, first_bias, gate, gate_bias, norm_weight, norm_bias, epsilon, out, stream
):
    before = x, x, context, first, None, first_bias
    given = *before, gate, None, gate_bias, norm_weight, norm_bias, out
    sequences = 1 if context is None else len(context)
    launch_gated(given, sequences, epsilon, x.dtype.name, stream)


def launch_gated(given, sequences, epsilon, terms, stream, levels=(1, 1)):
    """Queue gated.cu.

    Args:
        given: x, residual, context, first layer (or None), its scale and bias, gate, its scale and
            bias, the norm's weight and bias, out.
        sequences: rows of the context.
        epsilon: of the norm.
        terms: what products are of: "float32", "bfloat16" or "int8".
        stream: its address.
        levels: that a 1 of the inputs and of the units are, of int8.
    """
    x, residual, _, first, _, _, gate, *_, out = given
    (rows, hidden), inputs, units = out.shape, x.shape[1], gate.shape[1]
    widths = (inputs,) if first is None else (inputs, units)
    macros = rows_macros("gated", widths, hidden, rows, terms, launch.device())
    inputs_whole = whole(inputs, gate if first is None else first)
    flags = whole(inputs, x), inputs_whole, whole(units, gate), fours(hidden, residual, *given[9:])
    kernel = cuda_c(
        "tft/gated",
        "gated",
        first=first is not None,
        levels=x.dtype.name == "int8",
        # A context's runs of eight units are read as fours.
        whole=all_whole((*flags, units % 8 == 0, fours(units, given[2])), macros),
        **source_macros(macros),
    )
    sizes = rows, inputs, units, hidden, sequences, *flags
    args = *given, *map(np.int32, sizes), epsilon, *map(np.float32, levels)
    launch.launch(kernel, rows_grid(rows, macros), THREADS, args, stream, macros["nbytes"])
