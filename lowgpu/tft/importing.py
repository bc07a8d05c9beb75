"""Weights of pytorch-forecasting's TemporalFusionTransformer. Nothing is unpickled.

Its checkpoints hold pickled objects beside the weights, and its state_dict the same tensor under several
names. So the weights come as arrays, or as a safetensors file that pytorch's own side has written:

    import json
    from safetensors.torch import save_file
    arrays = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = {name: model.hparams[name] for name in lowgpu.tft.importing.HYPERPARAMETERS}
    save_file(arrays, "tft.safetensors", metadata={"hparams": json.dumps(wanted)})
"""

import json
import re
from pathlib import Path

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
from lowgpu.tft.layout import CONTEXTS, Selection, TFTShape
from lowgpu.tft.reader import Reader
from lowgpu_kernels.ops.tft.norm import spec_norm

HYPERPARAMETERS = (
    *("hidden_size", "attention_head_size", "lstm_layers", "output_size", "causal_attention"),
    *("x_reals", "x_categoricals", "static_categoricals", "static_reals"),
    *("time_varying_categoricals_encoder", "time_varying_reals_encoder"),
    *("time_varying_categoricals_decoder", "time_varying_reals_decoder"),
)
EPSILON = 1e-5  # of torch's LayerNorm
SOURCES = {"static": "static", "history": "encoder", "future": "decoder"}
# A tensor's other names, and the one it is read under.
ALIASES = (
    (re.compile(r"(?:static|encoder|decoder)_variable_selection\.prescalers\."), "prescalers."),
    (re.compile(r"post_lstm_(gate|add_norm)_decoder\."), r"post_lstm_\1_encoder."),
)
SHARED = re.compile(r"(?:encoder|decoder)_variable_selection\.single_variable_grns\.")


def load_pytorch_forecasting(path):
    """(shape, arrays) of a safetensors file with the hyperparameters in its metadata.

    Args:
        path: written as the module's first lines show.

    Raises:
        ValueError: another kind of file, one without the hyperparameters, or weights that
            `from_pytorch_forecasting` refuses.
    """
    from safetensors import SafetensorError, safe_open

    how = "write one as lowgpu.tft.importing shows, from model.state_dict()"
    if Path(path).suffix in (".ckpt", ".pt", ".pth", ".pkl"):
        raise ValueError(f"path must be a safetensors file, got {path}, which is pickled: {how}")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"path must be a safetensors file, got {path} ({error}): {how}") from None
    if "hparams" not in metadata:
        raise ValueError(f"{path} must have 'hparams' in its metadata, got {list(metadata)}: {how}")
    return from_pytorch_forecasting(arrays, json.loads(metadata["hparams"]))


def from_pytorch_forecasting(state, hparams):
    """(shape, arrays) of a state_dict of pytorch-forecasting's TemporalFusionTransformer.

    Args:
        state: {name: NumPy array}; a tensor with several names may come under one of them or all.
        hparams: what `model.hparams` says of HYPERPARAMETERS: the weights do not tell the order of
            the variables.

    Returns:
        shape: a TFTShape.
        arrays: float64, by the names of `shape.arrays()`, for `TFT`.

    Raises:
        TypeError: an array of another kind.
        ValueError: an array that is missing, unexpected, of another shape or not finite; names of
            one tensor that differ; a hyperparameter that is missing.
    """
    missing = [n for n in HYPERPARAMETERS if n not in hparams]
    if missing:
        raise ValueError(f"hparams must have {missing[0]}: give model.hparams[{missing[0]!r}]")
    shared = any(n.startswith("shared_single_variable_grns.") for n in state) or bool(
        hparams.get("share_single_variable_networks", False)
    )
    aliases = [*ALIASES, *([(SHARED, "shared_single_variable_grns.")] if shared else [])]
    return _Importer(Reader(state, aliases), hparams).run()


class _Importer:
    """Reads the modules of the library's network."""

    def __init__(self, reader, hparams):
        self.reader, self.given = reader, hparams
        self.hidden = int(hparams["hidden_size"])
        self.scalers = {}

    def run(self):
        given = self.given
        outputs = given["output_size"]
        outputs = tuple(outputs) if isinstance(outputs, (list, tuple)) else (int(outputs),)
        arrays, selections = {}, {}
        for name in SOURCES:
            selections[name], found = self.selection(name)
            arrays |= {f"{name}.{n}": a for n, a in found.items()}
        layers, heads = int(given["lstm_layers"]), int(given["attention_head_size"])
        arrays |= self.contexts(layers, bool(selections["static"].variables))
        for layer in range(layers):
            arrays |= self.recurrent_layer(layer)
        arrays |= self.attention(heads) | self.blocks() | self.heads(outputs)
        for name in given["x_reals"]:
            # Scaled like the others, and read by no selection.
            if name not in self.scalers and f"prescalers.{name}.weight" in self.reader:
                self.linear(f"prescalers.{name}", None, 1)
        self.reader.finish()
        shape = TFTShape(
            hidden=self.hidden,
            heads=heads,
            reals=tuple(given["x_reals"]),
            categoricals=tuple(given["x_categoricals"]),
            **selections,
            outputs=outputs,
            layers=layers,
            epsilon=EPSILON,
            ahead=0 if given["causal_attention"] else None,
        )
        return shape, arrays

    def linear(self, name, outputs, inputs):
        weight = self.reader.take(f"{name}.weight", outputs, inputs)
        return weight, self.reader.take(f"{name}.bias", len(weight))

    def norm(self, name, size):
        return Norm(*(self.reader.take(f"{name}.{n}", size) for n in ("weight", "bias")))

    def network(self, name, inputs, units, outputs, context=False):
        """A gated residual network; its residual is resampled where the width changes."""
        first, first_bias = self.linear(f"{name}.fc1", units, inputs)
        second, second_bias = self.linear(f"{name}.fc2", units, units)
        gate, gate_bias = self.linear(f"{name}.gate_norm.glu.fc", 2 * outputs, units)
        resample = None
        if inputs != outputs:
            matrix, norm = self.resampled(f"{name}.resample_norm", inputs, outputs)
            resample = Resample(matrix, np.zeros(outputs), norm)
        return Network(
            *(first, first_bias, second, second_bias, gate, gate_bias),
            self.norm(f"{name}.gate_norm.add_norm.norm", outputs),
            resample,
            self.reader.take(f"{name}.context.weight", units, self.hidden) if context else None,
        )

    def resampled(self, name, inputs, outputs):
        """(matrix, norm) of a linear interpolation between columns, scaled by twice a sigmoid."""
        scale = 2 / (1 + np.exp(-self.reader.take(f"{name}.mask", outputs)))
        matrix = scale[:, None] * interpolation(inputs, outputs)
        return matrix, self.norm(f"{name}.norm", outputs)

    def variable(self, selection, name, categorical):
        hidden, own = self.hidden, f"{selection}.single_variable_grns.{name}"
        shared = f"shared_single_variable_grns.{name}"
        if f"{shared}.fc1.weight" in self.reader and not selection.startswith("static"):
            own = shared
        if not categorical:
            if name not in self.scalers:
                weight, bias = self.linear(f"prescalers.{name}", None, 1)
                self.scalers[name] = weight[:, 0], bias
            slope, shift = self.scalers[name]
            network = self.network(own, len(slope), min(len(slope), hidden), hidden)
            return RealVariable(slope, shift, network)
        rows = self.reader.take(f"input_embeddings.embeddings.{name}.weight", None, None)
        width = rows.shape[1]
        if f"{own}.fc1.weight" in self.reader:
            network = self.network(own, width, min(width, hidden), hidden)
            return CategoricalVariable(rows, network.of_rows(rows, EPSILON))
        matrix, norm = self.resampled(own, width, hidden)
        represented = spec_norm(rows @ matrix.T, norm.weight, norm.bias, EPSILON)
        return CategoricalVariable(rows, represented)

    def selection(self, name):
        source = SOURCES[name]
        kind = "static_{}" if name == "static" else f"time_varying_{{}}_{source}"
        cats, reals = (self.given[kind.format(n)] for n in ("categoricals", "reals"))
        selection, order = f"{source}_variable_selection", [*cats, *reals]
        variables = {n: self.variable(selection, n, n in cats) for n in order}
        if not order:
            return Selection(), {}
        joint = None
        if len(order) > 1:
            joint = self.network(
                f"{selection}.flattened_grn",
                sum(v.width for v in variables.values()),
                min(self.hidden, len(order)),
                len(order),
                context=name != "static",
            )
        arrays, units, variable_units = fold_selection(variables, order, joint, self.hidden)
        if joint is None and name != "static":
            arrays["context"] = np.zeros((units, self.hidden))
        cardinalities = tuple(len(variables[n].embedding) for n in cats)
        return Selection(tuple(reals), tuple(cats), cardinalities, units, variable_units), arrays

    def contexts(self, layers, static):
        """What static variables say to the rest; constants where there are none."""
        arrays = {}
        for name in CONTEXTS:
            source = {
                "selection": "variable_selection",
                "hidden": "initial_hidden_lstm",
                "cell": "initial_cell_lstm",
            }.get(name, name)
            network = self.network(f"static_context_{source}", *[self.hidden] * 3)
            states = name in ("hidden", "cell")
            for own in [f"{name}.{n}" for n in range(layers)] if states else [name]:
                if static:
                    arrays |= network.arrays(f"context.{own}")
                else:
                    zero = np.zeros((1, self.hidden))
                    arrays[f"context.{own}"] = network.of_rows(zero, EPSILON)[0]
        return arrays

    def recurrent_layer(self, layer):
        gates, hidden = 4 * self.hidden, self.hidden
        parts = []
        for part in ("lstm_encoder", "lstm_decoder"):
            of_input, of_hidden = (
                self.reader.take(f"{part}.weight_{n}_l{layer}", gates, hidden) for n in ("ih", "hh")
            )
            biases = (self.reader.take(f"{part}.bias_{n}_l{layer}", gates) for n in ("ih", "hh"))
            parts.append((of_input, sum(biases), of_hidden))
        return recurrent_arrays(layer, parts)

    def attention(self, heads):
        value, name = self.hidden // heads, "multihead_attn"
        queries = [self.linear(f"{name}.q_layers.{h}", value, self.hidden) for h in range(heads)]
        sources = [self.linear(f"{name}.k_layers.{h}", value, self.hidden) for h in range(heads)]
        sources.append(self.linear(f"{name}.v_layer", value, self.hidden))
        back = self.reader.take(f"{name}.w_h.weight", self.hidden, value)
        gate, gate_bias = self.linear("post_attn_gate_norm.glu.fc", 2 * self.hidden, self.hidden)
        arrays = {}
        for kind, layers in (("query", queries), ("source", sources)):
            arrays[f"attention.{kind}"] = np.concatenate([weight for weight, _ in layers])
            arrays[f"attention.{kind}_bias"] = np.concatenate([bias for _, bias in layers])
        norm = self.norm("post_attn_gate_norm.add_norm.norm", self.hidden)
        return arrays | gated("attention.gate", gate @ back, gate_bias, norm)

    def blocks(self):
        hidden = self.hidden
        enrichment = self.network("static_enrichment", hidden, hidden, hidden, context=True)
        arrays = enrichment.arrays("enrichment") | {"enrichment.context": enrichment.context}
        arrays |= self.network("pos_wise_ff", hidden, hidden, hidden).arrays("feed_forward")
        for name, gate, norm in (
            ("lstm.gate", "post_lstm_gate_encoder.fc", "post_lstm_add_norm_encoder.norm"),
            ("output.gate", "pre_output_gate_norm.glu.fc", "pre_output_gate_norm.add_norm.norm"),
        ):
            layer = self.linear(gate, 2 * hidden, hidden)
            arrays |= gated(name, *layer, self.norm(norm, hidden))
        return arrays

    def heads(self, outputs):
        several = "output_layer.0.weight" in self.reader
        layers = [
            self.linear(f"output_layer.{i}" if several else "output_layer", size, self.hidden)
            for i, size in enumerate(outputs)
        ]
        weight, bias = (np.concatenate(parts) for parts in zip(*layers))
        return {"output.weight": weight, "output.bias": bias}


def recurrent_arrays(layer, parts):
    """A layer's arrays of (input weight, bias, recurrent weight) of history and future.

    torch has all units of a gate together; here the four gates of a unit are.
    """
    arrays = {}
    for name, both in zip(("input", "bias", "recurrent"), zip(*parts)):
        stacked = np.stack(both)
        by_gate = stacked.reshape(2, 4, -1, *stacked.shape[2:])
        arrays[f"lstm.{layer}.{name}"] = by_gate.swapaxes(1, 2).reshape(stacked.shape)
    return arrays


def interpolation(inputs, outputs):
    """The matrix of a linear interpolation between columns whose ends are the ends."""
    matrix = np.zeros((outputs, inputs))
    for o in range(outputs):
        at = o * (inputs - 1) / (outputs - 1) if outputs > 1 else 0.0
        low = min(int(at), max(inputs - 2, 0))
        matrix[o, low] += 1 - (at - low)
        if inputs > 1:
            matrix[o, low + 1] += at - low
    return matrix
