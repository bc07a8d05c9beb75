"""The harness must refuse wrong executors; each of these once looked like a working one."""

import numpy as np
import pytest

from lowgpu_kernels import gae
from lowgpu_kernels.dims import E, T
from tests.harness import arrays_for, assert_agrees, run_numpy

SIZES = {T: 40, E: 5}


def leaves_the_first_step_unwritten(advantage):
    advantage[0] = np.nan


def rounds_through_half(advantage):
    advantage[:] = advantage.astype(np.float16)


def is_one_environment_off(advantage):
    advantage[:] = np.roll(advantage, 1, axis=1)


def loses_the_last_step(advantage):
    advantage[-1] = 0


@pytest.mark.parametrize(
    "spoil",
    [
        leaves_the_first_step_unwritten,
        rounds_through_half,
        is_one_environment_off,
        loses_the_last_step,
    ],
)
def test_refuses_an_executor_that(spoil):
    params = gae.checked_params({})
    inputs = arrays_for(gae, np.random.default_rng(0), SIZES, params)
    got = run_numpy(gae, inputs, params, SIZES)
    assert_agrees(gae, got, inputs, params, SIZES)
    spoil(got["advantage"])
    with pytest.raises(AssertionError):
        assert_agrees(gae, got, inputs, params, SIZES)
