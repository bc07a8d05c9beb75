"""The exported model against onnxruntime: the same bits with relu, within a bound with tanh."""

import sys

import numpy as np
import pytest

from lowgpu.quantization import forward
from lowgpu.quantization.calibration import calibrate
from lowgpu.quantization.onnx_export import OnnxError, onnx_model
from lowgpu_kernels.ops.int8.quantized_network import quantized_views
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network
from tests.test_quantization import rounded_once

RELU = [
    (Network(8, ((3,),)), 2, 1),
    (Network(56, ((256, 128, 64, 4),)), 3, 1),
    (Network(16, ((72, 13), (8, 1))), 13, 4),
    (Network(512, ((512, 512, 5),)), 5, 1),  # the widest sums
]


def test_without_the_package_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(OnnxError, match=r"pip install lowgpu\[onnx\]"):
        onnx_model(None, 2)


def quantized(network, copies):
    rng = np.random.default_rng(0)
    parameters = draw_parameters(rng, network).astype("f4")
    x = (rng.normal(size=(500, network.inputs)) * rng.uniform(0.1, 9, network.inputs)).astype("f4")
    return calibrate(network, parameters, x, copies=copies), x


def run(model, x):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"observation": x})


@pytest.mark.parametrize("network, actions, copies", RELU, ids=str)
def test_onnxruntime_gives_the_same_bits_for_relu(network, actions, copies):
    pytest.importorskip("onnx")
    made, x = quantized(network, copies)
    model = onnx_model(made, actions)
    x[3, 0], x[4], x[5, 1] = np.nan, x[4] * 1e6, np.inf
    for rows in (1, 7, 500):
        output, action = run(model, x[:rows])
        wanted = forward.outputs(made.network, made.arrays, x[:rows, made.columns])
        np.testing.assert_array_equal(output, wanted)
        best = np.where(np.isnan(wanted).any(1), -1, wanted[:, :actions].argmax(1))
        np.testing.assert_array_equal(action, best)


def test_the_model_rounds_once_between_two_products_with_relu():
    pytest.importorskip("onnx")
    made, want = rounded_once()
    output, _ = run(onnx_model(made, 8), np.zeros((1, 8), "f4"))
    assert output[0, :3].tolist() == want


def test_onnxruntime_is_within_a_level_a_layer_for_tanh():
    """Its tanh rounds otherwise, so a level may be the next one; tanh's slope is at most 1."""
    pytest.importorskip("onnx")
    network = Network(8, ((64, 64, 2), (64, 64, 1)), "tanh")
    made, x = quantized(network, 1)
    output, _ = run(onnx_model(made, 2), x)
    off = np.abs(output - forward.outputs(network, made.arrays, x)).max(0)
    allowed, hidden, moved = [], 0, 0.0
    for layer, weight, _, scale in quantized_views(network, *made.arrays[:3]):
        moved = 0.0 if layer.source < 0 else moved
        # Levels that each of the layer's inputs may be off by, times what a level is worth in it.
        z = np.abs(weight.astype("f8")).sum(1) * scale * moved
        if layer.head:
            allowed += list(z + 1e-6)
            continue
        moved = np.ceil(z.max() / made.arrays.hidden_scale[hidden]) + 1
        hidden += 1
    assert (off <= allowed).all(), (off, allowed)
    same = (output == forward.outputs(network, made.arrays, x)).all(1).mean()
    assert same > 0.8, same


def test_the_model_is_of_the_opset_it_says_and_holds_the_checkpoints_integers():
    onnx = pytest.importorskip("onnx")
    network = Network(8, ((16, 3),))
    made, _ = quantized(network, 2)
    model = onnx_model(made, 3)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for layer, weight, bias, _ in quantized_views(made.network, *made.arrays[:3]):
        name = "head" if layer.head else "layer 1"
        np.testing.assert_array_equal(stored[f"{name} weight stored"], weight.T)
        np.testing.assert_array_equal(stored[f"{name} bias stored"], bias)
        assert stored[f"{name} weight stored"].dtype == np.int8
