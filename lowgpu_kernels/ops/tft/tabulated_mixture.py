"""What a step is represented by, where every variable's network has been tabulated beforehand."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import BF16, F32, I32, Dim
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.tft.levels import STORED
from lowgpu_kernels.ops.tft.norm import assert_within
from lowgpu_kernels.ops.tft.rows import whole
from lowgpu_kernels.ops.tft.sizes import (
    BOUNDS,
    CATEGORICAL_VARIABLES,
    CATEGORIES,
    HIDDEN,
    REAL_VARIABLES,
    REALS,
    SEQUENCES,
    STEPS,
    TABLE,
    VARIABLES,
    refuse_other_categories,
    selection_draw,
    selection_sizes,
)

NODES = Dim("nodes", "reals that each variable's network was worked out for, two or more")
THREADS = 256  # pieces of 16 bytes a block. Untuned.
PIECE = 8


def _sizes(params, known):
    return selection_sizes(known) | {NODES: max(known.get(NODES, 2), 2)}


@op(
    # Relative to the largest value: where a real lies is within 2^-21 of the table, and nodes of a random
    # table differ by several; the compare adds the result's rounding.
    error=lambda nodes, variables, **_: 16.0 * (1 + nodes) * (1 + variables),
    sizes=_sizes,
    bench=(
        "sequences=1024 steps=168 reals=6 categories=0 real_variables=6 categorical_variables=0 "
        "table=0 nodes=1025 hidden=128",
    ),
)
def tabulated_mixture(
    reals: F32[SEQUENCES, STEPS, REALS],
    categories: I32[SEQUENCES, STEPS, CATEGORIES],
    columns: I32[REAL_VARIABLES],
    category_columns: I32[CATEGORICAL_VARIABLES],
    bounds: I32[BOUNDS],
    share: F32[STEPS, SEQUENCES, VARIABLES],
    spread: F32[REAL_VARIABLES],
    nodes: BF16[REAL_VARIABLES, NODES, HIDDEN],
    table: F32[TABLE, HIDDEN],
) -> BF16[STEPS, SEQUENCES, HIDDEN]:
    """`variable_mixture` with a table for every real variable, between whose rows it is a straight line.

        x      = reals[columns[v]]
        p      = (x / (spread[v] + |x|) + 1) / 2 (nodes - 1)        all reals lie in the table
        f[v]   = nodes[v, i] + (p - i) (nodes[v, i + 1] - nodes[v, i]),  i = floor(p)
        f[v]   = table[bounds[v] + categories[category_columns[v]]]  of a categorical one
        out    = sum over v of share[v] f[v]

    A variable's network is a function of one number that has a limit at either end, because it is
    normed last: row i of a table is that function at the real whose p is i, or its limit.

    Args:
        reals, categories: what the caller brings.
        columns, category_columns: of the variables among them, no column twice.
        bounds: rows of the table in front of each categorical variable's, and their number.
        share: what `selection_weights` gave, real variables first.
        spread: of each real variable, above 0: half of its table is for reals up to it.
        nodes: each real variable's network, worked out at the nodes.
        table: what each category is represented by.

    Returns:
        time-major. NaN where a share or a real is.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: shapes that do not go together; on the CPU, a category without a row.

    Source: Lim et al. 2021, equation 8 (arXiv:1912.09363); linear interpolation.
    """
    sequences, steps = reals.shape[:2]
    out = np.zeros((steps, sequences, table.shape[1]))
    last = nodes.shape[1] - 1
    for v, column in enumerate(columns):
        for b in range(sequences):
            for t in range(steps):
                x = reals[b, t, column]
                p = (x / (spread[v] + abs(x)) + 1) / 2 * last
                i = min(int(p), last - 1)
                row = nodes[v, i] + (p - i) * (nodes[v, i + 1] - nodes[v, i])
                out[t, b] += share[t, b, v] * row
    for v, column in enumerate(category_columns):
        for b in range(sequences):
            for t in range(steps):
                row = table[bounds[v] + categories[b, t, column]]
                out[t, b] += share[t, b, len(columns) + v] * row
    return out


@tabulated_mixture.draws
def _draw(rng, sizes, params):
    shares = rng.random((sizes[STEPS], sizes[SEQUENCES], sizes[VARIABLES]))
    return selection_draw(rng, sizes) | {
        "share": shares / np.maximum(shares.sum(-1, keepdims=True), 1e-3),
        "spread": rng.uniform(0.5, 2, sizes[REAL_VARIABLES]),
    }


@tabulated_mixture.checks
def _check(categories, category_columns, bounds, **_):
    refuse_other_categories(categories, category_columns, bounds)


@tabulated_mixture.compares
def _compare(name, found, expected, arguments, allowed):
    within = allowed + STORED * np.abs(expected)
    assert_within(f"tabulated_mixture.{name}", found, expected, within)


@tabulated_mixture.on_cpu
def _cpu(
    reals,
    categories,
    columns,
    category_columns,
    bounds,
    share,
    spread,
    nodes,
    table,
    out,
):
    total = np.zeros(out.shape, np.float32)
    last = np.float32(nodes.shape[1] - 1)
    half = np.float32(0.5)
    for v, column in enumerate(columns):
        x = np.ascontiguousarray(reals[:, :, column].T)
        with np.errstate(invalid="ignore"):
            place = np.where(np.isinf(x), np.sign(x), x / (spread[v] + np.abs(x)))
            place = (place * half + half) * last
            node = np.clip(np.nan_to_num(place), 0, last - 1).astype(np.int32)
        of_next = share[..., v] * (place - node.astype(np.float32))
        rows = nodes[v].astype(np.float32)
        total += (share[..., v] - of_next)[..., None] * rows[node]
        total += of_next[..., None] * rows[node + 1]
    for v, column in enumerate(category_columns):
        rows = table[bounds[v] + categories[:, :, column].T]
        total += share[..., len(columns) + v, None] * rows
    out[:] = total


@tabulated_mixture.on_cuda
def _launch(*given):
    *arrays, out, stream = given
    reals, categories, columns, category_columns = arrays[:4]
    nodes = arrays[7]
    steps, sequences, hidden = out.shape
    sizes = (
        *(sequences, steps, reals.shape[2], categories.shape[2]),
        *(len(columns), len(category_columns), nodes.shape[1], hidden),
    )
    whole_rows = whole(hidden, nodes, out)
    kernel = cuda_c("tft/tabulated_mixture", "tabulated_mixture", whole=whole_rows)
    rows = THREADS // min(max(blocks(hidden, PIECE), 1), THREADS)  # of a block
    grid = blocks(steps * sequences, rows) if hidden else 0
    launch.launch(kernel, grid, THREADS, (*arrays, out, *map(np.int32, sizes)), stream)
