"""The rollout's kernel, emulated: against the spec, in every shape, whatever multiplies and wherever the
weights lie."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import launch, rollout
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK
from lowgpu_kernels.ops.rollout.rollout import kernels_of, pairs
from lowgpu_kernels.ops.rollout.rollout_tile import (
    resident_tiles,
    rollout_tile,
    streaming_tile,
    warpgroup_tile,
    warpgroup_tiles,
)
from tests import acting
from tests.acting import H100, WARPGROUPS, assert_same_bits, each_way, named

MARKET = acting.MARKET, policy_network(56, 3)
PAIRS = [tuple(pair.values()) for pair in pairs()]
NETWORKS = (
    *PAIRS,
    MARKET,
    (WALK, policy_network(24, 3, (72, 40, 8), "tanh")),
    (DRIFT, Network(8, ((56, 24, 2), (1,)))),
    (DRIFT, Network(8, ((3,),))),
)
ENVS = (1, 3, 5, 133)

drawn, emulated = partial(acting.drawn, rollout), partial(acting.emulated, rollout)
assert_right = partial(acting.assert_right, rollout)


@pytest.mark.parametrize("env, network", NETWORKS, ids=named)
@each_way
def test_the_kernel_agrees_with_the_spec_in_either_order_of_threads(env, network, on, precision):
    assert (rollout_tile(network, 5, precision, on).groups > 0) == (on is WARPGROUPS)
    for envs in ENVS if (env, network) in PAIRS else (133,):
        call = drawn(env, network, envs, 2, precision)
        one = acting.assert_either_order_is_right(rollout, call, on)
        assert one["truncated"].any() or envs < 133


@pytest.mark.parametrize("env, network", (*PAIRS, *NETWORKS[3:]), ids=named)
def test_no_bit_depends_on_the_tile_or_on_where_the_weights_lie(env, network):
    call = drawn(env, network, 133, 1, "bfloat16")
    resident = resident_tiles(network, H100)
    assert [(t.rows, t.teams) for t in resident] == [(64, 2), (64, 1), (32, 1), (16, 1)]
    streaming = [streaming_tile(network, rows, "bfloat16") for rows in (64, 32, 16)]
    first, *others = [emulated(*call, H100, tile=tile) for tile in (*resident, *streaming)]
    for other in others:
        assert_same_bits(first, other, "the tile shows")


@pytest.mark.parametrize("env, network", (PAIRS[1], *NETWORKS[2:4]), ids=named)
def test_no_bit_depends_on_the_teams_or_on_their_warpgroups(env, network):
    call = drawn(env, network, 200, 1, "bfloat16")
    shapes = (1, 1), (1, 2), (2, 1), (2, 2)
    tiles = [warpgroup_tile(network, *shape, H100) for shape in shapes]
    chosen = warpgroup_tiles(network, H100)
    more = () if (env, network) == MARKET else ((3, 1), (4, 1))
    assert [(t.teams, t.groups) for t in chosen] == [(1, 2), (2, 1), *more]
    tiles += [t for t in chosen if t not in tiles]
    first, *others = [emulated(*call, H100, backwards=t.teams > 1, tile=t) for t in tiles]
    for other in others:
        assert_same_bits(first, other, "the tile shows")
    assert_right(first, *call[:2])


@pytest.mark.parametrize("steps", (0, 1))
@pytest.mark.parametrize("env, network", (*PAIRS, MARKET), ids=named)
@each_way
def test_few_steps_or_none_are_right(env, network, on, precision, steps):
    call = drawn(env, network, 67, steps, precision)
    assert_right(emulated(*call, on), *call[:2])


@each_way
def test_greedy_is_right(on, precision):
    call = drawn(*PAIRS[0], 67, 3, precision, greedy=True)
    assert_right(emulated(*call, on), *call[:2])


@each_way
def test_a_state_that_is_not_finite_shows_in_no_other_environment(on, precision):
    inputs, params, sizes = drawn(*PAIRS[1], 67, 3, precision)
    clean = emulated(inputs, params, sizes, on)
    got = emulated({**inputs, "floats": inputs["floats"].copy()}, params, sizes, on)
    assert_same_bits(clean, got, "the same call twice")
    inputs["floats"][5, 0] = np.nan
    got = emulated(inputs, params, sizes, on)
    assert np.isnan(got["log_probability"][0, 5]) and got["action"][0, 5] == 0
    others = np.arange(67) != 5
    for name in rollout.outputs:
        one, other = (x[name][..., others, :] if x[name].ndim == 3 else x[name][..., others]
                      for x in (clean, got))  # fmt: skip
        assert one.tobytes() == other.tobytes(), name


@each_way
def test_a_wrong_weight_or_row_is_more_than_rounding_may_explain(on, precision):
    inputs, params, sizes = drawn(*MARKET, 67, 1, precision)
    for name, place in (("parameters", 56 * 256 + 256 + 5), ("table", inputs["ints"][66, 0])):
        other = {**inputs, name: inputs[name].copy()}
        other[name][place] += np.asarray(2, inputs[name].dtype)
        with pytest.raises(AssertionError):
            assert_right(emulated(other, params, sizes, on), inputs, params)


def test_tiles_make_the_fewest_rounds_and_then_the_most_sms_work():
    network = MARKET[1]

    def chosen(envs, part, precision="bfloat16"):
        tile = rollout_tile(network, envs, precision, launch.KNOWN[part])
        return tile.rows, tile.teams, tile.resident, tile.grid(envs)

    assert chosen(4, "A100") == (16, 1, True, 1)
    assert chosen(1728, "A100") == (16, 1, True, 108)
    assert chosen(16384, "A100") == (32, 1, True, 512)
    assert chosen(16384, "L4") == (64, 1, False, 256)
    assert not any(chosen(16384, part, "float32")[2] for part in ("H200", "A100", "L4"))
    assert rollout_tile(network, 0, "bfloat16", H100).grid(0) == 0


def test_warpgroups_are_as_many_a_tile_as_an_sm_has_room_for():
    network = MARKET[1]

    def chosen(envs, network=network):
        tile = rollout_tile(network, envs, "bfloat16", H100)
        return tile.groups, tile.teams, tile.blocks_a_sm, tile.grid(envs)

    assert chosen(4) == (2, 1, 1, 1)
    assert chosen(132 * 64) == (2, 1, 1, 132)
    assert chosen(132 * 64 + 1) == (1, 2, 1, 67)
    assert chosen(16384) == (1, 2, 1, 128)
    assert chosen(131072) == (1, 2, 1, 1024)
    # Weights of 17 KB: blocks of a team share an SM.
    small = policy_network(56, 3, (64, 64))
    assert chosen(16384, small) == (2, 1, 2, 256)
    assert chosen(32768, small) == (1, 2, 2, 256)


def test_weights_that_fit_beside_too_few_rows_are_streamed():
    network, a100 = MARKET[1], launch.KNOWN["A100"]
    tiles = {t.rows * t.teams: t.nbytes for t in resident_tiles(network, H100)}
    for rows in tiles:
        room = replace(a100, shared_per_block=tiles[rows])
        assert rollout_tile(network, 4, "bfloat16", room).resident == (rows >= 32)


def test_warps_multiply_where_a_tile_of_warpgroups_does_not_fit():
    network = MARKET[1]
    needed = warpgroup_tile(network, 1, 1, H100).nbytes
    for room, groups in ((needed, 2), (needed - 1, 0)):
        tile = rollout_tile(network, 4, "bfloat16", replace(H100, shared_per_block=room))
        assert (tile.groups, tile.resident) == (groups, True)


def test_a_network_that_does_not_fit_is_refused_with_its_bytes():
    network = Network(512, ((512, 512, 4),))
    tiny = replace(launch.KNOWN["L4"], shared_per_block=8 * 1024)
    with pytest.raises(ValueError, match=r"network needs \d+ B of shared memory .* has 8192 B"):
        rollout_tile(network, 64, "bfloat16", tiny)


@pytest.mark.parametrize("precision", ("float32", "bfloat16"))
@pytest.mark.parametrize("part", ("A100", "L4", "H100"))
@pytest.mark.parametrize("name", ("market", "cartpole"))
def test_the_kernels_keep_to_registers_and_use_tensor_cores(precision, part, name):
    on, env = launch.KNOWN[part], make(name)
    network = policy_network(env.width, env.actions)
    about = network, on, precision, env.table_columns > 0
    acting.assert_kernels_fit_and_multiply(
        lambda tile: kernels_of(env, network, tile, False, precision)[0], *about
    )
