"""Where the integers of a quantized network lie: what the int8 ops read and calibration writes.

For a Network, its layers in their order:

    weight        int8, [fan_out, fan_in] row-major in [-127, 127], each layer at a multiple of 16, the
                  gaps zero
    bias          int32, one an output channel: rint(real bias / scale) less what the zero points add
    scale         float32, one an output channel, above 0: what one unit of its sum is worth
    input_scale, input_zero      float32 and int32, one a column of the observation
    hidden_scale, hidden_zero    float32 and int32, one a hidden layer; one element without any

    level(x)      clamp(rint(x * float32(1 / scale)) + zero, -128, 127), ties to even
    s             float32(sum of weight * level, plus bias): the sum exact
    head          z = s * scale
    tanh          level(tanh(z)) with its layer's scale and zero point
    relu          clamp(rint(max(s * factor, 0)) + zero, -128, 127), where
                  factor = float32(scale * float32(1 / hidden_scale)): what is between two products
                  rounds once

A row with a NaN has no numbers: its outputs are NaN and its action is -1.
"""

import numpy as np

from lowgpu_kernels.dims import Dim
from lowgpu_kernels.ops.mlp.network import round_up

C = Dim("C", "output channels of a quantized network, all layers side by side")
J = Dim("J", "hidden layers of a quantized network; 1 for one without any")
Q = Dim("Q", "int8 weights of a quantized network, all layers flat")
ALIGNED = 16  # elements, so that a layer's weights start where the widest load may


def level_factors(scale, hidden_scale):
    """Levels of a hidden layer of relu that one unit of each channel's sum is worth, float32."""
    return np.asarray(scale, np.float32) * (np.float32(1) / np.float32(hidden_scale))


def quantized_weights(network):
    """Length of the flat int8 weights of a Network."""
    return sum(round_up(layer.fan_out * layer.fan_in, ALIGNED) for layer in network.layers)


def quantized_views(network, weight, bias, scale):
    """(layer, weight [fan_out, fan_in], bias [fan_out], scale [fan_out]) of each layer, as views."""
    offset, channel = 0, 0
    for layer in network.layers:
        count, channels = layer.fan_out * layer.fan_in, slice(channel, channel + layer.fan_out)
        shaped = weight[offset : offset + count].reshape(layer.fan_out, layer.fan_in)
        yield layer, shaped, bias[channels], scale[channels]
        offset += round_up(count, ALIGNED)
        channel += layer.fan_out


def quantized_sizes(network):
    """Sizes of a quantized network's arrays: {Dim: length}."""
    return {
        C: sum(layer.fan_out for layer in network.layers),
        J: max(1, sum(not layer.head for layer in network.layers)),
        Q: quantized_weights(network),
    }
