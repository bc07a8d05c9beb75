"""Inference of the workload's network, 56-256-128-64-8, in PyTorch."""

from itertools import pairwise

import torch
from torch import nn

from bench.peers import workload
from bench.peers.torch_work import TorchWork

VARIANTS = {
    "original": {},
    "fused relu": {"form": "fused_relu"},
    "compiled": {"form": "compiled"},
}


def network(device):
    """The network with torch's own initial weights, float32."""
    sizes = workload.LAYERS
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device)


class MLP(TorchWork):
    """The network on a batch of random observations.

    Args:
        batch: observations a call.
        precision: "float32", exact unless the process has turned TF32 on, or "bfloat16" for
            weights, activations and outputs.
        device, mode: see `TorchWork`.
        calls: forward passes in one unit of work. With 200 in one graph, the time of a pass is
            free of the graph's own launch; the passes are alike and run one after another.
        form: "sequential" is `nn.Sequential`. "fused_relu" asks the matrix product to apply bias
            and ReLU as it writes (`torch._addmm_activation`): a ReLU of its own reads and writes
            every activation once more, 1.8 GB of traffic at a batch of a million in bf16.
            "compiled" leaves fusion to `torch.compile`.

    Attributes:
        observation: [batch, 56] on the device.
        output: the last result, [batch, 8].
        flops: floating-point operations of one unit of work.
        nbytes: the least traffic of one unit of work: observations read and outputs written once
            a pass.
    """

    def __init__(
        self,
        batch,
        precision="bfloat16",
        device="cuda",
        mode="graph",
        calls=1,
        form="sequential",
        seed=0,
    ):
        super().__init__(device, mode)
        if precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision must be 'float32' or 'bfloat16', got {precision!r}")
        if form not in ("sequential", "fused_relu", "compiled"):
            raise ValueError(f"form must be 'sequential', 'fused_relu' or 'compiled', got {form!r}")
        self.batch, self.precision, self.calls, self.form = batch, precision, calls, form
        self.flops = calls * batch * workload.FLOPS_FORWARD
        width = 4 if precision == "float32" else 2
        self.nbytes = calls * batch * width * (workload.PADDED + workload.OUTPUTS)
        torch.manual_seed(seed)
        dtype = getattr(torch, precision)
        self.network = network(device).to(dtype)
        self.observation = torch.randn(batch, workload.PADDED, device=device).to(dtype)
        self.output = None
        self._forward = {
            "sequential": self.network,
            "fused_relu": self._with_fused_relu,
            "compiled": self.network,
        }[form]
        if form == "compiled":
            # Another graph inside ours is no use: `mode` already decides on capture.
            self._forward = torch.compile(self.network, mode="max-autotune-no-cudagraphs")

    def _with_fused_relu(self, hidden):
        *inner, last = (layer for layer in self.network if hasattr(layer, "weight"))
        for layer in inner:
            hidden = torch._addmm_activation(layer.bias, hidden, layer.weight.t())
        return torch.addmm(last.bias, hidden, last.weight.t())

    def _work(self):
        with torch.no_grad():
            for _ in range(self.calls):
                self.output = self._forward(self.observation)
