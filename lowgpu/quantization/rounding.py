"""One layer's weights and biases as integers, and what makes them worth rounding."""

import numpy as np

from lowgpu.quantization.ranges import HIGHEST, LOWEST, TINY

LARGEST_WEIGHT = 127
# With at most 512 terms a sum stays below 2^24, and what zero points add too.
LARGEST_BIAS = 2**30
NEVER_ON = -(2**25)  # a bias that no sum of weights and levels makes up for
# 1 gives every unit all levels and leaves weights unequal, 0.5 shares between them (Nagel et al.). Best
# or near it for three policies trained on the built-in bars and on CartPole.
EVENNESS = 0.75
LEAST_VARIANCE = 1e-6  # in levels: above what is left of a constant column by rounding
DAMPING = 0.01  # of the mean variance, for directions in which calibration saw nothing vary
SMALLEST_UNIT = 1e-3  # of a unit's range beside its layer's: smaller ones are not drawn out further


def equalized(network, parameters, largest):
    """float32 parameters of the same function whose hidden units have more equal ranges.

    relu(z / r) is relu(z) / r: what a unit's weights are divided by, the weights that read it are
    multiplied by. A network of tanh is left as it is.

    Args:
        network: a Network.
        parameters: float32, flat.
        largest: of each unit, as hidden activations are stored: [network.hidden].

    Returns:
        (parameters, r): r is a unit's range over its layer's, to the power of EVENNESS; 1 for tanh.

    Source: Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias
    Correction, section 4.1.
    """
    made, divisor = parameters.copy(), np.ones(network.hidden, np.float32)
    if network.activation != "relu":
        return made, divisor
    for layer, weight, bias in network.views(made):
        if layer.source >= 0:
            weight *= divisor[layer.source : layer.source + layer.fan_in]
        if not layer.head:
            units = slice(layer.column, layer.column + layer.fan_out)
            most = max(largest[units].max(), TINY)
            part = np.where(largest[units] > 0, largest[units] / most, 1)
            divisor[units] = np.maximum(part, SMALLEST_UNIT) ** EVENNESS
            weight /= divisor[units, None]
            bias /= divisor[units]
    return made, divisor


def rounded_layer(weight, bias, step=1.0, zero=0, name="layer", met=None):
    """One layer in integers.

        weight[n, k] = rint(w[n, k] * step[k] / scale[n]),  scale[n] = max over k |w step| / 127
        bias[n]      = rint(b[n] / scale[n]) - sum over k of clamp(zero[k]) * weight[n, k]

    Where it is known what the layer reads, weights are rounded so that their sums vary as the exact
    ones', and biases so that they have the same mean.

    Args:
        weight, bias: [fan_out, fan_in] and [fan_out], finite.
        step, zero: what a level of what it reads is worth and its zero point, one or one a column.
        name: of the layer, for errors.
        met: (mean, covariance, sums): of the levels it reads, above 0's, and the mean of what the
            exact weights make of the exact values.

    Returns:
        (weight int8 in [-127, 127], bias int32, scale float32 above 0). A channel without weights
        has its bias for a scale, or 1. One whose bias would be past 2^30 units has a larger scale.

    Raises:
        ValueError: a channel whose scale is past float32.

    Source: Frantar et al. 2022 (arXiv:2210.17323), for the rounding; Nagel et al. 2019 for the means.
    """
    folded = weight.astype(np.float64) * np.asarray(step, np.float64)
    size = np.abs(bias.astype(np.float64))
    largest = np.abs(folded).max(axis=1)
    unit = np.maximum(largest / LARGEST_WEIGHT, size / LARGEST_BIAS)
    unit = np.where(largest == 0, np.where(size == 0, 1.0, size), unit)
    with np.errstate(over="ignore"):
        scale = np.maximum(unit, TINY).astype(np.float32)
    if not np.isfinite(scale).all():
        n = int(np.argmax(~np.isfinite(scale)))
        raise ValueError(
            f"parameters must have scales that float32 holds, got {unit[n]:g} for channel {n} of "
            f"{name}: its weights times the range of what it reads are too large"
        )
    wide = scale.astype(np.float64)
    exact, middle = folded / wide[:, None], bias.astype(np.float64) / wide
    if met is None:
        whole = _nearest(exact)
    else:
        mean, covariance, sums = met
        whole = _compensated(exact, covariance)
        middle += sums / wide - whole @ mean
    at_zero = np.clip(np.asarray(zero, np.int64), LOWEST, HIGHEST)
    shift = (whole.astype(np.int64) * at_zero).sum(axis=1)
    shifted = np.rint(middle).astype(np.int64) - shift
    assert np.abs(shifted).max(initial=0) < 2**31
    return whole.astype(np.int8), shifted.astype(np.int32), scale


def _nearest(exact):
    return np.clip(np.rint(exact), -LARGEST_WEIGHT, LARGEST_WEIGHT)


def _compensated(exact, covariance):
    """Whole weights whose sums vary as the exact ones': later columns make up for what each lost."""
    count = len(covariance)
    damped = covariance + np.eye(count) * (DAMPING * np.trace(covariance) / count + LEAST_VARIANCE)
    shares = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, whole = exact.copy(), np.empty_like(exact)
    for k in range(count):
        whole[:, k] = _nearest(left[:, k])
        error = (left[:, k] - whole[:, k]) / shares[k, k]
        left[:, k:] -= error[:, None] * shares[k, k:]
    return whole
