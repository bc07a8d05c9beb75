"""The forward pass of a multilayer perceptron, every layer in one kernel."""

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, REAL, B, H, I, O, Outputs, P, Static
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.mlp.examples import draw_parameters, example_networks
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, assert_within, forward_deviations
from lowgpu_kernels.ops.mlp.tile import THREADS, tile_macros, tile_nbytes, tile_rows


@op(
    # Each layer rounds its weights and its output, by half an eps each, and He's weights keep the
    # size of an error from layer to layer. What tests allow is worked out element by element.
    error=lambda network, **_: DEVIATIONS * np.sqrt(len(network.layers) / 2),
    sizes=lambda params, known: {
        I: params["network"].inputs,
        O: params["network"].outputs,
        H: params["network"].hidden,
        P: params["network"].parameters,
    },
    bench=("B=4096", "B=262144"),
    flops=lambda B, P, **_: 2 * B * P,
)
def mlp_forward(
    x: REAL[B, I],
    parameters: F32[P],
    *,
    network: Static(Network, example_networks),
) -> Outputs(y=F32[B, O], hidden=REAL[B, H]):
    """Outputs of a network for each input row, and the activations that its gradient needs.

        h[0] = x
        h[l] = activation(h[l-1] weight[l]^T + bias[l])    for every hidden layer l of a tower
        head = h[last] weight[head]^T + bias[head]         one a tower, all reading the same x

    The precision is that of x. In float32 every product is an exact float32 multiply-add. In bfloat16
    weights are rounded to bfloat16 as they are read, sums, biases and activation functions are
    float32, and activations are stored as bfloat16. On a GPU in bfloat16 tanh is the hardware's,
    within 2^-11. A row's result does not depend on the other rows.

    Args:
        x: input rows, any unit of order 1.
        parameters: weights and biases, flat, laid out as `network.views` says.
        network: widths and activation; its inputs, outputs, hidden and parameters are the arrays'
            sizes.

    Returns:
        y: the heads side by side, not activated; columns past them are zero.
        hidden: every hidden layer after its activation, tower after tower, layer after layer; zero
            where the network has no hidden layer.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: arrays whose sizes are not the network's; on a GPU, layers too wide for its
            shared memory.

    Source: Rumelhart, Hinton & Williams 1986, Learning representations by back-propagating errors.
    """
    hidden = np.zeros((len(x), network.hidden), x.dtype)
    y = np.zeros((len(x), network.outputs), x.dtype)
    for layer, weight, bias in network.views(parameters):
        inputs = x if layer.source < 0 else hidden[:, layer.source : layer.source + layer.fan_in]
        total = inputs @ weight.T + bias
        into = slice(layer.column, layer.column + layer.fan_out)
        if layer.head:
            y[:, into] = total
        elif network.activation == "tanh":
            hidden[:, into] = np.tanh(total)
        else:
            hidden[:, into] = np.maximum(total, 0)
    return y, hidden


@mlp_forward.draws
def _draw(rng, sizes, params):
    return {"parameters": draw_parameters(rng, params["network"])}


@mlp_forward.compares
def _compare(name, found, expected, arguments, _):
    y, hidden = forward_deviations(arguments["x"], arguments["parameters"], arguments["network"])
    assert_within(f"mlp_forward.{name}", found, expected, {"y": y, "hidden": hidden}[name])


@mlp_forward.on_cpu
def _cpu(x, parameters, network, y, hidden):
    y[:] = 0
    hidden[:] = 0
    for layer, weight, bias in network.views(parameters):
        columns = slice(layer.source, layer.source + layer.fan_in)
        inputs = x if layer.source < 0 else hidden[:, columns]
        weight = weight.astype(x.dtype).astype(np.float32)
        total = inputs.astype(np.float32) @ weight.T + bias
        into = slice(layer.column, layer.column + layer.fan_out)
        if layer.head:
            y[:, into] = total
        else:
            hidden[:, into] = np.tanh(total) if network.activation == "tanh" else total.clip(0)


@mlp_forward.on_cuda
def _launch(x, parameters, network, y, hidden, stream):
    batch, precision = len(x), x.dtype.name
    rows = tile_rows(network, batch, precision, launch.device())
    kernel = cuda_c("mlp/mlp_forward", "mlp_forward", **tile_macros(network, rows, precision))
    shared = tile_nbytes(network, rows, precision)
    launch.launch(
        kernel,
        blocks(batch, rows),
        THREADS,
        (x, parameters, y, hidden, np.int32(batch)),
        stream,
        shared,
    )
