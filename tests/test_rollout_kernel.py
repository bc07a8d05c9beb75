"""The rollout's kernel, emulated: against the spec, in every shape, with weights resident or not."""

import importlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import env_step, launch, mlp_forward, observe, rollout
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.device.philox import ACTION, numpy_draw
from lowgpu_kernels.dims import E, R
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, SUM, assert_within, forward_deviations
from lowgpu_kernels.ops.mlp.tile import tile_nbytes
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK
from lowgpu_kernels.ops.rollout.rollout import kernels_of, pairs
from lowgpu_kernels.ops.rollout.rollout_tile import RolloutTile, _resident_tiles, rollout_tile
from tests.emulator import emulating
from tests.harness import EPS, arrays_for, run_launcher

PRECISIONS = "float32", "bfloat16"
H100 = launch.KNOWN["H100"]
ONE_SM = replace(H100, sms=1)  # so that few environments fill a block, and more take several
MARKET = make("market", episode=2), policy_network(56, 3)
PAIRS = [tuple(pair.values()) for pair in pairs()]
NETWORKS = (
    *PAIRS,
    MARKET,
    (WALK, policy_network(24, 3, (72, 40, 8), "tanh")),
    (DRIFT, Network(8, ((56, 24, 2), (1,)))),
    (DRIFT, Network(8, ((3,),))),
)
ENVS = (1, 3, 5, 100, 127, 129, 133, 257)

each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def named(value):
    if isinstance(value, Network):
        return str(value).replace(" ", "")
    return getattr(value, "name", None)


def drawn(env, network, envs, steps, precision, **given):
    """(inputs, params, sizes) of a call."""
    params = {"env": env, "network": network, "steps": steps, "precision": precision, "seed": 3}
    params = rollout.checked_params({**params, **given})
    sizes = rollout.sizes_of({E: envs, R: 40}, params)
    rng = np.random.default_rng(envs)
    inputs = arrays_for(rollout, rng, sizes, params)
    if env is MARKET[0]:
        inputs["series"][0] = np.exp(rng.normal(size=40) / 50)
        inputs["series"][1] = np.arange(40) % 8 == 7
        inputs["ints"][:] = np.stack([rng.integers(7, size=envs), np.zeros(envs)], 1)
        inputs["floats"][:] = 0, 1
    return inputs, params, sizes


def emulated(inputs, params, sizes, on=ONE_SM, backwards=False, tile=None):
    """What the launcher gives, with the tile it chooses or with another."""
    module = importlib.import_module("lowgpu_kernels.ops.rollout.rollout")
    chosen = rollout_tile if tile is None else lambda *_: tile
    with emulating(on, backwards), mock.patch.object(module, "rollout_tile", chosen):
        return run_launcher(rollout, inputs, params, sizes)


def assert_same_bits(one, other, what):
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), f"{name}: {what}"


def assert_within_rounding(got, inputs, params):
    """Hold values, log-probabilities and actions to what rounding explains, element by element."""
    env, network, precision = params["env"], params["network"], params["precision"]
    table, series, parameters = (inputs[n] for n in ("table", "series", "parameters"))

    def policy(floats, ints):
        x = observe(floats, ints, table, series, env=env, precision=precision)
        wide = x.astype(np.float64), parameters.astype(np.float64)
        y, _ = mlp_forward.spec(*wide, network=network)
        deviation, _ = forward_deviations(x, parameters, network)
        heads = slice(env.actions + 1)
        return y[:, heads], deviation[:, heads]

    every = np.arange(got["action"].shape[1])
    for t, action in enumerate(got["action"]):
        floats, ints = got["state_floats"][t].copy(), got["state_ints"][t].copy()
        y, deviation = policy(floats, ints)
        assert_within(f"value, step {t}", got["value"][t], y[:, -1], deviation[:, -1])
        logits = y[:, :-1]
        # No log-probability moves further than two logits do; exp and log round in float32.
        moves = 2 * deviation[:, :-1].max(1)
        probability = np.exp(logits - logits.max(1, keepdims=True))
        probability /= probability.sum(1, keepdims=True)
        want = np.log(probability[every, action])
        rounding = moves + 4 * SUM * (1 + abs(want))
        assert_within(f"log_probability, step {t}", got["log_probability"][t], want, rounding)
        clock = inputs["clock"] + np.uint64(t)
        if not params["greedy"]:
            words = numpy_draw(int(params["seed"]), ACTION, every, int(clock[0]))[0]
            u, high = (words >> np.uint64(8)) * 2.0**-24, np.cumsum(probability, 1)[every, action]
            allowed = DEVIATIONS * (moves + 4 * SUM)
            assert (u <= high + allowed).all(), f"action, step {t}"
            assert (u >= high - probability[every, action] - allowed).all(), f"action, step {t}"
        env_step(floats, ints, action, series, clock, env=env, seed=int(params["seed"]))
        y, deviation = policy(floats, ints)
        limit = got["truncated"][t]
        assert_within(
            f"final_value, step {t}", got["final_value"][t], y[:, -1] * limit, deviation[:, -1]
        )
    y, deviation = policy(got["floats"], got["ints"])
    assert_within("last_value", got["last_value"], y[:, -1], deviation[:, -1])


def assert_right(got, inputs, params):
    rollout.verify(got, inputs, params, EPS[params["precision"]])
    assert_within_rounding(got, inputs, params)


@pytest.mark.parametrize("env, network", NETWORKS, ids=named)
@each_precision
def test_the_kernel_agrees_with_the_spec_in_either_order_of_threads(env, network, precision):
    for envs in ENVS if (env, network) in PAIRS else (5, 133):
        call = drawn(env, network, envs, 3, precision)
        one, other = (emulated(*call, backwards=b) for b in (False, True))
        assert_same_bits(one, other, f"who goes first, of {envs} environments?")
        assert_right(one, *call[:2])
        assert one["truncated"].any() or envs < 5


@pytest.mark.parametrize("env, network", NETWORKS, ids=named)
def test_no_bit_depends_on_the_tile_or_on_where_the_weights_lie(env, network):
    call = drawn(env, network, 133, 3, "bfloat16")
    resident = _resident_tiles(network, H100)
    assert [(t.rows, t.teams) for t in resident] == [(64, 2), (64, 1), (32, 1), (16, 1)]
    streaming = [
        RolloutTile(rows, 1, False, tile_nbytes(network, rows, "bfloat16"), 1)
        for rows in (64, 32, 16)
    ]
    first, *others = [emulated(*call, tile=tile) for tile in (*resident, *streaming)]
    for other in others:
        assert_same_bits(first, other, "the tile shows")


@pytest.mark.parametrize("steps", (0, 1))
@pytest.mark.parametrize("env, network", (*PAIRS, MARKET), ids=named)
@each_precision
def test_few_steps_or_none_are_right(env, network, precision, steps):
    call = drawn(env, network, 67, steps, precision)
    assert_right(emulated(*call), *call[:2])


@each_precision
def test_greedy_is_right(precision):
    call = drawn(*PAIRS[0], 67, 3, precision, greedy=True)
    assert_right(emulated(*call), *call[:2])


def test_a_wrong_weight_or_row_is_more_than_rounding_may_explain():
    inputs, params, sizes = drawn(*MARKET, 67, 1, "bfloat16")
    for name, place in (("parameters", 56 * 256 + 256 + 5), ("table", inputs["ints"][66, 0])):
        other = {**inputs, name: inputs[name].copy()}
        other[name][place] += np.asarray(1, inputs[name].dtype)
        with pytest.raises(AssertionError):
            assert_within_rounding(emulated(other, params, sizes), inputs, params)


def test_tiles_make_the_fewest_rounds_and_then_the_most_sms_work():
    network = MARKET[1]

    def chosen(envs, part="H200", precision="bfloat16"):
        tile = rollout_tile(network, envs, precision, launch.KNOWN[part])
        return tile.rows, tile.teams, tile.resident, tile.grid(envs)

    assert chosen(4) == (16, 1, True, 1)
    assert chosen(2112) == (16, 1, True, 132)
    assert chosen(2113) == (32, 1, True, 67)
    assert chosen(8192) == (64, 1, True, 128)
    assert chosen(12000) == (64, 2, True, 94)
    assert chosen(16384) == (64, 2, True, 128)
    assert chosen(16384, "A100") == (32, 1, True, 512)
    assert chosen(16384, "L4") == (64, 1, False, 256)
    assert not any(chosen(16384, part, "float32")[2] for part in ("H200", "A100", "L4"))
    assert rollout_tile(network, 0, "bfloat16", H100).grid(0) == 0


def test_weights_that_fit_beside_too_few_rows_are_streamed():
    network = MARKET[1]
    tiles = {t.rows * t.teams: t.nbytes for t in _resident_tiles(network, H100)}
    for rows in tiles:
        room = replace(H100, shared_per_block=tiles[rows] + 1024)
        assert rollout_tile(network, 4, "bfloat16", room).resident == (rows >= 32)


def test_a_network_that_does_not_fit_is_refused_with_its_bytes():
    network = Network(512, ((512, 512, 4),))
    tiny = replace(launch.KNOWN["L4"], shared_per_block=8 * 1024)
    with pytest.raises(ValueError, match=r"network needs \d+ B of shared memory .* has 8192 B"):
        rollout_tile(network, 64, "bfloat16", tiny)


@each_precision
@pytest.mark.parametrize("part", ("A100", "L4", "H100"))
@pytest.mark.parametrize("name", ("market", "cartpole"))
def test_the_kernels_keep_to_registers_and_use_tensor_cores(precision, part, name):
    on, env = launch.KNOWN[part], make(name)
    network = policy_network(env.width, env.actions)
    for tile in {rollout_tile(network, e, precision, on) for e in (4, 4096, 8192, 16384)}:
        kernel = kernels_of(env, network, tile, False, precision)[0]
        binary = kernel.binary(on.architecture)
        resources = binary.kernel(kernel.entry)
        assert resources.spill_stores + resources.spill_loads + resources.stack == 0
        assert resources.shared + tile.nbytes <= on.shared_per_block
        held = launch.occupancy(resources, tile.threads, tile.nbytes, on).blocks_per_sm
        assert held >= tile.blocks_a_sm
        code = disassemble(binary)
        assert not FLOAT64.search(code) and not CALL.search(code)
        assert ("HMMA.16816.F32.BF16" in code) == (precision == "bfloat16")
        assert ("LDGSTS" in code) == (env.table_columns > 0)
