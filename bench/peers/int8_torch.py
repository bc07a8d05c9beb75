"""INT8 in PyTorch: the matrix product `torch._int_mm`, its bf16 twin, and a quantized network."""

from itertools import pairwise

import torch

from bench.peers import workload
from bench.peers.torch_work import TorchWork

# Variants of the network; the matrix products have none.
VARIANTS = {
    "original": {},
    "fewer passes": {"form": "fewer_passes"},
    "compiled": {"form": "compiled"},
}

# `_int_mm` wants the inner dimension in multiples of its tile, so 56 is padded.
INNER = 64
# Any scale does for timing: this one maps accumulators to about the int8 range.
SCALE = 0.01


class Gemm(TorchWork):
    """`a @ b` with a [rows, inner] and b [inner, columns], b stored by columns.

    Args:
        precision: "int8", with an int32 result by `_int_mm`, or "bfloat16" on the same numbers.
        device, mode: see `TorchWork`.

    Attributes:
        a, b: the operands.
        result: the last product, [rows, columns].
        operations: multiplications and additions a call.
        nbytes: operands read once and the result written once.
    """

    def __init__(self, rows, columns, inner, precision="int8", device="cuda", mode="graph", seed=0):
        super().__init__(device, mode)
        if precision not in ("int8", "bfloat16"):
            raise ValueError(f"precision must be 'int8' or 'bfloat16', got {precision!r}")
        self.rows, self.columns, self.inner, self.precision = rows, columns, inner, precision
        self.operations = 2 * rows * columns * inner
        width, result_width = (1, 4) if precision == "int8" else (2, 2)
        self.nbytes = width * inner * (rows + columns) + result_width * rows * columns
        torch.manual_seed(seed)
        numbers = {"device": device, "dtype": torch.int8}
        self.a = torch.randint(-128, 127, (rows, inner), **numbers)
        self.b = torch.randint(-128, 127, (columns, inner), **numbers).t()
        if precision == "bfloat16":
            self.a, self.b = self.a.bfloat16(), self.b.bfloat16()
        self.result = None

    def _work(self):
        if self.precision == "int8":
            self.result = torch._int_mm(self.a, self.b)
        else:
            self.result = self.a @ self.b


class MLP(TorchWork):
    """The workload's network with int8 weights and activations, 64-256-128-64-8.

    Each layer is a product into int32, then scale, ReLU, round and clamp back to int8; the last
    stays float32.

    Args:
        batch: observations a call; `_int_mm` wants more than 16 rows.
        device, mode: see `TorchWork`.
        form: "plain" is the original, six passes over the accumulators of a layer.
            "fewer_passes" scales as it converts and lets the clamp at zero do the ReLU's work, in
            place where it can. "compiled" has `torch.compile` make the passes one.

    Attributes:
        observation: int8 [batch, 64].
        output: the last result, float32 [batch, 8].
        operations: multiplications and additions a call, padding not counted.
    """

    def __init__(self, batch, device="cuda", mode="graph", form="plain", seed=0):
        super().__init__(device, mode)
        if form not in ("plain", "fewer_passes", "compiled"):
            raise ValueError(f"form must be 'plain', 'fewer_passes' or 'compiled', got {form!r}")
        self.batch, self.form = batch, form
        self.operations = batch * workload.FLOPS_FORWARD
        torch.manual_seed(seed)
        numbers = {"device": device, "dtype": torch.int8}
        sizes = (INNER, *workload.HIDDEN, workload.OUTPUTS)
        self.weights = [
            torch.randint(-127, 127, (outputs, inputs), **numbers)
            for inputs, outputs in pairwise(sizes)
        ]
        self.observation = torch.randint(-127, 127, (batch, INNER), **numbers)
        self.output = None
        requantize = fewer_passes if form == "fewer_passes" else plain
        self._requantize = torch.compile(requantize) if form == "compiled" else requantize

    def _work(self):
        with torch.no_grad():
            hidden = self.observation
            for weight in self.weights[:-1]:
                hidden = self._requantize(torch._int_mm(hidden, weight.t()))
            self.output = torch._int_mm(hidden, self.weights[-1].t()).float() * SCALE


def plain(accumulator):
    """Scale, ReLU and requantize int32 accumulators to int8, one operator at a time."""
    return torch.relu(accumulator.float() * SCALE).round().clamp(-127, 127).to(torch.int8)


def fewer_passes(accumulator):
    """The same numbers in fewer passes."""
    return accumulator.mul(SCALE).round_().clamp_(0, 127).to(torch.int8)
