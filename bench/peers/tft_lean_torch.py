"""The Temporal Fusion Transformer in PyTorch as fast as we can write it: the peer to beat at inference.

The same weights and the same folding as ours (lowgpu.tft.folding): second layers inside gates, embeddings
of reals as slopes, categories as tables. So it does no more arithmetic than our kernels do; what is left is
how it is run. Sequences are all full. It needs PyTorch and no other library.

In the shapes, B is the batch and T history and future steps together.
"""

import torch
from torch import nn
from torch.nn import functional as F

from bench.peers.torch_work import TorchWork, tensor_float_32

VARIANTS = {
    "original": {},
    "float32": {"precision": "float32"},
    "compiled": {"compiled": True},
}


class TFT(TorchWork):
    """A whole pass over random inputs.

    Args:
        shape, arrays: as an importer of `lowgpu.tft` gives them.
        batch, history, future: sequences, and steps of each.
        precision: "float32" with TF32 products, or "bfloat16" for weights and what is stored; norms,
            softmax and the prediction are float32 in either.
        device, mode: see `TorchWork`.
        compiled: run what is before, between and behind the LSTMs through `torch.compile`; the LSTMs
            are cuDNN's in either.

    Attributes:
        inputs: (history reals, future reals, history categories, future categories) on the device.
        output: the last prediction, float32 [B, future, outputs].
    """

    def __init__(
        self,
        shape,
        arrays,
        batch=1024,
        history=168,
        future=24,
        precision="bfloat16",
        device="cuda",
        mode="graph",
        compiled=False,
        seed=0,
    ):
        super().__init__(device, mode)
        if precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision must be 'float32' or 'bfloat16', got {precision!r}")
        if shape.ahead is None:
            raise ValueError("shape.ahead must be a number: this peer's mask is causal, got None")
        self.network = Lean(shape, arrays, history, getattr(torch, precision)).to(device).eval()
        if compiled:
            for part in ("select", "between", "after"):
                setattr(self.network, part, torch.compile(getattr(self.network, part)))
        torch.manual_seed(seed)
        self.inputs = random_inputs(shape, batch, history, future, device)
        self.output = None

    def _work(self):
        with torch.no_grad(), tensor_float_32():
            self.output = self.network(*self.inputs)


def random_inputs(shape, batch, history, future, device):
    """Standard normal reals, and categories that every selection has; static ones the same at all steps."""
    counts = {}
    for selection in (shape.static, shape.history, shape.future):
        counts |= dict(zip(selection.categoricals, selection.cardinalities))
    reals = torch.randn(batch, history + future, len(shape.reals))
    columns = [torch.randint(0, counts.get(n, 1), (batch, 1)) for n in shape.categoricals]
    categories = torch.stack(columns, -1) if columns else torch.zeros(batch, 1, 0, dtype=torch.long)
    categories = categories.expand(batch, history + future, len(columns))
    parts = [
        x[:, rows] for x in (reals, categories) for rows in (slice(history), slice(history, None))
    ]
    return tuple(x.contiguous().to(device) for x in parts)


class Lean(nn.Module):
    """The folded network."""

    def __init__(self, shape, arrays, history, dtype):
        super().__init__()
        self.shape, self.history, self.dtype = shape, history, dtype
        described = shape.arrays()
        for name, array in arrays.items():
            kind = dtype if described[name].product else torch.float32
            self.register_buffer(name.replace(".", "__"), torch.tensor(array, dtype=kind))
        # Lists would be copied to the device in every pass, which a graph cannot hold.
        for name in ("static", "history", "future"):
            wanted = [shape.reals.index(n) for n in getattr(shape, name).reals]
            self.register_buffer(f"{name}__reals", torch.tensor(wanted, dtype=torch.long))
        self.lstms = nn.ModuleList(self._lstm(part) for part in range(2))

    def _lstm(self, part):
        """cuDNN's LSTM over all layers, with the weights of the history (0) or the future (1)."""
        hidden, layers = self.shape.hidden, self.shape.layers
        lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)

        # cuDNN has all units of a gate together, ours the four gates of a unit.
        def apart(x):
            return x.reshape(hidden, 4, *x.shape[1:]).transpose(0, 1).flatten(0, 1)

        for layer in range(layers):
            for theirs, ours in (
                ("weight_ih", "input"),
                ("weight_hh", "recurrent"),
                ("bias_ih", "bias"),
            ):
                value = self[f"lstm.{layer}.{ours}"][part]
                getattr(lstm, f"{theirs}_l{layer}").data = apart(value).float().contiguous()
            getattr(lstm, f"bias_hh_l{layer}").data.zero_()
        return lstm.to(self.dtype)

    def __getitem__(self, name):
        return getattr(self, name.replace(".", "__"))

    def has(self, name):
        return hasattr(self, name.replace(".", "__"))

    def norm(self, name, x):
        weight, bias = self[f"{name}_weight"], self[f"{name}_bias"]
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.shape.epsilon)

    def gate(self, name, x, residual):
        gated = F.glu(F.linear(x, self[f"{name}.gate"]) + self[f"{name}.gate_bias"].to(x.dtype), -1)
        return self.norm(f"{name}.norm", residual + gated).to(self.dtype)

    def grn(self, name, x, context=None):
        units = F.linear(x, self[f"{name}.first"]) + self[f"{name}.first_bias"].to(x.dtype)
        if context is not None:
            units = units + context[:, None]
        return self.gate(name, F.elu(units), x)

    def select(self, name, reals, categories, context):
        """The variables of a selection, weighed and mixed, [B, steps, hidden]."""
        selection, index = getattr(self.shape, name), self.shape.categoricals.index
        x = reals.index_select(-1, self[f"{name}.reals"])
        mapped = x @ self[f"{name}.weigh.slope"] + self[f"{name}.weigh.shift"]
        first, rows = 0, []
        for variable, count in zip(selection.categoricals, selection.cardinalities):
            rows.append(first + categories[..., index(variable)])
            mapped = mapped + F.embedding(rows[-1], self[f"{name}.weigh.table"])
            first += count
        hidden, residual = mapped.split([selection.units, len(selection.variables)], -1)
        if context is not None:
            hidden = hidden + context[:, None]
        if self.has(f"{name}.weigh.residual_weight"):
            residual = self.norm(f"{name}.weigh.residual", residual)
        gated = F.linear(F.elu(hidden), self[f"{name}.weigh.gate"], self[f"{name}.weigh.gate_bias"])
        share = self.norm(f"{name}.weigh.norm", residual + F.glu(gated, -1)).softmax(-1)
        total = 0
        if selection.reals:
            total = (self.own(name, x) * share[..., : len(selection.reals), None]).sum(-2)
        for row, weight in zip(rows, share[..., len(selection.reals) :].unbind(-1)):
            total = total + weight[..., None] * F.embedding(row, self[f"{name}.table"])
        return total.to(self.dtype)

    def own(self, name, x):
        """Every real variable through its own network, [B, steps, variables, hidden]."""
        x = x[..., None]
        units = F.elu(x * self[f"{name}.slope"] + self[f"{name}.shift"]).to(self.dtype)
        residual = x * self[f"{name}.residual_slope"] + self[f"{name}.residual_shift"]
        if self.has(f"{name}.residual_weight"):
            residual = self.each_norm(f"{name}.residual", residual)
        # One product of a batch of variables.
        flat = units.flatten(0, 1).transpose(0, 1)
        gated = torch.bmm(flat, self[f"{name}.gate"].transpose(1, 2)).transpose(0, 1)
        gated = gated.unflatten(0, x.shape[:2]) + self[f"{name}.gate_bias"].to(self.dtype)
        return self.each_norm(f"{name}.norm", residual + F.glu(gated, -1))

    def each_norm(self, name, x):
        normed = F.layer_norm(x, x.shape[-1:], None, None, self.shape.epsilon)
        return normed * self[f"{name}_weight"] + self[f"{name}_bias"]

    def context(self, name, static, batch):
        if static is None:
            return self[f"context.{name}"].expand(batch, -1)
        return self.grn(f"context.{name}", static)[:, 0]

    def between(self, recurrent, selected, enrichment):
        """From the LSTMs to queries and to keys and values."""
        temporal = self.gate("lstm.gate", recurrent, selected)
        enriched = self.grn(
            "enrichment", temporal, F.linear(enrichment, self["enrichment.context"])
        )
        source = F.linear(
            enriched, self["attention.source"], self["attention.source_bias"].to(self.dtype)
        )
        query = F.linear(
            enriched[:, self.history :],
            self["attention.query"],
            self["attention.query_bias"].to(self.dtype),
        )
        return temporal, enriched, source, query

    def after(self, temporal, enriched, source, query):
        """Attention, averaged over heads, and what follows it."""
        heads, value = self.shape.heads, self.shape.hidden // self.shape.heads
        keys, values = source.split([self.shape.hidden, value], -1)

        def split(x):
            return x.unflatten(-1, (heads, value)).transpose(1, 2)

        score = (split(query) @ split(keys).transpose(2, 3)).float() * value**-0.5
        step = torch.arange(source.shape[1], device=score.device)
        predicted = torch.arange(query.shape[1], device=score.device)[:, None]
        seen = step < self.history + predicted + self.shape.ahead
        attention = score.masked_fill(~seen, -1e9).softmax(-1).mean(1)
        mixed = attention.to(self.dtype) @ values
        attended = self.gate("attention.gate", mixed, enriched[:, self.history :])
        last = self.gate(
            "output.gate", self.grn("feed_forward", attended), temporal[:, self.history :]
        )
        return F.linear(last, self["output.weight"]).float() + self["output.bias"]

    def forward(self, history_reals, future_reals, history_categories, future_categories):
        batch, static = len(history_reals), None
        if self.shape.static.variables:
            first = history_reals[:, :1], history_categories[:, :1]
            static = self.select("static", *first, None)
        context = self.context("selection", static, batch)
        parts = (
            ("history", history_reals, history_categories),
            ("future", future_reals, future_categories),
        )
        selected = [
            self.select(name, reals, categories, F.linear(context, self[f"{name}.context"]).float())
            for name, reals, categories in parts
        ]
        states = [
            torch.stack(
                [self.context(f"{n}.{layer}", static, batch) for layer in range(self.shape.layers)]
            )
            for n in ("hidden", "cell")
        ]
        past, states = self.lstms[0](selected[0], tuple(states))
        coming, _ = self.lstms[1](selected[1], states)
        enrichment = self.context("enrichment", static, batch)
        both = torch.cat([past, coming], 1), torch.cat(selected, 1)
        return self.after(*self.between(*both, enrichment))
