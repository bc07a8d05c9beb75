"""A network up and down as a spec computes it: in NumPy, rounded where the executors round."""

import numpy as np

from lowgpu_kernels.ops.rollout.observe import observe


def rounded(array, precision):
    """What of a wide array is left in bfloat16; in float32 a spec rounds nothing."""
    return array.astype(precision).astype(array.dtype) if precision == "bfloat16" else array


def observed(floats, ints, table, series, index, env, precision):
    """Observation rows [B, I] of states, or of those that `index` names."""
    x = observe.spec(floats, ints, table, series, index, env=env, precision=precision)
    return rounded(x, precision)


def forward(x, parameters, network, precision):
    """What each layer reads, and the output rows [B, O]."""
    sources, y, out = [], np.zeros((len(x), network.outputs)), x
    for layer, weight, bias in network.views(parameters):
        sources.append(x if layer.source < 0 else out)
        out = sources[-1] @ rounded(weight, precision).T + bias
        if layer.head:
            y[:, layer.column : layer.column + layer.fan_out] = out
        else:
            out = np.tanh(out) if network.activation == "tanh" else np.maximum(out, 0)
            out = rounded(out, precision)
    return sources, y


def backward(sources, grad_y, parameters, network, precision):
    """The gradient by the parameters [P], given that by the output rows."""
    gradient = np.zeros(network.parameters)
    layers, into = list(network.views(parameters)), list(network.views(gradient))
    for (layer, weight, _), (_, of_weight, of_bias), source in zip(
        layers[::-1], into[::-1], sources[::-1]
    ):
        if layer.head:
            columns = slice(layer.column, layer.column + layer.fan_out)
            upstream = rounded(grad_y[:, columns], precision)
        of_weight[:] = upstream.T @ source
        of_bias[:] = upstream.sum(0)
        slope = 1 - source**2 if network.activation == "tanh" else source > 0
        upstream = rounded(upstream @ rounded(weight, precision) * slope, precision)
    return gradient
