"""The portable float32 functions against float64 and against their CUDA C twins."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

from lowgpu_kernels.device import f32, maths
from tests.headers import address, compiled

# The first call compiles, and takes longer than hypothesis allows.
compiles = settings(deadline=None)

NAMES = ("exp_f32", "log_f32", "sin_f32", "cos_f32", "tanh_f32")
each = pytest.mark.parametrize("name", NAMES)
SMALLEST_NORMAL = np.finfo("f4").tiny
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38], "f4")


@pytest.fixture(scope="module")
def header():
    loops = "".join(
        f'extern "C" void {n}_all(int n, const float* x, float* y) '
        f"{{ for (int i = 0; i < n; ++i) y[i] = {n}(x[i]); }}\n"
        for n in NAMES
    )
    return compiled(f'#include "maths.cuh"\n{loops}')


def python_all(name, x):
    function = getattr(maths, name)

    @njit
    def go(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    y = np.empty_like(x)
    go(x, y)
    return y


def ulps(got, want):
    """Distance in units in the last place of the correctly rounded answer."""
    size = np.maximum(np.abs(want), 2.0**-149).astype("f4")
    return np.abs(got - want) / np.spacing(size).astype("f8")


def across(low, high, count=400_000, seed=0):
    return np.random.default_rng(seed).uniform(low, high, count).astype("f4")


@each
def test_python_and_cuda_c_agree_bit_for_bit(header, name):
    words = np.random.default_rng(3).integers(0, 2**32, 500_000, dtype=np.uint32)
    near = across(-110, 110)
    x = np.concatenate([words.view("f4"), near, SPECIAL])
    twin = np.empty_like(x)
    getattr(header, f"{name}_all")(len(x), address(x), address(twin))
    got = python_all(name, x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(twin))
    kept = ~np.isnan(got)
    np.testing.assert_array_equal(got[kept].view("u4"), twin[kept].view("u4"))


def test_exp_is_within_two_ulps():
    edges = [maths.EXP_LARGEST, maths.EXP_SMALLEST, -87.336544, -87.4, -100]
    x = np.concatenate([across(-103.9, 88.7), across(-1, 1), np.array(edges, "f4")])
    assert ulps(python_all("exp_f32", x), np.exp(x.astype("f8"))).max() <= 2


def test_log_is_within_two_ulps():
    bits = np.random.default_rng(1).integers(1, 0x7F800000, 400_000, dtype=np.uint32)
    denormal = np.random.default_rng(2).integers(1, 0x00800000, 100_000, dtype=np.uint32)
    x = np.concatenate([bits.view("f4"), denormal.view("f4"), across(0.5, 2)])
    assert ulps(python_all("log_f32", x), np.log(x.astype("f8"))).max() <= 2


@pytest.mark.parametrize("name, exact", [("sin_f32", np.sin), ("cos_f32", np.cos)])
def test_sin_and_cos_are_within_2_to_the_minus_23_up_to_1e4(name, exact):
    multiples = (np.arange(-6366, 6367) * (math.pi / 2)).astype("f4")
    x = np.concatenate([across(-1e4, 1e4), across(-7, 7), multiples, np.array([1e4, -1e4], "f4")])
    assert np.abs(python_all(name, x) - exact(x.astype("f8"))).max() <= 2.0**-23


def test_tanh_is_within_2_to_the_minus_23_and_six_ulps():
    x = np.concatenate([across(-12, 12), across(-0.3, 0.3), across(-1e-6, 1e-6)])
    got, want = python_all("tanh_f32", x), np.tanh(x.astype("f8"))
    assert np.abs(got - want).max() <= 2.0**-23
    assert ulps(got, want).max() <= 6


@pytest.mark.parametrize(
    "name, x, want",
    [
        ("exp_f32", 0, 1),
        ("exp_f32", math.inf, math.inf),
        ("exp_f32", -math.inf, 0),
        ("exp_f32", np.nextafter(maths.EXP_LARGEST, f32(99)), math.inf),
        ("exp_f32", maths.EXP_SMALLEST, 1e-45),
        ("exp_f32", np.nextafter(maths.EXP_SMALLEST, f32(-200)), 0),
        ("exp_f32", 1e-45, 1),
        ("exp_f32", -103.27893, 1e-45),
        ("log_f32", 1, 0),
        ("log_f32", 0, -math.inf),
        ("log_f32", -0.0, -math.inf),
        ("log_f32", math.inf, math.inf),
        ("log_f32", -1, math.nan),
        ("log_f32", -math.inf, math.nan),
        ("sin_f32", 0, 0),
        ("sin_f32", 1e-45, 1e-45),
        ("sin_f32", math.inf, math.nan),
        ("sin_f32", 10001, math.nan),
        ("cos_f32", 0, 1),
        ("cos_f32", -math.inf, math.nan),
        ("cos_f32", -10001, math.nan),
        ("tanh_f32", 0, 0),
        ("tanh_f32", math.inf, 1),
        ("tanh_f32", -math.inf, -1),
    ],
)
def test_limits(name, x, want):
    np.testing.assert_array_equal(f32(getattr(maths, name)(f32(x))), f32(want))


@each
def test_nan_stays_nan(name):
    assert math.isnan(getattr(maths, name)(f32(math.nan)))


@compiles
@given(st.floats(-87, 87, width=32))
@example(0.0)
def test_log_undoes_exp(x):
    # exp's own error of 2 ulps moves the logarithm by 2^-22; the rest is log's own.
    assert abs(maths.log_f32(f32(maths.exp_f32(f32(x)))) - x) <= 2.0**-22 + 2 * 2.0**-23 * abs(x)


@compiles
@given(st.floats(-1e4, 1e4, width=32))
def test_sine_is_odd_cosine_is_even_and_their_squares_sum_to_one(x):
    sine, cosine = maths.sin_f32(f32(x)), maths.cos_f32(f32(x))
    assert maths.sin_f32(f32(-x)) == -sine and maths.cos_f32(f32(-x)) == cosine
    assert abs(sine**2 + cosine**2 - 1) <= 2 * (abs(sine) + abs(cosine)) * 2.0**-23


@each
def test_a_double_is_taken_as_the_float_it_rounds_to(name):
    """In the simulator a scalar function's result comes back as a Python float."""
    assert getattr(maths, name)(0.3) == getattr(maths, name)(f32(0.3))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a"])
def test_a_kernel_of_all_five_has_no_double_no_fused_add_and_no_approximation(architecture):
    """The same bits on a GPU need the same operations: no FFMA but the ones inside a division."""
    from lowgpu_kernels.compile import NumbaKernel, disassemble
    from lowgpu_kernels.device import cuda

    def kernel(x, y):
        i = cuda.grid(1)
        if i < x.shape[0]:
            a = maths.exp_f32(x[i]) + maths.sin_f32(x[i])
            y[i] = a + maths.cos_f32(x[i])

    binary = NumbaKernel(kernel, ("float32[1]", "float32[1]"), 256).binary(architecture)
    (resources,) = binary.kernels
    assert resources.spill_stores == 0 and resources.registers <= 40
    code = disassemble(binary)
    assert "FMUL" in code and "FADD" in code
    for unwanted in ("FFMA", "MUFU", "DADD", "DMUL", "DFMA", "F2F.F32.F64", "CALL"):
        assert unwanted not in code
