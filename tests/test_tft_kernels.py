"""The transformer's kernels: emulated against the specs, compiled and disassembled."""

from dataclasses import replace

import numpy as np
import pytest

from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu.tft import load_pytorch_forecasting
from lowgpu.tft.graph import buffers, forward
from lowgpu.tft.model import checked_inputs, checked_weights, reference
from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.dims import REAL
from lowgpu_kernels.op import OPS
from lowgpu_kernels.ops.tft.rows import TILES, rows_macros
from lowgpu_kernels.ops.tft.selection_weights import block_of
from tests.emulator import emulating
from tests.harness import arrays_for, assert_agrees, dims_of, kinds_of_real, run_launcher
from tests.test_tft import SINGLE, WEIGHTS, parts

H200 = launch.KNOWN["H200"]
ONE_SM = replace(
    H200, sms=1
)  # so that few rows take the tallest tiles; of 132 SMs they take the flattest
# Sizes that fill no tile, several of a call; of an LSTM the widths are few, as each is compiled anew.
CALLS = {
    "linear": (
        ({"rows": 67, "inputs": 40, "outputs": 136}, {}),
        ({"rows": 5, "inputs": 7, "outputs": 3}, {}),
        ({"rows": 33, "inputs": 129, "outputs": 1}, {}),
        ({"rows": 2, "inputs": 0, "outputs": 5}, {}),
    ),
    "linear_float32": (
        ({"rows": 67, "inputs": 40, "outputs": 136}, {}),
        ({"rows": 3, "inputs": 33, "outputs": 7}, {}),
    ),
    "gated_norm": (
        ({"rows": 67, "inputs": 32, "hidden": 128}, {}),
        ({"rows": 31, "inputs": 9, "hidden": 1}, {}),
        ({"rows": 3, "inputs": 16, "hidden": 133}, {"epsilon": 1e-3}),
    ),
    "gated_residual": (
        ({"rows": 67, "hidden": 128, "units": 40, "sequences": 7}, {}),
        ({"rows": 9, "hidden": 3, "units": 33, "sequences": 2}, {"epsilon": 1e-3}),
        ({"rows": 65, "hidden": 16, "units": 16, "sequences": 65}, {}),
    ),
    "selection_weights": (
        (
            {"sequences": 7, "steps": 19, "reals": 5, "categories": 2, "units": 6}
            | {"real_variables": 4, "categorical_variables": 2, "table": 9},
            {},
        ),
        (
            {"sequences": 3, "steps": 1, "reals": 1, "categories": 0, "units": 1}
            | {"real_variables": 1, "categorical_variables": 0, "table": 0},
            {"epsilon": 1e-3},
        ),
    ),
    "variable_mixture": (
        (
            {"sequences": 7, "steps": 10, "reals": 4, "categories": 2, "units": 40, "hidden": 128}
            | {"real_variables": 3, "categorical_variables": 2, "table": 9},
            {},
        ),
        (
            {"sequences": 5, "steps": 2, "reals": 2, "categories": 1, "units": 7, "hidden": 19}
            | {"real_variables": 2, "categorical_variables": 1, "table": 3},
            {"epsilon": 1e-3},
        ),
        (
            {"sequences": 2, "steps": 3, "reals": 0, "categories": 2, "units": 0, "hidden": 16}
            | {"real_variables": 0, "categorical_variables": 2, "table": 4},
            {},
        ),
    ),
    "lstm": (
        ({"steps": 7, "sequences": 11, "hidden": 16}, {"history": 4}),
        ({"steps": 5, "sequences": 3, "hidden": 137}, {"history": 9}),
    ),
    "interpretable_attention": (
        ({"future": 5, "sequences": 3, "projected": 32, "steps": 70}, {"heads": 4}),
        ({"future": 35, "sequences": 2, "projected": 35, "steps": 35}, {"heads": 1, "ahead": 3}),
        ({"future": 3, "sequences": 2, "projected": 6, "steps": 131}, {"heads": 2, "ahead": 1}),
        ({"future": 18, "sequences": 2, "projected": 72, "steps": 66}, {"heads": 1, "ahead": 1}),
    ),
    "linear_int8": (
        ({"rows": 67, "inputs": 80, "outputs": 136}, {"levels": 30}),
        ({"rows": 5, "inputs": 7, "outputs": 3}, {"levels": 30}),
        ({"rows": 33, "inputs": 129, "outputs": 1}, {"levels": 0.7}),
        ({"rows": 2, "inputs": 0, "outputs": 5}, {"levels": 30}),
        ({"rows": 18, "inputs": 72, "outputs": 40}, {"levels": 3}),
    ),
    "gated_norm_int8": (
        ({"rows": 67, "inputs": 32, "hidden": 128}, {"levels": 30}),
        ({"rows": 31, "inputs": 16, "hidden": 16}, {"levels": 0.7}),
        ({"rows": 3, "inputs": 73, "hidden": 133}, {"levels": 30, "epsilon": 1e-3}),
    ),
    "gated_residual_int8": (
        (
            {"rows": 67, "hidden": 128, "units": 80, "sequences": 7},
            {"levels": 30, "unit_levels": 25},
        ),
        (
            {"rows": 9, "hidden": 3, "units": 33, "sequences": 2},
            {"levels": 3, "unit_levels": 2, "epsilon": 1e-3},
        ),
        (
            {"rows": 65, "hidden": 16, "units": 16, "sequences": 65},
            {"levels": 30, "unit_levels": 90},
        ),
    ),
    "tabulated_mixture": (
        (
            {"sequences": 7, "steps": 10, "reals": 4, "categories": 2, "hidden": 128, "nodes": 33}
            | {"real_variables": 3, "categorical_variables": 2, "table": 9},
            {},
        ),
        (
            {"sequences": 5, "steps": 2, "reals": 2, "categories": 1, "hidden": 19, "nodes": 2}
            | {"real_variables": 2, "categorical_variables": 1, "table": 3},
            {},
        ),
    ),
    "lstm_int8": (
        (
            {"steps": 7, "sequences": 11, "hidden": 80},
            {"history": 4, "levels": 30, "first_levels": 40},
        ),
        (
            {"steps": 5, "sequences": 3, "hidden": 137},
            {"history": 9, "levels": 30, "first_levels": 40},
        ),
    ),
}


def drawn(name, counts, params, real, seed=0):
    """(op, inputs, params, sizes) of a call; with seed 0 no input is left out."""
    op = OPS[name]
    given = {"precision": real, **params}
    params = op.checked_params({n: v for n, v in given.items() if n in op.params})
    sizes = {d: counts[d.name] for d in dims_of(op) if d.name in counts}
    sizes = op.sizes_of(sizes, params)
    rng = np.random.default_rng(seed)
    inputs = arrays_for(op, rng, sizes, params, real)
    while seed == 0 and any(a is None for a in inputs.values()):
        inputs = arrays_for(op, rng, sizes, params, real)
    return op, inputs, params, sizes


def reals_of(name):
    op = OPS[name]
    return op.params["precision"].values if "precision" in op.params else kinds_of_real(op, {})


EACH = [(name, real) for name in CALLS for real in reals_of(name)]
each_kernel = pytest.mark.parametrize("name, real", EACH)


# What a GPU would run, on the host.


@each_kernel
def test_the_kernels_agree_with_the_specs_in_either_order_of_threads(name, real):
    for seed, (counts, params) in enumerate(CALLS[name]):
        op, inputs, params, sizes = drawn(name, counts, params, real, seed)
        runs = []
        for backwards in (False, True):
            with emulating(ONE_SM, backwards):
                runs.append(run_launcher(op, inputs, params, sizes, real))
        assert_agrees(op, runs[0], inputs, params, sizes, real)
        for output, first in runs[0].items():
            assert first.tobytes() == runs[1][output].tobytes(), f"{output} at {counts}"


@pytest.mark.parametrize(
    "name",
    (
        *("linear", "gated_residual", "variable_mixture", "lstm"),
        *("linear_int8", "gated_residual_int8", "tabulated_mixture", "lstm_int8"),
    ),
)
def test_a_kernels_row_depends_on_no_other_row(name):
    counts, given = CALLS[name][0]
    by = "sequences" if "sequences" in counts else "rows"
    op, inputs, params, sizes = drawn(name, counts, given, "float32")
    order = np.random.default_rng(1).permutation(counts[by])
    if name.startswith("gated_residual"):
        inputs["context"], by = None, "rows"
        order = np.random.default_rng(1).permutation(counts["rows"])
    moved = dict(inputs)
    for n, array in inputs.items():
        axes = [d.name for d in op.inputs[n].dims()] if array is not None else []
        if by in axes:
            moved[n] = np.ascontiguousarray(np.take(array, order, axes.index(by)))
    with emulating(ONE_SM):
        (first,), (second,) = (
            run_launcher(op, given, params, sizes).values() for given in (inputs, moved)
        )
    (output,) = op.outputs.values()
    axis = [d.name for d in output.dims()].index(by)
    assert np.take(first, order, axis).tobytes() == second.tobytes()


def test_a_category_without_a_row_gives_nan_on_a_gpu_and_reads_no_other_memory():
    for name in ("selection_weights", "variable_mixture"):
        op, inputs, params, sizes = drawn(name, *CALLS[name][0], "float32")
        column = inputs["category_columns"][1]
        for unknown in (-1, 9, 2**31 - 1):
            given = {**inputs, "categories": inputs["categories"].copy()}
            given["categories"][3, 5, column] = unknown
            if name == "variable_mixture":
                given["share"] = inputs["share"].copy()
                given["share"][5, 3] = np.nan
            with emulating(ONE_SM):
                (got,) = run_launcher(op, given, params, sizes).values()
            wrong = np.isnan(got).any(-1)
            assert wrong[5, 3] and wrong.sum() == 1


def test_the_kernels_one_after_the_other_predict_what_pytorch_forecasting_does():
    shape, arrays = load_pytorch_forecasting(WEIGHTS)
    found = parts(WEIGHTS.with_name("expected.safetensors"))
    given = {n.replace("_", ".", 1) if "len" not in n else n: a for n, a in found["in"].items()}
    inputs = checked_inputs(shape, given, np)
    types = {"real": "f4", "float32": "f4", "int32": "i4"}
    weights = {
        n: np.ascontiguousarray(np.asarray(a).astype(types[kind]))
        for n, (a, kind) in checked_weights(shape, arrays).items()
    }
    into = {n: np.full(s, 77, types[t]) for n, (s, t) in buffers(shape, 6, 12, 6).items()}
    for kind in ("reals", "categories"):
        inputs[f"static.{kind}"] = np.ascontiguousarray(inputs[f"history.{kind}"][:, :1])

    def run(op, arrays, out, **parameters):
        params = op.checked_params(parameters).values()
        op.cuda(*arrays, *params, *(out if isinstance(out, tuple) else (out,)), 0)

    with emulating(H200):
        forward(shape, weights, inputs, into, run)
    want = found["out"]["prediction"].swapaxes(0, 1)
    np.testing.assert_allclose(into["prediction"], want, rtol=0, atol=SINGLE)
    want = reference(shape, arrays, **found["in"]).attention.swapaxes(0, 1)
    np.testing.assert_allclose(into["attention"], want, rtol=0, atol=SINGLE)


# What a GPU would run, compiled for it.

SERVED = {
    "linear": ({"rows": 196608, "inputs": 128, "outputs": 512}, {}),
    "linear_float32": ({"rows": 24576, "inputs": 128, "outputs": 7}, {}),
    "gated_norm": ({"rows": 196608, "inputs": 128, "hidden": 128}, {}),
    "gated_residual": ({"rows": 196608, "hidden": 128, "units": 128, "sequences": 1024}, {}),
    "selection_weights": (
        {"sequences": 1024, "steps": 168, "reals": 6, "categories": 0, "units": 6}
        | {"real_variables": 6, "categorical_variables": 0, "table": 0},
        {},
    ),
    "variable_mixture": (
        {"sequences": 1024, "steps": 168, "reals": 6, "categories": 0, "units": 128}
        | {"hidden": 128, "real_variables": 6, "categorical_variables": 0, "table": 0},
        {},
    ),
    "lstm": ({"steps": 192, "sequences": 1024, "hidden": 128}, {"history": 168}),
    "interpretable_attention": (
        {"future": 24, "sequences": 1024, "projected": 128, "steps": 192},
        {"heads": 4},
    ),
    "linear_int8": ({"rows": 196608, "inputs": 128, "outputs": 160}, {"levels": 30}),
    "gated_norm_int8": ({"rows": 196608, "inputs": 128, "hidden": 128}, {"levels": 30}),
    "gated_residual_int8": (
        {"rows": 196608, "hidden": 128, "units": 128, "sequences": 1024},
        {"levels": 30, "unit_levels": 30},
    ),
    "tabulated_mixture": (
        {"sequences": 1024, "steps": 168, "reals": 6, "categories": 0, "hidden": 128}
        | {"real_variables": 6, "categorical_variables": 0, "table": 0, "nodes": 1025},
        {},
    ),
    "lstm_int8": (
        {"steps": 192, "sequences": 1024, "hidden": 128},
        {"history": 168, "levels": 30, "first_levels": 40},
    ),
}


def recorded(name, real, on):
    """The one launch that a call makes on the Device `on`."""
    op, (counts, params) = OPS[name], SERVED[name]
    given = {"precision": real, **params}
    params = op.checked_params({n: v for n, v in given.items() if n in op.params})
    sizes = op.sizes_of({d: counts[d.name] for d in dims_of(op) if d.name in counts}, params)
    chosen = op.chosen_by(params) or {REAL.dtypes: real}
    buffer = lambda spec: Buffer(1 << 40, spec.resolve(sizes), spec.dtype(chosen))
    arrays = map(buffer, op.inputs.values())
    with launch.recording(on) as made:
        op.cuda(*arrays, *params.values(), *map(buffer, op.outputs.values()), 0)
    (only,) = made
    return only


@each_kernel
@pytest.mark.parametrize("part", ("A100", "L4", "H200"))
def test_kernels_keep_to_registers_and_use_the_units_they_are_written_for(name, real, part):
    int8 = name.endswith("_int8")
    everywhere = int8 or name in ("selection_weights", "tabulated_mixture")
    if real == "float32" and part != "H200" and not everywhere:
        pytest.skip("the same source as for the H200, with no instruction of one architecture")
    on = launch.KNOWN[part]
    launched = recorded(name, real, on)
    resources = launched.resources(on)
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0
    assert resources.shared + launched.shared <= on.shared_per_block
    assert launched.block[0] <= launch.fitting_threads(resources, launched.block[0], on)
    code = disassemble(launched.kernel.binary(on.architecture))
    assert not FLOAT64.search(code) and not CALL.search(code)
    products = real == "bfloat16"
    assert ("HMMA.16816.F32.BF16" in code) == products
    assert ("IMMA.16832.S8.S8" in code) == int8
    if (products or int8) and name in ("linear", "lstm", "linear_int8", "lstm_int8"):
        # Factors arrive where the tensor cores take them.
        lines = code.splitlines()
        at = [i for i, line in enumerate(lines) if "HMMA" in line or "IMMA" in line]
        between = lines[at[0] : at[-1]]
        assert sum("MOV" in line for line in between) < len(at)
    alone = "lstm", "lstm_int8", "selection_weights", "interpretable_attention"
    if part == "H200" and name not in alone:
        # Two blocks an SM hide what one waits for.
        assert launch.occupancy(resources, launched.block[0], launched.shared, on).blocks_per_sm > 1


def test_tiles_become_flatter_as_rows_become_wider_or_fewer_until_none_fits():
    tallest, flatter, flattest = TILES["bfloat16"]

    def tile(hidden, rows):
        macros = rows_macros("mixture", (hidden,), hidden, rows, "bfloat16", H200)
        return macros["down"], macros["warps_down"]

    assert [tile(n, 1 << 20) for n in (128, 256, 512, 1024)] == [
        tallest,
        tallest,
        flatter,
        flattest,
    ]
    assert [tile(128, 132 * n) for n in (64, 32, 16, 1)] == [tallest, flatter, flattest, flattest]
    tiny = replace(H200, name="Tiny", shared_per_block=16 * launch.KB)
    with pytest.raises(ValueError, match=r"rows of 128, 128 columns need .* Tiny has 16384 B"):
        rows_macros("mixture", (128,), 128, 1, "bfloat16", tiny)


def test_attention_and_state_that_fit_no_block_are_refused_with_both_sizes():
    tiny = replace(H200, name="Tiny", shared_per_block=4 * launch.KB)
    for name, wanted in (
        ("interpretable_attention", "give fewer steps"),
        ("lstm", "smaller hidden"),
    ):
        with pytest.raises(ValueError, match=rf"Tiny has 4096 B: give .*{wanted[5:]}"):
            recorded(name, "float32", tiny)


def test_many_variables_take_smaller_blocks_and_too_many_are_refused():
    on = launch.KNOWN["L4"]
    assert block_of(100, on) == (128, 51_200)
    assert block_of(300, on) == (64, 76_800)
    assert block_of(700, on) == (32, 89_600)
    with pytest.raises(ValueError, match=r"102528 B of shared memory a block for 801 .* L4 has"):
        block_of(801, on)
