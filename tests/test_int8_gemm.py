"""The int8 products: exact on the CPU, and their kernels emulated in every tile, width and result."""

import importlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import int8_gemm, int8_gemm_requantized, int8_gemm_scaled, launch
from lowgpu_kernels.compile import cuda_c, disassemble
from lowgpu_kernels.dims import X, Y, Z
from lowgpu_kernels.ops.int8.gemm_tile import NARROW, WIDE, WarpTile, gemm_tile, splits_of
from tests.emulator import emulating
from tests.harness import arrays_for, assert_agrees, poisoned_outputs

gemm = importlib.import_module("lowgpu_kernels.ops.int8.gemm")
GRID = (1, 3, 7, 10, 15, 16, 17, 31, 33, 54, 55, 56, 57, 64, 100, 127, 128, 129, 496, 1024)
A100, H100, H200 = (launch.KNOWN[name] for name in ("A100", "H100", "H200"))
ONE_CLUSTER = replace(H100, sms=2)  # so that its blocks take several tiles, one after another
SCALED = {
    "float32": (int8_gemm_scaled, {"precision": "float32"}),
    "bfloat16": (int8_gemm_scaled, {"precision": "bfloat16", "activation": "relu"}),
    "int8": (int8_gemm_requantized, {"scale": 0.7}),
    "int32": (int8_gemm, {}),
}
each_result = pytest.mark.parametrize("result", SCALED)


def drawn(result, rows, columns, terms):
    """(op, inputs, params, sizes) of a call."""
    op, given = SCALED[result]
    params, sizes = op.checked_params(given), {X: rows, Y: columns, Z: terms}
    rng = np.random.default_rng(rows * 31 + columns * 7 + terms)
    return op, arrays_for(op, rng, sizes, params), params, sizes


def assert_emulated(result, rows, columns, terms, tile=None, on=ONE_CLUSTER, offset=0):
    """Hold a launcher to the spec in either order of threads, with this tile or the one it chooses."""
    op, inputs, params, sizes = drawn(result, rows, columns, terms)
    given = {
        n: a if a is None else at_offset(a, offset if n in "ab" else 0) for n, a in inputs.items()
    }
    bits = []
    for backwards in (False, True):
        chosen = gemm_tile if tile is None else lambda *_: tile
        with emulating(on, backwards), mock.patch.object(gemm, "gemm_tile", chosen):
            (poison,) = poisoned_outputs(op, sizes, params)
            # Rows before and behind the result, which nothing may write.
            around = at_offset(np.resize(poison, (rows + 32, columns)), 0)
            outs = (around[16 : rows + 16],)
            shape, _ = op.scratch_specs({d.name: n for d, n in sizes.items()}, params)["shares"]
            op.cuda(*given.values(), *params.values(), *outs, np.full(shape, 77, np.int32), 0)
        assert_agrees(op, {"out": outs[0]}, inputs, params, sizes)
        bits.append(outs[0].tobytes())
        rest = np.concatenate([around[:16], around[rows + 16 :]])
        assert rest.tobytes() == np.resize(poison, rest.shape).tobytes()
    assert bits[0] == bits[1]


def at_offset(array, offset):
    """The same array at an address whose remainder by 16 is `offset`."""
    flat = np.empty(array.nbytes + 32, np.uint8)
    start = (offset - flat.ctypes.data) % 16
    view = flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[:] = array
    return view


# The CPU


def test_sums_are_those_of_exact_arithmetic_over_the_grid_of_sizes():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        rows, columns, terms = rng.choice(GRID, 3)
        a, b = (rng.integers(-128, 128, (n, terms), np.int8) for n in (rows, columns))
        a[0], b[0] = rng.choice([-128, 127], 2)
        want = a.astype(np.float64) @ b.astype(np.float64).T  # exact: far below 2^53
        np.testing.assert_array_equal(int8_gemm(a, b), want)


def test_a_known_product_of_small_odd_sizes():
    """Case E5."""
    rng = np.random.default_rng(0)
    a = rng.integers(-128, 128, (7, 10)).astype(np.int8)
    b = rng.integers(-128, 128, (10, 15)).astype(np.int8)
    got = int8_gemm(a, np.ascontiguousarray(b.T))
    assert got[0, :3].tolist() == [-33414, -22931, 8645] and got.sum() == 29149


def test_the_longest_sum_fits_and_a_longer_one_is_refused():
    """Case E4."""
    full = np.full((1, 131_071), -128, np.int8)
    assert int8_gemm(full, full)[0, 0] == 2_147_467_264
    # Odd products, whose sums float32 would round.
    odd = np.full((1, 131_071), 127, np.int8)
    assert int8_gemm(odd, odd)[0, 0] == 127**2 * 131_071
    longer = np.full((1, 131_072), -128, np.int8)
    for op in (int8_gemm, int8_gemm_scaled, int8_gemm_requantized):
        with pytest.raises(ValueError, match="at most 131071 columns, got 131072"):
            op(longer, longer)


def test_no_terms_give_the_bias():
    a, b = np.empty((3, 0), np.int8), np.empty((2, 0), np.int8)
    assert int8_gemm(a, b).tolist() == [[0, 0]] * 3
    bias = np.array([1.5, -2.5], np.float32)
    assert int8_gemm_requantized(a, b, bias=bias).tolist() == [[2, -2]] * 3


def test_ties_go_to_the_even_number_and_the_rest_to_the_ends():
    """Case E2."""
    one = np.ones((1, 1), np.int8)
    halves = np.array([[1], [3], [5], [-1], [-3], [-5]], np.int8)
    got = int8_gemm_requantized(one, halves, scale=0.5)
    assert got.tolist() == [[0, 2, 2, 0, -2, -2]]
    far = np.array([127, -128, 3, -3], np.int8)[:, None]
    scale = np.array([1.1, 1.1, np.inf, np.nan], np.float32)
    assert int8_gemm_requantized(one, far, column_scale=scale).tolist() == [[127, -128, 127, 0]]


def test_a_row_of_zeros_and_a_tiny_scale_stay_finite():
    """Cases E1 and E9."""
    a = np.array([[0] * 1024, [127] * 1024], np.int8)
    tiny = np.array([1e-9, 6.0], np.float32)
    got = int8_gemm_scaled(a, a, tiny, tiny)
    assert np.isfinite(got).all() and got[0].tolist() == [0, 0] and got[1, 1] == 36 * 127**2 * 1024


def test_a_rows_result_is_its_own():
    """Case E6."""
    op, inputs, params, _ = drawn("int8", 64, 40, 100)
    both = op(**inputs, **params)
    alone = {**inputs, "a": inputs["a"][5:6], "row_scale": inputs["row_scale"][5:6]}
    np.testing.assert_array_equal(op(**alone, **params), both[5:6])


# The kernel of warps


@each_result
@pytest.mark.parametrize("rows, columns", [(5, 136), (40, 131), (129, 264), (133, 130)])
def test_warps_agree_with_the_spec_in_every_height_and_result(result, rows, columns):
    assert_emulated(result, rows, columns, 112, on=A100)


@pytest.mark.parametrize("terms", [0, 1, 64, 192, 256, 320, 576])
def test_warps_agree_with_any_number_of_steps(terms):
    tile = WarpTile(16, 128, 1, 4, 4, 1 if terms == 1 else 16)
    assert_emulated("int32", 17, 130, terms, tile)


@pytest.mark.parametrize("terms, width", [(336, 16), (328, 8), (332, 4), (334, 1), (331, 1)])
def test_warps_take_rows_that_start_anywhere(terms, width):
    assert gemm.width_of(np.empty((3, terms), np.int8)) == width
    assert_emulated("int8", 70, 40, terms, on=A100)


@pytest.mark.parametrize("offset, width", [(8, 8), (4, 4), (2, 1), (13, 1)])
def test_warps_take_arrays_that_start_anywhere(offset, width):
    assert gemm.width_of(at_offset(np.empty((3, 128), np.int8), offset)) == width
    assert_emulated("int32", 18, 24, 144, on=H100, offset=offset)


@each_result
def test_terms_that_are_split_add_up(result):
    assert splits_of(3, 130, 2000, A100) == 7
    assert_emulated(result, 3, 130, 2000, on=A100)


def test_shares_without_a_step_add_nothing():
    tile = WarpTile(16, 128, 1, 4, 4, 16, splits=4)  # five steps in shares of two
    with mock.patch.object(gemm, "splits_of", lambda *_: 4):
        assert_emulated("int32", 9, 20, 320, tile)


def test_the_longest_sum_is_exact_in_the_kernels():
    full = np.full((1, 131_071), -128, np.int8)
    a, b = np.repeat(full, 2, 0), np.repeat(full, 3, 0)
    a[1] = 127
    for terms, tile in ((131_071, WarpTile(16, 128, 1, 4, 4, 1)), (131_056, NARROW)):
        out = np.full((2, 3), 7, np.int32)
        left, right = (at_offset(x[:, :terms], 0) for x in (a, b))
        with emulating(ONE_CLUSTER), mock.patch.object(gemm, "gemm_tile", lambda *_: tile):  # noqa: B023
            int8_gemm.cuda(left, right, out, None, 0)
        assert out.tolist() == [[16384 * terms] * 3, [-16256 * terms] * 3]


# The kernel of warpgroups


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 7, 9])
@pytest.mark.parametrize("tile", [WIDE, NARROW], ids=["wide", "narrow"])
def test_warpgroups_agree_with_any_number_of_blocks_of_terms(tile, blocks):
    terms = 128 * blocks - 16 * (blocks % 3)
    assert_emulated("int32", 2 * 128 * tile.cluster + 5, tile.columns - 12, terms, tile)


@each_result
@pytest.mark.parametrize("columns", [256 + 40, 256 + 37])
@pytest.mark.parametrize("tile", [WIDE, NARROW], ids=["wide", "narrow"])
def test_warpgroups_agree_with_the_spec_in_every_result(tile, columns, result):
    assert_emulated(result, 150, columns, 144, tile)


def test_bands_and_their_rest_cover_every_tile_once():
    assert_emulated("int8", 19 * 128 - 50, 264, 16, NARROW)
    assert_emulated("int8", 11 * 256 - 50, 520, 16, replace(WIDE, band=4), replace(H100, sms=4))


@pytest.mark.parametrize("columns", [264, 257])
@pytest.mark.parametrize("tile", [WIDE, NARROW, WarpTile(64, 128, 1, 4, 4, 16)], ids=repr)
def test_ties_in_the_kernels_go_to_the_even_number(tile, columns):
    a = np.zeros((3, 16), np.int8)
    a[:, 0] = 1, -1, 3
    b = np.zeros((columns, 16), np.int8)
    b[:, 0] = np.arange(columns) % 255 - 127
    out = np.full((3, columns), 77, np.int8)
    scales = None, None, None, np.float32(0.5)
    with emulating(ONE_CLUSTER), mock.patch.object(gemm, "gemm_tile", lambda *_: tile):
        int8_gemm_requantized.cuda(a, b, *scales, "none", out, None, 0)
    halves = a[:, :1] * b[:, 0].astype(np.float64) / 2
    np.testing.assert_array_equal(out, np.clip(np.rint(halves), -128, 127))


# Launches


def test_tiles_follow_the_shape_and_the_device():
    assert gemm_tile(8192, 8192, 8192, 16, H200) is WIDE
    assert gemm_tile(4096, 4096, 4096, 16, H200) is WIDE
    assert gemm_tile(1 << 20, 128, 256, 16, H200) is NARROW
    assert gemm_tile(1024, 1024, 1024, 16, H200) is NARROW
    assert (WIDE.grid(8192, 8192, H200), NARROW.grid(1 << 20, 128, H200)) == (132, 264)
    assert (WIDE.grid(130, 257, H200), NARROW.grid(130, 257, H200)) == (4, 6)

    def warps(*call):
        tile = gemm_tile(*call)
        return tile.rows, tile.stages, tile.width, tile.splits

    assert warps(8192, 8192, 8190, 1, H200) == (128, 4, 1, 1)
    assert warps(8192, 8192, 0, 16, H200) == (128, 4, 16, 1)
    assert warps(8192, 8192, 8192, 16, A100) == (128, 4, 16, 1)
    assert warps(8192, 8192, 8192, 16, launch.KNOWN["L4"]) == (128, 3, 16, 1)
    assert warps(64, 4096, 4096, 16, H200) == (64, 4, 16, 9)
    assert warps(16, 4096, 512, 16, H200) == (16, 4, 16, 2)
    assert warps(16, 65536, 4096, 16, H200) == (16, 4, 16, 1)


@pytest.mark.parametrize("tile", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("whole", [True, False])
@each_result
def test_warpgroup_kernels_keep_to_registers_and_multiply_without_copying_sums(tile, whole, result):
    made = {"result": gemm.RESULTS[result], "relu": True, "whole": whole}
    kernel = cuda_c(tile.path, "gemm_warpgroup", **tile.macros, **made)
    binary = kernel.binary("sm_90a")
    resources = binary.kernel("gemm_warpgroup")
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0
    fits = launch.occupancy(resources, tile.threads, tile.nbytes, H200)
    assert fits.blocks_per_sm >= tile.blocks_a_sm
    code = disassemble(binary)
    assert not FLOAT64.search(code) and not CALL.search(code)
    assert code.count("IGMMA") == 4 and code.count("UTMALDG") == 2
    # One wait in the loop and one behind it: none that the compiler had to add.
    assert code.count("WARPGROUP.DEPBAR") == 2
    assert ("MULTICAST" in code) == (tile.cluster > 1)


@pytest.mark.parametrize("part", ["A100", "L4", "H200"])
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("width", [16, 8, 4, 1])
def test_warp_kernels_keep_to_registers_and_use_tensor_cores(part, rows, width):
    on = launch.KNOWN[part]
    # No terms: else some sizes would be warpgroups'.
    tile = gemm_tile(rows, 4096, 0, width, on)
    made = {"result": "int", "relu": False, "whole": True}
    binary = cuda_c(tile.path, "gemm", **tile.macros, **made).binary(on.architecture)
    resources = binary.kernel("gemm")
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0
    fits = launch.occupancy(resources, tile.threads, tile.nbytes, on)
    assert fits.blocks_per_sm >= tile.blocks_a_sm
    code = disassemble(binary)
    assert "IMMA.16832.S8.S8" in code and ("LDGSTS" in code) == (width > 1)


@pytest.mark.gpu
def test_products_on_the_gpu_are_exact_over_the_grid_of_sizes():
    import cupy

    rng = np.random.default_rng(1)
    aligned = [n for n in GRID if n % 16 == 0]
    for i in range(2000):
        rows, columns, terms = rng.choice(GRID, 3)
        if i % 2:
            rows, terms = max(rows, 65), rng.choice([*aligned, 384, 640, 1040])
        a, b = (rng.integers(-128, 128, (n, terms), np.int8) for n in (rows, columns))
        want = a.astype(np.float64) @ b.astype(np.float64).T
        got = int8_gemm(cupy.asarray(a), cupy.asarray(b)).get()
        np.testing.assert_array_equal(got, want, err_msg=f"{rows} x {columns} x {terms}")


@pytest.mark.gpu
@each_result
@pytest.mark.parametrize("tile", [WIDE, NARROW], ids=["wide", "narrow"])
def test_warpgroups_on_the_gpu_give_the_bits_of_the_cpu(result, tile):
    import cupy

    if launch.device().capability != (9, 0):
        pytest.skip("warpgroup products need compute capability 9.0")
    for rows, columns, terms in ((300, 264, 384), (2000, 1111, 640), (129, 1000, 2064)):
        op, inputs, params, _ = drawn(result, rows, columns, terms)
        given = {n: None if x is None else cupy.asarray(x) for n, x in inputs.items()}
        with mock.patch.object(gemm, "gemm_tile", lambda *_: tile):
            got = op(**given, **params).get()
        assert got.tobytes() == op(**inputs, **params).tobytes()
