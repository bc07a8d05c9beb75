"""Kernels for reinforcement learning, one file per op; see `ops/`."""

from lowgpu_kernels.ops import *  # noqa: F403
from lowgpu_kernels.ops import __all__  # noqa: F401
