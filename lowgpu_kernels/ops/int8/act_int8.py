"""A quantized policy: all layers in int8 and the actions, or the outputs alone, in one kernel."""

import functools

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device import njit
from lowgpu_kernels.device.maths import tanh_f32
from lowgpu_kernels.dims import (
    F32,
    FLAG,
    I32,
    REAL,
    SEED,
    U8,
    U64,
    B,
    I,
    Int,
    O,
    Outputs,
    Static,
    V,
)
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.int8.act_int8_tile import int8_grid
from lowgpu_kernels.ops.int8.gemm import exact_sums
from lowgpu_kernels.ops.int8.pack_int8 import (
    POSITIVE,
    ROUNDER,
    ROW,
    STEP,
    draw_quantized,
    example_networks,
    image_nbytes,
    pack_int8,
    packed_layer,
    unpacked,
)
from lowgpu_kernels.ops.int8.quantized_network import J, quantized_sizes
from lowgpu_kernels.ops.mlp.network import WIDEST, Network, round_up
from lowgpu_kernels.ops.policy.categorical import categorical

CONVERTS = (8, 6)  # the compute capability whose F2IP converts and packs two numbers at once
CPU_ROWS = 4096  # whose levels a CPU holds at once. Untuned.


def policies():
    """The example networks as policies with a value, and the last of action values alone."""
    found = [(n, _heads(n)) for n in example_networks()]
    with_value = [{"network": n, "actions": heads - 1} for n, heads in found[:-1]]
    network, heads = found[-1]
    return [*with_value, {"network": network, "actions": heads}]


def _of_network(params, known):
    network = params["network"]
    return {I: network.inputs, O: network.outputs, V: image_nbytes(network)}


def _of_policy(params, known):
    heads, actions = _heads(params["network"]), int(params["actions"])
    if heads not in (actions, actions + 1):
        raise ValueError(
            f"actions must be the columns of the network's heads, {heads}, or one fewer where the "
            f"last is a value, got {actions}"
        )
    return _of_network(params, known)


def _heads(network):
    return sum(widths[-1] for widths in network.towers)


BENCH = ("B=1", "B=256", "B=8192", "B=1048576")


@op(error=lambda **_: 0, sizes=_of_network, bench=BENCH, flops=lambda B, V, **_: 2 * B * V)
def mlp_int8(
    observation: REAL[B, I], image: U8[V], *, network: Static(Network, example_networks)
) -> F32[B, O]:
    """The outputs of a quantized network for each input row.

        level(x) = clamp(rint(x * float32(1 / scale)) + zero, -128, 127)
        s        = float32(weight . level + bias)    the sum exact
        head       s * scale                         a scale a channel
        relu       clamp(rint(max(s * factor, 0)) + zero, -128, 127)
                   factor = float32(scale * float32(1 / scale of the layer's levels))
        tanh       level(tanh(s * scale))

    All in float32, each operation rounded once and ties of rint to even; tanh is
    `device.maths.tanh_f32`. So every device gives the same bits, and a row's do not depend on the
    other rows.

    Args:
        observation: input rows, in the unit they were calibrated in.
        image: what `pack_int8` made of the quantized network.
        network: widths and activation.

    Returns:
        The heads side by side; columns past them are zero. NaN in a row that has one.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: arrays whose sizes are not the network's; on a GPU, a network whose image does not
            fit its shared memory.

    Source: Jacob et al. 2018, Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, section 2; levels as ONNX QuantizeLinear rounds.
    """
    return _outputs(observation, image, network).astype(np.float64)


@op(
    error=lambda **_: 0,
    sizes=_of_policy,
    bench=BENCH,
    flops=lambda B, V, **_: 2 * B * V,
    examples=policies,
)
def act_int8(
    observation: REAL[B, I],
    image: U8[V],
    clock: U64[1],
    *,
    network: Static(Network, example_networks),
    actions: Int(1, WIDEST),
    seed: SEED,
    greedy: FLAG = False,
) -> Outputs(action=I32[B], log_probability=F32[B], value=F32[B]):
    """A quantized policy's action for every observation; no activation is stored.

        y = mlp_int8(observation, image), logits = y[:, :actions]
        action, log_probability as `categorical(logits, clock, seed, greedy)` gives them
        value = y[:, actions], or y[b, action[b]] where the network has no such column

    As `act` does for float32 parameters, with the same draws. Every device gives the same bits; a
    row's depend on its number, through the draw, and on no other row.

    Args:
        observation: input rows, in the unit they were calibrated in.
        image: what `pack_int8` made of the quantized network.
        clock: global step the draws belong to; read and not advanced.
        network: widths and activation.
        actions: columns that are logits.
        seed: in [0, 2^64).
        greedy: take the likeliest action instead of drawing; the first among equals.

    Returns:
        action: in [0, actions); -1 for a row with a NaN.
        log_probability: log of the action's probability, nats, also when greedy; NaN without one.
        value: NaN where the row has one.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: arrays whose sizes are not the network's, or actions that are not; on a GPU, a
            network whose image does not fit its shared memory.

    Source: as for `mlp_int8` and `categorical`.
    """
    y = _outputs(observation, image, network)
    return _chosen(y[:, : _heads(network)], clock, actions, seed, greedy)


def _chosen(y, clock, actions, seed, greedy):
    """What `categorical` chooses by its own CPU executor, which has the same bits as the kernels."""
    rows = len(y)
    action, log_probability = np.empty(rows, np.int32), np.empty(rows, np.float32)
    logits = np.ascontiguousarray(y[:, :actions])
    seed, entropy = np.uint64(seed), np.empty(rows, np.float32)
    categorical.cpu(logits, clock, seed, greedy, action, log_probability, entropy)
    has_value = y.shape[1] > actions
    value = y[:, actions] if has_value else y[np.arange(rows), action]
    return action, log_probability, np.where(action < 0, np.float32(np.nan), value)


def _outputs(observation, image, network):
    """The specs' y: float32, whatever the observation is widened to."""
    x, words = observation.astype(np.float32), image.tobytes()
    at = sum(packed_layer(layer).nbytes for layer in network.layers)
    pairs = sum(packed_layer(layer).columns for layer in network.layers) // 2
    sums = np.frombuffer(words, [("bias", "<i4", 2), ("factor", "<f4", 2)], pairs, at)
    bias, factor = sums["bias"].reshape(-1), sums["factor"].reshape(-1)
    at, inputs = at + 16 * pairs, round_up(network.inputs, STEP)
    levels = np.frombuffer(words, "<f4", 2 * (inputs + quantized_sizes(network)[J]), at)
    inverse, zero = levels[::2], levels[1::2].astype(np.float64) + ROUNDER
    own, hidden, offset, channel = slice(network.inputs), inputs, 0, 0
    first = level = _bytes(x, inverse[own], zero[own])
    y = np.zeros((len(x), network.outputs), np.float32)
    for layer in network.layers:
        packed = packed_layer(layer)
        weight = _weight(image, offset, packed, layer)
        level = first if layer.source < 0 else level
        these = slice(channel, channel + layer.fan_out)
        total = level @ weight.T + bias[these].astype(np.int64) - (0 if layer.head else POSITIVE)
        z = total.astype(np.float32) * factor[these]
        if layer.head:
            y[:, layer.column : layer.column + layer.fan_out] = z
        else:
            active = tanh(z) if network.activation == "tanh" else np.maximum(z, 0)
            level = _bytes(active, inverse[hidden], zero[hidden])
            hidden += 1
        offset, channel = offset + packed.nbytes, channel + packed.columns
    y[np.isnan(x).any(1), : _heads(network)] = np.nan
    return y


def _bytes(x, inverse, zero):
    """Levels, 128 more than they are in int8; 0 for a NaN."""
    with np.errstate(over="ignore"):
        level = np.rint(x * inverse) + zero
    return np.clip(np.nan_to_num(level, nan=0), 0, 255).astype(np.int64)


def _weight(image, offset, packed, layer):
    """A layer's weights, [fan_out, fan_in], by the address of each."""
    n, k = np.arange(layer.fan_out)[:, None], np.arange(layer.fan_in)
    if layer.source < 0:
        half, lane, of_four = k % 8 // 4, k % 32 // 8, k % 4
    else:
        half, lane, of_four = k % 32 // 16, k % 8 // 2, k % 16 // 8 * 2 + k % 2
    part, row = n // packed.rows, n % packed.rows
    term = part * packed.terms + k // STEP * STEP + half * 16 + lane * 4 + of_four
    piece = (term % ROW // 16) ^ row % 8
    at = term // ROW * packed.rows * ROW + row * ROW + piece * 16 + term % 16
    return image[offset + at].view(np.int8).astype(np.int64)


def _draw_image(rng, network):
    arrays = draw_quantized(rng, network)
    return pack_int8.spec(**arrays, network=network)


@mlp_int8.draws
def _draw_mlp(rng, sizes, params):
    """Observations with ties, values past the levels' ends, and rows that are not numbers."""
    x = rng.normal(size=(sizes[B], sizes[I])) * 3
    x[rng.random(x.shape) < 0.02] = np.inf
    x[rng.random(sizes[B]) < 0.05, rng.integers(sizes[I])] = np.nan
    return {"observation": x, "image": _draw_image(rng, params["network"])}


act_int8.draws(_draw_mlp)


@njit
def _tanh_loop(x, out):
    for i in range(x.size):
        out[i] = tanh_f32(x[i])


def tanh(x):
    """`device.maths.tanh_f32` of every element."""
    out = np.empty_like(x)
    _tanh_loop(x.reshape(-1), out.reshape(-1))
    return out


def _run(observation, image, network, y):
    """The outputs by products of float32, whose sums of at most 512 terms are exact."""
    layers, inputs, hidden = unpacked(image, network)
    y[:] = 0
    for first in range(0, len(observation), CPU_ROWS):
        x = observation[first : first + CPU_ROWS].astype(np.float32)
        into = y[first : first + CPU_ROWS]
        of_input = level = _levels(x, *inputs)
        levels_of = iter(hidden)
        for layer, (weight, bias, factor) in zip(network.layers, layers):
            level = of_input if layer.source < 0 else level
            z = (exact_sums(level, weight) + bias).astype(np.float32)
            z *= factor
            if layer.head:
                into[:, layer.column : layer.column + layer.fan_out] = z
            else:
                active = tanh(z) if network.activation == "tanh" else z.clip(0)
                level = _levels(active, *next(levels_of))
        into[np.isnan(x).any(axis=1), : _heads(network)] = np.nan


def _levels(x, inverse, zero):
    with np.errstate(over="ignore", invalid="ignore"):
        level = x * inverse
    np.rint(level, out=level)
    level += zero
    # fmax takes the number where the other is none.
    return np.fmin(np.fmax(level, 0), 255).astype(np.uint8)


@mlp_int8.on_cpu
def _cpu_mlp(observation, image, network, y):
    _run(observation, image, network, y)


@act_int8.on_cpu
def _cpu(observation, image, clock, network, actions, seed, greedy, action, log_probability, value):
    rows = len(observation)
    y = np.empty((rows, network.outputs), np.float32)
    _run(observation, image, network, y)
    logits, entropy = np.ascontiguousarray(y[:, :actions]), np.empty(rows, np.float32)
    categorical.cpu(logits, clock, seed, greedy, action, log_probability, entropy)
    if _heads(network) > actions:
        value[:] = y[:, actions]
    else:
        value[:] = np.where(action < 0, np.nan, y[np.arange(rows), action])


@mlp_int8.on_cuda
def _launch_mlp(observation, image, network, y, stream):
    no_action = None, None, None
    given = (network, 0, False, len(observation), observation.dtype.name)
    _queue(given, observation, image, None, np.uint64(0), (*no_action, y), stream)


@act_int8.on_cuda
def _launch(
    observation,
    image,
    clock,
    network,
    actions,
    seed,
    greedy,
    action,
    log_probability,
    value,
    stream,
):
    given = (network, int(actions), bool(greedy), len(observation), observation.dtype.name)
    outputs = action, log_probability, value, None
    _queue(given, observation, image, clock, seed, outputs, stream)


def _queue(given, observation, image, clock, seed, outputs, stream):
    kernel, warpgroups, *shape, shared = launch_of(*given, launch.device())
    arguments = observation, image, clock, seed, np.int32(len(observation)), *outputs
    early = image if warpgroups else None
    launch.launch(kernel, *shape, arguments, stream, shared, early=early)


@functools.cache
def launch_of(network, actions, greedy, batch, precision, on):
    """(kernel, whether warpgroups multiply, blocks, threads, shared memory) of a call.

    0 actions for all outputs.
    """
    itemsize = 4 if precision == "float32" else 2
    grid = int8_grid(network, batch, actions > 0, itemsize, on)
    given = {"actions": actions, "greedy": greedy, "float32": precision == "float32"}
    given["converts"] = on.capability >= CONVERTS
    kernel = cuda_c(grid.path, grid.entry, **grid.macros(network), **given)
    return kernel, grid.warpgroups, grid.grid, grid.threads, grid.nbytes
