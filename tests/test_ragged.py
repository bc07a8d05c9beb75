"""Sizes that fill no tile: rows, environments, single steps and every count of a pipeline's stages."""

import numpy as np
import pytest

from lowgpu_kernels import int8_gemm, launch
from lowgpu_kernels.dims import X, Y, Z
from lowgpu_kernels.ops.int8.gemm_tile import WarpgroupTile, WarpTile, gemm_tile
from tests.harness import arrays_for, assert_agrees, every_op, params_for, sizes_for
from tests.test_gpu import run_gpu

ROWS, ENVS = (1, 7, 100, 127, 129, 8191), (3, 5, 133)
STAGE_TERMS = {WarpgroupTile: 128, WarpTile: 64}
FEW = (1, 3, 33)  # of every other dimension
# A verified op's spec is a network and an env step in plain Python, a row at a time.
MOST_VERIFIED = 129


def draw(op, dims, size, steps=None):
    """(inputs, parameters, sizes) of a call in which those of `dims` that the op has are `size`."""
    rng = np.random.default_rng(size)
    params = params_for(op, rng)
    if "steps" in op.params and steps is not None:
        params = op.checked_params({**params, "steps": steps})
    sizes = sizes_for(op, rng, params, FEW if op.verify is None else FEW[:2])
    fixed = op.derived(params, dict(sizes)) if op.derived is not None else {}
    for dim in sizes.keys() - fixed.keys():
        if dim.name in dims:
            sizes[dim] = size
        elif dim.name == "T" and steps is not None:
            sizes[dim] = steps
    sizes |= op.derived(params, dict(sizes)) if op.derived is not None else {}
    return arrays_for(op, rng, sizes, params), params, sizes


def having(*names):
    """Ops with one of these dimensions in an input."""
    return [
        o for o in every_op if any(d.name in names for s in o.inputs.values() for d in s.dims())
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", having("B", "N", "rows", "X"), ids=str)
def test_rows_that_fill_no_tile_agree_with_the_spec(op, rows):
    if op.verify is not None and rows > MOST_VERIFIED:
        rows = MOST_VERIFIED + 2
    inputs, params, sizes = draw(op, ("B", "N", "rows", "X"), rows)
    assert_agrees(op, run_gpu(op, inputs, params, sizes), inputs, params, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", (1, 2, 9))
@pytest.mark.parametrize("envs", ENVS)
@pytest.mark.parametrize("op", having("E", "sequences"), ids=str)
def test_few_environments_and_single_steps_agree_with_the_spec(op, envs, steps):
    inputs, params, sizes = draw(op, ("E", "sequences"), envs, steps)
    assert_agrees(op, run_gpu(op, inputs, params, sizes), inputs, params, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns", [(8192, 4096), (1024, 1024), (64, 512), (16, 512)])
@pytest.mark.parametrize("width", (16, 1))
def test_every_count_of_stages_of_a_product_is_exact(rows, columns, width):
    """Of the terms of a sum: one stage, one fewer than there are, all, one more, and twice and one."""
    on, rng, done = launch.device(), np.random.default_rng(rows), set()
    for kind, stage in STAGE_TERMS.items():
        for most in range(1, 12):
            # With a term more, no row but the first starts at a multiple of 16 bytes.
            terms = most * stage + (width == 1)
            tile = gemm_tile(rows, columns, terms, width, on)
            counts = 1, tile.stages - 1, tile.stages, tile.stages + 1, 2 * tile.stages + 1
            if type(tile) is not kind or most not in counts:
                continue
            done.add(most)
            inputs = {
                name: rng.integers(-128, 128, (n, terms), np.int8)
                for name, n in (("a", rows), ("b", columns))
            }
            got = run_gpu(int8_gemm, inputs, {}, {X: rows, Y: columns, Z: terms})["out"]
            some = rng.choice(rows, 16, replace=False)
            want = inputs["a"][some].astype(np.float64) @ inputs["b"].astype(np.float64).T
            np.testing.assert_array_equal(got[some], want)
    assert len(done) >= 4
