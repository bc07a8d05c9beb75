"""The same policy as a network that rounding hurts less: parted heads, and units that never bend merged."""

import numpy as np

from lowgpu_kernels import mlp_forward
from lowgpu_kernels.ops.mlp.network import Network, round_up

ROWS = 4096  # observations whose activations are held at once. Untuned.


def parted(network, parameters, actions, values):
    """A network whose first heads are what the actions differ by: logits or action values less their mean.

    Int8 weights have a scale a channel, and what all actions have in common would fill it. Action
    values without a value of the state get one, their mean, as a dueling network has.

    Args:
        network: a Network.
        parameters: float32, flat.
        actions: columns of the first tower's head that are logits or action values.
        values: whether they are action values.

    Returns:
        (network, parameters): best actions, probabilities and, with the mean, action values are the same.
    """
    towers = network.towers
    alone = values and sum(widths[-1] for widths in towers) == actions
    if alone:
        towers = ((*towers[0][:-1], actions + 1), *towers[1:])
    made = Network(network.inputs, towers, network.activation)
    into = np.zeros(made.parameters, np.float32)
    pairs = zip(network.views(parameters), made.views(into))
    for (layer, weight, bias), (_, to_weight, to_bias) in pairs:
        to_weight[: layer.fan_out], to_bias[: layer.fan_out] = weight, bias
        if layer.head and layer.tower == 0:
            for array, to in ((weight, to_weight), (bias, to_bias)):
                each = array[:actions].astype(np.float64)
                to[:actions] = each - each.mean(axis=0)
                if alone:
                    to[actions] = each.mean(axis=0)
    return made, into


def condensed(network, parameters, observations):
    """A narrower network of relu that gives the same outputs on some observations, to rounding.

    Units that are 0 on every row go. Those that are above 0 on every row only add: where they are more
    than the layer reads or the next one has, as many new units do the same,

        W_next relu(W x + b) = (W_next W) x + W_next b

    and each is lowered by the least that it has on a row, so that its levels span what it varies by.
    So there is room for copies of the units that bend. Off these rows the new units go on in
    straight lines, and stop at the least.

    Args:
        network: a Network; one of tanh is given back as it is.
        parameters: float32, flat.
        observations: float32 [rows, network.inputs].

    Returns:
        (network, parameters).
    """
    if network.activation != "relu":
        return network, parameters
    least, most = _extremes(network, parameters, observations)
    towers = [[] for _ in network.towers]
    for layer, weight, bias in network.views(parameters):
        towers[layer.tower].append((layer, weight.astype(np.float64), bias.astype(np.float64)))
    made = [_condensed_tower(tower, least, most, observations) for tower in towers]
    widths = [
        (*(max(8, round_up(len(bias), 8)) for _, bias in tower[:-1]), len(tower[-1][1]))
        for tower in made
    ]
    narrow = Network(network.inputs, tuple(widths), "relu")
    into = np.zeros(narrow.parameters, np.float32)
    pairs = zip(narrow.views(into), (layer for tower in made for layer in tower))
    for (_, to_weight, to_bias), (weight, bias) in pairs:
        to_weight[: weight.shape[0], : weight.shape[1]] = weight
        to_bias[: len(bias)] = bias
    return narrow, into


def _extremes(network, parameters, observations):
    """Least and most of every hidden unit."""
    least, most = np.full(network.hidden, np.inf), np.full(network.hidden, -np.inf)
    for x in _batches(observations):
        hidden = mlp_forward(x, parameters, network=network).hidden
        np.minimum(least, hidden.min(axis=0), out=least)
        np.maximum(most, hidden.max(axis=0), out=most)
    return least, most


def _batches(observations):
    for first in range(0, len(observations), ROWS):
        yield np.ascontiguousarray(observations[first : first + ROWS])


def _condensed_tower(tower, least, most, observations):
    """[weight, bias] of a tower's layers, float64, made of its (layer, weight, bias)."""
    made, straight = [[weight, bias] for _, weight, bias in tower], []
    for k in reversed(range(len(tower) - 1)):
        layer, (weight, bias), after = tower[k][0], made[k], made[k + 1]
        units = slice(layer.column, layer.column + layer.fan_out)
        on, bends = least[units] > 0, (least[units] <= 0) & (most[units] > 0)
        kept, count, weight_on, bias_on = after[0][:, bends], on.sum(), weight[on], bias[on]
        reads = np.flatnonzero(weight.any(axis=0)) if k == 0 else np.arange(weight.shape[1])
        if count <= min(len(after[0]), len(reads)):
            lines, at, share = weight_on, bias_on, after[0][:, on]
        elif len(after[0]) <= len(reads):
            lines, at = after[0][:, on] @ weight_on, after[0][:, on] @ bias_on
            share = np.eye(len(after[0]))
        else:
            lines, at = np.eye(weight.shape[1])[reads], np.zeros(len(reads))
            after[1] = after[1] + after[0][:, on] @ bias_on
            share = (after[0][:, on] @ weight_on)[:, reads]
        made[k] = [np.concatenate([weight[bends], lines]), np.concatenate([bias[bends], at])]
        after[0] = np.concatenate([kept, share], axis=1)
        straight.insert(0, len(lines))
    for k, count in enumerate(straight):
        lines = slice(len(made[k][1]) - count, None)
        low = np.min(
            [_sums(made[: k + 1], x)[:, lines].min(axis=0) for x in _batches(observations)], 0
        )
        made[k][1][lines] -= low
        made[k + 1][1] = made[k + 1][1] + made[k + 1][0][:, lines] @ low
    return made


def _sums(layers, x):
    """The last layer's sums, before its activation."""
    x = x.astype(np.float64)
    for weight, bias in layers[:-1]:
        x = np.maximum(x @ weight.T + bias, 0)
    return x @ layers[-1][0].T + layers[-1][1]
