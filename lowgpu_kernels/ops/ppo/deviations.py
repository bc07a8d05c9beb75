"""How far rounding may take a PPO update from its spec: a running error analysis.

As in ops/mlp/rounding.py every rounding is an independent error of zero mean, whose variance is
carried along. The spec rounds factors to bfloat16 where the executors do, so what is left is the
error of float32 sums, what becomes of it when it crosses an edge between two bfloat16 numbers or
the kink of relu, and, on a GPU in bfloat16, the rounding of each tile's share of the gradient, alone
and once more with those of the block's tiles before it.
"""

import numpy as np

from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, SUM
from lowgpu_kernels.ops.mlp.tile import ROWS

SPACING = {"float32": 0.0, "bfloat16": 2.0**-7}  # of stored numbers, relative to their size
PARTIAL = {"float32": 0.0, "bfloat16": 2.0**-9}  # of the rounding of a share or of shares so far
TANH = {"float32": 4 * SUM, "bfloat16": 2.0**-11}  # relative error of tanh before it is stored
OBSERVED = 8  # roundings of the env's arithmetic in an observation
SCALARS = 16  # roundings in a row's loss: exponentials, logarithms, quotients


def update_deviations(x, parameters, network, precision, grad_y, through_loss):
    """Standard deviations of the parameters' gradient [P] and of the statistics [8].

    Args:
        x: float64 observations, rounded to the precision.
        parameters: float64.
        network: widths and activation.
        precision: "float32" or "bfloat16".
        grad_y: the gradient at y, [B, O].
        through_loss: deviations of y [B, O] -> those of grad_y [B, O] and of the statistics.
    """
    spacing, tanh = SPACING[precision], network.activation == "tanh"

    def rounded(array):
        return array.astype(precision).astype(np.float64) if spacing else array

    def stored(value, deviation):
        """Variance once stored: an error that crosses an edge becomes a whole step."""
        return deviation**2 + deviation * spacing * np.abs(value)

    def product(left, right):
        """Variance of a sum of products formed in float32."""
        return left.shape[1] * (SUM * (np.abs(left) @ np.abs(right))) ** 2

    of_y = np.zeros_like(grad_y)
    passes = []
    for layer, weight, bias in network.views(parameters):
        weight = rounded(weight)
        if layer.source < 0:
            source, variance = x, stored(x, OBSERVED * SUM * np.abs(x))
        total = source @ weight.T + bias
        of_total = variance @ (weight**2).T + product(source, weight.T) + (SUM * bias) ** 2
        near = np.abs(total) <= DEVIATIONS * np.sqrt(of_total)
        passes.append((layer, weight, source, variance, near))
        if layer.head:
            of_y[:, layer.column : layer.column + layer.fan_out] = np.sqrt(of_total)
            continue
        source = rounded(np.tanh(total) if tanh else np.maximum(total, 0))
        error = np.sqrt(of_total) + (TANH[precision] * np.abs(source) if tanh else 0)
        variance = stored(source, error)

    of_grad_y, of_statistics = through_loss(of_y)
    deviation = np.zeros(network.parameters)
    ones = np.ones((len(x), 1))
    into = list(network.views(deviation))
    kinks = [None, *(near for *_, near in passes[:-1])]  # of the layer before
    for (layer, weight, source, of_source, _), near, (_, of_weight, of_bias) in zip(
        passes[::-1], kinks[::-1], into[::-1]
    ):
        if layer.head:
            at = slice(layer.column, layer.column + layer.fan_out)
            g = rounded(grad_y[:, at])
            variance = stored(g, of_grad_y[:, at])
        for target, factor, of_factor in (
            (of_weight, source, of_source),
            (of_bias, ones, 0 * ones),
        ):
            total = variance.T @ factor**2 + (g**2).T @ of_factor + product(g.T, factor)
            total += PARTIAL[precision] ** 2 * _squared_shares(g, factor, precision)
            target[...] = np.sqrt(total).reshape(target.shape)
        if layer.source >= 0:
            through = g @ weight
            variance = variance @ weight**2 + product(g, weight)
            if tanh:
                slope = 1 - source**2
                variance = variance * slope**2 + (2 * source * through) ** 2 * of_source
                variance += (2 * SUM * through) ** 2
            else:
                slope = source > 0
                variance = variance * slope + near * through**2
            g = rounded(through * slope)
            variance = stored(g, np.sqrt(variance))
    return deviation, of_statistics


def _squared_shares(g, factor, precision):
    """Squares of tiles' shares of g^T factor and of a lone block's sums of them, for the tiles of most."""
    most = 0.0
    for rows in ROWS[precision]:
        total, squares = 0.0, 0.0
        for at in range(0, len(g), rows):
            share = g[at : at + rows].T @ factor[at : at + rows]
            total = total + share
            squares = squares + share**2 + (total**2 if at else 0)
        most = np.maximum(most, squares)
    return most


def loss_deviations(y, of_y, taken, actions, clip, value_clip, value_weight, entropy_weight):
    """Deviations of the loss's gradient at y [B, O] and of its statistics [8].

    Rows are away from the edges of the clips. Errors of different rows may point one way, as those
    of a weight do, so a mean is as wrong as its rows.

    Args:
        y, of_y: the output rows and their deviations, [B, O].
        taken: what else the loss reads, by name.
        actions, clip, value_clip, value_weight, entropy_weight: as for `ppo_loss`.
    """
    index, rows, rounding = taken["index"], np.arange(len(y)), SCALARS * SUM
    gain, old, target = (taken[n][index] for n in ("advantage", "value", "returns"))
    if taken["moments"] is not None:
        gain = (gain - taken["moments"][0]) / (taken["moments"][1] + 1e-8)
    logits, v = y[:, :actions], y[:, actions]
    log_p = logits - logits.max(1, initial=-np.inf, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
    least = np.abs(log_p).max(1, initial=0)
    ratio = np.exp(log_p[rows, taken["action"][index]] - taken["log_probability"][index])
    of_log = 2 * of_y[:, :actions].max(1, initial=0)
    of_log += rounding * (1 + np.abs(logits).max(1, initial=0) + least)
    of_v = of_y[:, actions] + rounding * (1 + np.abs(v) + np.abs(old))
    push, error = np.abs(gain) * ratio, np.abs(v - target) + np.abs(old - target)
    of_entropy = actions * (1 + least) * of_log
    of_kl = np.abs(ratio - 1) * of_log + rounding * (1 + ratio)
    of_loss = push * of_log + value_weight * error * of_v + entropy_weight * of_entropy
    exact = np.zeros(len(y))  # counts of rows
    terms = (push * of_log, error * of_v, of_entropy, of_kl, exact, ratio * of_log, exact, of_loss)
    of_grad_y = np.zeros_like(y)
    pushed = push * (of_log + rounding) + entropy_weight * (of_entropy + rounding)
    of_grad_y[:, :actions] = pushed[:, None]
    of_grad_y[:, actions] = value_weight * (of_v + rounding * error)
    count = max(len(y), 1)
    return of_grad_y / count, np.array([term.sum() / count for term in terms])
