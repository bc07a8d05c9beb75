"""What a Temporal Fusion Transformer is made of: its inputs, its widths and its arrays by name."""

from dataclasses import dataclass

SELECTIONS = "static", "history", "future"
CONTEXTS = "selection", "enrichment", "hidden", "cell"


@dataclass(frozen=True)
class Array:
    """One of a transformer's arrays.

    Attributes:
        shape: its sizes.
        product: whether it is stored in the precision, as a product's factor is; else in float32.
        optional: whether a transformer may do without it.
        other: a kind of elements that follows from neither.
        kind: of its elements: "real" is the precision's; "number" is one that is not an array.
    """

    shape: tuple
    product: bool = False
    optional: bool = False
    other: str | None = None

    @property
    def kind(self):
        return self.other or ("real" if self.product else "float32")


@dataclass(frozen=True)
class Selection:
    """The variables that one selection chooses among, by name: real ones first.

    Attributes:
        reals: real variables.
        categoricals: categorical variables.
        cardinalities: categories of each of them.
        units: hidden units of the network that weighs the variables.
        variable_units: hidden units of the networks of real variables, the most of any.
    """

    reals: tuple = ()
    categoricals: tuple = ()
    cardinalities: tuple = ()
    units: int = 0
    variable_units: int = 0

    @property
    def variables(self):
        return self.reals + self.categoricals

    def arrays(self, hidden):
        """{name: Array} of its arrays; what they mean is said by the ops they are given to."""
        if not self.variables:
            return {}
        reals, variables = len(self.reals), len(self.variables)
        mapped, table = self.units + variables, sum(self.cardinalities)
        units, of_hidden = (reals, self.variable_units), Array((reals, hidden))
        return {
            "weigh.slope": Array((reals, mapped)),
            "weigh.shift": Array((mapped,)),
            "weigh.table": Array((table, mapped)),
            "weigh.gate": Array((2 * variables, self.units)),
            "weigh.gate_bias": Array((2 * variables,)),
            "weigh.residual_weight": Array((variables,), optional=True),
            "weigh.residual_bias": Array((variables,), optional=True),
            "weigh.norm_weight": Array((variables,)),
            "weigh.norm_bias": Array((variables,)),
            "slope": Array(units),
            "shift": Array(units),
            "gate": Array((reals, 2 * hidden, self.variable_units), product=True),
            "gate_bias": Array((reals, 2 * hidden)),
            "residual_slope": of_hidden,
            "residual_shift": of_hidden,
            "residual_weight": Array(of_hidden.shape, optional=True),
            "residual_bias": Array(of_hidden.shape, optional=True),
            "norm_weight": of_hidden,
            "norm_bias": of_hidden,
            "table": Array((table, hidden)),
        }


@dataclass(frozen=True)
class TFTShape:
    """Sizes and inputs of a transformer; everything that its arrays do not say.

    Attributes:
        hidden: its width.
        heads: of the attention; they divide the width.
        reals: columns of the real inputs, by name.
        categoricals: columns of the categorical inputs, by name.
        static, history, future: which of them each selection reads; a static one may read none.
        outputs: columns of the prediction of each target, its quantiles.
        layers: of long short-term memory.
        epsilon: of every norm.
        ahead: future steps that a predicted step sees from itself on; None is all of them.
    """

    hidden: int
    heads: int
    reals: tuple
    categoricals: tuple
    static: Selection
    history: Selection
    future: Selection
    outputs: tuple
    layers: int = 1
    epsilon: float = 1e-5
    ahead: int | None = 0

    def __post_init__(self):
        if self.hidden < 1 or self.heads < 1 or self.hidden % self.heads:
            raise ValueError(
                f"hidden must be a multiple of heads, got hidden={self.hidden}, heads={self.heads}"
            )
        for name in SELECTIONS:
            selection = getattr(self, name)
            for kind in ("reals", "categoricals"):
                missing = set(getattr(selection, kind)) - set(getattr(self, kind))
                if missing:
                    raise ValueError(
                        f"{name}.{kind} must be among {kind}={list(getattr(self, kind))}, got "
                        f"{sorted(missing)}"
                    )
        if not self.history.variables or not self.future.variables:
            raise ValueError("history and future must each read a variable")

    def arrays(self):
        """{name: Array} of every array of the transformer."""
        hidden, value, square = (
            self.hidden,
            self.hidden // self.heads,
            Array((self.hidden,) * 2, True),
        )
        found = {}
        for name in SELECTIONS:
            selection = getattr(self, name)
            found |= {f"{name}.{n}": a for n, a in selection.arrays(hidden).items()}
            if name != "static":
                found[f"{name}.context"] = Array((selection.units, hidden), product=True)
        for name in self.contexts:
            if self.static.variables:
                found |= _network(f"context.{name}", hidden)
            else:
                found[f"context.{name}"] = Array((hidden,), product=True)
        for layer in range(self.layers):
            both = Array((2, 4 * hidden, hidden), product=True)
            found |= {f"lstm.{layer}.{n}": both for n in ("input", "recurrent")}
            found[f"lstm.{layer}.bias"] = Array((2, 4 * hidden))
        found |= _gate("lstm.gate", hidden, hidden)
        found |= _network("enrichment", hidden) | {"enrichment.context": square}
        found |= {"attention.query": square, "attention.query_bias": Array((hidden,))}
        found["attention.source"] = Array((hidden + value, hidden), product=True)
        found["attention.source_bias"] = Array((hidden + value,))
        found |= _gate("attention.gate", hidden, value)
        found |= _network("feed_forward", hidden)
        found |= _gate("output.gate", hidden, hidden)
        found["output.weight"] = Array((sum(self.outputs), hidden), product=True)
        found["output.bias"] = Array((sum(self.outputs),))
        return found

    @property
    def contexts(self):
        """Names of what the static variables say to the rest: also the states of every layer."""
        states = [f"{n}.{layer}" for n in ("hidden", "cell") for layer in range(self.layers)]
        return ("selection", "enrichment", *states)


def _network(name, hidden):
    """Arrays of a gated residual network of one width."""
    return {
        f"{name}.first": Array((hidden, hidden), product=True),
        f"{name}.first_bias": Array((hidden,)),
    } | _gate(name, hidden, hidden)


def _gate(name, hidden, inputs):
    """Arrays of a gate with a residual and a norm."""
    return {
        f"{name}.gate": Array((2 * hidden, inputs), product=True),
        f"{name}.gate_bias": Array((2 * hidden,)),
        f"{name}.norm_weight": Array((hidden,)),
        f"{name}.norm_bias": Array((hidden,)),
    }
