"""What a step of a sequence is represented by: each variable's own network, mixed by the shares."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, I32, REAL, Choice, Float
from lowgpu_kernels.op import op
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
from lowgpu_kernels.ops.tft.rows import (
    THREADS,
    all_whole,
    fours,
    rows_grid,
    rows_macros,
    source_macros,
    whole,
)
from lowgpu_kernels.ops.tft.sizes import (
    BOUNDS,
    CATEGORICAL_VARIABLES,
    CATEGORIES,
    GATES,
    HIDDEN,
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


@op(
    error=lambda units, variables, **_: 6 * (2 + np.sqrt(units) + variables),
    sizes=lambda params, known: selection_sizes(known) | {GATES: 2 * known.get(HIDDEN, 0)},
    bench=(
        "sequences=172032 steps=1 reals=6 categories=0 units=128 hidden=128 real_variables=6 "
        "categorical_variables=0 table=0",
    ),
    flops=lambda sequences, steps, real_variables, units, gates, **_: (
        2 * sequences * steps * real_variables * units * gates
    ),
)
def variable_mixture(
    reals: F32[SEQUENCES, STEPS, REALS],
    categories: I32[SEQUENCES, STEPS, CATEGORIES],
    columns: I32[REAL_VARIABLES],
    category_columns: I32[CATEGORICAL_VARIABLES],
    bounds: I32[BOUNDS],
    share: F32[STEPS, SEQUENCES, VARIABLES],
    slope: F32[REAL_VARIABLES, UNITS],
    shift: F32[REAL_VARIABLES, UNITS],
    gate: REAL[REAL_VARIABLES, GATES, UNITS],
    gate_bias: F32[REAL_VARIABLES, GATES],
    residual_slope: F32[REAL_VARIABLES, HIDDEN],
    residual_shift: F32[REAL_VARIABLES, HIDDEN],
    residual_weight: F32[REAL_VARIABLES, HIDDEN] | None,
    residual_bias: F32[REAL_VARIABLES, HIDDEN] | None,
    norm_weight: F32[REAL_VARIABLES, HIDDEN],
    norm_bias: F32[REAL_VARIABLES, HIDDEN],
    table: F32[TABLE, HIDDEN],
    *,
    epsilon: Float(0, 1, above=True) = EPSILON,
    precision: Choice("float32", "bfloat16") = "float32",
) -> REAL[STEPS, SEQUENCES, HIDDEN]:
    """Every variable through a network of its own, mixed by the shares, in one kernel.

        x      = reals[columns[v]]
        h      = ELU(x slope[v] + shift[v])
        r      = x residual_slope[v] + residual_shift[v], normed where residual_weight is given
        f[v]   = norm(r + GLU(h gate[v]^T + gate_bias[v]))        of a real variable
        f[v]   = table[bounds[v] + categories[category_columns[v]]]   of a categorical one
        out    = sum over v of share[v] f[v]

    A variable's network sees one number, embedded linearly: its first layer and its residual are
    linear in that number. A category's network gives one row for each category, held in `table`.

    Args:
        reals, categories: what the caller brings.
        columns, category_columns: of the variables among them, no column twice.
        bounds: rows of the table in front of each categorical variable's, and their number.
        share: what `selection_weights` gave, real variables first.
        slope, shift: first layers.
        gate, gate_bias: the gates, second layers folded in, values before gates.
        residual_slope, residual_shift: the residuals.
        residual_weight, residual_bias: their norms, both or neither.
        norm_weight, norm_bias: norms of the sums.
        table: what each category is represented by.
        epsilon: added to each variance, in (0, 1].
        precision: of the gates, the units h and the result; all else is float32.

    Returns:
        time-major. NaN where the share is, as it is for a category without a row.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on the CPU, a category without a row; on a GPU,
            layers too wide for its shared memory.

    Source: Lim et al. 2021, equations 7 and 8 (arXiv:1912.09363).
    """
    given = dict(locals())
    sequences, steps = reals.shape[:2]
    out = np.zeros((steps, sequences, table.shape[1]))
    for v in range(len(columns)):
        sums, _ = _before_norm(given, v)
        normed = spec_norm(sums, norm_weight[v], norm_bias[v], epsilon)
        out += share[..., v : v + 1] * normed
    for v, column in enumerate(category_columns):
        for b in range(sequences):
            for t in range(steps):
                row = table[bounds[v] + categories[b, t, column]]
                out[t, b] += share[t, b, len(columns) + v] * row
    return out


def _before_norm(given, v):
    """What variable v's last norm takes, and what its residual's norm takes, time-major."""
    x = given["reals"][:, :, given["columns"][v]].T[:, :, None]
    hidden = spec_elu(x * given["slope"][v] + given["shift"][v])
    linear = x * given["residual_slope"][v] + given["residual_shift"][v]
    residual = linear
    if given["residual_weight"] is not None:
        norm = given["residual_weight"][v], given["residual_bias"][v], given["epsilon"]
        residual = spec_norm(linear, *norm)
    return residual + spec_glu(hidden, given["gate"][v], given["gate_bias"][v]), linear


@variable_mixture.draws
def _draw(rng, sizes, params):
    shares = rng.random((sizes[STEPS], sizes[SEQUENCES], sizes[VARIABLES]))
    given = {
        "gate": weight_draw(rng, sizes[REAL_VARIABLES], sizes[GATES], sizes[UNITS]),
        "share": shares / np.maximum(shares.sum(-1, keepdims=True), 1e-3),
    }
    if rng.random() < 0.5:
        given |= {"residual_weight": None, "residual_bias": None}
    return selection_draw(rng, sizes) | given


@variable_mixture.checks
def _check(categories, category_columns, bounds, residual_weight, residual_bias, **_):
    refuse_half_a_norm("variable_mixture", residual_weight, residual_bias)
    refuse_other_categories(categories, category_columns, bounds)


@variable_mixture.compares
def _compare(name, found, expected, arguments, allowed):
    wide = widened(arguments)
    grown = np.zeros((*found.shape[:2], 1))
    for v in range(len(wide["columns"])):
        sums, linear = _before_norm(wide, v)
        of_variable = gain(sums, wide["epsilon"]) * np.abs(wide["norm_weight"][v]).max(initial=0)
        if wide["residual_weight"] is not None:
            # A norm of the residual in float32, whatever the precision of the rest.
            finer = 2.0**-16 if found.dtype.name == "bfloat16" else 1
            steepest = np.abs(wide["residual_weight"][v]).max(initial=0)
            of_variable = of_variable * (1 + finer * gain(linear, wide["epsilon"]) * steepest)
        grown = grown + of_variable * wide["share"][..., v : v + 1]
    assert_within(f"variable_mixture.{name}", found, expected, allowed * (1 + grown))


@variable_mixture.on_cpu
def _cpu(
    reals,
    categories,
    columns,
    category_columns,
    bounds,
    share,
    slope,
    shift,
    gate,
    gate_bias,
    residual_slope,
    residual_shift,
    residual_weight,
    residual_bias,
    norm_weight,
    norm_bias,
    table,
    epsilon,
    precision,
    out,
):
    total = np.zeros(out.shape, np.float32)
    for v, column in enumerate(columns):
        x = np.ascontiguousarray(reals[:, :, column].T)[..., None]
        hidden = elu(x * slope[v] + shift[v]).astype(gate.dtype).astype(np.float32)
        residual = x * residual_slope[v] + residual_shift[v]
        if residual_weight is not None:
            residual = layer_norm(residual, residual_weight[v], residual_bias[v], epsilon)
        sums = residual + gated_linear(hidden, gate[v], gate_bias[v])
        total += share[..., v : v + 1] * layer_norm(sums, norm_weight[v], norm_bias[v], epsilon)
    for v, column in enumerate(category_columns):
        rows = table[bounds[v] + categories[:, :, column].T]
        total += share[..., len(columns) + v, None] * rows
    out[:] = total


@variable_mixture.on_cuda
def _launch(*given):
    *arrays, epsilon, precision, out, stream = given
    refuse_half_a_norm("variable_mixture", *arrays[12:14])
    steps, sequences, hidden = out.shape
    reals, categories, columns, category_columns = arrays[:4]
    units = arrays[6].shape[1]
    macros = rows_macros("mixture", (units,), hidden, steps * sequences, precision, launch.device())
    flags = whole(units, arrays[8]), fours(hidden, *arrays[10:], out)
    own = {"whole": all_whole(flags, macros)}
    kernel = cuda_c("tft/variable_mixture", "variable_mixture", **own, **source_macros(macros))
    sizes = (
        *(sequences, steps, reals.shape[2], categories.shape[2]),
        *(len(columns), len(category_columns), units, hidden),
        *flags,
    )
    args = (*arrays, out, *map(np.int32, sizes), epsilon)
    grid = rows_grid(steps * sequences, macros)
    launch.launch(kernel, grid, THREADS, args, stream, macros["nbytes"])
