"""Scalar Python shared by CPU loops and by Numba kernels, and the one door to `numba.cuda`.

numba-cuda is optional and in maintenance: nothing else in the project imports it, so replacing it
is a change to this file and to compile.py.
"""

import importlib.util
import sys
import threading
from types import ModuleType

import numpy as np

from lowgpu_kernels.kept import njit
from lowgpu_kernels.launch import SIMULATED


class _StandIn(ModuleType):
    """What kernels hold as `cuda` until one is compiled.

    Importing numba.cuda takes a third of the time of all imports, and a start that finds its kernels
    on disk compiles none. No entry of sys.modules: threads that look through it would load this one.
    """

    def __getattr__(self, name):
        return getattr(load_cuda(), name)


# One thread imports what compiles while the others wait.
_loading = threading.RLock()
_loaded = None


def load_cuda(kernel=None):
    """numba.cuda, imported at the first call and put where modules, and a kernel, hold its stand-in.

    A module that gets it late, because its import was under way, is seen to when it has a kernel.
    """
    global _loaded
    with _loading:
        if _loaded is None:
            from numba import cuda as real

            for module in list(sys.modules.values()):
                # The dictionary itself: a module that another library loads when it is first asked
                # for an attribute is not to be asked.
                if isinstance(module, ModuleType):
                    _replace(object.__getattribute__(module, "__dict__"), real)
            _loaded = real
    if kernel is not None:
        _replace(kernel.__globals__, _loaded)
        for cell in kernel.__closure__ or ():
            if type(cell.cell_contents) is _StandIn:
                cell.cell_contents = _loaded
    return _loaded


def _replace(names, real):
    if type(names.get("cuda")) is _StandIn:
        names["cuda"] = real


def numba_cuda_dispatcher():
    """The module of numba.cuda whose question for the current device compile.py answers."""
    from numba.cuda import dispatcher

    return dispatcher


def _cuda():
    """numba.cuda or its stand-in; None without the GPU extra: the CPU executors need it not."""
    if importlib.util.find_spec("numba.cuda") is None:
        return None
    return load_cuda() if SIMULATED else _StandIn("numba.cuda")


cuda = _cuda()

f32, i32, u32, u64 = np.float32, np.int32, np.uint32, np.uint64

# A scalar function called from njit loops and from kernels alike. No fastmath: it would delete
# NaN tests, and the CPU and the GPU would round differently.
# Division by zero is infinity, as on a GPU.
scalar = njit(error_model="numpy")

# A function that kernels alone call. The simulator runs it as Python, with its own `cuda`.
for_kernels = cuda.jit(device=True) if SIMULATED else scalar
