"""Tables of what the networks of real variables make of a number.

Such a network is a function of one real; because it is normed last it has a limit at either end. A table
holds it at nodes that reach from one end to the other, closest where the calibration's reals lie.
"""

import numpy as np

from lowgpu.tft.int8_layout import TABULATED
from lowgpu_kernels.ops.tft.norm import spec_elu, spec_glu, spec_norm

# Of a selection's tables: the first that is within CLOSE of the networks half-way between its nodes, for all
# reals up to MET spreads from 0, or the last. At a width of 128 a variable's are 256 KB to 2 MB.
NODES = 1025, 2049, 4097, 8193
CLOSE = 2.0**-8  # as bfloat16 rounds numbers of order 1
MET = 10
FAR = 1e9  # spreads from 0 to where a limit is taken
AT_ONCE = 4096  # reals whose networks are worked out together
NETWORK = (
    *("slope", "shift", "gate", "gate_bias", "residual_slope", "residual_shift"),
    *("residual_weight", "residual_bias", "norm_weight", "norm_bias"),
)


def with_tables(shape, weights):
    """`weights` {name: (array, kind)} with the networks of TABULATED selections as tables."""
    found = dict(weights)
    for name in TABULATED:
        arrays = {n: found.pop(f"{name}.{n}", (None,))[0] for n in NETWORK}
        spread = np.asarray(found[f"{name}.spread"][0], np.float64)
        if not (np.isfinite(spread) & (spread > 0)).all():
            raise ValueError(f"arrays[{name + '.spread'!r}] must be finite and above 0")
        found[f"{name}.nodes"] = tables_of(arrays, spread, shape)[0], "real"
    return found


def tables_of(arrays, spread, shape):
    """([variables, nodes, hidden], the most that it is off half-way between two nodes up to MET spreads)."""
    for count in NODES:
        nodes = variables_of(arrays, nodes_of(spread, count), shape)
        reals = nodes_of(spread, count, 0.5)[:, :-1]
        off = np.abs(variables_of(arrays, reals, shape) - (nodes[:, 1:] + nodes[:, :-1]) / 2)
        most = float(off[np.abs(reals) <= MET * np.asarray(spread)[:, None]].max(initial=0))
        if most <= CLOSE:
            break
    return nodes, most


def nodes_of(spread, count, between=0.0):
    """[variables, count] reals of tables' nodes, or `between` 0 and 1 of the way to the next."""
    part = 2 * (np.arange(count) + between) / (count - 1) - 1
    most = FAR / (1 + FAR)
    part = np.clip(part, -most, most)
    return np.asarray(spread, np.float64)[:, None] * (part / (1 - np.abs(part)))


def variables_of(arrays, reals, shape):
    """[variables, reals, hidden] in float64: each variable's network at each of its reals."""
    made = np.empty((*reals.shape, shape.hidden))
    of = {n: None if a is None else np.asarray(a, np.float64) for n, a in arrays.items()}
    for v in range(len(reals)):
        for first in range(0, reals.shape[1], AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            x = reals[v, rows, None]
            residual = x * of["residual_slope"][v] + of["residual_shift"][v]
            if of["residual_weight"] is not None:
                norm = of["residual_weight"][v], of["residual_bias"][v], shape.epsilon
                residual = spec_norm(residual, *norm)
            hidden = spec_elu(x * of["slope"][v] + of["shift"][v])
            with np.errstate(over="ignore"):
                sums = residual + spec_glu(hidden, of["gate"][v], of["gate_bias"][v])
            norm = of["norm_weight"][v], of["norm_bias"][v], shape.epsilon
            made[v, rows] = spec_norm(sums, *norm)
    return made


def table_error(shape, arrays):
    """{selection: the most that its tables are off for reals that are met}, for a report."""
    found = {}
    for name in TABULATED:
        of = {n: arrays.get(f"{name}.{n}") for n in NETWORK}
        found[name] = tables_of(of, arrays[f"{name}.spread"], shape)[1]
    return found
