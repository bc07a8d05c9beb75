"""Reinforcement learning on one GPU: data, environments, trainers and the command line.

Importing this package imports neither CuPy nor Numba and makes no CUDA context.
"""

__version__ = "0.1.0"
