"""Every op, by name. Adding an op is adding its file and its line here."""

from lowgpu_kernels.ops.advantage.gae import gae
from lowgpu_kernels.ops.loss.huber import huber
from lowgpu_kernels.ops.optim.adam import adam
from lowgpu_kernels.ops.ppo.ppo_loss import ppo_loss
from lowgpu_kernels.ops.rollout.env_step import env_step
from lowgpu_kernels.ops.rollout.observe import observe
from lowgpu_kernels.ops.rollout.reset import reset

__all__ = ["adam", "env_step", "gae", "huber", "observe", "ppo_loss", "reset"]
