"""ELU, gated linear units and layer norms: as specs have them, and as CPU executors do.

Also what rounding may change behind a norm, which divides by a row's spread.
"""

import numpy as np

EPSILON = 1e-5


def spec_elu(x):
    """x above zero, e^x - 1 below."""
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def spec_glu(x, weight, bias):
    """The first half of the columns of a product times the sigmoid of the second."""
    values, gates = np.split(x @ weight.T + bias, 2, axis=-1)
    return values / (1 + np.exp(-gates))


def spec_norm(x, weight, bias, epsilon):
    """Rows of mean 0 and variance 1, scaled and shifted."""
    if x.shape[-1] == 0:
        return x
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * weight + bias


def elu(x):
    low = np.minimum(x, np.float32(0))
    return np.where(x > 0, x, np.expm1(low))


def gated_linear(x, weight, bias):
    total = x @ weight.astype(np.float32).T + bias
    columns = len(weight) // 2
    with np.errstate(over="ignore"):
        return total[..., :columns] / (np.float32(1) + np.exp(-total[..., columns:]))


def layer_norm(x, weight, bias, epsilon):
    columns = np.float32(max(x.shape[-1], 1))
    mean = x.sum(-1, keepdims=True) / columns
    variance = np.square(x - mean).sum(-1, keepdims=True) / columns
    return (x - mean) / np.sqrt(variance + epsilon) * weight + bias


def widened(arguments):
    """A call's arguments as a spec takes them: floats in float64."""
    whole = lambda a: not isinstance(a, np.ndarray) or a.dtype.kind in "iu"  # noqa: E731
    return {n: a if whole(a) else a.astype(np.float64) for n, a in arguments.items()}


def gain(x, epsilon):
    """How much larger a change of each row is behind its norm."""
    if x.shape[-1] == 0:
        return np.ones((*x.shape[:-1], 1))
    return 1 / np.sqrt(x.var(-1, keepdims=True) + epsilon)


def assert_normed(name, found, expected, before, arguments, allowed):
    """Refuse more than what `allowed` before a norm becomes behind it, and its own rounding."""
    steepest = np.abs(arguments["norm_weight"].astype(float)).max(initial=0)
    behind = allowed * (1 + gain(before, float(arguments["epsilon"])) * steepest)
    assert_within(name, found, expected, behind)


def assert_within(name, found, expected, allowed):
    """Refuse a NaN that is not expected, and a difference of more than `allowed`, in any element."""
    difference = np.abs(found.astype(np.float64) - expected)
    wrong = ~((difference <= allowed) | (np.isnan(found) & np.isnan(expected)))
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        most = np.broadcast_to(allowed, wrong.shape)[at]
        raise AssertionError(
            f"{name}{list(at)} is {found[at]}, not {expected[at]}; allowed is a difference of "
            f"{most:.3g}; {wrong.sum()} of {wrong.size} elements are wrong"
        )
