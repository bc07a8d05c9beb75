"""The transformer with int8 products, as a list of ops."""

from lowgpu.tft.graph import GATE, WEIGHING, Pass, buffers, rows_of
from lowgpu.tft.int8_layout import TABULATED, int8_products
from lowgpu_kernels.ops.tft.gated_int8 import gated_norm_int8, gated_residual_int8
from lowgpu_kernels.ops.tft.linear import linear
from lowgpu_kernels.ops.tft.linear_int8 import linear_int8
from lowgpu_kernels.ops.tft.lstm_int8 import ONE, lstm_int8
from lowgpu_kernels.ops.tft.selection_weights import selection_weights
from lowgpu_kernels.ops.tft.tabulated_mixture import tabulated_mixture

LSTM = "input", "input_scale", "bias", "recurrent", "recurrent_scale"
GATE_INT8 = "gate", "gate_scale", *GATE[1:]


def int8_buffers(shape, sequences, history, future):
    """As `buffers`: hidden states are levels, and the gates' inputs are never stored."""
    found = buffers(shape, sequences, history, future)
    del found["gates"]
    for layer in range(shape.layers):
        name = f"recurrent.{layer}"
        found[name] = found[name][0], "int8"
    return found


class Int8Pass(Pass):
    """A pass whose products over steps are of int8, with variables' networks as tables."""

    def recurrence(self):
        x = self.into["selected"]
        for layer in range(self.shape.layers):
            states = (self.into[f"context.{n}.{layer}"] for n in ("hidden", "cell"))
            arrays = x, *self._named(f"lstm.{layer}", LSTM), *states, self.inputs["lengths"]
            levels, first = self._named(f"lstm.{layer}", ("levels", "first_levels"))
            x, history = self.into[f"recurrent.{layer}"], self.history
            given = {"levels": levels or ONE, "first_levels": first}
            self.run(lstm_int8, arrays, x, history=history, **given)
        self._gate("lstm.gate", x, self.into["selected"], self.into["temporal"])

    def _select(self, name, out):
        if name not in TABULATED:
            super()._select(name, out)
            return
        brought = self.inputs[f"{name}.reals"], self.inputs[f"{name}.categories"]
        read = self._named(name, ("columns", "category_columns", "bounds"))
        share = self.into[f"{name}.share"]
        arrays = *brought, *read, self.into[f"{name}.context"]
        weigh = self._named(f"{name}.weigh", WEIGHING)
        self.run(selection_weights, (*arrays, *weigh), share, epsilon=self.shape.epsilon)
        arrays = *brought, *read, share, *self._named(name, ("spread", "nodes", "table"))
        self.run(tabulated_mixture, arrays, out)

    def _project(self, name, x, out, op=linear):
        if name not in int8_products(self.shape):
            super()._project(name, x, out, op)
            return
        arrays = rows_of(x), *(self.weights[f"{name}{n}"] for n in ("", "_scale", "_bias"))
        self.run(linear_int8, arrays, rows_of(out), levels=self.weights["attention.levels"])

    def _network(self, name, x, out, context=None):
        if f"{name}.first" not in int8_products(self.shape):
            super()._network(name, x, out, context)
            return
        named = self._named(name, ("first", "first_scale", "first_bias", *GATE_INT8))
        levels = {n: self.weights[f"{name}.{n}"] for n in ("levels", "unit_levels")}
        arrays = rows_of(x), context, *named
        epsilon = self.shape.epsilon
        self.run(gated_residual_int8, arrays, rows_of(out), epsilon=epsilon, **levels)

    def _gate(self, name, x, residual, out):
        if f"{name}.gate" not in int8_products(self.shape):
            super()._gate(name, x, residual, out)
            return
        arrays = rows_of(x), rows_of(residual), *self._named(name, GATE_INT8)
        levels = self.weights.get(f"{name}.levels", ONE)
        epsilon = self.shape.epsilon
        self.run(gated_norm_int8, arrays, rows_of(out), epsilon=epsilon, levels=levels)
