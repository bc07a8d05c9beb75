"""How far rounding may take the MLP ops from their specs: a running error analysis.

Every rounding is an independent error of zero mean; its variance is carried through the layers as
the value itself is. What comes out is a standard deviation for each element, from the precision,
the widths and the numbers at hand; `DEVIATIONS` of them are allowed.

Source: Higham & Mary 2019, A New Approach to Probabilistic Rounding Error Analysis.
"""

import numpy as np

DEVIATIONS = 6  # exceeded once in 5e8 normal draws
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # largest relative error of one rounding
SUM = 2.0**-24  # sums are formed in float32 in either precision


def forward_deviations(x, parameters, network):
    """Standard deviations of (y, hidden) as float64 arrays of their shapes."""
    unit = UNIT[x.dtype.name]
    # tanh is taken within 2^-11 by the hardware in bfloat16, within 2 units in the last place else.
    shaping = unit if network.activation == "relu" else unit + max(2.0**-11 * (unit > SUM), 4 * SUM)
    inputs = x.astype(np.float64)
    y = np.zeros((len(x), network.outputs))
    hidden, value = np.zeros((2, len(x), network.hidden))
    for layer, weight, bias in network.views(parameters.astype(np.float64)):
        if layer.source < 0:
            source, variance = inputs, np.zeros_like(inputs)
        else:
            at = slice(layer.source, layer.source + layer.fan_in)
            source, variance = value[:, at], hidden[:, at] ** 2
        variance = variance @ (weight**2).T + _product(source, weight.T, unit)
        variance += (SUM * bias) ** 2
        at = slice(layer.column, layer.column + layer.fan_out)
        if layer.head:
            y[:, at] = np.sqrt(variance)
        else:
            total = source @ weight.T + bias
            value[:, at] = np.tanh(total) if network.activation == "tanh" else np.maximum(total, 0)
            hidden[:, at] = np.sqrt(variance + (shaping * value[:, at]) ** 2)
    return y, hidden


def backward_deviations(x, hidden, grad_y, parameters, network):
    """Standard deviation of the gradient, a float64 vector of its length."""
    unit = UNIT[x.dtype.name]
    rounding = unit if x.dtype.name == "bfloat16" else 0.0  # of what is stored as it came
    inputs, hidden = x.astype(np.float64), hidden.astype(np.float64)
    deviation = np.zeros(network.parameters)
    layers = list(network.views(parameters.astype(np.float64)))
    into = list(network.views(deviation))
    for (layer, weight, _), (_, of_weight, of_bias) in zip(layers[::-1], into[::-1]):
        if layer.head:
            gradient = grad_y[:, layer.column : layer.column + layer.fan_out].astype(np.float64)
            variance = (rounding * gradient) ** 2
        columns = slice(layer.source, layer.source + layer.fan_in)
        source = inputs if layer.source < 0 else hidden[:, columns]
        of_weight[:] = np.sqrt(variance.T @ source**2 + _product(gradient.T, source, 0.0))
        ones = np.ones((len(x), 1))
        of_bias[:] = np.sqrt(variance.sum(0) + _product(gradient.T, ones, 0.0)[:, 0])
        if layer.source >= 0:
            slope = 1 - source**2 if network.activation == "tanh" else source > 0
            variance = variance @ weight**2 + _product(gradient, weight, unit)
            # 1 - h * h is off by a rounding of 1, which counts where it is small.
            variance = variance * slope**2 + (2 * SUM * (gradient @ weight)) ** 2
            gradient = gradient @ weight * slope
            variance += (unit * gradient) ** 2
    return deviation


def _product(left, right, unit):
    """Variance of left @ right whose right factor is rounded to `unit`, summed in float32."""
    terms = left.shape[1]
    return unit**2 * (left**2 @ right**2) + terms * (SUM * (abs(left) @ abs(right))) ** 2


def assert_within(name, found, expected, deviations):
    """Refuse a difference of more than DEVIATIONS standard deviations, or a NaN, in any element."""
    difference = np.abs(found.astype(np.float64) - expected)
    wrong = ~(difference <= DEVIATIONS * deviations)
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        raise AssertionError(
            f"{name}{list(at)} is {found[at]}, not {expected[at]}; allowed is a difference of "
            f"{DEVIATIONS * deviations[at]:.3g}; {wrong.sum()} of {wrong.size} elements are wrong"
        )
