"""The transformer as a list of ops, and the arrays that they fill."""

import math
from dataclasses import dataclass

from lowgpu_kernels.ops.tft.gated import gated_norm, gated_residual
from lowgpu_kernels.ops.tft.interpretable_attention import interpretable_attention
from lowgpu_kernels.ops.tft.linear import linear, linear_float32
from lowgpu_kernels.ops.tft.lstm import lstm
from lowgpu_kernels.ops.tft.selection_weights import selection_weights
from lowgpu_kernels.ops.tft.variable_mixture import variable_mixture

WEIGHING = (
    *("slope", "shift", "table", "gate", "gate_bias"),
    *("residual_weight", "residual_bias", "norm_weight", "norm_bias"),
)
MIXING = (
    *("slope", "shift", "gate", "gate_bias", "residual_slope", "residual_shift"),
    *("residual_weight", "residual_bias", "norm_weight", "norm_bias", "table"),
)
GATE = "gate", "gate_bias", "norm_weight", "norm_bias"


def buffers(shape, sequences, history, future):
    """{name: (shape, element type)} of what a pass fills; "real" is the precision's type.

    Args:
        shape: the TFTShape.
        sequences, history, future: sequences of the batch, and steps of each.
    """
    hidden, steps, value = shape.hidden, history + future, shape.hidden // shape.heads
    rows = steps, sequences
    found = {
        "selected": ((*rows, hidden), "real"),
        "temporal": ((*rows, hidden), "real"),
        "enriched": ((*rows, hidden), "real"),
        "gates": ((*rows, 4 * hidden), "real"),
        "sources": ((*rows, hidden + value), "real"),
        "query": ((future, sequences, hidden), "real"),
        "mixed": ((future, sequences, value), "real"),
        "attention": ((future, sequences, steps), "float32"),
        "prediction": ((future, sequences, sum(shape.outputs)), "float32"),
        "enrichment_context": ((sequences, hidden), "float32"),
    }
    for name in ("attended", "fed", "last"):
        found[name] = (future, sequences, hidden), "real"
    for layer in range(shape.layers):
        found[f"recurrent.{layer}"] = (*rows, hidden), "real"
    for name, count in (("static", 1), ("history", history), ("future", future)):
        selection = getattr(shape, name)
        found[f"{name}.share"] = (count, sequences, len(selection.variables)), "float32"
        if name != "static":
            found[f"{name}.context"] = (sequences, selection.units), "float32"
    if shape.static.variables:
        found["static"] = (1, sequences, hidden), "real"
        found["static.reals"] = (sequences, 1, len(shape.reals)), "float32"
        found["static.categories"] = (sequences, 1, len(shape.categoricals)), "int32"
        found |= {f"context.{n}": ((sequences, hidden), "real") for n in shape.contexts}
    return found


def forward(shape, weights, inputs, into, run, precision="float32", made_by=None):
    """One pass: every op in order, each into its buffers.

    Args:
        shape: the TFTShape.
        weights: arrays by name, and of each selection `columns`, `category_columns`, `bounds`.
        inputs: reals and categories of history and future, and of static variables where there are
            any; lengths or None.
        into: what `buffers` names; without static variables also what they would have said.
        run: (op, arrays, out, **parameters) -> None, which fills `out`.
        precision: of the REAL arrays.
        made_by: the Pass to make; `Pass` where left out.
    """
    made = (made_by or Pass)(shape, weights, inputs, into, run, precision)
    made.contexts()
    made.selections()
    made.recurrence()
    made.enrichment()
    made.attention()
    made.head()


@dataclass(frozen=True)
class Pass:
    """The arguments of `forward`, and its parts."""

    shape: object
    weights: dict
    inputs: dict
    into: dict
    run: object
    precision: str

    @property
    def history(self):
        return self.inputs["history.reals"].shape[1]

    def contexts(self):
        """What static variables say to the rest."""
        if self.shape.static.variables:
            self._select("static", self.into["static"])
            for name in self.shape.contexts:
                self._network(f"context.{name}", self.into["static"], self.into[f"context.{name}"])

    def selections(self):
        for name, rows in (("history", slice(self.history)), ("future", slice(self.history, None))):
            said, context = self.into["context.selection"], self.into[f"{name}.context"]
            self._project(f"{name}.context", said, context, linear_float32)
            self._select(name, self.into["selected"][rows])

    def recurrence(self):
        x, gates = self.into["selected"], self.into["gates"]
        for layer in range(self.shape.layers):
            for part, rows in enumerate((slice(self.history), slice(self.history, None))):
                weight, bias = (self.weights[f"lstm.{layer}.{n}"][part] for n in ("input", "bias"))
                self.run(linear, (rows_of(x[rows]), weight, bias), rows_of(gates[rows]))
            states = (self.into[f"context.{n}.{layer}"] for n in ("hidden", "cell"))
            recurrent, x = self.weights[f"lstm.{layer}.recurrent"], self.into[f"recurrent.{layer}"]
            arrays = gates, recurrent, *states, self.inputs["lengths"]
            self.run(lstm, arrays, x, history=self.history)
        self._gate("lstm.gate", x, self.into["selected"], self.into["temporal"])

    def enrichment(self):
        context, enriched = self.into["enrichment_context"], self.into["enriched"]
        said = self.into["context.enrichment"]
        self._project("enrichment.context", said, context, linear_float32)
        self._network("enrichment", self.into["temporal"], enriched, context)
        self._project("attention.source", enriched, self.into["sources"])
        self._project("attention.query", enriched[self.history :], self.into["query"])

    def attention(self):
        ahead = len(self.into["query"]) if self.shape.ahead is None else self.shape.ahead
        lengths = self.inputs["lengths"], self.inputs["future_lengths"]
        arrays = self.into["query"], self.into["sources"], *lengths
        found = self.into["mixed"], self.into["attention"]
        self.run(interpretable_attention, arrays, found, heads=self.shape.heads, ahead=ahead)
        enriched = self.into["enriched"][self.history :]
        self._gate("attention.gate", self.into["mixed"], enriched, self.into["attended"])

    def head(self):
        self._network("feed_forward", self.into["attended"], self.into["fed"])
        temporal = self.into["temporal"][self.history :]
        self._gate("output.gate", self.into["fed"], temporal, self.into["last"])
        arrays = (
            rows_of(self.into["last"]),
            self.weights["output.weight"],
            self.weights["output.bias"],
        )
        self.run(linear_float32, arrays, rows_of(self.into["prediction"]))

    def _named(self, name, arrays):
        return [self.weights.get(f"{name}.{n}") for n in arrays]

    def _project(self, name, x, out, op=linear):
        arrays = rows_of(x), self.weights[name], self.weights.get(f"{name}_bias")
        self.run(op, arrays, rows_of(out))

    def _select(self, name, out):
        brought = self.inputs[f"{name}.reals"], self.inputs[f"{name}.categories"]
        read = self._named(name, ("columns", "category_columns", "bounds"))
        context, share = self.into.get(f"{name}.context"), self.into[f"{name}.share"]
        epsilon = self.shape.epsilon
        arrays = *brought, *read, context, *self._named(f"{name}.weigh", WEIGHING)
        self.run(selection_weights, arrays, share, epsilon=epsilon)
        arrays = *brought, *read, share, *self._named(name, MIXING)
        self.run(variable_mixture, arrays, out, epsilon=epsilon, precision=self.precision)

    def _network(self, name, x, out, context=None):
        arrays = rows_of(x), context, *self._named(name, ("first", "first_bias", *GATE))
        self.run(gated_residual, arrays, rows_of(out), epsilon=self.shape.epsilon)

    def _gate(self, name, x, residual, out):
        arrays = rows_of(x), rows_of(residual), *self._named(name, GATE)
        self.run(gated_norm, arrays, rows_of(out), epsilon=self.shape.epsilon)


def rows_of(array):
    """The same memory as rows that do not depend on each other."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
