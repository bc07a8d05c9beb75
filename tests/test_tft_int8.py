"""The transformer in int8: its tables, its calibration, its file, and its predictions beside float32's."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench.tft import random_arrays
from bench.tft_accuracy import measured
from lowgpu import checkpoint
from lowgpu.checkpoint import CheckpointError
from lowgpu.tft import (
    TFT,
    QuantizedTFT,
    Selection,
    TFTShape,
    load_pytorch_forecasting,
    quantile_loss,
    quantize_tft,
    tft_report,
)
from lowgpu.tft.int8_layout import int8_products
from lowgpu.tft.quantizing import _Most, _Seen, rounded_rows
from lowgpu.tft.tables import nodes_of
from lowgpu_kernels import gated_norm_int8, launch, lstm_int8, tabulated_mixture, variable_mixture
from lowgpu_kernels.dims import bfloat16
from tests.emulator import emulating
from tests.test_tft import FOLDER, WEIGHTS, parts

TWO_LAYERS = TFTShape(
    hidden=16,
    heads=2,
    reals=("a", "b"),
    categoricals=(),
    static=Selection(),
    history=Selection(("a", "b"), units=4, variable_units=16),
    future=Selection(("a",), units=3, variable_units=16),
    outputs=(3,),
    layers=2,
)
EMULATED = "linear_int8", "gated_norm_int8", "gated_residual_int8", "tabulated_mixture"
ONE_SM = replace(launch.KNOWN["H200"], sms=1)


@pytest.fixture(scope="module")
def trained():
    """(float32 model, its inputs): trained by pytorch-forecasting on daily bars, lengths of 5 to 12."""
    return TFT(*load_pytorch_forecasting(WEIGHTS)), parts(FOLDER / "expected.safetensors")["in"]


@pytest.fixture(scope="module")
def quantized(trained):
    model, inputs = trained
    return quantize_tft(model, [inputs])


def two_layers_inputs():
    rng = np.random.default_rng(0)
    return {
        f"{n}_reals": rng.normal(size=(24, steps, 2)).astype(np.float32)
        for n, steps in (("history", 9), ("future", 4))
    }


def decibels(found, wanted):
    noise = np.square(found.astype(float) - wanted).mean()
    if noise == 0:
        return np.inf
    return 10 * np.log10(np.square(wanted - wanted.mean()).mean() / noise)


# What it predicts


def test_int8_predicts_what_float32_does_to_a_hundredth(trained, quantized):
    model, inputs = trained
    wanted = model.predict(**inputs)
    found = TFT(quantized.shape, quantized.arrays, "int8").predict(**inputs)
    # 2^-9 of a range each, from the eight products that a prediction passes on its way.
    assert decibels(found.prediction, wanted.prediction) > 40
    np.testing.assert_allclose(found.attention, wanted.attention, rtol=0, atol=0.02)
    # Shares are worked out in float32 from what the static variables say in bfloat16.
    np.testing.assert_allclose(found.history_share, wanted.history_share, rtol=0, atol=2.0**-7)


def test_coarser_levels_predict_worse(trained, quantized):
    model, inputs = trained
    wanted = model.predict(**inputs).prediction.copy()
    for name in ("enrichment.unit_levels", "lstm.0.levels", "attention.levels"):
        arrays = dict(quantized.arrays)
        weights = [w for w, levels in int8_products(quantized.shape).items() if levels == name]
        arrays[name] = arrays[name] / 30
        for weight in weights:
            arrays[f"{weight}_scale"] = arrays[f"{weight}_scale"] * 30
        coarse = TFT(quantized.shape, arrays, "int8").predict(**inputs).prediction
        fine = TFT(quantized.shape, quantized.arrays, "int8").predict(**inputs).prediction
        assert decibels(coarse, wanted) < decibels(fine, wanted) - 1, name


def test_a_second_layer_of_lstm_is_given_the_levels_of_the_first():
    inputs = two_layers_inputs()
    model = TFT(TWO_LAYERS, random_arrays(TWO_LAYERS))
    found = quantize_tft(model, [inputs])
    assert "lstm.0.levels" in found.arrays and "lstm.1.levels" not in found.arrays
    wanted = model.predict(**inputs).prediction
    int8 = TFT(TWO_LAYERS, found.arrays, "int8")
    assert decibels(int8.predict(**inputs).prediction, wanted) > 25


def test_int8_kernels_one_after_the_other_predict_what_the_cpu_does(trained, quantized):
    _, inputs = trained

    class Emulated(TFT):
        def run(self, op, arrays, out, **parameters):
            # All but the LSTM, which would be compiled for this width alone.
            if str(op) not in EMULATED:
                super().run(op, arrays, out, **parameters)
                return
            out.fill(77)
            with emulating(ONE_SM):
                op.cuda(*arrays, *op.checked_params(parameters).values(), out, 0)

    wanted, found = (
        kind(quantized.shape, quantized.arrays, "int8").predict(**inputs)
        for kind in (TFT, Emulated)
    )
    # A level here and there is another, because a GPU's exponentials are others.
    assert decibels(found.prediction, wanted.prediction) > 50
    np.testing.assert_allclose(found.attention, wanted.attention, rtol=0, atol=0.01)


# Ops


def test_levels_that_are_given_are_those_that_numbers_would_become():
    rng = np.random.default_rng(1)
    levels = rng.integers(-128, 128, (19, 40)).astype(np.int8)
    gate, residual = rng.integers(-127, 128, (64, 40), np.int8), rng.normal(size=(19, 32))
    rest = (
        residual.astype(bfloat16),
        gate,
        *(rng.normal(size=64).astype(np.float32) / n for n in (5000, 1)),
        *(rng.normal(size=32).astype(np.float32) for _ in range(2)),
    )
    # An eighth of a level is a power of two, so bfloat16 holds it.
    numbers = (levels.astype(np.float32) / 8).astype(bfloat16)
    given, made = (gated_norm_int8(x, *rest, levels=8) for x in (levels, numbers))
    assert given.tobytes() == made.tobytes()
    poisoned = np.full_like(given, np.nan)
    with emulating(ONE_SM):
        gated_norm_int8.cuda(levels, *rest, np.float32(8), np.float32(1e-5), poisoned, 0)
    np.testing.assert_allclose(poisoned.astype(float), given.astype(float), rtol=0.02, atol=0.01)


def test_a_first_state_past_1_is_not_cut_off_and_counts_in_the_future_of_an_empty_history():
    width, one = 3, np.full((2, 12), 1 / 127, np.float32)
    recurrent = np.zeros((2, 12, width), np.int8)
    recurrent[1, :, 0] = 64
    zeros = np.zeros((2, 1, width), bfloat16)
    first = np.full((1, width), 2.5, bfloat16)
    found = lstm_int8(
        zeros,
        np.zeros_like(recurrent),
        one,
        np.zeros_like(one),
        recurrent,
        one / 127,
        first,
        np.zeros((1, width), bfloat16),
        np.zeros(1, np.int32),
        history=1,
        levels=1.0,
        first_levels=127 / 4,
    )
    # Every gate has 2.5 * 64 / 127, the levels of 2.5 being 79 of 127 that stand for 4.
    gate = 79 * 4 / 127 * 64 / 127
    sigmoid = 1 / (1 + np.exp(-gate))
    assert (found[0] == 0).all()
    assert (found[1] == np.rint(127 * sigmoid * np.tanh(sigmoid * np.tanh(gate)))).all()


def looked_up(reals, spread, nodes):
    """The mixture of one variable whose share is 1, on the CPU and emulated, NaN behind its table."""
    none = np.zeros((len(reals), 1, 0), np.int32)
    behind = np.full((len(nodes) + 1, nodes.shape[1]), np.nan).astype(bfloat16)
    behind[:-1] = nodes
    given = (
        np.asarray(reals, np.float32)[:, None, None],
        none,
        np.zeros(1, np.int32),
        np.zeros(0, np.int32),
        np.zeros(1, np.int32),
        np.ones((1, len(reals), 1), np.float32),
        np.float32([spread]),
        behind[None, :-1],
        np.zeros((0, nodes.shape[1]), np.float32),
    )
    emulated = np.full((1, len(reals), nodes.shape[1]), 77, bfloat16)
    with emulating(ONE_SM):
        tabulated_mixture.cuda(*given, emulated, 0)
    return [found[0].astype(np.float32) for found in (tabulated_mixture(*given), emulated)]


def test_every_real_lies_in_a_table_and_nan_stays_nan():
    nodes = np.arange(10).reshape(5, 2).astype(np.float32)
    both = looked_up([-np.inf, np.inf, 0, 2, -2, 6, 1, np.nan, 3e38, -3e38], 2.0, nodes)
    # x / (2 + |x|) is -1, 1, 0, 1/2, -1/2, 3/4, 1/3: nodes 0, 4, 2, 3, 1, 3.5 and 2.67.
    places = np.array([0, 4, 2, 3, 1, 3.5, 8 / 3])
    wanted = np.stack([2 * places, 2 * places + 1], 1)
    for found in both:
        np.testing.assert_allclose(found[:7], wanted, rtol=2.0**-8)
        assert np.isnan(found[7]).all()
        np.testing.assert_allclose(found[8:], [[8, 9], [0, 1]], rtol=2.0**-8)
    assert np.array_equal(nodes_of([2.0], 1025)[0, [512, 768, 256]], [0, 2, -2])


def test_tables_mix_as_the_networks_do_that_they_were_made_of(trained, quantized):
    model, inputs = trained
    of = lambda m, *names: [m._weights.get(f"history.{n}") for n in names]
    brought = inputs["history_reals"], inputs["history_categories"]
    read = of(model, "columns", "category_columns", "bounds")
    share = np.ascontiguousarray(model.predict(**inputs).history_share.swapaxes(0, 1))
    network = "slope", "shift", "gate", "gate_bias", "residual_slope", "residual_shift"
    norms = "residual_weight", "residual_bias", "norm_weight", "norm_bias", "table"
    wanted = variable_mixture(*brought, *read, share, *of(model, *network, *norms))
    int8 = TFT(quantized.shape, quantized.arrays, "int8")
    found = tabulated_mixture(*brought, *read, share, *of(int8, "spread", "nodes", "table"))
    off = quantized.summary["table_error"]["history"]
    assert off < 1e-3
    # A rounding of the table, one of the result, and the straight lines.
    most = np.abs(wanted).max() * 2 * 2.0**-8 + off
    np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=0, atol=most)


# Calibration


def test_rows_of_weights_use_all_levels_and_an_empty_row_stays_empty():
    weight = np.array([[0.5, -1.0, 0.25], [0, 0, 0], [3e-8, 0, -1e-8]])
    levels, scale = rounded_rows(weight)
    assert levels.tolist() == [[64, -127, 32], [0, 0, 0], [127, 0, -42]]
    np.testing.assert_allclose(levels * scale[:, None], weight, atol=0.5 / 127)
    assert (scale > 0).all()


def test_a_range_is_cut_off_where_that_loses_less_but_for_the_first_state():
    # Half a level lies between two at the full range, and on one at a hundredth less.
    values = np.full(16, 4.5, np.float32)
    values[0] = 9
    cut, kept = _Seen("x"), _Most("x")
    for seen in (cut, kept):
        seen.add(values)
    assert cut.range() < kept.range() == 9
    arrays = random_arrays(TWO_LAYERS) | {"context.hidden.0": values}
    found = quantize_tft(TFT(TWO_LAYERS, arrays), [two_layers_inputs()])
    assert found.arrays["lstm.0.first_levels"] == np.float32(127 / 9)


def test_a_model_or_batches_that_cannot_be_calibrated_are_refused(trained):
    model, inputs = trained
    with pytest.raises(TypeError, match="model must be a TFT, got dict"):
        quantize_tft({}, [inputs])
    other = TFT(*load_pytorch_forecasting(WEIGHTS), "bfloat16")
    with pytest.raises(ValueError, match="model must be in float32, got bfloat16"):
        quantize_tft(other, [inputs])
    with pytest.raises(ValueError, match="batches must hold a sequence at least"):
        quantize_tft(model, [])
    broken = inputs["history_reals"].copy()
    broken[2, 3] = np.nan
    with pytest.raises(ValueError, match=r"batches give history.spread a NaN or an infinity"):
        quantize_tft(model, [{**inputs, "history_reals": broken}])


# The file


def test_a_saved_transformer_predicts_the_same_bits(tmp_path, trained, quantized):
    _, inputs = trained
    quantized.save(tmp_path / "tft.safetensors")
    loaded = QuantizedTFT.load(tmp_path / "tft.safetensors")
    assert loaded.shape == quantized.shape
    assert loaded.summary["sequences"] == 6 and loaded.summary["ranges"]["enrichment.levels"] > 0
    first, second = (
        TFT(q.shape, q.arrays, "int8").predict(**inputs).prediction for q in (quantized, loaded)
    )
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    "change, message",
    (
        ({"lstm.gate.gate": None}, "lacks lstm.gate.gate"),
        ({"more": np.zeros(1, np.float32)}, "has an unknown array, more"),
        (
            {"lstm.gate.gate": np.zeros((3, 16), np.int8)},
            r"must be int8\[32, 16\], got int8\[3, 16\]",
        ),
        ({"lstm.gate.gate": np.zeros((32, 16), np.float32)}, "must be int8"),
        ({"lstm.gate.gate": np.full((32, 16), -128, np.int8)}, r"must be in \[-127, 127\]"),
        ({"attention.levels": np.zeros(1, np.float32)}, "attention.levels must be above 0"),
        ({"history.spread": np.zeros(6, np.float32)}, "history.spread must be above 0"),
    ),
    ids=str,
)
def test_a_file_of_something_else_is_refused(tmp_path, quantized, change, message):
    arrays = {n: a for n, a in {**quantized.arrays, **change}.items() if a is not None}
    changed = QuantizedTFT(quantized.shape, arrays, {})
    changed.save(tmp_path / "tft.safetensors")
    with pytest.raises(CheckpointError, match=message):
        QuantizedTFT.load(tmp_path / "tft.safetensors")


def test_a_checkpoint_that_is_no_transformer_is_refused(tmp_path):
    checkpoint.save(tmp_path / "other", {"a": np.zeros(1)}, {"kind": "something"})
    with pytest.raises(CheckpointError, match="is no quantized transformer: is a 'something'"):
        QuantizedTFT.load(tmp_path / "other")


# The report


def test_the_quantile_loss_is_that_of_a_hand_worked_case():
    prediction = np.array([[[0.0, 1.0], [5.0, 5.0]]])
    # e of (3, 2) at 0.1 and 0.5: 0.3 and 1; the second step does not count.
    assert quantile_loss(prediction, [[3.0, 9.0]], (0.1, 0.5), [1]) == pytest.approx(0.65)
    # e of -4: 0.9 * 4 and 0.5 * 4.
    assert quantile_loss(prediction[:, 1:], [[1.0]], (0.1, 0.5)) == pytest.approx(2.8)
    with pytest.raises(ValueError, match="finite"):
        quantile_loss(prediction, [[np.nan, 1]], (0.1, 0.5))
    with pytest.raises(ValueError, match="of target"):
        quantile_loss(prediction, [[1.0, 1]], (0.5,))


def test_the_bench_of_accuracy_reads_its_two_files_and_compares_three_precisions(tmp_path, trained):
    model, inputs = trained
    raw = np.asarray(model.predict(**inputs).prediction)
    held = inputs | {"target": raw[..., 3].copy(), "prediction": raw.copy()}
    held |= {"scale": np.full(6, 2, np.float32), "location": np.zeros(6, np.float32)}
    parts_of = (("held", held), ("calibration", inputs))
    arrays = {f"{part}.{n}": a for part, found in parts_of for n, a in found.items()}
    path = tmp_path / "windows.safetensors"
    quantiles = [0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98]
    save_file(arrays, path, metadata={"quantiles": json.dumps(quantiles)})
    found = measured(WEIGHTS, path)
    assert found["hidden"] == 16 and found["steps"] == [12, 6] and found["sequences"] == 6
    assert found["calibration"]["sequences"] == 6
    assert found["float32"]["rise"] == 0
    # Pinball losses of a target that is no draw of the prediction: only that each is another's.
    losses = {found[n]["quantile_loss"] for n in ("float32", "bfloat16", "int8")}
    assert len(losses) == 3 and max(losses) < 1.01 * min(losses)


def test_a_report_is_in_units_of_the_target_and_relative_to_the_first_model(trained, quantized):
    model, inputs = trained
    int8 = TFT(quantized.shape, quantized.arrays, "int8")
    quantiles = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
    rng = np.random.default_rng(0)
    scale, location = rng.uniform(1, 2, 6), rng.normal(size=6)
    raw = np.asarray(model.predict(**inputs).prediction).copy()
    target = location[:, None] + scale[:, None] * (raw[..., 3] + rng.normal(size=(6, 6)))
    models = {"float32": model, "int8": int8}
    found = tft_report(models, inputs, target, quantiles, scale, location)
    assert found["sequences"] == 6 and found["float32"]["rise"] == 0
    lengths = inputs["future_lengths"]
    scaled = location[:, None, None] + scale[:, None, None] * raw
    wanted = quantile_loss(scaled, target, quantiles, lengths)
    assert found["float32"]["quantile_loss"] == pytest.approx(wanted)
    assert abs(found["int8"]["rise"]) < 0.01
    assert found["int8"]["signal_to_noise"] > 40
