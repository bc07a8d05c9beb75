"""How much each variable of a step counts: the selection's network, which sees all variables."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, I32, Float
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.tft.norm import (
    EPSILON,
    assert_within,
    elu,
    gain,
    gated_linear,
    layer_norm,
    spec_elu,
    spec_glu,
    spec_norm,
    widened,
)
from lowgpu_kernels.ops.tft.sizes import (
    BOUNDS,
    CATEGORICAL_VARIABLES,
    CATEGORIES,
    GATES,
    MAPPED,
    REAL_VARIABLES,
    REALS,
    SEQUENCES,
    STEPS,
    TABLE,
    UNITS,
    VARIABLES,
    refuse_half_a_norm,
    refuse_other_categories,
    selection_draw,
    selection_sizes,
    weight_draw,
)

THREADS = 128  # rows a block, one a thread. Untuned.


def _sizes(params, known):
    found = selection_sizes(known)
    mapped = known.get(UNITS, 0) + found[VARIABLES]
    return found | {MAPPED: mapped, GATES: 2 * found[VARIABLES]}


@op(
    error=lambda units, real_variables, categories, **_: (
        8 * (4 + units + real_variables + categories)
    ),
    sizes=_sizes,
    bench=(
        "sequences=172032 steps=1 reals=6 categories=0 units=6 real_variables=6 "
        "categorical_variables=0 table=0",
    ),
    flops=lambda sequences, steps, reals, mapped, units, gates, **_: (
        2 * sequences * steps * (reals * mapped + units * gates)
    ),
)
def selection_weights(
    reals: F32[SEQUENCES, STEPS, REALS],
    categories: I32[SEQUENCES, STEPS, CATEGORIES],
    columns: I32[REAL_VARIABLES],
    category_columns: I32[CATEGORICAL_VARIABLES],
    bounds: I32[BOUNDS],
    context: F32[SEQUENCES, UNITS] | None,
    slope: F32[REAL_VARIABLES, MAPPED],
    shift: F32[MAPPED],
    table: F32[TABLE, MAPPED],
    gate: F32[GATES, UNITS],
    gate_bias: F32[GATES],
    residual_weight: F32[VARIABLES] | None,
    residual_bias: F32[VARIABLES] | None,
    norm_weight: F32[VARIABLES],
    norm_bias: F32[VARIABLES],
    *,
    epsilon: Float(0, 1, above=True) = EPSILON,
) -> F32[STEPS, SEQUENCES, VARIABLES]:
    """The share of each variable in what a step of a sequence is represented by.

        m      = shift + sum over v of reals[columns[v]] slope[v]
                       + sum over v of table[bounds[v] + categories[category_columns[v]]]
        h      = ELU(m[:units] + context)
        r      = m[units:], normed with residual_weight and residual_bias where given
        out    = softmax(norm(r + GLU(h gate^T + gate_bias)))

    The network's first layer and its residual are linear in the embedded variables, and an embedded
    real is linear in the real: together they are `slope`, and for a category a row of `table`.

    Args:
        reals, categories: what the caller brings.
        columns, category_columns: of the variables among them, no column twice.
        bounds: rows of the table in front of each categorical variable's, and their number.
        context: what each sequence adds to the units before ELU; nothing where left out.
        slope: what a real variable of 1 adds to the units and to the residual.
        shift: what they are without any.
        table: what each category adds to them.
        gate, gate_bias: of the network's gate, its second layer folded in, values before gates.
        residual_weight, residual_bias: norm of the residual, both or neither.
        norm_weight, norm_bias: norm of the sum.
        epsilon: added to each variance, in (0, 1].

    Returns:
        time-major; a row of shares sums to 1. NaN where a category has no row in the table.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on the CPU, a category without a row; on a GPU,
            variables and units too many for its shared memory.

    Source: Lim et al. 2021, equation 6 (arXiv:1912.09363).
    """
    sums, _ = _before_norm(dict(locals()))
    return _softmax(spec_norm(sums, norm_weight, norm_bias, epsilon))


def _before_norm(given):
    """What the last norm takes, and what the residual's norm takes, [steps, sequences, variables]."""
    reals, categories, slope = given["reals"], given["categories"], given["slope"]
    bounds, table, gate = given["bounds"], given["table"], given["gate"]
    sequences, steps = reals.shape[:2]
    units = gate.shape[1]
    mapped = np.tile(given["shift"], (steps, sequences, 1))
    for b in range(sequences):
        for t in range(steps):
            for v, column in enumerate(given["columns"]):
                mapped[t, b] += reals[b, t, column] * slope[v]
            for v, column in enumerate(given["category_columns"]):
                mapped[t, b] += table[bounds[v] + categories[b, t, column]]
    hidden, linear = mapped[..., :units], mapped[..., units:]
    if given["context"] is not None:
        hidden = hidden + given["context"]
    residual = linear
    if given["residual_weight"] is not None:
        norm = given["residual_weight"], given["residual_bias"], given["epsilon"]
        residual = spec_norm(linear, *norm)
    return residual + spec_glu(spec_elu(hidden), gate, given["gate_bias"]), linear


def _softmax(x):
    if x.shape[-1] == 0:
        return x
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@selection_weights.draws
def _draw(rng, sizes, params):
    given = {"gate": weight_draw(rng, sizes[GATES], sizes[UNITS])}
    if rng.random() < 0.3:
        given["context"] = None
    if rng.random() < 0.3:
        given |= {"residual_weight": None, "residual_bias": None}
    return selection_draw(rng, sizes) | given


@selection_weights.checks
def _check(categories, category_columns, bounds, residual_weight, residual_bias, **_):
    refuse_half_a_norm("selection_weights", residual_weight, residual_bias)
    refuse_other_categories(categories, category_columns, bounds)


@selection_weights.compares
def _compare(name, found, expected, arguments, allowed):
    if found.size == 0:
        return
    wide = widened(arguments)
    sums, linear = _before_norm(wide)
    grown = gain(sums, wide["epsilon"]) * np.abs(wide["norm_weight"]).max()
    if wide["residual_weight"] is not None:
        steepest = np.abs(wide["residual_weight"]).max()
        grown = grown * (1 + gain(linear, wide["epsilon"]) * steepest)
    assert_within(f"selection_weights.{name}", found, expected, allowed * (1 + grown))


@selection_weights.on_cpu
def _cpu(
    reals,
    categories,
    columns,
    category_columns,
    bounds,
    context,
    slope,
    shift,
    table,
    gate,
    gate_bias,
    residual_weight,
    residual_bias,
    norm_weight,
    norm_bias,
    epsilon,
    out,
):
    if out.size == 0:
        return
    units = gate.shape[1]
    mapped = reals.swapaxes(0, 1)[..., columns] @ slope + shift
    for v, column in enumerate(category_columns):
        mapped += table[bounds[v] + categories[..., column].T]
    hidden, residual = mapped[..., :units], mapped[..., units:]
    if context is not None:
        hidden = hidden + context
    if residual_weight is not None:
        residual = layer_norm(residual, residual_weight, residual_bias, epsilon)
    sums = residual + gated_linear(elu(hidden), gate, gate_bias)
    normed = layer_norm(sums, norm_weight, norm_bias, epsilon)
    powers = np.exp(normed - normed.max(-1, keepdims=True))
    out[:] = powers / powers.sum(-1, keepdims=True)


@selection_weights.on_cuda
def _launch(*given):
    *arrays, epsilon, out, stream = given
    refuse_half_a_norm("selection_weights", *arrays[11:13])
    steps, sequences, variables = out.shape
    reals, categories, columns, category_columns = arrays[:4]
    units = arrays[9].shape[1]
    sizes = (
        *(sequences, steps, reals.shape[2], categories.shape[2]),
        *(len(columns), len(category_columns), units),
    )
    if variables == 0:
        return
    threads, shared = block_of(len(columns) + units + variables, launch.device())
    kernel = cuda_c("tft/selection_weights", "selection_weights", threads=threads)
    grid = blocks(steps * sequences, threads)
    launch.launch(
        kernel, grid, threads, (*arrays, out, *map(np.int32, sizes), epsilon), stream, shared
    )


def block_of(numbers, on):
    """(threads, bytes of shared memory) of a block whose threads keep so many numbers each.

    A thread's reals, units and sums are a column each of [numbers, threads].

    Raises:
        ValueError: numbers of one warp that do not fit the Device `on`.
    """
    for threads in (THREADS, THREADS // 2, launch.WARP):
        if 4 * threads * numbers <= on.shared_per_block:
            return threads, 4 * threads * numbers
    raise ValueError(
        f"selection_weights needs {4 * launch.WARP * numbers} B of shared memory a block for "
        f"{numbers} variables and units; {on.name} has {on.shared_per_block} B: give fewer"
    )
