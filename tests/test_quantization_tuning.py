"""Networks written anew are the same function; fine-tuning has the integers' arithmetic and does no harm."""

import math

import numpy as np
import pytest
import torch

from lowgpu.config import ConfigError, from_dict, in_use, setting
from lowgpu.quantization import fine_tuning, forward
from lowgpu.quantization.calibration import calibrate
from lowgpu.quantization.fine_tuning import BIAS_UNIT, Student, fine_tuned
from lowgpu.quantization.quantized import faults
from lowgpu.quantization.report import action_values, compare
from lowgpu.quantization.rewriting import condensed, parted
from lowgpu_kernels import mlp_forward
from lowgpu_kernels.ops.int8.quantized_network import quantized_views
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network, policy_network

RELU = Network(8, ((24, 16, 3),))  # 2 actions and a value
TANH = Network(8, ((16, 2), (16, 1)), "tanh")


def drawn(network, rows=600, seed=0):
    """(parameters, observations): three columns that vary."""
    rng = np.random.default_rng(seed)
    x = np.zeros((rows, network.inputs), "f4")
    x[:, :3] = rng.normal(size=(rows, 3)) * (1, 0.1, 5)
    return draw_parameters(rng, network).astype("f4"), x


def outputs(network, parameters, x):
    heads = sum(widths[-1] for widths in network.towers)
    return mlp_forward(x, parameters, network=network).y[:, :heads].astype("f8")


@pytest.mark.parametrize(
    "network, actions, values",
    [
        (policy_network(8, 3, (16,)), 3, False),
        (policy_network(8, 2, (16,), "tanh", shared=False), 2, False),
        (Network(8, ((16, 4),)), 4, True),
        (Network(8, ((16, 5),)), 4, True),
    ],
    ids=str,
)
def test_parted_heads_have_the_same_probabilities_values_and_action_values(
    network, actions, values
):
    parameters, x = drawn(network)
    made, its = parted(network, parameters, actions, values)
    mine, theirs = outputs(network, parameters, x), outputs(made, its, x)
    near = {"atol": 1e-5 * np.abs(mine).max()}
    assert np.abs(theirs[:, :actions].sum(axis=1)).max() <= near["atol"]
    mine, state = action_values(mine, actions, values)
    theirs, its_state = action_values(theirs, actions, values)
    if not values:  # probabilities: what logits have in common is nothing to them
        mine = mine - mine.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(theirs, mine, **near)
    np.testing.assert_allclose(its_state, state, **near)


def bent(network, parameters, x, on, off):
    """Biases by which the first `on` units of each hidden layer are always above 0, the next `off` never."""
    made = parameters.copy()
    for _ in network.layers:  # layer after layer, since each moves the next
        hidden = mlp_forward(x, made, network=network)
        for layer, weight, bias in network.views(made):
            if layer.head:
                continue
            read = x if layer.source < 0 else hidden.hidden[:, layer.source :][:, : layer.fan_in]
            sums = read @ weight.T
            bias[:on] = 0.5 - sums.min(axis=0)[:on]
            bias[on : on + off] = -0.5 - sums.max(axis=0)[on : on + off]
    return made


@pytest.mark.parametrize(
    "widths, on, off, wanted",
    [
        # 14 that never bend become 3, as many as columns are read, or as there are outputs.
        ((24, 24, 3), 14, 2, (16, 8, 3)),
        # Fewer than either stay as they are.
        ((24, 24, 3), 2, 12, (16, 16, 3)),
        ((16, 2), 0, 16, (8, 2)),
        ((32, 3), 32, 0, (8, 3)),
    ],
)
def test_a_condensed_network_is_narrower_and_the_same_on_its_rows(widths, on, off, wanted):
    network = Network(8, (widths, (8, 1)))
    parameters, x = drawn(network)
    for layer, weight, _ in network.views(parameters):
        if layer.source < 0:
            weight[:, 3:] = 0  # as of padding
    parameters = bent(network, parameters, x, on, off)
    made, its = condensed(network, parameters, x)
    assert made.towers[0] == wanted
    mine, theirs = outputs(network, parameters, x), outputs(made, its, x)
    np.testing.assert_allclose(theirs, mine, atol=2e-5 * np.abs(mine).max())
    # What never bends starts from 0, so that all its levels are in use.
    hidden = mlp_forward(x, its, network=made).hidden
    assert not (hidden.min(axis=0) > 1e-4 * hidden.max(axis=0)).any()


def test_a_network_of_tanh_is_not_condensed():
    parameters, x = drawn(TANH)
    made, its = condensed(TANH, parameters, x)
    assert made is TANH and its is parameters


def test_copies_of_units_of_tanh_make_their_mean_finer_by_their_number():
    network = Network(8, ((8, 8),), "tanh")
    parameters = np.zeros(network.parameters, "f4")
    for _, weight, _ in network.views(parameters):
        weight[:] = np.eye(8)
    x = np.random.default_rng(0).uniform(-0.2, 0.2, (4000, 8)).astype("f4")
    step = 2 * math.tanh(0.2) / 255
    for units in (1, 2, 4):
        made = calibrate(network, parameters, x, "minmax", copies=16, unit_copies=units)
        assert made.network.towers == ((8 * units, 8),)
        found = forward.outputs(made.network, made.arrays, x[:, made.columns])
        wanted = math.hypot(step / units, 0.4 / 255 / 16) / math.sqrt(12)
        # The step shrinks by up to a twenty-fifth where tanh is less steep.
        assert np.std(found - np.tanh(x)) == pytest.approx(wanted, rel=0.15)
        layers = compare(network, parameters, made, x, 7)["layers"]
        assert layers["layer 1"] == pytest.approx(layers["head"], abs=1)


@pytest.mark.parametrize("copies, units", [(1, 1), (3, 2)])
def test_a_student_of_relu_gives_the_integers_bits_and_is_written_as_it_was_read(copies, units):
    parameters, x = drawn(RELU)
    made = calibrate(RELU, parameters, x, copies=copies, unit_copies=units)
    student = Student(made)
    wanted = forward.outputs(made.network, made.arrays, x[:, made.columns])
    np.testing.assert_array_equal(student.heads(student.levels(x)), wanted)
    blank = made.arrays._replace(weight=made.arrays.weight * 0, bias=made.arrays.bias * 0)
    student.write(blank, student.parameters)
    for one, other in zip(blank, made.arrays):
        np.testing.assert_array_equal(one, other)


def straight(x, exact):
    """A value whose gradient is that of another."""
    return exact + (x - exact).detach()


@pytest.mark.parametrize("network", [RELU, TANH], ids=["relu", "tanh"])
def test_the_gradient_is_that_of_torch_straight_through_the_rounding(network):
    parameters, x = drawn(network)
    made = calibrate(network, parameters, x, "percentile", percentile=90, copies=2)
    student = Student(made)
    rng = np.random.default_rng(1)
    student.parameters += rng.uniform(-3, 3, len(student.parameters)).astype("f4")
    levels = student.levels(x)
    y, kept = student.forward(levels)
    pull = rng.normal(size=y.shape).astype("f4")
    found = student.gradient(kept, pull)

    flat = torch.tensor(student.parameters, dtype=torch.float64, requires_grad=True)
    read, hidden, at = torch.tensor(levels, dtype=torch.float64), 0, 0
    for layer, weight, bias, scale in quantized_views(made.network, *made.arrays[:3]):
        if layer.tower:
            break
        own = flat[at : at + weight.size].reshape(weight.shape)
        its = flat[at + weight.size : at + weight.size + len(bias)] * float(BIAS_UNIT)
        at += weight.size + len(bias)
        inside = own.clamp(-127.5, 127.5)
        z = read @ straight(own.round().clamp(-127, 127), inside).T + straight(its.round(), its)
        z = z * torch.tensor(scale, dtype=torch.float64)
        if not layer.head:
            active = torch.tanh(z) if network.activation == "tanh" else torch.relu(z)
            steps = active * float(np.float32(1) / made.arrays.hidden_scale[hidden])
            zero, hidden = int(made.arrays.hidden_zero[hidden]), hidden + 1
            ends = -128 - zero, 127 - zero
            inside = steps.clamp(ends[0] - 0.5, ends[1] + 0.5)
            read = straight(steps.round().clamp(*ends), inside)
    (z * torch.tensor(pull, dtype=torch.float64)).sum().backward()
    wanted = flat.grad.numpy()
    assert (wanted != 0).mean() > 0.25  # most columns are always 0
    # Sums of 600 rows, through at most three layers of 24 terms.
    np.testing.assert_allclose(found, wanted, atol=700 * 2.0**-23 * np.abs(wanted).max())


def agreement(made, network, parameters, x, actions):
    return compare(network, parameters, made, x, actions)["agreement"]


@pytest.mark.parametrize("network", [RELU, TANH], ids=["relu", "tanh"])
def test_fine_tuning_mends_what_rounding_changed_and_repeats_its_bits(network):
    parameters, x = drawn(network, 4000)
    learned, checked = x[:3000], x[3000:]
    parameters = parted(network, parameters, 2, False)[1]
    made = calibrate(network, parameters, learned)
    for _, weight, _, _ in quantized_views(network, *made.arrays[:3]):  # to 3 bits
        weight[:] = np.rint(weight / 42) * 42
    before = [array.copy() for array in made.arrays]
    tuned = fine_tuned(made, learned, checked, 2, steps=300, seed=3)
    again = fine_tuned(made, learned, checked, 2, steps=300, seed=3)
    for one, other, kept, mine in zip(tuned.arrays, again.arrays, before, made.arrays):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(kept, mine)
    assert not list(faults(tuned.network, tuned.arrays))
    told = tuned.summary["fine_tuning"]
    assert told["taken"] > 0 and 1 - told["agreement"] < 0.5 * (1 - told["agreement_before"])
    found = agreement(tuned, network, parameters, checked, 2)
    assert found == pytest.approx(told["agreement"], abs=1e-3)
    if len(network.towers) > 1:  # the value's tower is as it was
        (_, one, _, _), (_, other, _, _) = (
            list(quantized_views(network, *a[:3]))[-1] for a in (tuned.arrays, made.arrays)
        )
        np.testing.assert_array_equal(one, other)


def test_fine_tuning_that_only_does_harm_leaves_the_integers_as_they_were(monkeypatch):
    parameters, x = drawn(RELU)
    made = calibrate(RELU, parameters, x)
    monkeypatch.setitem(fine_tuning.RATE, "relu", 1e6)
    tuned = fine_tuned(made, x, x, 2, steps=3)
    assert tuned.summary["fine_tuning"]["taken"] == 0
    for one, other in zip(tuned.arrays, made.arrays):
        np.testing.assert_array_equal(one, other)


def test_a_policy_whose_actions_are_all_alike_is_tuned_without_a_nan():
    parameters, x = np.zeros(RELU.parameters, "f4"), drawn(RELU)[1]
    with np.errstate(invalid="raise", divide="raise"):
        tuned = fine_tuned(calibrate(RELU, parameters, x), x, x, 2, steps=2)
    assert np.isfinite(forward.outputs(RELU, tuned.arrays, x)).all()


@pytest.mark.parametrize(
    "given, said",
    [
        ({"steps": 0}, r"steps must be in \[1, 1073741824\], got 0"),
        ({"steps": 1, "seed": -1}, "seed must be"),
        ({"steps": 1, "device": "tpu"}, "device must be one of 'cpu', 'cuda', got 'tpu'"),
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_refused_by_name(given, said):
    parameters, x = drawn(RELU)
    with pytest.raises(ValueError, match=said):
        fine_tuned(calibrate(RELU, parameters, x), x, x, 2, **given)


def test_a_run_that_does_not_ask_for_int8_has_the_config_it_always_had():
    assert "quantize" not in in_use(from_dict({}))
    asked = from_dict(setting("quantize.fine_tune=500"))
    assert in_use(asked)["quantize"] == {"fine_tune": 500, "agreement": 0.99}
    assert from_dict(in_use(asked)) == asked
    with pytest.raises(ConfigError, match=r"^quantize.fine_tune must be in \[0, "):
        from_dict(setting("quantize.fine_tune=-1"))


@pytest.mark.gpu
@pytest.mark.parametrize("network", [RELU, TANH], ids=["relu", "tanh"])
def test_a_gpu_learns_too_and_its_integers_are_as_good(network):
    parameters, x = drawn(network, 4000)
    made = calibrate(network, parameters, x[:3000])
    for _, weight, _, _ in quantized_views(network, *made.arrays[:3]):
        weight[:] = np.rint(weight / 42) * 42
    tuned = fine_tuned(made, x[:3000], x[3000:], 2, steps=300, device="cuda")
    told = tuned.summary["fine_tuning"]
    assert 1 - told["agreement"] < 0.5 * (1 - told["agreement_before"])
    found = agreement(tuned, network, parameters, x[3000:], 2)
    assert found == pytest.approx(told["agreement"], abs=1e-3)
