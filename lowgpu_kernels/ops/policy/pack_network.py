"""A network's weights as `act` reads them on GPUs whose warpgroups multiply."""

import functools

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, U8, P, Static, V
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.mlp.examples import draw_parameters, example_networks
from lowgpu_kernels.ops.mlp.network import Network, round_up
from lowgpu_kernels.ops.mlp.tile import network_macros

THREADS = 256  # each writes 16 bytes. Untuned.
COLUMNS = 64  # of a block of a matrix
PIECE = 8  # elements in 16 bytes


@functools.cache
def image_nbytes(network):
    """Bytes of a network's image."""
    weights = sum(
        blocks(x.fan_in, COLUMNS) * COLUMNS * round_up(x.fan_out, 16) for x in network.layers
    )
    return 2 * weights + 4 * network_macros(network)["gradients"]


@op(
    error=lambda **_: 0,
    sizes=lambda params, known: {
        P: params["network"].parameters,
        V: image_nbytes(params["network"]),
    },
    bench=("",),
    flops=lambda P, **_: P,
)
def pack_network(
    parameters: F32[P],
    *,
    network: Static(Network, example_networks),
) -> U8[V]:
    """The image of a network's weights that `act` takes: rounded, and in the order it reads them.

        image = (weight[0], weight[1], .., bias[0], bias[1], ..)

    A weight is [fan_out, fan_in] in bfloat16, zeros around to a multiple of 16 rows and 64 columns,
    in blocks of 64 columns one after another. In row r of a block the piece of eight columns 8p and
    on stands at p xor r % 8. In a tower's first layer column 32a + 8b + 4c + 2d + e first moves to
    32a + 16c + 8d + 2b + e. Biases are float32, each layer's from a multiple of 8. The bytes are the
    same on every device. Pack again whenever the parameters have changed.

    Args:
        parameters: weights and biases, flat, laid out as `network.views` says.
        network: widths and activation.

    Returns:
        The image.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: arrays whose sizes are not the network's.

    Source: PTX ISA, "Shared Memory Matrix Layout" of wgmma, 128-byte swizzling.
    """
    weights, biases = [], []
    for layer, weight, bias in network.views(parameters):
        rows, count = round_up(layer.fan_out, 16), blocks(layer.fan_in, COLUMNS)
        padded = np.zeros((rows, count * COLUMNS), "bfloat16")
        padded[: layer.fan_out, : layer.fan_in] = weight
        if layer.source < 0:
            of_32 = padded.reshape(rows, -1, 4, 2, 2, 2)
            padded = of_32.transpose(0, 1, 3, 4, 2, 5).reshape(padded.shape)
        pieces = padded.reshape(rows, count, PIECE, PIECE).transpose(1, 0, 2, 3)
        at = np.arange(PIECE) ^ np.arange(rows)[:, None] % PIECE
        weights.append(pieces[:, np.arange(rows)[:, None], at].tobytes())
        biases.append(np.pad(bias, (0, -layer.fan_out % PIECE)).astype(np.float32).tobytes())
    return np.frombuffer(b"".join(weights + biases), np.uint8)


@pack_network.draws
def _draw(rng, sizes, params):
    return {"parameters": draw_parameters(rng, params["network"])}


@pack_network.on_cpu
def _cpu(parameters, network, image):
    # The spec is a handful of copies: there is nothing to make faster.
    image[:] = pack_network.spec(parameters, network=network)


@pack_network.on_cuda
def _launch(parameters, network, image, stream):
    nbytes = image_nbytes(network)
    kernel = cuda_c(
        "policy/pack_network",
        "pack_network_kernel",
        **network_macros(network),
        float32=False,
        image_nbytes=nbytes,
        threads=THREADS,
    )
    launch.launch(kernel, blocks(nbytes // 16, THREADS), THREADS, (parameters, image), stream)
