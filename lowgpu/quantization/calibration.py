"""Post-training quantization: a trained network and what it sees, as int8 weights and ranges."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowgpu.quantization.forward import levels_of
from lowgpu.quantization.ranges import HIGHEST, LOWEST, STEPS, TINY, Extremes, Histogram, levels
from lowgpu.quantization.rounding import NEVER_ON, equalized, rounded_layer
from lowgpu_kernels import mlp_forward
from lowgpu_kernels.dims import Choice, Float, Int
from lowgpu_kernels.ops.int8.quantized_network import quantized_views, quantized_weights
from lowgpu_kernels.ops.mlp.network import WIDEST, Network, round_up

ROWS = 4096  # observations whose activations are held at once. Untuned.
METHOD = Choice("mse", "percentile", "minmax")
PERCENTILE = Float(50, 100, above=True)
COPIES = Int(1, 16)


class QuantizedArrays(NamedTuple):
    """A network in int8, as the int8 ops take it; `quantized_network.py` has the layout."""

    weight: np.ndarray  # int8, every layer's
    bias: np.ndarray  # int32, in units of `scale`, less what the zero points add
    scale: np.ndarray  # float32, what one unit of a channel's sum is worth
    input_scale: np.ndarray  # float32, of each column
    input_zero: np.ndarray  # int32
    hidden_scale: np.ndarray  # float32, of each hidden layer
    hidden_zero: np.ndarray  # int32


@dataclass(frozen=True, eq=False)
class Calibration:
    """A quantized network and where it comes from.

    Attributes:
        observation: columns of an observation.
        network: what the arrays are of: the original, or one that reads columns repeatedly.
        columns: int32, the column of an observation that each of its inputs reads.
        arrays: the QuantizedArrays.
        parameters: float32, of `source`: the same function as what was given, with hidden units of
            more equal ranges; what the int8 layers come close to.
        summary: what was seen, for JSON.
        source: the Network that was given; None for `network`.
        tuned: whether the first tower's integers have been fine-tuned since.
    """

    observation: int
    network: Network
    columns: np.ndarray
    arrays: QuantizedArrays
    parameters: np.ndarray
    summary: dict
    source: Network | None = None
    tuned: bool = False


def calibrate(
    network,
    parameters,
    observations,
    method="mse",
    *,
    percentile=99.99,
    copies=1,
    unit_copies=1,
    names=(),
):
    """Quantize a network by the ranges that its activations have over some observations.

    Weights are int8 without zero points, with a scale for each channel; activations int8 with zero
    points, with a scale for each column of an observation, which goes into the first layer's
    weights, and one for each hidden layer. `rounding.py` has the formulas. Hidden units of relu are
    brought to more equal ranges first. Layer after layer, weights are rounded so that their sums vary
    as the exact ones', and biases so that they have the same mean over the observations.

    With `copies` the network reads each column so often, and each copy has the levels of its own
    part of the range: 255 * copies steps instead of 255. `unit_copies` does the same for hidden units
    of relu, by their biases. Copies of a unit of tanh each have the whole range, and their biases are
    an equal part of a step apart: their mean has as many levels more where tanh is steep.

    A column that was 0 in every row keeps its weights and gets a range as wide as the middle one of
    the others; a hidden layer that was 0 throughout gets a range to 1.

    The observations are read a few times and once a layer, some thousands at a time.

    Args:
        network: a Network.
        parameters: float32, flat, as `network.views` says.
        observations: float32 [rows, network.inputs], such as the policy meets; at least one row.
        method: which part of the values seen the levels span: "mse" the part with the least squared
            error, "percentile" all without the outermost, "minmax" all.
        percentile: of the values at either end that are spanned, in (50, 100]; for "percentile".
        copies: of every column that a weight reads, in [1, 16]; all together at most 512.
        unit_copies: of every hidden unit, in [1, 16]; a layer of at most 512.
        names: of the columns, for errors and the summary; "column k" past them.

    Returns:
        A Calibration.

    Raises:
        TypeError: arrays of another element type.
        ValueError: shapes that are not the network's, no rows, a NaN or an infinity in the
            parameters or the observations, with its place; weights too large for float32 scales;
            too many copies.

    Source: Jacob et al. 2018; Krishnamoorthi 2018 (arXiv:1806.08342) for a scale a channel;
    Nagel et al. 2021 (arXiv:2106.08295), sections 3.1 and 4.2.1, for ranges of least squared error
    and for biases.
    """
    METHOD("method", method)
    PERCENTILE("percentile", percentile)
    COPIES("copies", copies)
    COPIES("unit_copies", unit_copies)
    _check(network, parameters, observations, names)
    wide, columns, reads = widened(network, parameters, copies, unit_copies)
    inputs, units, constant = _seen(network, parameters, observations)
    largest = units.high
    if method == "percentile":  # one row must not decide how units compare
        largest = _unit_histogram(network, parameters, observations, units).percentile(percentile)[
            1
        ]
    made, divisor = equalized(network, parameters, largest)
    hidden = [layer for layer in network.layers if not layer.head]
    ranges = inputs.low, inputs.high, *_of_layers(hidden, units.low / divisor, units.high / divisor)
    if method != "minmax":
        part = "least_error" if method == "mse" else "percentile"
        given = () if method == "mse" else (percentile,)
        steps = STEPS * copies, STEPS * parts_of(network, unit_copies)
        histograms = _histograms(network, made, observations, hidden, ranges, steps)
        parts = [getattr(histogram, part)(*given) for histogram in histograms]
        ranges = *parts[0], *np.array(parts[1:]).reshape(-1, 2).T
    read = _input_levels(*ranges[:2], columns, reads, copies)
    stored, dead = _hidden_levels(*ranges[2:], network, unit_copies)
    seen = network, made, observations, ranges
    arrays = _arrays(seen, wide, columns, reads * copies, read, stored)
    summary = {
        "method": method,
        "percentile": float(percentile) if method == "percentile" else None,
        "copies": int(copies),
        "unit_copies": int(unit_copies),
        "rows": len(observations),
        "constant_columns": [column_name(names, k) for k in np.flatnonzero(constant)],
        "dead_layers": [layer_name(network, hidden[h]) for h in np.flatnonzero(dead)],
        "channels_without_weights": {
            layer_name(wide, layer): int((~weight.any(axis=1)).sum())
            for layer, weight, _, _ in quantized_views(wide, *arrays[:3])
        },
    }
    return Calibration(network.inputs, wide, columns, arrays, made, summary, network)


def column_name(names, k):
    """What a column of the observation is called."""
    return str(names[k]) if k < len(names) else f"column {k}"


def layer_name(network, layer):
    """What a layer is called: its tower, where there are two, and its place from the input."""
    tower = [other for other in network.layers if other.tower == layer.tower]
    place = "head" if layer.head else f"layer {tower.index(layer) + 1}"
    return f"tower {layer.tower + 1} {place}" if len(network.towers) > 1 else place


def widened(network, parameters, copies, unit_copies=1):
    """(network, columns, reads): one that reads `reads` columns `copies` times, round after round.

    Hidden layers have `unit_copies` of every unit, round after round too.

    `columns` has the column of each input. Those that no weight reads, such as padding, are left
    out; what fills the row to a multiple of 8 has column 0, and weights of 0.
    """
    towers = tuple((*(w * unit_copies for w in t[:-1]), t[-1]) for t in network.towers)
    if max(max(t) for t in towers) > WIDEST:
        raise ValueError(
            f"unit_copies must leave hidden layers of at most {WIDEST}, got {unit_copies} for "
            f"{network.towers}"
        )
    if copies == 1:
        network = Network(network.inputs, towers, network.activation)
        return network, np.arange(network.inputs, dtype=np.int32), network.inputs
    firsts = [weight for layer, weight, _ in network.views(parameters) if layer.source < 0]
    used = np.flatnonzero(np.any([weight.any(axis=0) for weight in firsts], axis=0))
    inputs = max(round_up(len(used) * copies, 8), 8)
    if inputs > WIDEST:
        raise ValueError(
            f"copies must be at most {WIDEST // len(used)} for {len(used)} columns, got {copies}"
        )
    columns = np.zeros(inputs, np.int32)
    columns[: len(used) * copies] = np.tile(used, copies)
    return Network(inputs, towers, network.activation), columns, len(used)


def _check(network, parameters, observations, names):
    for name, array in (("parameters", parameters), ("observations", observations)):
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            came = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} must be a NumPy array of float32, got {came}")
    if parameters.shape != (network.parameters,):
        raise ValueError(
            f"parameters must be [{network.parameters}] for this network, "
            f"got shape {list(parameters.shape)}"
        )
    if observations.ndim != 2 or observations.shape[1] != network.inputs or not len(observations):
        raise ValueError(
            f"observations must be [rows, {network.inputs}] with at least one row, "
            f"got shape {list(observations.shape)}"
        )
    for layer, weight, bias in network.views(parameters):
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise ValueError(
                f"parameters must be finite, and those of {layer_name(network, layer)} are not: "
                "give an earlier checkpoint"
            )
    for first, x in _batches(observations):
        wrong = np.argwhere(~np.isfinite(x))
        if len(wrong):
            row, k = wrong[0]
            raise ValueError(
                f"observations must be finite, got {x[row, k]} in {column_name(names, k)}, "
                f"row {first + row}: leave that row out, or mend what it was made of"
            )


def _batches(observations):
    for first in range(0, len(observations), ROWS):
        yield first, np.ascontiguousarray(observations[first : first + ROWS])


def _stored(network, parameters, x):
    """Every hidden unit's values, [rows, network.hidden]."""
    with np.errstate(over="ignore", invalid="ignore"):
        return mlp_forward(x, parameters, network=network).hidden


def _seen(network, parameters, observations):
    """Extremes of the columns and of the hidden units, and which columns never changed."""
    inputs, units = Extremes(network.inputs), Extremes(network.hidden)
    constant = np.ones(network.inputs, bool)
    for _, x in _batches(observations):
        inputs.add(x)
        constant &= (x == observations[0]).all(axis=0)
        stored = _stored(network, parameters, x)
        if not np.isfinite(stored).all():
            wrong = int(np.argwhere(~np.isfinite(stored))[0, 1])
            layer = next(
                layer
                for layer in network.layers
                if not layer.head and layer.column <= wrong < layer.column + layer.fan_out
            )
            raise ValueError(
                f"{layer_name(network, layer)} must be finite on every observation, and is not: "
                "its weights or the observations are too large for float32"
            )
        units.add(stored)
    return inputs, units, constant


def _units(layer):
    return slice(layer.column, layer.column + layer.fan_out)


def _of_layers(hidden, low, high):
    """Ends of each hidden layer's range, given its units'."""
    return (
        np.array([low[_units(layer)].min() for layer in hidden]),
        np.array([high[_units(layer)].max() for layer in hidden]),
    )


def _unit_histogram(network, parameters, observations, units):
    """A Histogram of every hidden unit."""
    made = Histogram(units.low, units.high)
    for _, x in _batches(observations):
        made.add(_stored(network, parameters, x))
    return made


def _histograms(network, parameters, observations, hidden, ranges, steps):
    """A Histogram of the columns, then one of each hidden layer."""
    low, high, lowest, highest = ranges
    made = [Histogram(low, high, steps[0])]
    for h in range(len(hidden)):
        made.append(Histogram(lowest[h : h + 1], highest[h : h + 1], steps[1]))
    for _, x in _batches(observations):
        made[0].add(x)
        stored = _stored(network, parameters, x)
        for histogram, layer in zip(made[1:], hidden):
            histogram.add(stored[:, _units(layer)].reshape(-1, 1))
    return made


def _input_levels(low, high, columns, reads, copies):
    """(scale, zero) of every input; copies have the levels of their part of the column's range."""
    varies = high - low >= STEPS * copies * TINY
    middle = float(np.median((high - low)[varies])) if varies.any() else 1.0
    low, high = np.where(varies, low, -middle / 2), np.where(varies, high, middle / 2)
    scale, zero = levels(low, high, STEPS * copies)
    # What fills the row up has no weights.
    part = np.minimum(np.arange(len(columns)) // max(reads, 1), copies - 1)
    return scale[columns], zero[columns] - np.int32(STEPS) * part.astype(np.int32)


def parts_of(network, unit_copies):
    """Parts that the range of a hidden layer is cut into for copies of its units: 1 for tanh."""
    return unit_copies if network.activation == "relu" else 1


def _hidden_levels(low, high, network, copies):
    """(scale, zero) of the hidden layers, and which were 0 throughout."""
    dead = high - low < STEPS * TINY
    scale, zero = levels(
        np.where(dead, -1.0 if network.activation == "tanh" else 0.0, low),
        np.where(dead, 1.0, high),
        STEPS * parts_of(network, copies),
    )
    if not len(dead):  # the arrays are never empty
        return (np.ones(1, np.float32), np.zeros(1, np.int32)), dead
    return (scale, zero), dead


def _arrays(seen, wide, columns, reads, read, stored):
    """The QuantizedArrays of the wide network, whose first inputs read `columns`, layer by layer."""
    network, parameters, _, _ = seen
    channels = sum(layer.fan_out for layer in wide.layers)
    weight = np.zeros(quantized_weights(wide), np.int8)
    bias, scale = np.zeros(channels, np.int32), np.zeros(channels, np.float32)
    arrays, hidden = QuantizedArrays(weight, bias, scale, *read, *stored), 0
    layers = zip(network.views(parameters), quantized_views(wide, weight, bias, scale))
    for n, ((layer, real_weight, real_bias), (_, *to)) in enumerate(layers):
        levels_read, real_read = read, real_weight
        if layer.source < 0:
            real_read = np.zeros((layer.fan_out, wide.inputs), np.float32)
            real_read[:, :reads] = real_weight[:, columns[:reads]]
        else:  # what the hidden layer just before it gave
            levels_read = stored[0][hidden - 1], stored[1][hidden - 1]
            count = wide.layers[n].fan_in // layer.fan_in
            # Those of tanh are a mean, those of relu a sum.
            real_read = np.tile(real_weight, count) / np.float32(count // parts_of(network, count))
        met = _met(*seen, wide, columns, arrays, n)
        name = layer_name(network, layer)
        made = rounded_layer(real_read, real_bias, *levels_read, name, met)
        # Copies of a unit differ by their bias: each begins where the one before it is full.
        count = wide.layers[n].fan_out // layer.fan_out
        weight_made, bias_made, scale_made = made
        to[0][:], to[2][:] = np.tile(weight_made, (count, 1)), np.tile(scale_made, count)
        step = 0 if layer.head else np.float64(stored[0][hidden]) / scale_made
        if network.activation == "tanh":
            shifts = (np.arange(count) - (count - 1) / 2) / count
        else:
            shifts = -STEPS * np.arange(count)
        shifted = [np.rint(bias_made + step * shift) for shift in shifts]
        to[1][:] = np.maximum(shifted, np.minimum(bias_made, NEVER_ON)).ravel()
        hidden += not layer.head
    return arrays


def _met(network, parameters, observations, ranges, wide, columns, arrays, n):
    """What layer n reads, as levels above 0's: their mean and covariance, and the mean of its sums.

    The layers before it have been rounded, and their errors are in the levels; the mean of the sums is
    the float32 network's, of values within the ranges: what is cut off is not made up for.
    """
    layer, weight, _ = list(network.views(parameters))[n]
    fan_in, hidden = wide.layers[n].fan_in, sum(not other.head for other in network.layers[:n])
    ends = ranges[:2] if layer.source < 0 else (ranges[2][hidden - 1], ranges[3][hidden - 1])
    total, square, real = np.zeros(fan_in), np.zeros((fan_in, fan_in)), np.zeros(layer.fan_in)
    for _, x in _batches(observations):
        level, zero = levels_of(wide, arrays, x[:, columns], n)
        above = level.astype(np.float64) - np.clip(zero, LOWEST, HIGHEST)
        total += above.sum(axis=0)
        square += above.T @ above
        own = x
        if layer.source >= 0:
            own = _stored(network, parameters, x)[:, layer.source : layer.source + layer.fan_in]
        real += own.clip(*ends).sum(axis=0)
    rows = len(observations)
    mean = total / rows
    return mean, square / rows - np.outer(mean, mean), weight.astype(np.float64) @ (real / rows)
