"""Quantized checkpoints and the policies read from them: whole, alone, and within their ranges."""

import numpy as np
import pytest
import torch

from lowgpu import checkpoint
from lowgpu.checkpoint import CheckpointError
from lowgpu.quantization import forward, quantized
from lowgpu.quantization.calibration import calibrate
from lowgpu.quantization.policy import QuantizedPolicy
from lowgpu_kernels import act
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network

NETWORK = Network(8, ((24, 8, 3), (8, 1)))  # 3 actions and a value; the first gap is not empty


@pytest.fixture
def made():
    """(parameters, observations, Calibration) of a small policy."""
    rng = np.random.default_rng(0)
    parameters = draw_parameters(rng, NETWORK).astype("f4")
    x = rng.normal(size=(200, 8)).astype("f4")
    return parameters, x, calibrate(NETWORK, parameters, x, copies=2)


@pytest.fixture
def saved(made, tmp_path):
    """The path of its quantized checkpoint."""
    parameters, _, calibration = made
    path = tmp_path / "quantized.safetensors"
    normalizer = {"mean": np.arange(5, dtype="f4")}
    about = {"env": "none", "report": "as long as a run's " * 100}
    quantized.save(path, calibration, 3, parameters, normalizer=normalizer, about=about)
    return path


def changed(path, **arrays):
    """The same file with other arrays; None leaves one out."""
    whole = checkpoint.load(path)
    kept = {n: a for n, a in {**whole.arrays, **arrays}.items() if a is not None}
    checkpoint.save(path, kept, whole.document)


def documented(path, **fields):
    """The same file with another document."""
    whole = checkpoint.load(path)
    checkpoint.save(path, whole.arrays, {**whole.document, **fields})


def test_a_policy_that_was_saved_acts_as_its_calibration(made, saved):
    _, x, calibration = made
    y = forward.outputs(calibration.network, calibration.arrays, x[:, calibration.columns])
    policy = QuantizedPolicy.load(saved)
    action, log_probability, value = policy.act(x)
    np.testing.assert_array_equal(action, y[:, :3].argmax(1))
    np.testing.assert_array_equal(value, y[:, 3])
    below = y[:, :3].astype("f8") - y[:, :3].max(1, keepdims=True)
    np.testing.assert_allclose(log_probability, -np.log(np.exp(below).sum(1)), atol=1e-6)
    assert policy.normalizer["mean"].tolist() == [0, 1, 2, 3, 4]
    assert policy.act(x[:0]).action.shape == (0,)


def test_a_quarter_of_the_bytes_holds_the_weights_and_the_file_says_what_it_was_made_of(
    made, saved
):
    _, _, calibration = made
    whole = checkpoint.load(saved)
    assert whole.arrays["weight"].dtype == np.int8 and "parameters" not in whole.arrays
    assert whole.document["calibration"] == calibration.summary
    assert len(whole.document["made_of"]) == 64 and whole.document["env"] == "none"
    weights = sum(layer.fan_in * layer.fan_out for layer in calibration.network.layers)
    assert weights <= whole.arrays["weight"].nbytes < weights + 16 * len(calibration.network.layers)


def test_a_folder_is_read_by_the_name_its_run_gave_the_file(saved):
    assert QuantizedPolicy.load(saved.parent).actions == 3


def test_draws_follow_the_probabilities_and_are_anew_in_every_call(made, saved):
    _, x, _ = made
    policy, again = QuantizedPolicy.load(saved, seed=5), QuantizedPolicy.load(saved, seed=5)
    first, second = policy.act(x, greedy=False), policy.act(x, greedy=False)
    assert policy.step == 2 and (first.action != second.action).any()
    np.testing.assert_array_equal(again.act(x, greedy=False).action, first.action)
    np.testing.assert_array_equal(again.act(x).action, policy.act(x).action)


def test_a_row_with_a_nan_has_no_action_and_the_others_keep_theirs(made, saved):
    _, x, _ = made
    policy = QuantizedPolicy.load(saved)
    whole = policy.act(x)
    x[4, 2] = np.nan
    found = policy.act(x)
    assert found.action[4] == -1 and np.isnan([found.log_probability[4], found.value[4]]).all()
    for one, other in zip(whole, found):
        np.testing.assert_array_equal(np.delete(one, 4), np.delete(other, 4))


def test_a_network_of_action_values_gives_the_best_ones_value(tmp_path):
    rng = np.random.default_rng(1)
    network = Network(8, ((8, 4),))
    parameters, x = draw_parameters(rng, network).astype("f4"), rng.normal(size=(9, 8)).astype("f4")
    calibration = calibrate(network, parameters, x)
    quantized.save(tmp_path / "q", calibration, 4, parameters, about={"report": "long " * 300})
    found = QuantizedPolicy.load(tmp_path / "q").act(x)
    y = forward.outputs(network, calibration.arrays, x)
    np.testing.assert_array_equal(found.value, y.max(1))


def test_arrays_of_torch_come_back_as_torch(made, saved):
    _, x, _ = made
    policy = QuantizedPolicy.load(saved)
    found = policy.act(torch.from_numpy(x))
    assert all(isinstance(a, torch.Tensor) for a in found)
    np.testing.assert_array_equal(found.action.numpy(), policy.act(x).action)
    assert found._fields == tuple(act.outputs)


def test_an_observation_in_bfloat16_is_acted_on_as_it_is(made, saved):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    _, x, _ = made
    policy = QuantizedPolicy.load(saved)
    rounded = x.astype(bfloat16)
    np.testing.assert_array_equal(policy.act(rounded), policy.act(rounded.astype("f4")))


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_gpu_gives_the_bits_of_the_cpu(made, copies, kind):
    import cupy

    parameters, x, _ = made
    calibration = calibrate(NETWORK, parameters, x, copies=copies)
    given = calibration.network, calibration.columns, calibration.arrays, 3, 8
    policy, again = QuantizedPolicy(*given, seed=9), QuantizedPolicy(*given, seed=9)
    x[5, 1] = np.nan
    x = torch.from_numpy(x).to(getattr(torch, kind))
    for greedy in (True, False, False):
        found, wanted = policy.act(x.cuda(), greedy), again.act(x, greedy)
        assert all(isinstance(a, torch.Tensor) and a.is_cuda for a in found)
        for one, other in zip(found, wanted):
            np.testing.assert_array_equal(one.cpu().numpy(), other.numpy())
    if kind == "float32":
        found = policy.act(cupy.asarray(x.numpy()))
        np.testing.assert_array_equal(found.action.get(), policy.act(x).action.numpy())


@pytest.mark.parametrize(
    "wrong, error",
    [
        (np.zeros((2, 7), "f4"), ValueError),
        (np.zeros(8, "f4"), ValueError),
        (np.zeros((2, 8)), TypeError),
        ([[0.0] * 8], TypeError),
        (np.zeros((8, 2), "f4").T, TypeError),
    ],
)
def test_an_observation_of_another_shape_or_type_is_refused(saved, wrong, error):
    with pytest.raises(error, match=r"^observation must be "):
        QuantizedPolicy.load(saved).act(wrong)


def test_a_seed_out_of_range_is_refused(saved):
    with pytest.raises(ValueError, match=r"^seed must be in"):
        QuantizedPolicy.load(saved, seed=-1)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("weight", -128, r"weight must be in \[-127, 127\]"),
        ("scale", 0, "scale must be above 0"),
        ("scale", -1, "scale must be above 0"),
        ("scale", np.nan, "scale holds a NaN or an infinity"),
        ("scale", 3e38, r"scale must be less than 2\^128 of its layer's steps"),
        ("input_scale", 0, "input_scale must be a normal number above 0"),
        ("input_scale", 1e-40, "input_scale must be a normal number above 0"),
        ("hidden_scale", np.inf, "hidden_scale holds a NaN or an infinity"),
        ("input_zero", 3953, r"input_zero must be in \[-3953, 3952\]"),
        ("input_zero", -3954, r"input_zero must be in \[-3953, 3952\]"),
        ("hidden_zero", -129, r"hidden_zero must be in \[-128, 127\]"),
        ("bias", 2**31 - 1, "bias must leave the sums of its channel within int32"),
        ("bias", -(2**31), "bias must leave the sums of its channel within int32"),
        ("columns", 8, r"columns must be in 0\.\.7"),
        ("columns", -1, r"columns must be in 0\.\.7"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_arrays_name(saved, name, value, said):
    arrays = dict(checkpoint.load(saved).arrays)
    broken = arrays[name].copy()
    with np.errstate(invalid="ignore"):
        broken[0] = value
    if not np.isfinite(broken).all():  # what save would refuse too
        with pytest.raises(CheckpointError, match=said):
            changed(saved, **{name: broken})
        return
    changed(saved, **{name: broken})
    with pytest.raises(CheckpointError, match=said):
        QuantizedPolicy.load(saved)


def test_arrays_that_are_missing_unknown_or_of_another_shape_or_type_are_refused(saved):
    whole = checkpoint.load(saved)
    raw = saved.read_bytes()
    for name in quantized.layout(NETWORK):
        array = whole.arrays[name]
        other = array.astype("f4" if array.dtype.kind == "i" else "i4")
        for broken in (None, array[:-1].copy(), other):
            changed(saved, **{name: broken})
            with pytest.raises(CheckpointError, match=rf": {name} must be .*, got "):
                QuantizedPolicy.load(saved)
            saved.write_bytes(raw)
    changed(saved, extra=np.zeros(3, "f4"))
    with pytest.raises(CheckpointError, match="unknown array, extra"):
        QuantizedPolicy.load(saved)


def test_bytes_between_layers_must_be_zero(saved):
    arrays = checkpoint.load(saved).arrays
    weight = arrays["weight"].copy()
    weight[-1] = 3  # the last layer has 8 weights of 16
    changed(saved, weight=weight)
    with pytest.raises(CheckpointError, match="weight must be zero between layers"):
        QuantizedPolicy.load(saved)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "policy"},
        {"network": None},
        {"network": {"inputs": 8}},
        {"network": {"inputs": 7, "towers": [[3]]}},
        {"network": {"inputs": 8, "towers": [["x"]]}},
        {"network": {"inputs": 8, "towers": [[3]], "activation": "gelu"}},
        {"network": {"inputs": 8, "towers": [[3]], "more": 1}},
        {"network": {"inputs": 8, "towers": [[10**30]]}},
        {"actions": 2},
        {"actions": "3"},
        {"observation": 0},
        {"observation": 1e9},
    ],
    ids=str,
)
def test_a_document_that_describes_no_policy_is_refused(saved, fields):
    documented(saved, **fields)
    with pytest.raises(CheckpointError, match="is no quantized policy: "):
        QuantizedPolicy.load(saved)


def test_a_float32_checkpoint_a_changed_bit_and_a_pickle_are_refused(saved, tmp_path):
    """Cases S8 and S10, through the one reader of checkpoints."""
    plain = tmp_path / "checkpoint.safetensors"
    checkpoint.save(plain, {"parameters": np.zeros(4, "f4")}, {"iteration": 1})
    with pytest.raises(CheckpointError, match="is no quantized policy"):
        QuantizedPolicy.load(plain)
    raw = bytearray(saved.read_bytes())
    raw[-1] ^= 1
    saved.write_bytes(raw)
    with pytest.raises(CheckpointError, match="SHA-256"):
        QuantizedPolicy.load(saved)
    saved.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match="pickle"):
        QuantizedPolicy.load(saved)
