"""What the Huber loss promises beyond agreeing with its spec."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowgpu_kernels import huber

ERRORS = np.array([-3, -0.5, 0, 1, 2, 5], "f4")  # case C1


def test_small_errors_are_squared_and_large_ones_are_not():
    """Case C1."""
    got = huber(ERRORS, delta=2.0)
    np.testing.assert_array_equal(got.loss, np.array([4, 0.125, 0, 0.5, 2, 8], "f4"))
    np.testing.assert_array_equal(got.gradient, np.array([-2, -0.5, 0, 1, 2, 2], "f4"))


def test_smooth_l1_of_the_same_width_is_the_loss_divided_by_delta():
    """Case C1, second half."""
    smooth = torch.nn.functional.smooth_l1_loss(
        torch.from_numpy(ERRORS), torch.zeros(6), beta=2.0, reduction="none"
    )
    np.testing.assert_array_equal(huber(ERRORS, delta=2.0).loss / 2, smooth.numpy())


@given(st.floats(2.0**-7, 128, width=32), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
@example(2.0, 0)
def test_loss_and_gradient_are_those_of_torch(delta, seed):
    error = np.random.default_rng(seed).normal(size=65).astype("f4") * np.float32(2 * delta)
    leaf = torch.from_numpy(error.astype("f8")).requires_grad_()
    loss = torch.nn.functional.huber_loss(
        leaf, torch.zeros_like(leaf), delta=delta, reduction="none"
    )
    loss.sum().backward()
    got = huber(error, delta=delta)
    # Three rounded products, of which the difference in the linear part is at least half the size.
    np.testing.assert_allclose(got.loss, loss.detach(), rtol=4 * 2.0**-23)
    np.testing.assert_array_equal(got.gradient, leaf.grad.numpy().astype("f4"))


def test_a_nan_comes_out_in_both_and_an_infinity_keeps_a_finite_slope():
    got = huber(np.array([np.nan, np.inf, -np.inf], "f4"), delta=0.5)
    np.testing.assert_array_equal(got.loss, [np.nan, np.inf, np.inf])
    np.testing.assert_array_equal(got.gradient, np.array([np.nan, 0.5, -0.5], "f4"))


def test_the_square_of_a_large_error_is_never_formed():
    got = huber(np.array([1e30], "f4"), delta=1.0)
    assert got.loss[0] == np.float32(1e30) and got.gradient[0] == 1


@pytest.mark.parametrize("delta", [0.0, -1.0])
def test_a_delta_that_is_not_above_zero_is_refused(delta):
    with pytest.raises(ValueError, match=r"^delta must be in \(0, inf\]"):
        huber(ERRORS, delta=delta)
