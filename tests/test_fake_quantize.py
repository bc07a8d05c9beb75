"""What fake quantization promises beyond agreeing with its spec: torch's numbers, ties and ends."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowgpu_kernels import fake_quantize, fake_quantize_gradient


def values(rng, rows, columns, step):
    """Levels past both ends, half of them exactly between two, times what a level is worth."""
    level = rng.normal(size=(rows, columns)) * 120
    ties = rng.random((rows, columns)) < 0.5
    return (np.where(ties, np.floor(level) + 0.5, level) * step).astype("f4")


@given(st.integers(0, 2**32 - 1), st.sampled_from(["rows", "columns"]))
@settings(deadline=None, max_examples=20)
def test_values_and_gradients_are_those_of_torch(seed, axis):
    """torch scales one axis at a time, by x * (1 / scale) as here, and takes ties to even."""
    rng = np.random.default_rng(seed)
    shape, by_rows = (9, 33), axis == "rows"
    scale = (2.0 ** rng.integers(-6, 3, shape[not by_rows]) * rng.uniform(0.5, 1)).astype("f4")
    x = values(rng, *shape, scale[:, None] if by_rows else scale)
    gradient = rng.normal(size=shape).astype("f4")
    low = -127 if by_rows else -128
    if by_rows:
        zero, ours = np.zeros(len(scale), "i4"), {"row_scale": scale}
    else:
        zero = rng.integers(-128, 128, len(scale)).astype("i4")
        ours = {"column_scale": scale, "column_zero": zero}
    leaf = torch.from_numpy(x.copy()).requires_grad_()
    wanted = torch.fake_quantize_per_channel_affine(
        leaf, torch.from_numpy(scale), torch.from_numpy(zero), int(not by_rows), low, 127
    )
    wanted.backward(torch.from_numpy(gradient))
    np.testing.assert_array_equal(fake_quantize(x, **ours, low=low), wanted.detach().numpy())
    found = fake_quantize_gradient(x, gradient, **ours, low=low)
    np.testing.assert_array_equal(found, leaf.grad.numpy())


def test_ties_go_to_the_even_level():
    """Case E2."""
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], "f4")
    np.testing.assert_array_equal(fake_quantize(x), np.array([[0, 2, 2, 0, -2, -2]], "f4"))


def test_a_level_is_past_its_end_only_after_rounding():
    """127.49 rounds to 127 and is within, 127.5 rounds to 128 and is not."""
    x = np.array([[127.49, 127.5, -128.5, -128.51]], "f4")
    np.testing.assert_array_equal(fake_quantize(x), [[127, 127, -128, -128]])
    np.testing.assert_array_equal(fake_quantize_gradient(x, np.ones_like(x)), [[1, 0, 1, 0]])


def test_a_nan_stays_one_infinities_take_the_ends_and_neither_passes_a_gradient():
    x = np.array([[np.nan, np.inf, -np.inf, 1e38]], "f4")
    np.testing.assert_array_equal(fake_quantize(x), [[np.nan, 127, -128, 127]])
    np.testing.assert_array_equal(fake_quantize_gradient(x, np.ones_like(x)), np.zeros((1, 4)))


def test_rows_and_columns_multiply_into_one_step():
    """The first layer's weights: a scale a channel, over the scale of each input."""
    rng = np.random.default_rng(0)
    row, column = rng.uniform(0.5, 2, (2, 7)).astype("f4")
    x = rng.normal(size=(7, 7)).astype("f4") * 50
    step = row[:, None] * column
    wanted = np.clip(np.rint(x * (np.float32(1) / step)), -128, 127).astype("f4") * step
    np.testing.assert_array_equal(fake_quantize(x, row, column), wanted)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan, 1e-40])
def test_a_scale_that_is_no_normal_number_above_zero_is_refused_with_its_place(scale):
    scales = np.array([1, scale, 1], "f4")
    with pytest.raises(ValueError, match=r"^row_scale must be .* at 1$"):
        fake_quantize(np.ones((3, 2), "f4"), scales)
    with pytest.raises(ValueError, match=r"^column_scale must be .* at 1$"):
        fake_quantize_gradient(np.ones((2, 3), "f4"), np.ones((2, 3), "f4"), None, scales)


@pytest.mark.parametrize("zero", [-129, 128])
def test_a_zero_point_past_int8_is_refused_with_its_place(zero):
    with pytest.raises(ValueError, match=f"^column_zero must be in -128..127, got {zero} at 2$"):
        fake_quantize(np.ones((1, 3), "f4"), None, None, np.array([0, 0, zero], "i4"))


def test_a_layer_trained_through_it_learns_the_levels_it_will_have():
    """Least squares with columns that move together, so that rounding errors of a row add up: with
    the rounding inside, descent finds levels whose errors cancel."""
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(256, 1)) + 0.2 * rng.normal(size=(256, 8))).astype("f4")
    plain = rng.normal(size=(4, 8)).astype("f4")
    target, scale = x @ plain.T, np.full(4, 0.5, "f4")

    def loss(weight):
        return np.square(x @ weight.T - target).mean()

    weight, best = plain.copy(), np.inf
    for _ in range(200):
        fake = fake_quantize(weight, scale, low=-127)
        best = min(best, loss(fake))
        pull = np.ascontiguousarray(2 * (x @ fake.T - target).T @ x / len(x), "f4")
        weight -= 0.05 * fake_quantize_gradient(weight, pull, scale, low=-127)
    assert best < 0.5 * loss(fake_quantize(plain, scale, low=-127))
