"""Quantized checkpoints: int8 weights, scales and zero points in one file, held to their ranges."""

import hashlib

import numpy as np

from lowgpu import checkpoint
from lowgpu.checkpoint import CheckpointError
from lowgpu.quantization.calibration import COPIES, QuantizedArrays
from lowgpu.quantization.ranges import HIGHEST, LOWEST, STEPS, TINY
from lowgpu_kernels.ops.int8.quantized_network import (
    level_factors,
    quantized_views,
    quantized_weights,
)
from lowgpu_kernels.ops.mlp.network import Network

KIND = "quantized policy"
FARTHER = STEPS * (COPIES.high - 1)  # than int8, zero points of copies may lie
NORMALIZER = "normalizer."


def save(path, calibration, actions, parameters, *, normalizer=None, about=None):
    """Write a quantized policy as one checkpoint file, whole or not at all.

    Args:
        path: where; the folder exists.
        calibration: its Calibration.
        actions: columns of its output that are logits, action values or advantages.
        parameters: float32, of the original, to say what the file was made of.
        normalizer: {name: float32 array} that the observations were made with.
        about: what else the document says, for JSON.

    Raises:
        OSError: the disk refused; an old file is as it was.
    """
    network = calibration.network
    document = {
        "kind": KIND,
        "network": {
            "inputs": network.inputs,
            "towers": network.towers,
            "activation": network.activation,
        },
        "actions": actions,
        "observation": calibration.observation,
        "made_of": hashlib.sha256(parameters.tobytes()).hexdigest(),
        "calibration": calibration.summary,
        **(about or {}),
    }
    arrays = {**calibration.arrays._asdict(), "columns": calibration.columns}
    arrays |= {NORMALIZER + name: array for name, array in (normalizer or {}).items()}
    checkpoint.save(path, arrays, document)


def load(path):
    """Read a quantized policy, after checking that its integers are what int8 kernels may be given.

    Args:
        path: a file written by `save`.

    Returns:
        (network, columns, arrays, normalizer, document).

    Raises:
        CheckpointError: as `checkpoint.load`; a checkpoint of something else; arrays that are not
            the network's; a scale, a zero point, a weight, a column or a bias out of range.
    """
    saved = checkpoint.load(path)
    document, arrays = saved.document, saved.arrays
    network, width = _described(path, document)
    kept = {name: array for name, array in arrays.items() if name.startswith(NORMALIZER)}
    expected = layout(network)
    for name, (shape, kind) in expected.items():
        array = arrays.get(name)
        if array is None or array.shape != shape or array.dtype != kind:
            came = "nothing" if array is None else f"{array.dtype.name}{list(array.shape)}"
            raise CheckpointError(f"{path}: {name} must be {kind}{list(shape)}, got {came}")
    unknown = sorted(set(arrays) - set(expected) - set(kept))
    if unknown:
        raise CheckpointError(f"{path} has an unknown array, {unknown[0]}")
    columns = arrays["columns"]
    made = QuantizedArrays(*(arrays[name] for name in QuantizedArrays._fields))
    if ((columns < 0) | (columns >= width)).any():
        raise CheckpointError(f"{path}: columns must be in 0..{width - 1}")
    fault = next(faults(network, made), None)
    if fault:
        raise CheckpointError(f"{path}: {fault}")
    normalizer = {name.removeprefix(NORMALIZER): array for name, array in kept.items()}
    return network, columns, made, normalizer, document


def _described(path, document):
    """The network and the width of an observation that a document names."""
    try:
        if document["kind"] != KIND:
            raise ValueError(f"is a {document['kind']!r}")
        network = Network(**document["network"])
        heads = sum(widths[-1] for widths in network.towers)
        actions, width = document["actions"], document["observation"]
        if type(actions) is not int or actions not in (heads, heads - 1) or actions < 1:
            raise ValueError(f"has {actions!r} actions and {heads} outputs")
        if type(width) is not int or not 1 <= width <= 512:
            raise ValueError(f"has observations of {width!r} columns")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is no quantized policy: {error}") from None
    return network, width


def layout(network):
    """{name: (shape, element type)} of the arrays in a quantized checkpoint of a network."""
    channels = sum(layer.fan_out for layer in network.layers)
    hidden = max(1, sum(not layer.head for layer in network.layers))
    return {
        "weight": ((quantized_weights(network),), "int8"),
        "bias": ((channels,), "int32"),
        "scale": ((channels,), "float32"),
        "input_scale": ((network.inputs,), "float32"),
        "input_zero": ((network.inputs,), "int32"),
        "hidden_scale": ((hidden,), "float32"),
        "hidden_zero": ((hidden,), "int32"),
        "columns": ((network.inputs,), "int32"),
    }


def faults(network, arrays):
    """What of the values no int8 kernel may be given, a sentence each."""
    if not (arrays.weight > LOWEST).all():
        yield "weight must be in [-127, 127]"
    if not (arrays.scale > 0).all():
        yield "scale must be above 0"
    for name in ("input_scale", "hidden_scale"):
        if not (getattr(arrays, name) >= TINY).all():
            yield f"{name} must be a normal number above 0"
    for name, farther in (("input_zero", FARTHER), ("hidden_zero", 0)):
        zero, low, high = getattr(arrays, name), LOWEST - farther, HIGHEST + farther
        if not ((zero >= low) & (zero <= high)).all():
            yield f"{name} must be in [{low}, {high}]"
    used, steps = np.zeros(len(arrays.weight), bool), iter(arrays.hidden_scale)
    for layer, weight, bias, scale in quantized_views(network, *arrays[:3]):
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            factor = scale if layer.head else level_factors(scale, next(steps))
        if network.activation == "relu" and not np.isfinite(factor).all():
            yield "scale must be less than 2^128 of its layer's steps"
        most = np.abs(weight.astype(np.int64)).sum(axis=1) * -LOWEST
        if (np.abs(bias.astype(np.int64)) + most > np.iinfo(np.int32).max).any():
            yield "bias must leave the sums of its channel within int32"
    for _, into, _, _ in quantized_views(network, used, arrays.bias, arrays.scale):
        into[:] = True
    if arrays.weight[~used].any():
        yield "weight must be zero between layers"
