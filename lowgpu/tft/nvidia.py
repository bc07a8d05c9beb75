"""Weights of the transformer in NVIDIA's DeepLearningExamples, and of NeuralForecast's, which has its blocks.

Every variable is embedded to the full width, residuals of another width are projected and not normed, and
norms have an epsilon of 1e-3. Both come as arrays: {name: tensor.detach().cpu().float().numpy()} of a
state_dict. Neither says how its inputs are called, so the caller does, in the order they were trained in.
"""

import re

import numpy as np

from lowgpu.tft.folding import (
    CategoricalVariable,
    Network,
    Norm,
    RealVariable,
    Resample,
    fold_selection,
    gated,
)
from lowgpu.tft.importing import recurrent_arrays
from lowgpu.tft.layout import Selection, TFTShape
from lowgpu.tft.reader import Reader

EPSILON = 1e-3
AHEAD = 1  # a predicted step sees itself
# Of NeuralForecast: what NVIDIA has under another name.
RENAMED = (
    (re.compile(r"^temporal_(?:encoder|fusion_decoder)\."), ""),
    (re.compile(r"^output_adapter\."), "quantile_proj."),
    (re.compile(r"^embedding\.stat_exog_"), "embedding.s_cont_"),
    (re.compile(r"^embedding\.futr_exog_"), "embedding.t_cont_k_"),
    (re.compile(r"^embedding\.hist_exog_"), "embedding.t_cont_o_"),
    (re.compile(r"^embedding\.tgt_"), "embedding.t_tgt_"),
)
NO_WEIGHTS = re.compile(r"(^|\.)attention\._mask$|^(valid_)?loss\.")


def from_nvidia(
    state,
    *,
    targets,
    static_categoricals=(),
    static_reals=(),
    known_categoricals=(),
    known_reals=(),
    observed_categoricals=(),
    observed_reals=(),
):
    """(shape, arrays) of a state_dict of NVIDIA's TemporalFusionTransformer.

    Args:
        state: {name: NumPy array}.
        targets, static_categoricals, static_reals, known_categoricals, known_reals,
            observed_categoricals, observed_reals: the inputs' names, in the order they were trained in.

    Returns:
        shape: a TFTShape; its real inputs are static, known, observed and targets, in that order.
        arrays: float64, by the names of `shape.arrays()`, for `TFT`.

    Raises:
        TypeError: an array of another kind.
        ValueError: an array that is missing, unexpected, of another shape or not finite.
    """
    state = {n: a for n, a in state.items() if not NO_WEIGHTS.search(n)}
    names = {
        "s_cat": tuple(static_categoricals),
        "s_cont": tuple(static_reals),
        "t_cat_k": tuple(known_categoricals),
        "t_cont_k": tuple(known_reals),
        "t_cat_o": tuple(observed_categoricals),
        "t_cont_o": tuple(observed_reals),
        "t_tgt": tuple(targets),
    }
    return _Importer(Reader(state), names).run()


def from_neuralforecast(
    state, *, static_reals=(), known_reals=("repeated_target",), observed_reals=(), targets=("y",)
):
    """(shape, arrays) of a state_dict of NeuralForecast's TFT with LSTMs and ELU.

    Args:
        state: {name: NumPy array}.
        static_reals, known_reals, observed_reals, targets: the inputs' names: its stat_exog_list,
            futr_exog_list and hist_exog_list, and the series. A model without a futr_exog_list was
            trained with the last target of the history, repeated over all steps: a real input as
            every other, which the caller brings.

    Returns:
        as of `from_nvidia`.

    Raises:
        TypeError: an array of another kind.
        ValueError: an array that is missing, unexpected, of another shape (a GRU's has 3 gates) or
            not finite.
    """
    state = {n: a for n, a in state.items() if not NO_WEIGHTS.search(n)}
    names = dict.fromkeys(("s_cat", "t_cat_k", "t_cat_o"), ())
    names |= {"s_cont": tuple(static_reals), "t_cont_k": tuple(known_reals)}
    names |= {"t_cont_o": tuple(observed_reals), "t_tgt": tuple(targets)}
    return _Importer(Reader(state, RENAMED), names).run()


class _Importer:
    """Reads the modules of NVIDIA's network."""

    def __init__(self, reader, names):
        self.reader, self.names = reader, names
        self.outputs, self.hidden = reader.take("quantile_proj.weight", None, None).shape

    def run(self):
        names, hidden = self.names, self.hidden
        layers = 0
        while f"history_encoder.weight_ih_l{layers}" in self.reader:
            layers += 1
        value = len(self.reader.take("attention.qkv_linears.weight", None, hidden)) - 2 * hidden
        if value < 1 or hidden % value:
            raise ValueError(
                "state['attention.qkv_linears.weight'] must have rows of queries, keys and one value "
                f"of {hidden} columns, got {value + 2 * hidden}"
            )
        arrays, selections = {}, {}
        for name, source, kinds in (
            ("static", "static_encoder.vsn", ("s_cat", "s_cont")),
            ("history", "history_vsn", ("t_cat_o", "t_cont_o", "t_cat_k", "t_cont_k", "t_tgt")),
            ("future", "future_vsn", ("t_cat_k", "t_cont_k")),
        ):
            selections[name], found = self.selection(name, source, kinds)
            arrays |= {f"{name}.{n}": a for n, a in found.items()}
        arrays |= self.contexts(layers, bool(selections["static"].variables))
        for layer in range(layers):
            arrays |= self.recurrent_layer(layer)
        arrays |= self.attention(value) | self.blocks()
        weight, bias = self.linear("quantile_proj", self.outputs, hidden)
        self.reader.finish()
        shape = TFTShape(
            hidden=hidden,
            heads=hidden // value,
            reals=sum((names[n] for n in ("s_cont", "t_cont_k", "t_cont_o", "t_tgt")), ()),
            categoricals=sum((names[n] for n in ("s_cat", "t_cat_k", "t_cat_o")), ()),
            **selections,
            outputs=(self.outputs,),
            layers=layers,
            epsilon=EPSILON,
            ahead=AHEAD,
        )
        return shape, arrays | {"output.weight": weight, "output.bias": bias}

    def linear(self, name, outputs, inputs):
        weight = self.reader.take(f"{name}.weight", outputs, inputs)
        return weight, self.reader.take(f"{name}.bias", len(weight))

    def norm(self, name):
        return Norm(*(self.reader.take(f"{name}.{n}", self.hidden) for n in ("weight", "bias")))

    def network(self, name, context=False):
        hidden = self.hidden
        return Network(
            *self.linear(f"{name}.lin_a", hidden, hidden),
            *self.linear(f"{name}.lin_i", hidden, hidden),
            *self.linear(f"{name}.glu.lin", 2 * hidden, hidden),
            self.norm(f"{name}.layer_norm.ln"),
            context=self.reader.take(f"{name}.lin_c.weight", hidden, hidden) if context else None,
        )

    def joint(self, name, variables, static):
        """The network that weighs variables; of a single one nothing counts."""
        hidden, inputs = self.hidden, variables * self.hidden
        first = self.linear(f"{name}.lin_a", hidden, inputs)
        second = self.linear(f"{name}.lin_i", hidden, hidden)
        gate = self.linear(f"{name}.glu.lin", 2 * variables, hidden)
        # The static one's is never used.
        context = self.reader.take(f"{name}.lin_c.weight", hidden, hidden)
        projected = self.linear(f"{name}.out_proj", variables, inputs)
        if variables == 1:
            return None
        norm = Norm(
            *(self.reader.take(f"{name}.layer_norm.ln.{n}", variables) for n in ("weight", "bias"))
        )
        resample = Resample(*projected)
        return Network(*first, *second, *gate, norm, resample, None if static else context)

    def variables(self, source, kinds):
        """{name: variable} in the order in which the network reads them."""
        hidden, found = self.hidden, {}
        for kind in kinds:
            names, rows = self.names[kind], None
            if names and "cat" not in kind:
                rows = [
                    self.reader.take(f"embedding.{kind}_embedding_{n}", len(names), hidden)
                    for n in ("vectors", "bias")
                ]
            for i, name in enumerate(names):
                network = self.network(f"{source}.var_grns.{len(found)}")
                if rows is not None:
                    found[name] = RealVariable(rows[0][i], rows[1][i], network)
                else:
                    table = self.reader.take(f"embedding.{kind}_embed.{i}.weight", None, hidden)
                    found[name] = CategoricalVariable(table, network.of_rows(table, EPSILON))
        return found

    def selection(self, name, source, kinds):
        order = sum((self.names[kind] for kind in kinds), ())
        if len(set(order)) < len(order):
            raise ValueError(f"names of inputs must differ, got {list(order)}")
        if not order:
            return Selection(), {}
        variables = self.variables(source, kinds)
        joint = self.joint(f"{source}.joint_grn", len(order), name == "static")
        arrays, units, own_units = fold_selection(variables, list(order), joint, self.hidden)
        if joint is None and name != "static":
            arrays["context"] = np.zeros((units, self.hidden))
        reals = tuple(n for n in order if isinstance(variables[n], RealVariable))
        cats = tuple(n for n in order if n not in reals)
        cardinalities = tuple(len(variables[n].embedding) for n in cats)
        return Selection(reals, cats, cardinalities, units, own_units), arrays

    def contexts(self, layers, static):
        """Networks of selection, enrichment, then states: one for all layers, or one for each."""
        if not static:
            states = [f"{n}.{layer}" for n in ("hidden", "cell") for layer in range(layers)]
            names = ("selection", "enrichment", *states)
            return {f"context.{n}": np.zeros(self.hidden) for n in names}
        each = f"static_encoder.context_grns.{2 * layers + 1}.lin_a.weight" in self.reader
        states = layers if each else 1
        arrays = {}
        for i, name in enumerate(("selection", "enrichment")):
            network = self.network(f"static_encoder.context_grns.{i}")
            arrays |= network.arrays(f"context.{name}")
        for kind, first in (("hidden", 2), ("cell", 2 + states)):
            for layer in range(layers):
                at = first + (layer if each else 0)
                network = self.network(f"static_encoder.context_grns.{at}")
                arrays |= network.arrays(f"context.{kind}.{layer}")
        return arrays

    def recurrent_layer(self, layer):
        gates, hidden, parts = 4 * self.hidden, self.hidden, []
        for part in ("history_encoder", "future_encoder"):
            of_input, of_hidden = (
                self.reader.take(f"{part}.weight_{n}_l{layer}", gates, hidden) for n in ("ih", "hh")
            )
            biases = (self.reader.take(f"{part}.bias_{n}_l{layer}", gates) for n in ("ih", "hh"))
            parts.append((of_input, sum(biases), of_hidden))
        return recurrent_arrays(layer, parts)

    def attention(self, value):
        hidden = self.hidden
        both = self.reader.take("attention.qkv_linears.weight", 2 * hidden + value, hidden)
        back = self.reader.take("attention.out_proj.weight", hidden, value)
        gate, gate_bias = self.linear("attention_gate.lin", 2 * hidden, hidden)
        arrays = {
            "attention.query": both[:hidden],
            "attention.query_bias": np.zeros(hidden),
            "attention.source": both[hidden:],
            "attention.source_bias": np.zeros(hidden + value),
        }
        return arrays | gated("attention.gate", gate @ back, gate_bias, self.norm("attention_ln"))

    def blocks(self):
        enrichment = self.network("enrichment_grn", context=True)
        arrays = enrichment.arrays("enrichment") | {"enrichment.context": enrichment.context}
        arrays |= self.network("positionwise_grn").arrays("feed_forward")
        for name, source in (("lstm.gate", "input_gate"), ("output.gate", "decoder_gate")):
            gate = self.linear(f"{source}.lin", 2 * self.hidden, self.hidden)
            norm = self.norm(f"{source}_ln" if name == "lstm.gate" else "decoder_ln")
            arrays |= gated(name, *gate, norm)
        return arrays
