"""The Temporal Fusion Transformer of pytorch-forecasting at inference.

In the shapes, B is the batch, E encoder steps and D decoder steps.
"""

import math
from contextlib import ExitStack

import torch
from torch import nn

from bench.peers.torch_work import TorchWork, tensor_float_32

CLIENTS = 370
KNOWN = ["hour", "day", "week", "month", "index"]
REALS = [*KNOWN, "load"]

VARIANTS = {
    "original": {},
    "compiled": {"compiled": True},
    "full lengths": {"full_lengths": True},
    "full lengths, graph": {"full_lengths": True, "mode": "graph"},
    "full lengths, bf16 weights, graph": {
        "full_lengths": True,
        "mode": "graph",
        "precision": "bfloat16_weights",
    },
    "full lengths, bf16 weights, compiled, graph": {
        "full_lengths": True,
        "mode": "graph",
        "precision": "bfloat16_weights",
        "compiled": True,
    },
}


class TFT(TorchWork):
    """Electricity-like inference: one static category of 370, five known reals, one target.

    The library's forward pass cannot be captured: it reads the sequence lengths on the host,
    packs the sequences, and sends a scalar to the device for each attention head. Every sequence
    here is full, so `full_lengths` takes those out and computes the same: the LSTMs run unpacked,
    the attention mask is made once, and the scalar is a constant. That spares the copies of
    packing, and lets a CUDA graph or the compiler see the pass whole.

    Args:
        batch, hidden, heads, encoder, decoder: B, the width, attention heads, E and D.
        precision: "float32" with TF32 products, "bfloat16" by autocast, or "bfloat16_weights",
            which converts weights and inputs once in place of every pass.
        device, mode: see `TorchWork`; "graph" needs `full_lengths`.
        full_lengths: see above.
        compiled: run the network through `torch.compile`.

    Attributes:
        inputs: the library's input dictionary, on the device.
        output: the last prediction, [B, D, 7 quantiles].
        parameters: their number.
    """

    def __init__(
        self,
        batch=1024,
        hidden=128,
        heads=4,
        encoder=168,
        decoder=24,
        precision="bfloat16",
        device="cuda",
        mode="eager",
        full_lengths=False,
        compiled=False,
        seed=0,
    ):
        super().__init__(device, mode)
        if precision not in ("float32", "bfloat16", "bfloat16_weights"):
            raise ValueError(
                f"precision must be 'float32', 'bfloat16' or 'bfloat16_weights', got {precision!r}"
            )
        if mode == "graph" and not full_lengths:
            raise ValueError("the library's own pass cannot be captured; give full_lengths=True")
        self.batch, self.hidden, self.heads = batch, hidden, heads
        self.encoder, self.decoder = encoder, decoder
        self.precision, self.full_lengths, self.compiled = precision, full_lengths, compiled
        torch.manual_seed(seed)
        self._network = network(hidden, heads, encoder).to(device).eval()
        self.parameters = sum(p.numel() for p in self._network.parameters())
        self.inputs = random_inputs(batch, encoder, decoder, device)
        if full_lengths:
            assume_full_lengths(self._network, self.inputs)
        if precision == "bfloat16_weights":
            self._network.to(torch.bfloat16)
            self.inputs = {
                name: x.to(torch.bfloat16) if getattr(x, "dtype", None) == torch.float32 else x
                for name, x in self.inputs.items()
            }
        self._forward = torch.compile(self._network) if compiled else self._network
        self.output = None

    def _work(self):
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(tensor_float_32())
            if self.precision == "bfloat16":
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            self.output = self._forward(self.inputs)["prediction"]


def network(hidden, heads, encoder):
    """The library's network with one LSTM layer, no dropout and seven quantiles."""
    # Here alone, so that naming the module does not ask for the library.
    from pytorch_forecasting import TemporalFusionTransformer
    from pytorch_forecasting.metrics import QuantileLoss

    return TemporalFusionTransformer(
        hidden_size=hidden,
        lstm_layers=1,
        dropout=0.0,
        output_size=7,
        loss=QuantileLoss(),
        attention_head_size=heads,
        max_encoder_length=encoder,
        static_categoricals=["client"],
        time_varying_reals_encoder=REALS,
        time_varying_reals_decoder=KNOWN,
        x_reals=REALS,
        x_categoricals=["client"],
        hidden_continuous_size=hidden,
        embedding_sizes={"client": (CLIENTS, 16)},
        embedding_paddings=[],
        embedding_labels={},
        output_transformer=lambda output: output["prediction"],
    )


def random_inputs(batch, encoder, decoder, device):
    """The library's input dictionary: full sequences of random reals, one client a sequence."""
    client = torch.randint(0, CLIENTS, (batch, 1, 1))
    inputs = {
        "encoder_cat": client.expand(batch, encoder, 1).contiguous(),
        "encoder_cont": torch.randn(batch, encoder, len(REALS)),
        "encoder_lengths": torch.full((batch,), encoder),
        "encoder_target": torch.randn(batch, encoder),
        "decoder_cat": client.expand(batch, decoder, 1).contiguous(),
        "decoder_cont": torch.randn(batch, decoder, len(REALS)),
        "decoder_lengths": torch.full((batch,), decoder),
        "target_scale": torch.ones(batch, 2),
    }
    return {name: x.to(device) for name, x in inputs.items()}


class FullLengths:
    """Stands for lengths that are all the same; the network only asks for the longest."""

    def __init__(self, length):
        self.length = length

    def max(self):
        return self.length


def assume_full_lengths(network, inputs):
    """Take out what the library does for sequences of different lengths.

    Changes: the network's LSTMs, attention and mask, and the lengths of `inputs`.
    """
    mask = network.get_attention_mask(inputs["encoder_lengths"], inputs["decoder_lengths"])
    network.get_attention_mask = lambda encoder_lengths, decoder_lengths: mask
    for name, cont in (("encoder_lengths", "encoder_cont"), ("decoder_lengths", "decoder_cont")):
        inputs[name] = FullLengths(inputs[cont].size(1))
    network.lstm_encoder = Unpacked(network.lstm_encoder)
    network.lstm_decoder = Unpacked(network.lstm_decoder)
    # The library makes a new tuple type in every pass; the compiler stops at it.
    network.to_network_output = lambda **outputs: outputs
    attention = network.multihead_attn.attention
    attention.scale = False
    attention.forward = scaled(attention.forward)


class Unpacked(nn.Module):
    """An LSTM's plain forward pass, deaf to lengths."""

    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    # The compiler cannot look into an LSTM; told so, it goes on cleanly after it.
    @torch.compiler.disable
    def forward(self, x, hx=None, lengths=None, enforce_sorted=True):
        return nn.LSTM.forward(self.lstm, x, hx)


def scaled(attention):
    """The attention with the scale applied to the queries, by a constant."""

    def forward(q, k, v, mask=None):
        return attention(q * (1 / math.sqrt(k.size(-1))), k, v, mask)

    return forward
