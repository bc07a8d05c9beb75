"""The kernel of experience, emulated: against the spec, in every shape, whatever multiplies and wherever
the weights lie."""

from functools import partial

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import experience, launch
from lowgpu_kernels.ops.dqn.experience import epsilon_at, kernels_of, pairs
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK
from lowgpu_kernels.ops.rollout.rollout_tile import (
    resident_tiles,
    rollout_tile,
    streaming_tile,
    warpgroup_tiles,
)
from tests import acting
from tests.acting import H100, WARPGROUPS, WARPS, assert_same_bits, each_way, named
from tests.harness import run_numpy

MARKET = acting.MARKET, Network(56, ((256, 128, 64, 3),))
PAIRS = [tuple(pair.values()) for pair in pairs()]
NETWORKS = (
    *PAIRS,
    MARKET,
    (WALK, Network(24, ((72, 40, 8, 4),), "tanh")),
    (DRIFT, Network(8, ((2,),))),
)

emulated, assert_right = (partial(f, experience) for f in (acting.emulated, acting.assert_right))


def drawn(*call, **given):
    """A call whose epsilon falls from 0.6 to 0.1 within its steps."""
    falls = {"epsilon_start": 0.6, "epsilon_end": 0.1, "epsilon_steps": 2}
    inputs, params, sizes = acting.drawn(experience, *call, **{**falls, **given})
    inputs["clock"][0] = 0
    return inputs, params, sizes


@pytest.mark.parametrize("env, network", NETWORKS, ids=named)
@each_way
def test_the_kernel_agrees_with_the_spec_in_either_order_of_threads(env, network, on, precision):
    assert (rollout_tile(network, 5, precision, on).groups > 0) == (on is WARPGROUPS)
    for envs in (1, 5, 65, 133) if (env, network) in PAIRS else (5, 133):
        call = drawn(env, network, envs, 6, precision)
        one = acting.assert_either_order_is_right(experience, call, on)
        assert one["truncated"].any()
        assert one["terminated"].any() or env is not WALK or envs < 65


@pytest.mark.parametrize("env, network", (*PAIRS, MARKET), ids=named)
def test_no_bit_depends_on_the_tile_or_on_where_the_weights_lie(env, network):
    call = drawn(env, network, 133, 3, "bfloat16")
    tiles = (
        *resident_tiles(network, H100),
        *(streaming_tile(network, r, "bfloat16") for r in (64, 16)),
    )
    first, *others = [emulated(*call, H100, tile=tile) for tile in tiles]
    for other in others:
        assert_same_bits(first, other, "the tile shows")


@pytest.mark.parametrize("env, network", (PAIRS[1], MARKET), ids=named)
def test_no_bit_depends_on_the_teams_or_on_their_warpgroups(env, network):
    call = drawn(env, network, 200, 2, "bfloat16")
    tiles = warpgroup_tiles(network, H100)
    assert len({(t.teams, t.groups) for t in tiles}) == len(tiles) >= 2
    first, *others = [
        emulated(*call, H100, backwards=b, tile=tile) for tile in tiles for b in (False, True)
    ]
    for other in others:
        assert_same_bits(first, other, "the tile shows")
    assert_right(first, *call[:2])


@pytest.mark.parametrize("steps", (0, 1))
@pytest.mark.parametrize("env, network", (*PAIRS, MARKET), ids=named)
@each_way
def test_few_steps_or_none_are_right(env, network, on, precision, steps):
    call = drawn(env, network, 67, steps, precision)
    assert_right(emulated(*call, on), *call[:2])


@pytest.mark.parametrize("epsilon", (0.0, 1.0))
@each_way
def test_an_epsilon_of_zero_or_one_is_right(on, precision, epsilon):
    call = drawn(*PAIRS[0], 67, 3, precision, epsilon_start=epsilon, epsilon_end=epsilon)
    assert_right(emulated(*call, on), *call[:2])


@pytest.mark.parametrize("now", (0, 1, 3, 2**24 + 1, 2**40 - 1, 2**40, 2**63))
def test_epsilon_is_the_same_to_the_bit_wherever_it_is_worked_out(now):
    """With 4096 environments a step, a difference of 1e-3 would show; the CPU's own bits are tested
    in test_experience.py."""
    call = drawn(*PAIRS[1], 4096, 1, "float32", epsilon_steps=2**40)
    call[0]["clock"][0] = now
    call[0]["parameters"][:] = 0  # action 0 where it does not explore
    on_cpu, in_kernel = run_numpy(experience, *call), emulated(*call, WARPS)
    np.testing.assert_array_equal(on_cpu["action"], in_kernel["action"])
    rate = epsilon_at(np.uint64(now), np.float32(0.6), np.float32(0.1), np.uint64(2**40))
    explored = in_kernel["action"].mean() * 2  # half of the uniform actions are 0
    assert abs(explored - rate) < 4 * 2 * np.sqrt(rate / 2 * (1 - rate / 2) / 4096)


@each_way
def test_values_that_are_not_finite_give_the_first_of_the_largest(on, precision):
    inputs, params, sizes = drawn(WALK, Network(24, ((3,),)), 67, 1, precision, epsilon_end=0.0)
    params = experience.checked_params({**params, "epsilon_steps": 0})
    biases = {
        (np.nan, 1, 1): 1,
        (1, np.nan, 2): 2,
        (np.nan,) * 3: 0,
        (-np.inf,) * 3: 0,
        (0, 0, 0): 0,
    }
    biases |= {(0, np.inf, np.inf): 1, (-np.inf, -3e38, np.nan): 1}
    (_, weight, bias), *_ = params["network"].views(inputs["parameters"])
    weight[:] = 0
    for given, action in biases.items():
        bias[:] = given
        for got in (
            emulated(inputs, params, sizes, on),
            run_numpy(experience, inputs, params, sizes),
        ):
            np.testing.assert_array_equal(got["action"], action, err_msg=f"of {given}")


@each_way
def test_a_wrong_weight_or_row_is_more_than_rounding_may_explain(on, precision):
    inputs, params, sizes = drawn(*MARKET, 67, 1, precision, epsilon_steps=0, epsilon_end=0.0)
    a_row_off = np.roll(inputs["table"], 1, axis=0)
    a_bias_off = inputs["parameters"].copy()
    a_bias_off[-8] += 3
    for wrong in ({"table": a_row_off}, {"parameters": a_bias_off}):
        other = {**inputs, **wrong}
        with pytest.raises(AssertionError, match="action at 0"):
            assert_right(emulated(other, params, sizes, on), inputs, params)


@pytest.mark.parametrize("precision", ("float32", "bfloat16"))
@pytest.mark.parametrize("part", ("A100", "L4", "H100"))
@pytest.mark.parametrize("name", ("market", "cartpole"))
def test_the_kernels_keep_to_registers_and_use_tensor_cores(precision, part, name):
    on, env = launch.KNOWN[part], make(name)
    network = Network(env.width, ((256, 128, 64, env.actions),))
    about = network, on, precision, env.table_columns > 0
    acting.assert_kernels_fit_and_multiply(
        lambda tile: kernels_of(env, network, tile, precision)[0], *about
    )
