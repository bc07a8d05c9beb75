"""Numba kernels in numba's simulator, against their specs. Run with NUMBA_ENABLE_CUDASIM=1.

The simulator runs shared memory and barriers, a Python thread a CUDA thread; it knows no warps and
no CUDA C. It proves index arithmetic and barriers, never speed or code generation.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowgpu_kernels import launch
from lowgpu_kernels.device import cuda
from tests.harness import (
    arrays_for,
    assert_agrees,
    every_op,
    params_for,
    run_launcher,
    seeded,
    sizes_for,
)

pytestmark = pytest.mark.skipif(
    not launch.SIMULATED, reason="needs NUMBA_ENABLE_CUDASIM=1: make check runs it"
)


def in_numba(op):
    """Whether every kernel of an op is a Numba kernel, told by its file and what lies beside it."""
    import inspect
    from pathlib import Path

    path = Path(inspect.getfile(op.spec))
    return "launch.kernel(" in path.read_text("utf-8") and not path.with_suffix(".cu").exists()


@pytest.mark.parametrize("op", [o for o in every_op if in_numba(o)], ids=str)
@given(data=st.data())
@settings(deadline=None, max_examples=4)
def test_the_simulated_kernel_agrees_with_the_spec(op, data):
    rng = seeded(data)
    params = params_for(op, rng)
    sizes = sizes_for(op, rng, params, sizes=(0, 1, 3, 33), most=300)
    inputs = arrays_for(op, rng, sizes, params)
    assert_agrees(op, run_launcher(op, inputs, params, sizes), inputs, params, sizes)


def test_the_simulator_is_what_runs():
    x = np.zeros(4, "f4")

    @launch.kernel(threads=32)
    def fill(x):
        i = cuda.grid(1)
        if i < x.shape[0]:
            x[i] = np.float32(i)

    fill[1, 32, 0](x)
    np.testing.assert_array_equal(x, [0, 1, 2, 3])
