"""What a quantized network computes, layer by layer, in NumPy: the bits of `mlp_int8`."""

from itertools import islice

import numpy as np

from lowgpu.quantization.ranges import HIGHEST, LOWEST
from lowgpu_kernels.ops.int8.act_int8 import tanh
from lowgpu_kernels.ops.int8.gemm import exact_sums
from lowgpu_kernels.ops.int8.quantized_network import level_factors, quantized_views

ROWS = 4096  # whose activations are held at once. Untuned.


def quantized(values, scale, zero):
    """int8 levels of float32 values: clamp(rint(value * float32(1 / scale)) + zero, -128, 127)."""
    inverse = (np.float32(1) / np.asarray(scale, np.float32)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        level = np.rint(values * inverse) + np.asarray(zero, np.float32)
    return np.clip(np.nan_to_num(level, nan=0), LOWEST, HIGHEST).astype(np.int8)


def layer_values(network, arrays, observation):
    """(layer, z, values) of every layer in order, [rows, fan_out] each, float32.

        sum      = weight . level + bias                     in integers
        z        = float32(sum) * scale
        values   = z of a head; (level - zero) * hidden_scale of a hidden layer, what its levels
                   of relu(z) or tanh(z) stand for. Those of relu are of float32(sum) * factor, as
                   `quantized_network` says

    Rows with a NaN are NaN.

    Args:
        network: a Network.
        arrays: its QuantizedArrays.
        observation: float32 [rows, network.inputs].
    """
    absent, hidden = np.isnan(observation).any(axis=1), 0
    for layer, z, level in _layers(network, arrays, observation):
        values = z
        if not layer.head:
            step, zero = arrays.hidden_scale[hidden], arrays.hidden_zero[hidden]
            values = (level.astype(np.float32) - np.float32(zero)) * step
            hidden += 1
        values[absent] = np.nan
        yield layer, z, values


def _layers(network, arrays, observation):
    """(layer, z, the levels of a hidden layer) of every layer in order."""
    first = quantized(observation, arrays.input_scale, arrays.input_zero)
    level, hidden = first, 0
    for layer, weight, bias, scale in quantized_views(network, *arrays[:3]):
        level = first if layer.source < 0 else level
        sums = (exact_sums(level, weight) + bias).astype(np.float32)
        z, level = sums * scale, None
        if not layer.head:
            step, zero = arrays.hidden_scale[hidden], arrays.hidden_zero[hidden]
            if network.activation == "tanh":
                level = quantized(tanh(z), step, zero)
            else:
                steps = np.maximum(sums * level_factors(scale, step), 0)
                level = quantized(steps, np.float32(1), zero)
            hidden += 1
        yield layer, z, level


def levels_of(network, arrays, observation, n):
    """The levels that layer n reads, and their zero points."""
    layer, hidden = network.layers[n], sum(not other.head for other in network.layers[:n])
    if layer.source < 0:
        return quantized(observation, arrays.input_scale, arrays.input_zero), arrays.input_zero
    _, _, level = next(islice(_layers(network, arrays, observation), n - 1, None))
    return level, arrays.hidden_zero[hidden - 1]


def outputs(network, arrays, observation):
    """The heads side by side, float32 [rows, heads]; rows with a NaN are NaN."""
    made = [np.empty((0, sum(widths[-1] for widths in network.towers)), np.float32)]
    for first in range(0, len(observation), ROWS):
        layers = layer_values(network, arrays, observation[first : first + ROWS])
        made.append(np.concatenate([z for layer, z, _ in layers if layer.head], axis=1))
    return np.concatenate(made)
