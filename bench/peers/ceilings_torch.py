"""The machine's ceilings, by what PyTorch reaches: a device copy and a bf16 matrix product."""

import torch

from bench.peers.torch_work import TorchWork


class Copy(TorchWork):
    """Copy `count` float32 from one array to another; far more than the cache holds.

    Attributes:
        nbytes: bytes read and bytes written, together.
    """

    def __init__(self, count=1 << 30, device="cuda", mode="eager"):
        super().__init__(device, mode)
        self.count = count
        self.nbytes = 2 * 4 * count
        self.source = torch.ones(count, device=device)
        self.destination = torch.empty_like(self.source)

    def _work(self):
        self.destination.copy_(self.source)


class Gemm(TorchWork):
    """The square of a random bf16 matrix, [size, size]; zeros would draw less power and run faster.

    Attributes:
        flops: floating-point operations a call.
    """

    def __init__(self, size=8192, device="cuda", mode="eager", seed=0):
        super().__init__(device, mode)
        self.size = size
        self.flops = 2 * size**3
        torch.manual_seed(seed)
        self.matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self.result = torch.empty_like(self.matrix)

    def _work(self):
        torch.mm(self.matrix, self.matrix, out=self.result)
