"""Scalar Python shared by CPU loops and by Numba kernels, and the one door to `numba.cuda`.

numba-cuda is optional and in maintenance: nothing else in the project imports it, so replacing it
is a change to this file and to compile.py.
"""

import numpy as np

from lowgpu_kernels.kept import njit
from lowgpu_kernels.launch import SIMULATED

try:
    from numba import cuda
except ImportError:  # no GPU extra: the CPU executors need it not
    cuda = None


def numba_cuda_dispatcher():
    """The module of numba.cuda whose question for the current device compile.py answers."""
    from numba.cuda import dispatcher

    return dispatcher


f32, i32, u32, u64 = np.float32, np.int32, np.uint32, np.uint64

# A scalar function called from njit loops and from kernels alike. No fastmath: it would delete
# NaN tests, and the CPU and the GPU would round differently.
# Division by zero is infinity, as on a GPU.
scalar = njit(error_model="numpy")

# A function that kernels alone call. The simulator runs it as Python, with its own `cuda`.
for_kernels = cuda.jit(device=True) if SIMULATED else scalar
