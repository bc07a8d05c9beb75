"""Generalised advantage estimation in PyTorch: a loop over steps, as one CUDA graph.

In the shapes, T is steps and E environments.
"""

import torch

from bench.peers import workload
from bench.peers.torch_work import TorchWork

VARIANTS = {"original": {}, "one kernel a step": {"fused": True}}


class GAE(TorchWork):
    """Advantages of random float32 data, T x E.

    Args:
        steps, envs: T and E.
        device, mode: see `TorchWork`.
        fused: compute every one-step error and decay in wide operations first, so that a step of
            the loop is one `addcmul`. The original launches about nine kernels a step. The two
            extra arrays cost wide traffic, but a step is bound by its launches.

    Attributes:
        inputs: `reward` [T, E], `value` [T + 1, E] and `done` [T, E], float32 on the device.
        advantage: the result, [T, E].
        nbytes: reward, value and done read once and the advantages written once.
    """

    def __init__(self, steps, envs, device="cuda", mode="graph", fused=False, seed=0):
        super().__init__(device, mode)
        self.steps, self.envs, self.fused = steps, envs, fused
        self.nbytes = 4 * envs * (4 * steps + 1)
        generator = torch.Generator(device).manual_seed(seed)
        options = {"device": device, "generator": generator}
        self.inputs = (
            torch.randn(steps, envs, **options),
            torch.randn(steps + 1, envs, **options),
            (torch.rand(steps, envs, **options) < 0.01).float(),
        )
        self.advantage = torch.full((steps, envs), float("nan"), device=device)

    def _work(self):
        if self.fused:
            self._one_kernel_a_step()
        else:
            self._loop()

    def _loop(self):
        reward, value, done = self.inputs
        gamma, lam = workload.PPO["gamma"], workload.PPO["lam"]
        advantage = torch.zeros(self.envs, device=self.device)
        for t in reversed(range(self.steps)):
            alive = 1 - done[t]
            delta = reward[t] + gamma * value[t + 1] * alive - value[t]
            advantage = delta + gamma * lam * alive * advantage
            self.advantage[t] = advantage

    def _one_kernel_a_step(self):
        reward, value, done = self.inputs
        gamma, lam = workload.PPO["gamma"], workload.PPO["lam"]
        alive = 1 - done
        delta = torch.addcmul(reward, value[1:], alive, value=gamma).sub_(value[:-1])
        decay = alive.mul_(gamma * lam)
        self.advantage[-1] = delta[-1]
        for t in reversed(range(self.steps - 1)):
            torch.addcmul(delta[t], decay[t], self.advantage[t + 1], out=self.advantage[t])
