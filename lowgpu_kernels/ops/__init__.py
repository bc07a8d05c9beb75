"""Every op, by name. Adding an op is adding its file and its line here."""

from lowgpu_kernels.ops.advantage.gae import gae
from lowgpu_kernels.ops.dqn.dqn_rounds import dqn_rounds
from lowgpu_kernels.ops.dqn.dqn_update import dqn_update
from lowgpu_kernels.ops.dqn.experience import experience
from lowgpu_kernels.ops.dqn.target_move import target_move
from lowgpu_kernels.ops.int8.act_int8 import act_int8, mlp_int8
from lowgpu_kernels.ops.int8.fake_quantize import fake_quantize, fake_quantize_gradient
from lowgpu_kernels.ops.int8.gemm import int8_gemm, int8_gemm_requantized, int8_gemm_scaled
from lowgpu_kernels.ops.int8.pack_int8 import pack_int8
from lowgpu_kernels.ops.loss.huber import huber
from lowgpu_kernels.ops.mlp.mlp_backward import mlp_backward
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.optim.adam import adam
from lowgpu_kernels.ops.policy.act import act
from lowgpu_kernels.ops.policy.categorical import categorical
from lowgpu_kernels.ops.policy.pack_network import pack_network
from lowgpu_kernels.ops.ppo.ppo_loss import ppo_loss
from lowgpu_kernels.ops.ppo.ppo_update import ppo_update
from lowgpu_kernels.ops.replay.anneal_weights import anneal_weights
from lowgpu_kernels.ops.replay.priority_gather import priority_gather
from lowgpu_kernels.ops.replay.priority_sample import priority_sample
from lowgpu_kernels.ops.replay.priority_update import priority_update
from lowgpu_kernels.ops.replay.replay_gather import replay_gather
from lowgpu_kernels.ops.replay.replay_sample import replay_sample
from lowgpu_kernels.ops.replay.replay_write import replay_write
from lowgpu_kernels.ops.rollout.env_step import env_step
from lowgpu_kernels.ops.rollout.observe import observe
from lowgpu_kernels.ops.rollout.reset import reset
from lowgpu_kernels.ops.rollout.rollout import rollout
from lowgpu_kernels.ops.stats.episode_statistics import episode_statistics
from lowgpu_kernels.ops.stats.minibatch_moments import minibatch_moments
from lowgpu_kernels.ops.stats.moments import moments
from lowgpu_kernels.ops.stats.normalize import normalize
from lowgpu_kernels.ops.stats.permutation import permutation
from lowgpu_kernels.ops.tft.gated import gated_norm, gated_residual
from lowgpu_kernels.ops.tft.gated_int8 import gated_norm_int8, gated_residual_int8
from lowgpu_kernels.ops.tft.interpretable_attention import interpretable_attention
from lowgpu_kernels.ops.tft.linear import linear, linear_float32
from lowgpu_kernels.ops.tft.linear_int8 import linear_int8
from lowgpu_kernels.ops.tft.lstm import lstm
from lowgpu_kernels.ops.tft.lstm_int8 import lstm_int8
from lowgpu_kernels.ops.tft.selection_weights import selection_weights
from lowgpu_kernels.ops.tft.tabulated_mixture import tabulated_mixture
from lowgpu_kernels.ops.tft.variable_mixture import variable_mixture

__all__ = [
    "act",
    "act_int8",
    "adam",
    "anneal_weights",
    "categorical",
    "dqn_rounds",
    "dqn_update",
    "env_step",
    "episode_statistics",
    "experience",
    "fake_quantize",
    "fake_quantize_gradient",
    "gae",
    "gated_norm",
    "gated_norm_int8",
    "gated_residual",
    "gated_residual_int8",
    "huber",
    "int8_gemm",
    "int8_gemm_requantized",
    "int8_gemm_scaled",
    "interpretable_attention",
    "linear",
    "linear_float32",
    "linear_int8",
    "lstm",
    "lstm_int8",
    "minibatch_moments",
    "mlp_backward",
    "mlp_forward",
    "mlp_int8",
    "moments",
    "normalize",
    "observe",
    "pack_int8",
    "pack_network",
    "permutation",
    "ppo_loss",
    "ppo_update",
    "priority_gather",
    "priority_sample",
    "priority_update",
    "replay_gather",
    "replay_sample",
    "replay_write",
    "reset",
    "rollout",
    "selection_weights",
    "tabulated_mixture",
    "target_move",
    "variable_mixture",
]
