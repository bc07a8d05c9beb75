"""Networks that tests and benches of the MLP ops use, and parameters to go with them."""

import numpy as np

from lowgpu_kernels.ops.mlp.network import Network


def example_networks():
    """From the market's policy to the corners of what a Network may be."""
    return (
        Network(56, ((256, 128, 64, 4),)),
        Network(8, ((64, 64, 2), (64, 64, 1)), "tanh"),
        Network(16, ((1,),)),
        Network(24, ((8, 16, 24, 32, 40, 56, 64, 3),)),
        Network(64, ((512, 8, 5),), "tanh"),
        Network(40, ((72, 13), (1,))),
    )


def draw_parameters(rng, network):
    """Float32 parameters that keep the size of activations from layer to layer; gaps are zero.

    Source: He et al. 2015 (arXiv:1502.01852) for relu; Glorot & Bengio 2010 for tanh.
    """
    parameters = np.zeros(network.parameters, np.float32)
    gain = 2.0 if network.activation == "relu" else 1.0
    for layer, weight, bias in network.views(parameters):
        weight[:] = rng.normal(0, np.sqrt(gain / layer.fan_in), weight.shape)
        bias[:] = rng.normal(0, 0.1, bias.shape)
    return parameters
