"""A quantized network as one array, in the order in which the int8 policy kernels read it."""

import functools
from dataclasses import dataclass

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import F32, I8, I32, U8, I, Static, V
from lowgpu_kernels.op import blocks, op
from lowgpu_kernels.ops.int8.quantized_network import (
    C,
    J,
    Q,
    level_factors,
    quantized_sizes,
    quantized_views,
)
from lowgpu_kernels.ops.mlp.network import Network, round_up
from lowgpu_kernels.ops.mlp.tile import network_macros

THREADS = 512  # of the one block. Untuned: a network is packed once.
STEP = 32  # terms of a product
ROW = 128  # bytes of a row of weights
POSITIVE = 0x4B000000  # the bits of 2^23 as float32
ROUNDER = 3 * 2**22  # a float32 that it is added to becomes whole
FARTHEST = 2**20  # from int8 that an input's zero point may lie
TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Packed:
    """How the weights of a layer lie in an image.

    Attributes:
        columns: output columns, with those that fill up.
        terms: input columns, with those that fill up.
        parts: of the columns, that share rows of 128 bytes.
        rows: of a part.
        blocks: of 128 bytes a row, one after another.
    """

    columns: int
    terms: int
    parts: int
    rows: int
    blocks: int

    @property
    def nbytes(self):
        """Of the layer's weights."""
        return self.blocks * self.rows * ROW


def example_networks():
    """The market's policy, an actor and critic, odd widths, and one of action values alone."""
    return (
        Network(56, ((256, 128, 64, 4),)),
        Network(8, ((32, 24, 2), (32, 1)), "tanh"),
        Network(40, ((72, 13), (1,))),
        Network(16, ((24, 3),)),
    )


@functools.cache
def packed_layer(layer):
    """The Packed of a Layer; int8_image.cuh says the same."""
    terms, multiple = round_up(layer.fan_in, STEP), 8 if layer.head else 16
    columns = round_up(layer.fan_out, multiple)
    parts = ROW // terms if terms <= 64 else 1
    rows = round_up(blocks(columns, parts), multiple)
    return Packed(columns, terms, parts, rows, 1 if parts > 1 else blocks(terms, ROW))


@functools.cache
def image_nbytes(network):
    """Bytes of a quantized network's image."""
    layers = [packed_layer(layer) for layer in network.layers]
    terms = 8 * sum(x.columns for x in layers) + 8 * round_up(network.inputs, STEP)
    hidden = 8 * quantized_sizes(network)[J]
    return sum(x.nbytes for x in layers) + round_up(terms + hidden + 4, 16)


@functools.cache
def packed_macros(network):
    """The constants of CUDA C that includes int8_image.cuh."""
    return {**network_macros(network), "image_nbytes": image_nbytes(network)}


def _sizes(params, known):
    network = params["network"]
    return {I: network.inputs, **quantized_sizes(network), V: image_nbytes(network)}


@op(error=lambda **_: 0, sizes=_sizes, bench=("",), flops=lambda Q, **_: Q)
def pack_int8(
    weight: I8[Q],
    bias: I32[C],
    scale: F32[C],
    input_scale: F32[I],
    input_zero: I32[I],
    hidden_scale: F32[J],
    hidden_zero: I32[J],
    *,
    network: Static(Network, example_networks),
) -> U8[V]:
    """The image of a quantized network that `act_int8` and `mlp_int8` take.

        image = (weight[0], weight[1], .., terms of sums, terms of inputs, terms of hidden layers, plain)

    A level q is multiplied as the byte u = q + 128, so a bias is less 128 times the sum of its
    weights. A hidden layer of relu has its factors for scales, and 1 for what its values are then
    multiplied by. The bytes are the same on every device; `_image` has their order.

    Args:
        weight, bias, scale: of all layers, as `quantized_network.py` lays them out.
        input_scale, input_zero: what a step of a column of the observation is worth, and the level
            of 0. The zero point may lie past int8, by at most 2^20.
        hidden_scale, hidden_zero: the same of each hidden layer, zero points in [-128, 127].
        network: widths and activation.

    Returns:
        The image.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: arrays whose sizes are not the network's; on the CPU, a scale that is no normal
            number above 0, a factor past float32, a weight of -128, or a zero point out of range,
            with its place.

    Source: PTX ISA, "Shared Memory Matrix Layout" of wgmma, 128-byte swizzling, and "Register
    Fragments" of wgmma with 8-bit factors.
    """
    given = weight, bias, scale.astype(np.float32)
    inputs = input_scale.astype(np.float32), input_zero
    hidden = hidden_scale.astype(np.float32), hidden_zero
    return _image(network, given, inputs, hidden)


def _image(network, given, inputs, hidden):
    """Weights in swizzled blocks, every two columns' biases and factors, the levels' terms, plain."""
    relu = network.activation == "relu"
    weights, sums, plain, at = [], [], relu and (hidden[1] == -128).all(), 0
    for layer, weight, bias, scale in quantized_views(network, *given):
        packed, wide = packed_layer(layer), weight.astype(np.int64)
        weights.append(_swizzled(packed, wide, layer.source < 0).tobytes())
        shifted = bias - 128 * wide.sum(1)
        if not layer.head:
            scale = level_factors(scale, hidden[0][at]) if relu else scale
            at += 1
            low, high = (255 * end(wide, 0).sum(1) for end in (np.minimum, np.maximum))
            fits = (shifted + low >= -(2**30)) & (shifted + high < 2**23) & (scale <= 2.0**100)
            plain = plain and fits.all()
        pairs = np.zeros(packed.columns // 2, [("bias", "<i4", 2), ("factor", "<f4", 2)])
        flat = np.zeros(packed.columns, np.int64)
        flat[: layer.fan_out] = shifted
        flat += 0 if layer.head else POSITIVE
        pairs["bias"] = (flat & 0xFFFFFFFF).astype(np.uint32).view(np.int32).reshape(-1, 2)
        factor = np.ones(packed.columns, np.float32)
        factor[: layer.fan_out] = scale
        pairs["factor"] = factor.reshape(-1, 2)
        sums.append(pairs.tobytes())
    of_hidden = np.ones_like(hidden[0]) if relu else hidden[0]
    fill = (0, -network.inputs % STEP)
    every = (
        (np.pad(inputs[0], fill, constant_values=1), np.pad(inputs[1], fill)),
        (of_hidden, hidden[1]),
    )
    levels = [np.stack([1 / scale, zero + 128 - ROUNDER], 1) for scale, zero in every]
    parts = *weights, *sums, *(array.astype(np.float32).tobytes() for array in levels)
    image = b"".join((*parts, np.int32(plain).tobytes()))
    return np.frombuffer(image.ljust(image_nbytes(network), b"\0"), np.uint8)


def _swizzled(packed, weight, of_input):
    """A layer's weights as bytes, [blocks, rows, 128].

    In each 32 terms stand, of an input, column 8l + 4h + f, and of a hidden layer column
    16h + 8e + 2l + d, in term 16h + 4l + f with f = 2e + d. In row r of a block the piece of sixteen
    terms 16p and on stands at p xor r % 8. A layer of 64 terms or fewer has its columns in parts, one
    beside another in a row.
    """
    terms = packed.blocks * ROW // packed.parts
    padded = np.zeros((packed.parts * packed.rows, terms), np.int8)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    steps = (len(padded), -1)
    if of_input:
        padded = padded.reshape(*steps, 4, 2, 4).swapaxes(2, 3)
    else:
        padded = padded.reshape(*steps, 2, 2, 4, 2).swapaxes(3, 4)
    rows = padded.reshape(packed.parts, packed.rows, terms).swapaxes(0, 1)
    pieces = rows.reshape(packed.rows, packed.blocks, 8, 16).swapaxes(0, 1)
    at = np.arange(8) ^ np.arange(packed.rows)[:, None] % 8
    return pieces[:, np.arange(packed.rows)[:, None], at]


def unpacked(image, network):
    """What an image holds: ([(weight, bias, factor)], (inverse, zero) of inputs, the same of layers).

    Weights are int8 [fan_out, fan_in]; biases and zero points, in float32, are for levels from 0 on.
    """
    layers, at = [], 0
    for layer in network.layers:
        packed = packed_layer(layer)
        weight = image[at : at + packed.nbytes].view(np.int8)
        layers.append(_as_rows(packed, weight, layer.source < 0)[: layer.fan_out, : layer.fan_in])
        at += packed.nbytes
    terms = []
    for layer in network.layers:
        packed = packed_layer(layer)
        pairs = image[at : at + 8 * packed.columns].reshape(-1, 2, 2, 4)
        bias, factor = (np.ascontiguousarray(pairs[:, i]).reshape(-1, 4) for i in (0, 1))
        bias = bias.view(np.int32).reshape(-1)[: layer.fan_out] - (0 if layer.head else POSITIVE)
        terms.append((bias, factor.view(np.float32).reshape(-1)[: layer.fan_out]))
        at += 8 * packed.columns
    levels = image[at : len(image) - len(image) % 8].view(np.float32).reshape(-1, 2)
    inverse, zero = levels[:, 0].copy(), levels[:, 1] + np.float32(ROUNDER)
    inputs, hidden = round_up(network.inputs, STEP), quantized_sizes(network)[J]
    of_hidden = [(inverse[inputs + h], zero[inputs + h]) for h in range(hidden)]
    first = slice(network.inputs)
    return [(w, *t) for w, t in zip(layers, terms)], (inverse[first], zero[first]), of_hidden


def _as_rows(packed, swizzled, of_input):
    """The inverse of `_swizzled`."""
    at = np.arange(8) ^ np.arange(packed.rows)[:, None] % 8
    pieces = swizzled.reshape(packed.blocks, packed.rows, 8, 16)
    pieces = pieces[:, np.arange(packed.rows)[:, None], at]
    rows = pieces.swapaxes(0, 1).reshape(packed.rows, packed.parts, -1)
    steps = rows.swapaxes(0, 1).reshape(packed.parts * packed.rows, -1, STEP)
    if of_input:
        found = steps.reshape(*steps.shape[:2], 2, 4, 4).swapaxes(2, 3)
    else:
        found = steps.reshape(*steps.shape[:2], 2, 4, 2, 2).swapaxes(3, 4)
    return found.reshape(len(steps), -1)


def draw_quantized(rng, network):
    """A quantized network's arrays by name; levels spread over int8, with some at its ends."""
    sizes = quantized_sizes(network)
    weight = np.zeros(sizes[Q], np.int8)
    bias, scale = np.zeros(sizes[C], np.int32), np.ones(sizes[C], np.float32)
    relu = network.activation == "relu"
    hidden_scale = rng.uniform(0.006, 0.012, sizes[J]).astype(np.float32)
    hidden_zero = np.full(sizes[J], -128 if relu else 0, np.int32)
    if rng.random() < 0.4:
        hidden_zero[:] = rng.integers(-128, 128, sizes[J])
    input_zero = rng.integers(-140, 40, network.inputs).astype(np.int32)
    hidden = 0
    for layer, of_weight, of_bias, of_scale in quantized_views(network, weight, bias, scale):
        of_weight[:] = rng.integers(-127, 128, of_weight.shape)
        of_weight[rng.random(len(of_weight)) < 0.05] = 0
        zero = input_zero if layer.source < 0 else np.full(layer.fan_in, hidden_zero[hidden - 1])
        shift = of_weight.astype(np.int64) @ np.clip(zero, -128, 127)
        of_bias[:] = rng.normal(0, 4000, len(of_bias)) - shift
        of_scale[:] = rng.uniform(0.5, 1.5, len(of_scale)) / (4000 * np.sqrt(layer.fan_in))
        hidden += not layer.head
    return {
        "weight": weight,
        "bias": bias,
        "scale": scale,
        "input_scale": rng.uniform(0.01, 0.04, network.inputs).astype(np.float32),
        "input_zero": input_zero,
        "hidden_scale": hidden_scale,
        "hidden_zero": hidden_zero,
    }


@pack_int8.draws
def _draw(rng, sizes, params):
    return draw_quantized(rng, params["network"])


@pack_int8.checks
def _check(weight, bias, scale, input_scale, input_zero, hidden_scale, hidden_zero, network):
    for name, array in (
        ("scale", scale),
        ("input_scale", input_scale),
        ("hidden_scale", hidden_scale),
    ):
        _refuse(name, array, (array >= TINY) & np.isfinite(array), "normal numbers above 0")
    _refuse("weight", weight, weight != -128, "in [-127, 127]")
    if network.activation == "relu":
        steps, factor = iter(hidden_scale), scale.copy()
        with np.errstate(over="ignore"):
            for layer, _, _, channels in quantized_views(network, weight, bias, factor):
                if not layer.head:
                    channels[:] = level_factors(channels, next(steps))
        _refuse("scale", scale, np.isfinite(factor), "less than 2^128 of its layer's steps")
    within = (hidden_zero >= -128) & (hidden_zero <= 127)
    _refuse("hidden_zero", hidden_zero, within, "in [-128, 127]")
    _refuse("input_zero", input_zero, np.abs(input_zero) <= FARTHEST, "within 2^20 of 0")


def _refuse(name, array, right, wanted):
    if not right.all():
        at = int(np.argmin(right))
        raise ValueError(f"{name} must be {wanted}, got {array[at]} at {at}: calibrate again")


@pack_int8.on_cpu
def _cpu(*arguments):
    # The spec is a handful of copies: there is nothing to make faster.
    *given, network, image = arguments
    image[:] = pack_int8.spec(*given, network=network)


@pack_int8.on_cuda
def _launch(*arguments):
    *arrays, network, image, stream = arguments
    kernel = cuda_c("int8/pack_int8", "pack_int8_kernel", **packed_macros(network), threads=THREADS)
    launch.launch(kernel, 1, THREADS, (*arrays, image), stream)
