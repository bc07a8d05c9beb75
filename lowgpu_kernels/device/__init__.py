"""Scalar Python shared by CPU loops and Numba kernels, and the one door to `numba.cuda`.

numba-cuda is optional and in maintenance: nothing else in the project imports it, so replacing it
is a change to this file and to compile.py.
"""

import numpy as np
from numba import njit

try:
    from numba import cuda
    from numba.cuda import dispatcher as numba_cuda_dispatcher
except ImportError:  # a machine with no GPU extra: the CPU executors need neither
    cuda = numba_cuda_dispatcher = None

f32, i32, u32, u64 = np.float32, np.int32, np.uint32, np.uint64

# A scalar function called from njit loops and from kernels alike. No fastmath: it would delete
# NaN tests, and the CPU and the GPU would round differently.
# Division by zero is infinity, as on a GPU.
scalar = njit(error_model="numpy")
