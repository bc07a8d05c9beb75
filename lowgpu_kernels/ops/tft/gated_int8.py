"""Gates with a residual and a norm whose products are of int8."""

import numpy as np

from lowgpu_kernels.dims import BF16, F32, I8, Float
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.tft.gated import launch_gated
from lowgpu_kernels.ops.tft.levels import (
    APPROXIMATE,
    GIVEN,
    LEVELS,
    ROUNDED,
    STORED,
    given_levels,
    levels_of,
    product,
    scale_draw,
    spec_levels,
    spec_product,
    unsure_levels,
    weight_levels,
)
from lowgpu_kernels.ops.tft.norm import (
    EPSILON,
    assert_within,
    elu,
    gain,
    layer_norm,
    spec_elu,
    spec_norm,
)
from lowgpu_kernels.ops.tft.sizes import GATES, HIDDEN, INPUTS, ROWS, SEQUENCES, UNITS


@op(
    error=lambda **_: 1,  # `_compare` has a bound of its own
    sizes=lambda params, known: {GATES: 2 * known.get(HIDDEN, 0)},
    bench=("rows=196608 inputs=128 hidden=128",),
    flops=lambda rows, inputs, gates, **_: 2 * rows * inputs * gates,
    examples=lambda: [{"levels": 30.0}, {"levels": 0.7}],
)
def gated_norm_int8(
    x: GIVEN[ROWS, INPUTS],
    residual: BF16[ROWS, HIDDEN],
    gate: I8[GATES, INPUTS],
    gate_scale: F32[GATES],
    gate_bias: F32[GATES],
    norm_weight: F32[HIDDEN],
    norm_bias: F32[HIDDEN],
    *,
    levels: LEVELS,
    epsilon: Float(0, 1, above=True) = EPSILON,
) -> BF16[ROWS, HIDDEN]:
    """`gated_norm` with a product of int8.

        l      = x levels, the nearest whole number, ends at -128 and 127; x itself where it is int8
        [a, b] = gate_scale (l gate^T) + gate_bias       the values' columns, then the gates'
        s      = residual + a * sigmoid(b)
        out    = (s - mean(s)) / sqrt(var(s) + epsilon) * norm_weight + norm_bias

    The product's sums are int32 and exact, all behind them is float32.

    Args:
        x: rows that are gated, or their levels, as `lstm_int8` gives them.
        residual: rows that are added.
        gate: weights, the values' rows before the gates'.
        gate_scale: what a 1 of each of their sums is worth.
        gate_bias: of each of them.
        norm_weight, norm_bias: scale and shift of each normed column.
        levels: that a 1 of x is, in (0, 2^40]; of no use where x is int8.
        epsilon: added to the variance, in (0, 1].

    Returns:
        [rows, hidden].

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, rows too wide for its shared memory.

    Source: Lim et al. 2021, equations 2 and 5 (arXiv:1912.09363).
    """
    both = spec_product(spec_levels(x, levels), gate, gate_scale) + gate_bias
    return spec_norm(residual + _spec_gated(both), norm_weight, norm_bias, epsilon)


@op(
    error=lambda **_: 1,
    sizes=lambda params, known: {GATES: 2 * known.get(HIDDEN, 0)},
    bench=("rows=196608 hidden=128 units=128 sequences=1024",),
    flops=lambda rows, hidden, units, gates, **_: 2 * rows * units * (hidden + gates),
    examples=lambda: [{"levels": 30.0, "unit_levels": 25.0}, {"levels": 3.0, "unit_levels": 2.0}],
)
def gated_residual_int8(
    x: BF16[ROWS, HIDDEN],
    context: F32[SEQUENCES, UNITS] | None,
    first: I8[UNITS, HIDDEN],
    first_scale: F32[UNITS],
    first_bias: F32[UNITS],
    gate: I8[GATES, UNITS],
    gate_scale: F32[GATES],
    gate_bias: F32[GATES],
    norm_weight: F32[HIDDEN],
    norm_bias: F32[HIDDEN],
    *,
    levels: LEVELS,
    unit_levels: LEVELS,
    epsilon: Float(0, 1, above=True) = EPSILON,
) -> BF16[ROWS, HIDDEN]:
    """`gated_residual` with products of int8.

        l      = x levels, the nearest whole number, ends at -128 and 127
        h      = ELU(first_scale (l first^T) + first_bias + context[r mod sequences])
        k      = h unit_levels, the nearest whole number alike
        [a, b] = gate_scale (k gate^T) + gate_bias       the values' columns, then the gates'
        s      = x + a * sigmoid(b)
        out    = (s - mean(s)) / sqrt(var(s) + epsilon) * norm_weight + norm_bias

    The products' sums are int32 and exact, all between them is float32.

    Args:
        x: rows, time-major: row r is of sequence r mod sequences.
        context: what each sequence adds to the units before ELU; nothing where left out.
        first, first_bias: the first layer.
        gate: the gate's weight times the second layer's, the values' rows before the gates'.
        first_scale, gate_scale: what a 1 of each of their sums is worth.
        gate_bias: of each of them.
        norm_weight, norm_bias: scale and shift of each normed column.
        levels, unit_levels: that a 1 of x, and of h, is, in (0, 2^40].
        epsilon: added to the variance, in (0, 1].

    Returns:
        [rows, hidden].

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on a GPU, rows too wide for its shared memory.

    Source: Lim et al. 2021, equations 2 to 5 (arXiv:1912.09363).
    """
    hidden = _spec_units(x, context, first, first_scale, first_bias, levels)
    both = spec_product(spec_levels(hidden, unit_levels), gate, gate_scale) + gate_bias
    return spec_norm(x + _spec_gated(both), norm_weight, norm_bias, epsilon)


def _spec_gated(both):
    values, gates = np.split(both, 2, axis=-1)
    return values / (1 + np.exp(-gates))


def _spec_units(x, context, first, first_scale, first_bias, levels):
    total = spec_product(spec_levels(x, levels), first, first_scale) + first_bias
    if context is not None:
        for r in range(len(x)):
            total[r] += context[r % len(context)]
    return spec_elu(total)


@gated_norm_int8.draws
def _draw_norm(rng, sizes, params):
    return _weights(rng, "gate", sizes[GATES], sizes[INPUTS], params["levels"])


@gated_residual_int8.draws
def _draw_residual(rng, sizes, params):
    given = _weights(rng, "first", sizes[UNITS], sizes[HIDDEN], params["levels"])
    given |= _weights(rng, "gate", sizes[GATES], sizes[UNITS], params["unit_levels"])
    if sizes[SEQUENCES] == 0 or rng.random() < 0.3:
        given["context"] = None
    return given


def _weights(rng, name, columns, terms, levels):
    scale = scale_draw(rng, columns, terms, levels)
    return {name: weight_levels(rng, columns, terms), f"{name}_scale": scale}


@gated_norm_int8.compares
def _compare_norm(name, found, expected, arguments, allowed):
    given = _wide(arguments)
    both = spec_product(
        spec_levels(given["x"], given["levels"]), given["gate"], given["gate_scale"]
    )
    _assert_close(f"gated_norm_int8.{name}", found, expected, given, given["residual"], both, 0)


@gated_residual_int8.compares
def _compare_residual(name, found, expected, arguments, allowed):
    given = _wide(arguments)
    before = (given[n] for n in ("x", "context", "first", "first_scale", "first_bias", "levels"))
    hidden, levels = _spec_units(*before), given["unit_levels"]
    both = spec_product(spec_levels(hidden, levels), given["gate"], given["gate_scale"])
    # A unit that lies between two levels may have either.
    each = np.abs(given["gate"] * given["gate_scale"][:, None])
    moved = unsure_levels(hidden, levels) @ each.T
    _assert_close(f"gated_residual_int8.{name}", found, expected, given, given["x"], both, moved)


def _wide(arguments):
    """A call's arguments as a spec takes them."""
    kept = lambda a: not isinstance(a, np.ndarray) or a.dtype.kind in "iu"  # noqa: E731
    return {n: a if kept(a) else a.astype(np.float64) for n, a in arguments.items()}


def _assert_close(name, found, expected, given, residual, both, moved):
    """Refuse more than what approximations, `moved` sums and a rounding to bfloat16 make behind a norm."""
    values, _ = np.split(np.abs(both + given["gate_bias"]), 2, axis=-1)
    of_values, of_gates = np.split(np.broadcast_to(moved, both.shape), 2, axis=-1)
    before = of_values + values * (APPROXIMATE + of_gates / 4)
    sums = residual + _spec_gated(both + given["gate_bias"])
    epsilon = float(given["epsilon"])
    steepest = np.abs(given["norm_weight"]).max(initial=0)
    # A row's mean and spread move with its columns, and float32 rounds sums as large as its largest.
    most = before.max(-1, keepdims=True, initial=0)
    most += ROUNDED * np.abs(sums).max(-1, keepdims=True, initial=1)
    grown = most * gain(sums, epsilon) * (2 + np.abs(spec_norm(sums, 1, 0, epsilon))) * steepest
    assert_within(name, found, expected, STORED * np.abs(expected) + grown + ROUNDED)


@gated_norm_int8.on_cpu
def _cpu_norm(
    x, residual, gate, gate_scale, gate_bias, norm_weight, norm_bias, levels, epsilon, out
):
    both = product(given_levels(x, levels), gate, gate_scale) + gate_bias
    out[:] = layer_norm(residual.astype(np.float32) + _gated(both), norm_weight, norm_bias, epsilon)


@gated_residual_int8.on_cpu
def _cpu_residual(
    x,
    context,
    first,
    first_scale,
    first_bias,
    gate,
    gate_scale,
    gate_bias,
    norm_weight,
    norm_bias,
    levels,
    unit_levels,
    epsilon,
    out,
):
    total = product(levels_of(x, levels), first, first_scale) + first_bias
    if context is not None and len(x):
        total += context[np.arange(len(x)) % len(context)]
    both = product(levels_of(elu(total), unit_levels), gate, gate_scale) + gate_bias
    out[:] = layer_norm(x.astype(np.float32) + _gated(both), norm_weight, norm_bias, epsilon)


def _gated(both):
    columns = both.shape[-1] // 2
    with np.errstate(over="ignore"):
        return both[..., :columns] / (np.float32(1) + np.exp(-both[..., columns:]))


@gated_norm_int8.on_cuda
def _launch_norm(
    x, residual, gate, gate_scale, gate_bias, norm_weight, norm_bias, levels, epsilon, out, stream
):
    none = None, None, None, None
    given = x, residual, *none, gate, gate_scale, gate_bias, norm_weight, norm_bias, out
    launch_gated(given, 1, epsilon, "int8", stream, (levels, 1))


@gated_residual_int8.on_cuda
def _launch_residual(*given):
    x, context, *arrays, levels, unit_levels, epsilon, out, stream = given
    sequences = 1 if context is None else len(context)
    args = x, x, context, *arrays, out
    launch_gated(args, sequences, epsilon, "int8", stream, (levels, unit_levels))
