"""The gradient of a multilayer perceptron's parameters."""

import functools

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, REAL, B, H, I, O, Outputs, P, Static
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.mlp.examples import draw_parameters, example_networks
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, assert_within, backward_deviations
from lowgpu_kernels.ops.mlp.tile import (
    THREADS,
    network_macros,
    tile_macros,
    tile_nbytes,
    tile_rows,
)

SIDE = 64  # a block's tile of weights is SIDE x SIDE: 32 x 32 a warp. Untuned.
WEIGHT_THREADS = 128
STAGE = {"bfloat16": 64, "float32": 32}  # rows in shared memory at once: 8 KB of each operand
FEWEST_ROWS = 128  # a split sums at least these: a partial sum costs as much traffic as they do
SUM_THREADS = 256


def splits_of(network, batch, on):
    """Parts that the batch is cut into for the weight gradients, so blocks fill `on` about twice."""
    return max(1, min(2 * on.sms // weight_tiles(network), batch // FEWEST_ROWS))


@functools.cache
def weight_tiles(network):
    """Tiles of weights of all layers."""
    return sum(blocks(x.fan_out, SIDE) * blocks(x.fan_in, SIDE) for x in network.layers)


def _partials_shape(sizes, params):
    splits = splits_of(params["network"], sizes["B"], launch.device())
    # One split writes the gradient itself.
    return (splits if splits > 1 else 0, sizes["P"])


@op(
    # As for mlp_forward, there and back; tests work out what they allow element by element.
    error=lambda network, **_: DEVIATIONS * np.sqrt(len(network.layers)),
    sizes=lambda params, known: {
        I: params["network"].inputs,
        O: params["network"].outputs,
        H: params["network"].hidden,
        P: params["network"].parameters,
    },
    scratch={
        "gradients": (
            REAL,
            lambda sizes, params: (sizes["B"], network_macros(params["network"])["gradients"]),
        ),
        "partials": ("float32", _partials_shape),
    },
    bench=("B=4096", "B=262144"),
    flops=lambda B, P, **_: 4 * B * P,
)
def mlp_backward(
    x: REAL[B, I],
    hidden: REAL[B, H],
    grad_y: F32[B, O],
    parameters: F32[P],
    *,
    network: Static(Network, example_networks),
) -> Outputs(gradient=F32[P]):
    """Gradient of a loss with respect to a network's parameters, summed over the batch.

        g[head]   = grad_y
        g[l-1]    = (g[l] weight[l]) * activation'(h[l-1])    relu': h > 0; tanh': 1 - h^2
        weight[l] : sum over rows of g[l]^T h[l-1]
        bias[l]   : sum over rows of g[l]

    Precision as for `mlp_forward`; in bfloat16 the gradients g and the weights are rounded to
    bfloat16 as factors, sums are float32. On a GPU the same call gives the same bits: sums over the
    batch are formed in a fixed order, which depends on the device.

    Args:
        x: the input rows given to `mlp_forward`.
        hidden: the activations it returned.
        grad_y: gradient of the loss with respect to y, per row; columns past the heads are not read.
        parameters: the weights and biases given to it.
        network: widths and activation.

    Returns:
        gradient: laid out as the parameters, gaps zero. The sum over rows, not the mean.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: arrays whose sizes are not the network's; on a GPU, layers too wide for its
            shared memory.

    Source: Rumelhart, Hinton & Williams 1986, Learning representations by back-propagating errors.
    """
    gradient = np.zeros(network.parameters, x.dtype)
    layers, into = list(network.views(parameters)), list(network.views(gradient))
    for (layer, weight, _), (_, of_weight, of_bias) in zip(layers[::-1], into[::-1]):
        if layer.head:
            upstream = grad_y[:, layer.column : layer.column + layer.fan_out]
        first = layer.source < 0
        inputs = x if first else hidden[:, layer.source : layer.source + layer.fan_in]
        of_weight[:] = upstream.T @ inputs
        of_bias[:] = upstream.sum(0)
        if not first:
            slope = 1 - inputs**2 if network.activation == "tanh" else inputs > 0
            upstream = upstream @ weight * slope
    return gradient


@mlp_backward.draws
def _draw(rng, sizes, params):
    network = params["network"]
    hidden = rng.normal(size=(sizes[B], network.hidden))
    grad_y = rng.normal(size=(sizes[B], network.outputs))
    grad_y[:, sum(widths[-1] for widths in network.towers) :] = np.nan  # must not be read there
    return {
        "hidden": np.tanh(hidden) if network.activation == "tanh" else hidden.clip(0),
        "grad_y": grad_y,
        "parameters": draw_parameters(rng, network),
    }


@mlp_backward.compares
def _compare(name, found, expected, arguments, _):
    assert_within(
        f"mlp_backward.{name}",
        found,
        expected,
        backward_deviations(
            *(arguments[n] for n in ("x", "hidden", "grad_y", "parameters", "network"))
        ),
    )


@mlp_backward.on_cpu
def _cpu(x, hidden, grad_y, parameters, network, gradient, gradients, partials):
    def rounded(array):
        return array.astype(x.dtype).astype(np.float32)

    gradient[:] = 0
    layers, into = list(network.views(parameters)), list(network.views(gradient))
    for (layer, weight, _), (_, of_weight, of_bias) in zip(layers[::-1], into[::-1]):
        if layer.head:
            upstream = rounded(grad_y[:, layer.column : layer.column + layer.fan_out])
        columns = slice(layer.source, layer.source + layer.fan_in)
        inputs = (x if layer.source < 0 else hidden[:, columns]).astype(np.float32)
        np.matmul(upstream.T, inputs, out=of_weight)
        np.sum(upstream, 0, out=of_bias)
        if layer.source >= 0:
            upstream = upstream @ rounded(weight)
            if network.activation == "tanh":
                upstream *= 1 - inputs * inputs
            else:
                upstream[inputs <= 0] = 0
            upstream = rounded(upstream)


@mlp_backward.on_cuda
def _launch(x, hidden, grad_y, parameters, network, gradient, gradients, partials, stream):
    batch, precision = len(x), x.dtype.name
    rows = tile_rows(network, batch, precision, launch.device())
    macros = {
        **tile_macros(network, rows, precision),
        "side": SIDE,
        "stage": STAGE[precision],
    }
    splits = max(1, partials.shape[0])
    sums = gradient if splits == 1 else partials

    def kernel(entry):
        return cuda_c("mlp/mlp_backward", entry, **macros)

    launch.launch(
        kernel("mlp_backward_rows"),
        blocks(batch, rows),
        THREADS,
        (hidden, grad_y, parameters, gradients, np.int32(batch)),
        stream,
        tile_nbytes(network, rows, precision),
    )
    rows_a_split = blocks(blocks(batch, splits), STAGE[precision]) * STAGE[precision]
    launch.launch(
        kernel("mlp_backward_weights"),
        (weight_tiles(network), splits, 1),
        WEIGHT_THREADS,
        (x, hidden, gradients, sums, np.int32(batch), np.int32(rows_a_split)),
        stream,
    )
    if splits > 1:
        launch.launch(
            kernel("mlp_backward_sum"),
            blocks(network.parameters, SUM_THREADS),
            SUM_THREADS,
            (partials, gradient, np.int32(splits)),
            stream,
        )
