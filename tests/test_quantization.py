"""What calibration and the integer forward pass promise: the arithmetic, bounds, and refusals."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowgpu.quantization import calibration, forward
from lowgpu.quantization.calibration import calibrate, widened
from lowgpu.quantization.quantized import faults
from lowgpu.quantization.ranges import Histogram, levels
from lowgpu.quantization.rounding import equalized, rounded_layer
from lowgpu_kernels import mlp_forward, mlp_int8, pack_int8
from lowgpu_kernels.device.maths import tanh_f32
from lowgpu_kernels.ops.int8.quantized_network import quantized_views
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network

NETWORKS = [
    Network(8, ((3,),)),
    Network(16, ((24, 8, 3), (8, 1))),
    Network(8, ((16, 3), (8, 8, 1)), "tanh"),
    Network(56, ((64, 64, 4),)),
]


def drawn(network, rows=300, seed=0):
    """Parameters, and observations whose columns have different ranges."""
    rng = np.random.default_rng(seed)
    wide = rng.uniform(0.1, 20, network.inputs)
    x = (rng.normal(size=(rows, network.inputs)) * wide + rng.normal(size=network.inputs)).astype(
        "f4"
    )
    return draw_parameters(rng, network).astype("f4"), x


def rounded_once():
    """A Calibration whose hidden sums are 480, 864 and 1248 whatever it reads, and their levels.

    Rounded after the scale as well, each level would be one lower.
    """
    eye = np.eye(8, dtype=np.int8)
    made = calibration.QuantizedArrays(
        weight=np.concatenate([0 * eye.ravel(), eye.ravel()]),
        bias=np.int32([480, 864, 1248, *5 * [0], *8 * [128]]),
        scale=np.float32(8 * [1110 / 4096] + 8 * [1]),
        input_scale=np.ones(8, "f4"),
        input_zero=np.zeros(8, "i4"),
        hidden_scale=np.float32([1.40625]),
        hidden_zero=np.int32([-128]),
    )
    columns, network = np.arange(8, dtype="i4"), Network(8, ((8, 8),))
    return calibration.Calibration(8, network, columns, made, None, {}), [93, 167, 241]


def only_a_layer(weight, bias):
    """A network of one layer of these weights, and its parameters."""
    weight, bias = np.asarray(weight, "f4"), np.asarray(bias, "f4")
    network = Network(weight.shape[1], ((len(weight),),))
    parameters = np.zeros(network.parameters, "f4")
    ((_, into, its_bias),) = network.views(parameters)
    into[:], its_bias[:] = weight, bias
    return network, parameters


def by_hand(network, arrays, row):
    """The layout's arithmetic for one row, in Python's integers and single float32 operations."""
    f4 = np.float32

    def level(value, scale, zero):
        return int(min(max(int(np.rint(f4(value) * (f4(1) / scale))) + int(zero), -128), 127))

    first = [level(*of) for of in zip(row, arrays.input_scale, arrays.input_zero)]
    heads, read, hidden = [], first, 0
    for layer, weight, bias, scale in quantized_views(network, *arrays[:3]):
        read = first if layer.source < 0 else read
        sums = [
            f4(sum(int(w) * q for w, q in zip(row_of, read)) + int(b))
            for row_of, b in zip(weight, bias)
        ]
        if layer.head:
            heads += [s * of for s, of in zip(sums, scale)]
            continue
        step, zero = arrays.hidden_scale[hidden], arrays.hidden_zero[hidden]
        if network.activation == "tanh":
            read = [level(tanh_f32(s * of), step, zero) for s, of in zip(sums, scale)]
        else:
            factors = [of * (f4(1) / step) for of in scale]
            read = [level(max(s * of, f4(0)), f4(1), zero) for s, of in zip(sums, factors)]
        hidden += 1
    return heads


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("copies", [1, 3])
def test_the_forward_pass_is_the_layouts_arithmetic_bit_for_bit(network, copies):
    parameters, x = drawn(network)
    made = calibrate(network, parameters, x, copies=copies)
    x[1] *= 100  # past both ends
    read = x[:5, made.columns]
    found = forward.outputs(made.network, made.arrays, read)
    wanted = [by_hand(made.network, made.arrays, row) for row in read]
    np.testing.assert_array_equal(found, np.array(wanted, "f4"))


def test_with_relu_what_is_between_two_products_is_rounded_once():
    made, want = rounded_once()
    found = forward.outputs(made.network, made.arrays, np.zeros((1, 8), "f4"))
    assert found[0, :3].tolist() == want
    level, _ = forward.levels_of(made.network, made.arrays, np.zeros((1, 8), "f4"), 1)
    assert (level[0, :3] + np.float32(128)).tolist() == want


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("copies", [1, 3])
def test_the_op_gives_the_same_bits(network, copies):
    parameters, x = drawn(network)
    made = calibrate(network, parameters, x, copies=copies)
    assert not list(faults(made.network, made.arrays))
    x[3, 0], x[4], x[5, 1] = np.nan, x[4] * 1e6, np.inf
    read = np.ascontiguousarray(x[:, made.columns])
    found = mlp_int8(read, pack_int8(*made.arrays, network=made.network), network=made.network)
    wanted = forward.outputs(made.network, made.arrays, read)
    np.testing.assert_array_equal(found[:, : wanted.shape[1]], wanted)


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_a_rows_outputs_do_not_depend_on_the_others_and_a_nan_stays_in_its_row(network):
    """Cases E6 and E7."""
    parameters, x = drawn(network)
    made = calibrate(network, parameters, x)
    together = forward.outputs(network, made.arrays, x)
    np.testing.assert_array_equal(forward.outputs(network, made.arrays, x[7:8]), together[7:8])
    x[3, 1] = np.nan
    found = forward.outputs(network, made.arrays, x)
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(together, 3, 0))
    assert forward.outputs(network, made.arrays, x[:0]).shape == (0, together.shape[1])


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5]))
@settings(deadline=None, max_examples=25)
def test_one_layer_is_within_half_a_step_of_everything_that_was_rounded(seed, copies):
    """Inputs by half a step each and at their ends by half a step more, weights by what they lost
    for each of 255 levels, the bias by half a unit: the bound is their sum, and as much again, as the
    bias is moved by the mean of what they come to."""
    rng = np.random.default_rng(seed)
    network, parameters = only_a_layer(rng.normal(size=(4, 16)), rng.normal(size=4))
    x = (rng.normal(size=(50, 16)) * rng.uniform(0.01, 100, 16)).astype("f4")
    made = calibrate(network, parameters, x, "minmax", copies=copies)
    ((_, weight, bias),) = network.views(parameters.astype("f8"))
    wanted = x.astype("f8") @ weight.T + bias
    read = made.columns[: 16 * copies]
    step = made.arrays.input_scale[:16].astype("f8")
    # Rounding the zero point moves an end past which values are cut by up to half a step more.
    inputs = np.abs(weight) @ step
    ((_, whole, _, scale),) = quantized_views(made.network, *made.arrays[:3])
    lost = np.abs(weight[:, read] * step[read] - whole[:, : len(read)] * scale[:, None])
    assert (lost.mean(1) < scale).all()
    weights = 255 * lost.sum(1)
    allowed = inputs + weights + scale / 2 + 2.0**-22 * np.abs(wanted)
    off = np.abs(forward.outputs(made.network, made.arrays, x[:, made.columns]) - wanted)
    allowed += allowed.mean(0)
    assert (off <= allowed).all(), (off / allowed).max()


def test_copies_of_the_inputs_make_them_finer_by_their_number():
    network, parameters = only_a_layer(np.eye(8), np.zeros(8))
    x = np.random.default_rng(0).uniform(-1, 1, (4000, 8)).astype("f4")
    noise = []
    for copies in (1, 2, 4, 8):
        made = calibrate(network, parameters, x, "minmax", copies=copies)
        noise.append(np.std(forward.outputs(made.network, made.arrays, x[:, made.columns]) - x))
        # A uniform error of one step has a deviation of a step over the root of 12.
        assert noise[-1] == pytest.approx(2 / (255 * copies) / math.sqrt(12), rel=0.1)


def test_copies_of_hidden_units_make_them_finer_by_their_number():
    network = Network(8, ((8, 8),))
    parameters = np.zeros(network.parameters, "f4")
    for _, weight, _ in network.views(parameters):
        weight[:] = np.eye(8)
    x = np.random.default_rng(0).uniform(0, 1, (4000, 8)).astype("f4")
    for units in (1, 2, 4):
        made = calibrate(network, parameters, x, "minmax", copies=16, unit_copies=units)
        assert made.network.towers == ((8 * units, 8),)
        noise = np.std(forward.outputs(made.network, made.arrays, x[:, made.columns]) - x)
        # Of a unit, and a sixteenth of it of the input.
        wanted = math.hypot(1 / (255 * units), 1 / (255 * 16)) / math.sqrt(12)
        assert noise == pytest.approx(wanted, rel=0.1)


def test_a_unit_too_small_to_fill_its_first_copy_leaves_the_others_off():
    network = Network(8, ((8, 1),))
    parameters = np.zeros(network.parameters, "f4")
    (_, first, _), (_, head, _) = network.views(parameters)
    first[:], head[:] = np.diag([1, 1e-30] * 4), 1
    x = np.random.default_rng(0).uniform(0, 1, (200, 8)).astype("f4")
    made = calibrate(network, parameters, x, copies=2, unit_copies=4)
    assert not list(faults(made.network, made.arrays))
    found = forward.outputs(made.network, made.arrays, x[:, made.columns])
    np.testing.assert_allclose(found[:, 0], x[:, ::2].sum(1), atol=4 / 255)


def test_copies_that_make_a_layer_too_wide_are_refused():
    network, (parameters, x) = NETWORKS[3], drawn(NETWORKS[3])
    with pytest.raises(
        ValueError, match=r"^unit_copies must leave hidden layers of at most 512, got 9"
    ):
        calibrate(network, parameters, x, unit_copies=9)


def test_rounding_makes_up_for_what_columns_that_move_together_lost():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(500, 1)) + 0.1 * rng.normal(size=(500, 16))
    weight, bias = rng.normal(size=(5, 16)).astype("f4"), rng.normal(size=5).astype("f4")
    met = x.mean(0), np.cov(x.T, bias=True), x.mean(0) @ weight.T.astype("f8")
    noise = []
    for known in (None, met):
        whole, shifted, scale = rounded_layer(weight, bias, met=known)
        off = (x @ whole.T + shifted) * scale - (x @ weight.T + bias)
        noise.append(off.std(0))
    assert (noise[1] <= 1.001 * noise[0]).all() and noise[1].mean() < 0.4 * noise[0].mean()
    assert (np.abs(off.mean(0)) <= 0.51 * scale).all()


def test_columns_that_no_weight_reads_are_not_copied_and_too_many_copies_are_refused():
    network, parameters = only_a_layer([[1, 0, 2, 0, 0, 0, 0, 0]], [0])
    wide, columns, reads = widened(network, parameters, 3)
    assert (wide.inputs, reads, columns.tolist()) == (8, 2, [0, 2, 0, 2, 0, 2, 0, 0])
    made = calibrate(network, parameters, np.ones((3, 8), "f4"), copies=3)
    np.testing.assert_allclose(
        forward.outputs(wide, made.arrays, np.ones((1, 8), "f4")[:, columns]), [[3]], rtol=0.01
    )
    network, parameters = only_a_layer(np.zeros((1, 8)), [2])
    made = calibrate(network, parameters, np.ones((3, 8), "f4"), copies=16)
    assert not list(faults(made.network, made.arrays)) and made.network.inputs == 8
    network, parameters = only_a_layer(np.ones((1, 64)), [0])
    with pytest.raises(ValueError, match=r"^copies must be at most 8 for 64 columns, got 9$"):
        calibrate(network, parameters, np.ones((1, 64), "f4"), copies=9)


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("copies", [1, 3])
def test_no_output_is_off_on_average_over_the_calibration_rows(network, copies):
    """Half a unit of the head is what rounding the bias leaves, and float32 a little."""
    parameters, x = drawn(network)
    made = calibrate(network, parameters, x, "minmax", copies=copies)
    found = forward.outputs(made.network, made.arrays, x[:, made.columns])
    wanted = mlp_forward(x, parameters, network=network).y[:, : found.shape[1]]
    views = quantized_views(made.network, *made.arrays[:3])
    unit = np.concatenate([scale for layer, _, _, scale in views if layer.head])
    off = np.abs((found - wanted).mean(axis=0, dtype=np.float64))
    assert (off <= 0.51 * unit + 1e-6 * np.abs(wanted).max()).all(), off / unit


def test_zero_and_tiny_channels_keep_finite_scales():
    """Case E1."""
    weight = np.array([[0, 0, 0, 0], [1e-6, -2e-6, 0, 1e-6], [1, -1, 0.5, -0.25]], "f4")
    whole, bias, scale = rounded_layer(weight, np.zeros(3, "f4"))
    np.testing.assert_array_equal(whole, [[0, 0, 0, 0], [63, -127, 0, 63], [127, -127, 64, -32]])
    assert scale.dtype == np.float32 and scale[0] == 1 and not bias.any()
    assert np.isfinite(whole * scale[:, None]).all()
    np.testing.assert_allclose(whole * scale[:, None], weight, atol=scale.max() / 2)


@given(
    st.floats(-(2.0**99), 2.0**99, width=32),
    st.floats(0, 2.0**80, width=32),
    st.floats(2.0**-30, 2.0**30),
)
@settings(deadline=None, max_examples=100)
@example(0.3, 0.0, 1.0)
@example(3.0, 2.0**-40, 1.0)
@example(-1e30, 2.0**-126, 1e-6)
@example(0.0, 2.0**-126, 2.0**-30)
def test_a_bias_keeps_its_value_beside_weights_of_any_size(bias, size, step):
    """No bias is past int32, and what is lost of it float32 would not show beside the weights."""
    weight = np.array([[size, -size / 3, 0]], "f4")
    whole, shifted, scale = rounded_layer(weight, np.array([bias], "f4"), step, -128)
    most = 128 * np.abs(whole.astype("i8")).sum()
    assert abs(int(shifted[0])) + most < 2**31 and scale[0] > 0
    exact = int(shifted[0]) - 128 * int(whole.astype("i8").sum())
    found = float(np.float32(exact) * scale[0])
    allowed = scale[0] / 2 + abs(bias) * 2.0**-22
    assert abs(found - np.float32(bias)) <= allowed
    assert scale[0] <= max(
        size * step / 127 * 1.0001, abs(bias) * (1 if size == 0 else 2.0**-29), 1
    )


def test_a_channel_without_weights_gives_its_bias_exactly():
    network, parameters = only_a_layer(np.zeros((2, 8)), [0.3, 0])
    made = calibrate(network, parameters, np.ones((2, 8), "f4"))
    np.testing.assert_array_equal(
        forward.outputs(network, made.arrays, np.ones((1, 8), "f4")), np.array([[0.3, 0]], "f4")
    )
    assert made.summary["channels_without_weights"] == {"head": 2}


def test_relu_layers_span_all_levels_from_zero():
    network = NETWORKS[3]
    made = calibrate(network, *drawn(network), "minmax")
    np.testing.assert_array_equal(made.arrays.hidden_zero, [-128, -128])
    assert made.arrays.weight.min() >= -127
    _, x = drawn(network)
    largest = mlp_forward(x, made.parameters, network=network).hidden
    for h, columns in enumerate((slice(0, 64), slice(64, 128))):
        assert made.arrays.hidden_scale[h] == pytest.approx(
            largest[:, columns].max() / 255, rel=1e-6
        )


def test_ties_go_to_the_even_level_and_what_is_past_an_end_takes_it():
    """Case E2."""
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 200, -np.inf], "f4")
    found = forward.quantized(x, np.float32(1), 0)
    np.testing.assert_array_equal(found, [0, 2, 2, 0, -2, -2, 127, -128])


def test_zero_is_a_level_of_every_range():
    low, high = -np.array([0, 1, 3, 1e-3, 5.0]), np.array([1, 0, 1e-3, 3, 5.0])
    scale, zero = levels(low, high)
    assert ((zero >= -128) & (zero <= 127)).all()
    np.testing.assert_array_equal(forward.quantized(np.zeros(5, "f4"), scale, zero), zero)
    ends = forward.quantized(np.array([low, high], "f4"), scale, zero)
    assert ends.min(0).max() <= -127 and ends.max(0).min() >= 126


def test_a_column_that_was_always_zero_keeps_its_weight_and_a_constant_one_its_value():
    network, parameters = only_a_layer([[1, 1, 1, 0, 0, 0, 0, 0]], [0])
    x = np.zeros((100, 8), "f4")
    x[:, 0], x[:, 2] = np.linspace(-1, 1, 100), 0.7
    made = calibrate(network, parameters, x, names=("a", "b", "c"))
    assert made.summary["constant_columns"] == ["b", "c", *(f"column {k}" for k in range(3, 8))]
    later = np.zeros((2, 8), "f4")
    later[:, 1], later[:, 2] = (0, 0.3), 0.7
    found = forward.outputs(network, made.arrays, later)[:, 0]
    step = 1.5 * 2 / 255  # of the sum of three roundings
    np.testing.assert_allclose(found, [0.7, 1.0], atol=step)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_dead_hidden_layer_is_named_and_leaves_the_head_its_bias(activation):
    network = Network(8, ((16, 8, 2),), activation)
    parameters, x = drawn(network)
    (_, first, bias), (_, _, second_bias), _ = network.views(parameters)
    first[:], bias[:] = 0, -1 if activation == "relu" else 0
    second_bias[:] = 0.5
    made = calibrate(network, parameters, x)
    assert made.summary["dead_layers"] == ["layer 1"]
    found = forward.outputs(network, made.arrays, x)
    wanted = mlp_forward(x, parameters, network=network).y[:, :2]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, atol=0.02 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_calibration_refuses_what_is_not_finite_and_names_the_feature_and_the_row(wrong):
    """Case E8."""
    network, (parameters, x) = NETWORKS[3], drawn(NETWORKS[3], rows=5000)
    x[4500, 2] = wrong
    names = ("open", "close", "volume")
    said = f"^observations must be finite, got {wrong} in volume, row 4500: "
    with pytest.raises(ValueError, match=said):
        calibrate(network, parameters, x, names=names)
    with pytest.raises(ValueError, match="in column 2, row 4500"):
        calibrate(network, parameters, x)


def test_calibration_refuses_parameters_and_activations_that_are_not_finite_by_their_layer():
    network, (parameters, x) = NETWORKS[1], drawn(NETWORKS[1])
    broken = parameters.copy()
    broken[network.layers[1].weight] = np.nan
    with pytest.raises(
        ValueError, match=r"^parameters must be finite, and those of tower 1 layer 2 "
    ):
        calibrate(network, broken, x)
    large = parameters * np.float32(1e20)
    with pytest.raises(
        ValueError, match=r"^tower 1 layer 2 must be finite .* too large for float32$"
    ):
        calibrate(network, large, x)
    network, parameters = only_a_layer([[3e38] * 8], [0])
    with pytest.raises(
        ValueError, match=r"^parameters must have scales .* for channel 0 of head: "
    ):
        calibrate(network, parameters, np.full((1, 8), 3e5, "f4") * np.float32(255))


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"parameters": np.zeros(5, "f4")}, ValueError, r"parameters must be \[32\]"),
        ({"parameters": np.zeros(32)}, TypeError, "parameters must be a NumPy array of float32"),
        (
            {"observations": [[0.0]]},
            TypeError,
            "observations must be a NumPy array of float32, got list",
        ),
        ({"observations": np.zeros((0, 8), "f4")}, ValueError, "with at least one row"),
        ({"observations": np.zeros((3, 7), "f4")}, ValueError, r"\[rows, 8\]"),
        ({"method": "entropy"}, ValueError, "method must be one of"),
        ({"percentile": 50}, ValueError, r"percentile must be in \(50, 100\]"),
        ({"copies": 0}, ValueError, r"copies must be in \[1, 16\]"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_by_name(change, error, said):
    network = NETWORKS[0]
    given = {
        "parameters": np.zeros(network.parameters, "f4"),
        "observations": np.zeros((1, 8), "f4"),
    }
    with pytest.raises(error, match=said):
        calibrate(network, **{**given, **change})


@pytest.mark.parametrize("method", ["mse", "percentile", "minmax"])
def test_calibration_repeats_its_bits_and_holds_few_activations_at_once(method, monkeypatch):
    network, (parameters, x) = NETWORKS[1], drawn(NETWORKS[1])
    whole = calibrate(network, parameters, x, method)
    for one, other in zip(whole.arrays, calibrate(network, parameters, x, method).arrays):
        np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(calibration, "ROWS", 7)
    asked = []

    def recorded(x, *rest, **more):
        asked.append(len(x))
        return mlp_forward(x, *rest, **more)

    monkeypatch.setattr(calibration, "mlp_forward", recorded)
    parts = calibrate(network, parameters, x, method)
    assert max(asked) == 7 and sum(asked) >= len(x)
    np.testing.assert_array_equal(whole.arrays.input_scale, parts.arrays.input_scale)
    # BLAS adds in another order where there are fewer rows: at most 24 terms, twice.
    np.testing.assert_allclose(
        parts.arrays.hidden_scale, whole.arrays.hidden_scale, rtol=48 * 2.0**-23
    )


def test_a_percentile_leaves_an_outlier_out_and_all_of_it_is_minmax():
    network, parameters = only_a_layer(np.eye(8), np.zeros(8))
    x = np.random.default_rng(0).uniform(-1, 1, (10_000, 8)).astype("f4")
    x[17] = 1000
    cut = calibrate(network, parameters, x, "percentile", percentile=99.9).arrays
    assert (cut.input_scale < 3 / 255).all()
    whole = calibrate(network, parameters, x, "percentile", percentile=100).arrays
    np.testing.assert_array_equal(
        whole.input_scale, calibrate(network, parameters, x, "minmax").arrays[3]
    )


def test_an_outlier_that_is_left_out_moves_no_bias():
    network, (parameters, x) = NETWORKS[1], drawn(NETWORKS[1], rows=5000)
    without = calibrate(network, parameters, x, "percentile", percentile=99.9)
    x[17] *= 300
    made = calibrate(network, parameters, x, "percentile", percentile=99.9)
    x = np.delete(x, 17, 0)
    wanted = mlp_forward(x, parameters, network=network).y[:, :4]
    errors = [
        np.abs(forward.outputs(network, c.arrays, x) - wanted).mean(0) for c in (without, made)
    ]
    assert (errors[1] < 2 * errors[0]).all(), errors


def test_columns_that_never_change_leave_nothing_to_make_up_for():
    network, (parameters, _) = NETWORKS[3], drawn(NETWORKS[3])
    x = np.full((5000, 56), 0.3, "f4")
    made = calibrate(network, parameters, x)
    wanted = mlp_forward(x[:1], parameters, network=network).y[:, :4]
    np.testing.assert_allclose(forward.outputs(network, made.arrays, x[:1]), wanted, rtol=0.01)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=10)
def test_least_squared_error_is_never_worse_than_the_whole_range(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, size=(3000, 3)) * rng.uniform(0.1, 10, 3)
    low, high = np.minimum(x.min(0), 0), np.maximum(x.max(0), 0)
    histogram = Histogram(low, high)
    histogram.add(x)

    def error(low, high):
        scale, zero = levels(low, high)
        level = forward.quantized(x.astype("f4"), scale, zero).astype("f8")
        return np.square((level - zero) * scale - x).mean(0)

    # The histogram's bins are an eighth of a step wide.
    assert (error(*histogram.least_error()) <= error(low, high) * 1.05).all()


def test_equal_ranges_are_the_same_function_and_tanh_is_left_alone():
    network, (parameters, x) = NETWORKS[3], drawn(NETWORKS[3])
    _, (_, weight, _), _ = network.views(parameters)
    weight[:] *= np.geomspace(0.01, 1, 64)[:, None].astype("f4")
    y, hidden = mlp_forward(x, parameters, network=network)
    made, divisor = equalized(network, parameters, hidden.max(0).astype("f8"))
    its_y, its_hidden = mlp_forward(x, made, network=network)
    np.testing.assert_allclose(its_y, y, atol=1e-5 * np.abs(y).max())
    np.testing.assert_allclose(its_hidden * divisor, hidden, atol=1e-5 * hidden.max())

    def spread(values):
        most = values[:, 64:].max(0)
        return most.max() / most[most > 0].min()

    assert spread(its_hidden) < 0.2 * spread(hidden)
    still, ones = equalized(NETWORKS[2], drawn(NETWORKS[2])[0], np.ones(NETWORKS[2].hidden))
    np.testing.assert_array_equal(still, drawn(NETWORKS[2])[0])
    assert (ones == 1).all()
