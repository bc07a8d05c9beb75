"""Prioritized replay in PyTorch: a cumulative sum, and a binary search of it.

In the shapes, C is the capacity and B the batch. Source: Schaul et al. 2016, proportional variant.
"""

import torch

from bench.peers import workload
from bench.peers.torch_work import TorchWork

ALPHA = 0.6
BETA = 0.4

VARIANTS = {"original": {}, "stratified": {"stratified": True}}


class PrioritizedReplay(TorchWork):
    """Sample, importance weights, gather of the observations, and update of the priorities.

    Args:
        capacity, batch: C and B.
        device, mode: see `TorchWork`.
        stratified: draw one sample from each of B equal parts of the total, as the paper's
            appendix B.2.1 does, in place of B free draws. Each sample is as likely as before, and
            neighbouring searches and gathers then touch neighbouring memory.

    Attributes:
        priority: float32 [C], changed in place by every unit of work.
        index, weight: of the last batch, int64 [B] and float32 [B].
        gathered: bf16 [B, 56], the batch's observations.
        nbytes: priorities read once, and the batch's rows read and written once.
    """

    def __init__(
        self, capacity=1 << 20, batch=8192, device="cuda", mode="graph", stratified=False, seed=0
    ):
        super().__init__(device, mode)
        self.capacity, self.batch, self.stratified = capacity, batch, stratified
        self.nbytes = 4 * capacity + 2 * 2 * workload.PADDED * batch
        torch.manual_seed(seed)
        self.priority = torch.rand(capacity, device=device) + 1e-3
        self.error = torch.randn(batch, device=device)
        rows = {"device": device, "dtype": torch.bfloat16}
        self.observation = torch.randn(capacity, workload.PADDED, **rows)
        self.gathered = torch.empty(batch, workload.PADDED, **rows)
        self._part = torch.arange(batch, device=device, dtype=torch.float64)
        self.index = self.weight = None

    def _work(self):
        # In float32 the running sum of a million priorities would lose the small ones.
        running = torch.cumsum(self.priority, 0, dtype=torch.float64)
        total = running[-1]
        uniform = torch.rand(self.batch, device=self.device, dtype=torch.float64)
        if self.stratified:
            uniform = (uniform + self._part) / self.batch
        self.index = torch.searchsorted(running, uniform * total).clamp_(max=self.capacity - 1)
        weight = (self.capacity * self.priority[self.index] / total.float()).pow(-BETA)
        self.weight = weight / weight.max()
        torch.index_select(self.observation, 0, self.index, out=self.gathered)
        self.priority.index_copy_(0, self.index, (self.error.abs() + 1e-6).pow(ALPHA))
