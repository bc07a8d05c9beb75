"""A quantized network as an ONNX model that gives the same bits."""

import numpy as np

from lowgpu.quantization.calibration import layer_name
from lowgpu_kernels.ops.int8.quantized_network import level_factors, quantized_views

OPSET = 17
IR_VERSION = 8  # of the releases that brought opset 17, so that runtimes of that age read the file


class OnnxError(ImportError):
    """The package that writes ONNX is missing: one sentence that says what to install."""


class _Graph:
    """Nodes and constants as they are added; a method gives the name of what it makes."""

    def __init__(self, onnx):
        self.onnx, self.nodes, self.constants = onnx, [], []
        self.one = self.constant("one", np.float32(1))
        self.none = self.constant("no shift", np.int8(0))

    def constant(self, name, array):
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def node(self, kind, inputs, name, **attributes):
        made = self.onnx.helper.make_node(kind, inputs, [name], name=name, **attributes)
        self.nodes.append(made)
        return name

    def whole(self, name, array):
        """Stored integers as float32 whole numbers."""
        zero = self.constant(f"{name} zero", np.zeros((), array.dtype))
        stored = self.constant(f"{name} stored", array)
        return self.node("DequantizeLinear", [stored, self.one, zero], name)

    def levels(self, value, name, scale, zero):
        """The levels of a value, as float32 whole numbers."""
        steps = self.constant(f"{name} levels a unit", np.float32(1) / scale)
        return self.rounded(self.node("Mul", [value, steps], f"{name} scaled"), name, zero)

    def rounded(self, steps, name, zero):
        """The same of a value in steps."""
        zero = self.constant(f"{name} zero", zero.astype(np.float32))
        rounded = self.node("Round", [steps], f"{name} rounded")
        moved = self.node("Add", [rounded, zero], f"{name} moved")
        # Past int8 it takes the end.
        level = self.node("QuantizeLinear", [moved, self.one, self.none], f"{name} stored")
        return self.node("DequantizeLinear", [level, self.one, self.none], f"{name} level")

    def layer(self, value, name, weight, bias, factor):
        """float32(sum) * factor of a layer that reads levels."""
        weight = self.whole(f"{name} weight", weight.T)
        sums = self.node("MatMul", [value, weight], f"{name} products")
        sums = self.node("Add", [sums, self.whole(f"{name} bias", bias)], f"{name} sum")
        return self.node("Mul", [sums, self.constant(f"{name} factor", factor)], f"{name} z")

    def results(self, observation, heads, actions):
        """The outputs: NaN and -1 in rows whose observation has a NaN."""
        whole = self.node("Concat", heads, "heads", axis=1)
        absent = self.node("Cast", [self.node("IsNaN", [observation], "absent")], "absences", to=1)
        most = self.node("ReduceMax", [absent], "most absent", axes=[1], keepdims=1)
        absent = self.node("Cast", [most], "row is absent", to=9)
        nan = self.constant("nan", np.float32(np.nan))
        self.node("Where", [absent, nan, whole], "output")
        ends = (
            self.constant(name, np.array([at], np.int64))
            for name, at in (("first", 0), ("actions", actions), ("columns", 1))
        )
        each = self.node("Slice", [whole, *ends], "action outputs")
        best = self.node("ArgMax", [each], "best action", axis=1, keepdims=1)
        none = self.constant("no action", np.int64(-1))
        chosen = self.node("Where", [absent, none, best], "action column")
        row = self.constant("row", np.array([1], np.int64))
        self.node("Squeeze", [chosen, row], "action")


def onnx_model(calibration, actions):
    """A quantized network as an ONNX model of quantized and dequantized tensors (QDQ).

    The model takes `observation`, float32 [rows, columns], and gives `output`, the heads side by
    side, and `action`, int64 [rows], the first of the largest of the first `actions` columns. A row
    with a NaN gives NaN and -1.

    Its integers are the arrays of the Calibration. Scales and zero points are nodes of their own, and
    every QuantizeLinear and DequantizeLinear has scale 1 and zero point 0: what is multiplied are
    whole numbers whose sums float32 holds exactly. So with relu a runtime that rounds as IEEE 754
    says gives the bits of `forward.outputs`, as long as biases are below 2^23 units. tanh is the
    runtime's own: where it rounds otherwise, a level may be the next one.

    Args:
        calibration: a Calibration.
        actions: columns of the output that are logits, action values or advantages.

    Returns:
        An onnx.ModelProto of opset 17.

    Raises:
        OnnxError: the onnx package is missing.

    Source: the ONNX operators of opset 17.
    """
    try:
        import onnx
    except ImportError as error:
        raise OnnxError(f"ONNX needs its package ({error}): pip install lowgpu[onnx]") from None
    network, columns, arrays = calibration.network, calibration.columns, calibration.arrays
    graph, heads, hidden = _Graph(onnx), [], 0
    read = graph.constant("read columns", columns.astype(np.int64))
    observation = graph.node("Gather", ["observation", read], "read", axis=1)
    value = first = graph.levels(observation, "input", arrays.input_scale, arrays.input_zero)
    for layer, weight, bias, scale in quantized_views(network, *arrays[:3]):
        name, relu = layer_name(network, layer), network.activation == "relu"
        of_levels = relu and not layer.head
        factor = level_factors(scale, arrays.hidden_scale[hidden]) if of_levels else scale
        value = graph.layer(first if layer.source < 0 else value, name, weight, bias, factor)
        if layer.head:
            heads.append(value)
            continue
        value = graph.node("Relu" if relu else "Tanh", [value], name)
        step, zero = arrays.hidden_scale[hidden], arrays.hidden_zero[hidden]
        value = graph.rounded(value, name, zero) if relu else graph.levels(value, name, step, zero)
        hidden += 1
    graph.results("observation", heads, actions)
    return _model(onnx, graph, network, calibration.observation)


def _model(onnx, graph, network, width):
    kinds = onnx.TensorProto
    columns = sum(widths[-1] for widths in network.towers)
    ends = [
        onnx.helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("observation", kinds.FLOAT, ["rows", width]),
            ("output", kinds.FLOAT, ["rows", columns]),
            ("action", kinds.INT64, ["rows"]),
        )
    ]
    made = onnx.helper.make_graph(graph.nodes, "policy", ends[:1], ends[1:], graph.constants)
    model = onnx.helper.make_model(
        made, opset_imports=[onnx.helper.make_opsetid("", OPSET)], producer_name="lowgpu"
    )
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    return model
