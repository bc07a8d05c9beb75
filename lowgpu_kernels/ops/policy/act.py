"""A policy's actions for a batch of observations, from layers to draws in one kernel."""

import functools

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.device.philox import ACTION, numpy_draw
from lowgpu_kernels.dims import F32, FLAG, I32, REAL, SEED, U8, U64, B, I, Int, Outputs, P, Static
from lowgpu_kernels.op import op
from lowgpu_kernels.ops.mlp.examples import draw_parameters, example_networks
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.network import WIDEST, Network
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, SUM, forward_deviations
from lowgpu_kernels.ops.policy.act_tile import act_few, act_grid, act_tile
from lowgpu_kernels.ops.policy.categorical import categorical
from lowgpu_kernels.ops.policy.pack_network import V, image_nbytes, pack_network

CPU_ROWS = 4096  # whose activations a CPU holds at once. Untuned.


def policies():
    """The example networks as policies with a value, and one of action values alone."""
    found = [(n, sum(widths[-1] for widths in n.towers)) for n in example_networks()]
    return [
        *({"network": n, "actions": max(heads - 1, 1)} for n, heads in found),
        {"network": Network(56, ((256, 128, 64, 3),)), "actions": 3},
    ]


def _sizes(params, known):
    network, actions = params["network"], int(params["actions"])
    heads = sum(widths[-1] for widths in network.towers)
    if heads not in (actions, actions + 1):
        raise ValueError(
            f"actions must be the columns of the network's heads, {heads}, or one fewer where the "
            f"last is a value, got {actions}"
        )
    return {I: network.inputs, P: network.parameters, V: image_nbytes(network)}


@op(
    # As for mlp_forward; what is allowed of a logit is worked out element by element.
    error=lambda network, **_: DEVIATIONS * np.sqrt(len(network.layers) / 2),
    sizes=_sizes,
    bench=("B=1", "B=256", "B=1048576"),
    flops=lambda B, P, **_: 2 * B * P,
    examples=policies,
)
def act(
    observation: REAL[B, I],
    parameters: F32[P],
    image: U8[V] | None,
    clock: U64[1],
    *,
    network: Static(Network, example_networks),
    actions: Int(1, WIDEST),
    seed: SEED,
    greedy: FLAG = False,
) -> Outputs(action=I32[B], log_probability=F32[B], value=F32[B]):
    """A policy's action for every observation; no activation is stored.

        y = network(observation), logits = y[:, :actions]
        action, log_probability as `categorical(logits, clock, seed, greedy)` gives them
        value = y[:, actions], or y[b, action[b]] where the network has no such column

    So a network of action values, which has `actions` columns, gives its best action and that one's
    value when greedy; not greedy, its action is drawn from the softmax of the values.

    Precision as for `mlp_forward`: that of the observations. In bfloat16 on a GPU of compute
    capability 9.0 the weights are read from `image`, where it is given and the network fits one
    block; everywhere else from `parameters`. On a GPU a row's results depend on its number, through the
    draw, and on no other row.

    Args:
        observation: input rows, any unit of order 1.
        parameters: weights and biases, flat, laid out as `network.views` says.
        image: what `pack_network` made of the same parameters.
        clock: global step the draws belong to; read and not advanced.
        network: widths and activation.
        actions: columns that are logits.
        seed: in [0, 2^64).
        greedy: take the likeliest action instead of drawing; the first among equals.

    Returns:
        action: in [0, actions); -1 where the logits have no softmax, because one is NaN or +inf or
            all are -inf.
        log_probability: log of the action's probability, nats, also when greedy; NaN without one.
        value: NaN where it would be that of an action and there is none.

    Raises:
        TypeError: an array of another element type, or arrays in two places.
        ValueError: arrays whose sizes are not the network's, or actions that are not; on a GPU,
            layers too wide for its shared memory.

    Source: as for `mlp_forward` and `categorical`.
    """
    y, _ = mlp_forward.spec(observation, parameters, network=network)
    logits = y[:, :actions]
    action, log_probability, _ = categorical.spec(logits, clock, seed=seed, greedy=greedy)
    if sum(widths[-1] for widths in network.towers) > actions:
        return action, log_probability, y[:, actions]
    return action, log_probability, y[np.arange(len(y)), action]


@act.draws
def _draw(rng, sizes, params):
    parameters = draw_parameters(rng, params["network"])
    image = pack_network.spec(parameters, network=params["network"])
    return {"parameters": parameters, "image": image if rng.random() < 0.7 else None}


@act.verifies
def _verify(got, inputs, params, eps):
    """Hold every output to what rounding explains, and an action to the draw or to the maximum."""
    network, actions = params["network"], int(params["actions"])
    observation, parameters = inputs["observation"], inputs["parameters"]
    wide = observation.astype(np.float64), parameters.astype(np.float64)
    y, _ = mlp_forward.spec(*wide, network=network)
    deviation, _ = forward_deviations(observation, parameters, network)
    action, rows = got["action"], np.arange(len(y))
    assert ((action >= 0) & (action < actions)).all(), f"act.action {action}"
    # No log-probability moves further than two logits do; exp and log round in float32.
    moves = DEVIATIONS * 2 * deviation[:, :actions].max(1, initial=0)
    logits = y[:, :actions]
    p = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
    p /= p.sum(1, keepdims=True)
    want = np.log(p[rows, action])
    off = np.abs(got["log_probability"] - want)
    assert (off <= moves + DEVIATIONS * (4 + actions) * SUM * (1 + abs(want))).all(), off.max()
    column = actions if sum(widths[-1] for widths in network.towers) > actions else action
    off = np.abs(got["value"] - y[rows, column])
    assert (off <= DEVIATIONS * deviation[rows, column]).all(), f"act.value is off by {off.max()}"
    if params["greedy"]:
        assert (logits[rows, action] >= logits.max(1, initial=-np.inf) - moves).all(), "act.action"
        return
    words = numpy_draw(int(params["seed"]), ACTION, rows, int(inputs["clock"][0]))[0]
    u, high = (words >> np.uint64(8)) * 2.0**-24, np.cumsum(p, 1)[rows, action]
    allowed = moves + DEVIATIONS * (4 + actions) * SUM
    assert (u <= high + allowed).all() and (u >= high - p[rows, action] - allowed).all(), (
        "act.action"
    )


@act.on_cpu
def _cpu(
    observation,
    parameters,
    image,
    clock,
    network,
    actions,
    seed,
    greedy,
    action,
    log_probability,
    value,
):
    rows = len(observation)
    y = np.empty((rows, network.outputs), np.float32)
    hidden = np.empty((min(rows, CPU_ROWS), network.hidden), observation.dtype)
    for first in range(0, rows, CPU_ROWS):
        some = observation[first : first + CPU_ROWS]
        into = y[first : first + CPU_ROWS]
        mlp_forward.cpu(some, parameters, network, into, hidden[: len(some)])
    logits, entropy = y[:, :actions], np.empty(rows, np.float32)
    categorical.cpu(logits, clock, seed, greedy, action, log_probability, entropy)
    if sum(widths[-1] for widths in network.towers) > actions:
        value[:] = y[:, actions]
    else:
        value[:] = np.where(action < 0, np.nan, y[np.arange(rows), action])


@act.on_cuda
def _launch(
    observation,
    parameters,
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
    batch, precision = len(observation), observation.dtype.name
    plan = (network, int(actions), bool(greedy), batch, precision, image is not None)
    kernel, reads_image, *shape, shared = launch_of(*plan, launch.device())
    weights = image if reads_image else parameters
    outputs = action, log_probability, value
    arguments = observation, weights, clock, seed, np.int32(batch), *outputs
    early = image if reads_image else None
    launch.launch(kernel, *shape, arguments, stream, shared, early=early)


@functools.cache
def launch_of(network, actions, greedy, batch, precision, packed, on):
    """(kernel, whether it reads the image, blocks, threads, shared memory) of a call."""
    given = {"actions": actions, "greedy": greedy}
    if packed and precision == "bfloat16":
        few = act_few(network, batch, on)
        source = ("policy/act_few", "act_few_kernel") if few else ("policy/act", "act_kernel")
        grid = few or act_grid(network, batch, on)
        if grid is not None:
            kernel = cuda_c(*source, **grid.macros(network), **given)
            return kernel, True, grid.grid, grid.threads, grid.nbytes
    tile = act_tile(network, batch, precision, on)
    kernel = cuda_c(
        "policy/act_tile", "act_tile_kernel", **tile.macros(network, precision), **given
    )
    return kernel, False, tile.grid, tile.threads, tile.nbytes
