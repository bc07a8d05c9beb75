"""From the layers that a transformer was trained with to fewer that compute the same.

A gated residual network's second layer feeds its gate without an activation between, so the two are one
matrix. A real variable's embedding is linear in the real, so what is linear in the embedding is a slope
and a shift; a category's network has one result for each category, so it is a table. All in float64.
"""

from dataclasses import dataclass

import numpy as np

from lowgpu_kernels.ops.tft.norm import spec_elu, spec_glu, spec_norm


@dataclass(frozen=True)
class Norm:
    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Resample:
    """A residual of another width: `matrix` x + `bias`, and a norm of it where there is one."""

    matrix: np.ndarray
    bias: np.ndarray
    norm: Norm | None = None


@dataclass(frozen=True)
class Network:
    """A gated residual network as it was trained: first layer, ELU, second layer, gate, norm."""

    first: np.ndarray
    first_bias: np.ndarray
    second: np.ndarray
    second_bias: np.ndarray
    gate: np.ndarray
    gate_bias: np.ndarray
    norm: Norm
    resample: Resample | None = None
    context: np.ndarray | None = None

    def residual(self):
        """(matrix, bias, norm or None) of what is added behind the gate."""
        if self.resample is None:
            inputs = self.first.shape[1]
            return np.eye(inputs), np.zeros(inputs), None
        return self.resample.matrix, self.resample.bias, self.resample.norm

    def folded_gate(self):
        return self.gate @ self.second, self.gate @ self.second_bias + self.gate_bias

    def arrays(self, name):
        """The arrays of `gated_residual` under a name."""
        assert self.resample is None
        gate, gate_bias = self.folded_gate()
        return {f"{name}.first": self.first, f"{name}.first_bias": self.first_bias} | gated(
            name, gate, gate_bias, self.norm
        )

    def of_rows(self, x, epsilon):
        """What the network makes of rows, without a context."""
        matrix, bias, norm = self.residual()
        residual = x @ matrix.T + bias
        if norm is not None:
            residual = spec_norm(residual, norm.weight, norm.bias, epsilon)
        hidden = spec_elu(x @ self.first.T + self.first_bias) @ self.second.T + self.second_bias
        sums = residual + spec_glu(hidden, self.gate, self.gate_bias)
        return spec_norm(sums, self.norm.weight, self.norm.bias, epsilon)


def gated(name, gate, gate_bias, norm):
    """The arrays of `gated_norm` under a name."""
    return {
        f"{name}.gate": gate,
        f"{name}.gate_bias": gate_bias,
        f"{name}.norm_weight": norm.weight,
        f"{name}.norm_bias": norm.bias,
    }


@dataclass(frozen=True)
class RealVariable:
    """A real as it enters a network, real * slope + shift, and the network of its own."""

    slope: np.ndarray
    shift: np.ndarray
    network: Network

    @property
    def width(self):
        return len(self.slope)


@dataclass(frozen=True)
class CategoricalVariable:
    """What each category enters a network as, and what represents it, a row each."""

    embedding: np.ndarray
    represented: np.ndarray

    @property
    def width(self):
        return self.embedding.shape[1]


def fold_selection(variables, order, joint, hidden):
    """(arrays, units, variable_units) of a selection.

    Args:
        variables: by name, RealVariable or CategoricalVariable.
        order: their names as the joint network reads them.
        joint: the network that weighs them; None where there is one variable.
        hidden: the transformer's width.
    """
    reals = [n for n in order if isinstance(variables[n], RealVariable)]
    cats = [n for n in order if n not in reals]
    if joint is None:
        # One variable has all the weight, whatever the numbers.
        total = sum(variables[n].width for n in order)
        joint = _indifferent(total, len(order))
    else:
        joint = _reordered(joint, [order.index(n) for n in reals + cats])
    own = [_fold_real(variables[n]) for n in reals]
    units = max((len(a["slope"]) for a in own), default=0)
    arrays = _fold_joint(variables, order, reals, cats, joint)
    shapes = {
        "slope": (units,),
        "shift": (units,),
        "gate": (2 * hidden, units),
        "gate_bias": (2 * hidden,),
    }
    for name in ("residual_slope", "residual_shift", "norm_weight", "norm_bias"):
        shapes[name] = (hidden,)
    normed = {"residual_weight" in a for a in own}
    if len(normed) > 1:
        raise ValueError(
            "hidden_continuous_sizes must be the hidden size for all variables of a selection or "
            "for none: their residuals are normed or not together"
        )
    if normed == {True}:
        shapes |= {"residual_weight": (hidden,), "residual_bias": (hidden,)}
    for name, shape in shapes.items():
        stacked = np.zeros((len(own), *shape))
        for row, found in zip(stacked, own):
            row[tuple(slice(n) for n in found[name].shape)] = found[name]
        arrays[name] = stacked
    tables = [variables[n].represented for n in cats]
    arrays["table"] = np.concatenate(tables) if tables else np.zeros((0, hidden))
    return arrays, joint.first.shape[0], units


def _fold_real(variable):
    network = variable.network
    matrix, bias, norm = network.residual()
    gate, gate_bias = network.folded_gate()
    found = {
        "slope": network.first @ variable.slope,
        "shift": network.first @ variable.shift + network.first_bias,
        "gate": gate,
        "gate_bias": gate_bias,
        "residual_slope": matrix @ variable.slope,
        "residual_shift": matrix @ variable.shift + bias,
        "norm_weight": network.norm.weight,
        "norm_bias": network.norm.bias,
    }
    if norm is not None:
        found |= {"residual_weight": norm.weight, "residual_bias": norm.bias}
    return found


def _fold_joint(variables, order, reals, cats, joint):
    """The arrays of `selection_weights`."""
    matrix, bias, norm = joint.residual()
    both = np.concatenate([joint.first, matrix])
    shift = np.concatenate([joint.first_bias, bias])
    starts = np.cumsum([0] + [variables[n].width for n in order])
    part = {n: both[:, a:b] for n, a, b in zip(order, starts, starts[1:])}
    slopes, tables = [], []
    for name in reals:
        slopes.append(part[name] @ variables[name].slope)
        shift = shift + part[name] @ variables[name].shift
    for name in cats:
        tables.append(variables[name].embedding @ part[name].T)
    gate, gate_bias = joint.folded_gate()
    arrays = {
        "weigh.slope": np.reshape(slopes, (len(reals), len(both))),
        "weigh.shift": shift,
        "weigh.table": np.concatenate(tables) if tables else np.zeros((0, len(both))),
        "weigh.gate": gate,
        "weigh.gate_bias": gate_bias,
        "weigh.norm_weight": joint.norm.weight,
        "weigh.norm_bias": joint.norm.bias,
    }
    if norm is not None:
        arrays |= {"weigh.residual_weight": norm.weight, "weigh.residual_bias": norm.bias}
    if joint.context is not None:
        arrays["context"] = joint.context
    return arrays


def _reordered(joint, order):
    """A joint network whose outputs, a variable each, are in another order."""
    matrix, bias, norm = joint.residual()
    at, both = np.array(order), np.array([*order, *(len(order) + i for i in order)])
    of = lambda n: None if n is None else Norm(n.weight[at], n.bias[at])  # noqa: E731
    return Network(
        joint.first,
        joint.first_bias,
        joint.second,
        joint.second_bias,
        joint.gate[both],
        joint.gate_bias[both],
        of(joint.norm),
        Resample(matrix[at], bias[at], of(norm)),
        joint.context,
    )


def _indifferent(inputs, variables):
    zeros = np.zeros
    return Network(
        *(zeros((1, inputs)), zeros(1), zeros((1, 1)), zeros(1)),
        *(zeros((2 * variables, 1)), zeros(2 * variables)),
        Norm(zeros(variables), zeros(variables)),
        Resample(zeros((variables, inputs)), zeros(variables)),
    )
