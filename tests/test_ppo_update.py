"""The PPO update: the kernels emulated against the spec, and what the whole promises."""

from dataclasses import replace

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import adam, launch, mlp_backward, mlp_forward, observe, ppo_loss
from lowgpu_kernels.dims import B, M, N, R
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from lowgpu_kernels.ops.ppo.grid_update import tiles_of
from lowgpu_kernels.ops.ppo.ppo_loss import STATISTICS
from lowgpu_kernels.ops.ppo.ppo_update import (
    ADAM,
    LOSS,
    STATES,
    TAKEN,
    assert_first_update,
    ppo_update,
)
from lowgpu_kernels.ops.ppo.update_launch import grid_kernel, ppo_grid, tile_kernels
from lowgpu_kernels.ops.ppo.update_tile import update_tile
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK
from tests.emulator import emulating
from tests.harness import arrays_for, run_launcher, run_numpy
from tests.test_gpu import run_gpu
from tests.updates import assert_same_bits, assert_tiles_fit, assert_whole_fits, lone_updates

PRECISIONS = "float32", "bfloat16"
# So that small batches get full tiles, in rounds; without warpgroups' products.
FEW_SMS = replace(launch.KNOWN["H100"], sms=1, capability=(8, 0))
NO_ROOM = replace(FEW_SMS, shared_per_block=24 * 1024, shared_per_sm=50 * 1024)
EMULATED = (
    (WALK, policy_network(24, 3, (256, 128, 64)), 70, FEW_SMS),
    (WALK, policy_network(24, 3, (32, 16)), 129, FEW_SMS),
    (WALK, policy_network(24, 3, (40, 24), "tanh"), 1, FEW_SMS),
    (WALK, policy_network(24, 3, (72, 8)), 257, FEW_SMS),
    (WALK, policy_network(24, 3, (72, 40)), 33, NO_ROOM),
    (DRIFT, policy_network(8, 2, (16,), "tanh", False), 31, FEW_SMS),
    (DRIFT, Network(8, ((56, 24, 2), (1,))), 100, FEW_SMS),
    (DRIFT, Network(8, ((3,),)), 127, FEW_SMS),
)

GROUPED = (  # sms: enough blocks for a thread to own little of the gradient
    (WALK, policy_network(24, 3, (136, 72)), 70, 2, 28),
    (WALK, policy_network(24, 3, (32, 16)), 513, 3, 7),
    (WALK, policy_network(24, 3, (40, 24), "tanh"), 1, 2, 7),
    (DRIFT, policy_network(8, 2, (16,), "tanh", False), 129, 2, 9),
    (DRIFT, Network(8, ((56, 24, 2), (1,))), 330, 1, 5),
    (DRIFT, Network(8, ((3,),)), 130, 2, 4),
)

each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def named(value):
    return str(value).replace(" ", "") if isinstance(value, Network) else None


def drawn(env, network, batch, precision, seed=0, transitions=300, updates=1, **given):
    """(inputs, params, sizes) of a call."""
    settings = {"lr": 0.01, "max_norm": 0.5, "entropy_weight": 0.05, **given}
    params = ppo_update.checked_params(
        {"env": env, "network": network, "precision": precision, **settings}
    )
    sizes = ppo_update.sizes_of({M: updates, B: batch, N: transitions, R: 40}, params)
    return arrays_for(ppo_update, np.random.default_rng(seed), sizes, params), params, sizes


@pytest.mark.parametrize("env, network, batch, on", EMULATED, ids=named)
@each_precision
def test_the_kernels_agree_with_the_spec_in_either_order_of_threads(
    env, network, batch, on, precision
):
    inputs, params, sizes = drawn(env, network, batch, precision)
    runs = []
    for backwards in (False, True):
        with emulating(on, backwards):
            runs.append(run_launcher(ppo_update, inputs, params, sizes))
    # Adam's kernel is Numba's and does not run here; what it starts from is all there.
    for name in ("gradient", "statistics"):
        assert runs[0][name].tobytes() == runs[1][name].tobytes(), f"{name}: who goes first?"
    assert_first_update(runs[0], inputs, params)


@pytest.mark.parametrize("env, network, batch, updates, sms", GROUPED, ids=named)
def test_updates_in_one_launch_are_lone_updates_one_after_another_and_the_specs(
    env, network, batch, updates, sms
):
    on = replace(launch.KNOWN["H100"], sms=sms)
    assert ppo_grid(env, network, batch, "bfloat16", on) is not None
    inputs, params, sizes = drawn(env, network, batch, "bfloat16", updates=updates)

    def run(*call, backwards=False):
        with emulating(on, backwards):
            return run_launcher(ppo_update, *call)

    call = inputs, params, sizes
    whole, other = (run(*call, backwards=b) for b in (False, True))
    assert_same_bits(whole, other, "who goes first?")
    ppo_update.verify(whole, inputs, params, None)
    rows, results = ("index", "moments"), ("statistics", "norm")
    lone_updates(ppo_update, run, whole, call, rows, results)


@pytest.mark.gpu
def test_a_gpus_blocks_add_up_several_tiles_and_agree_with_the_spec():
    env = make("market")
    network, batch = policy_network(env.width, env.actions), 64 * launch.device().sms + 513
    whole = ppo_grid(env, network, batch, "bfloat16", launch.device())
    if whole is None:
        pytest.skip("needs warpgroups' products")
    assert whole.several
    inputs, params, sizes = drawn(env, network, batch, "bfloat16")
    got, again = (run_gpu(ppo_update, inputs, params, sizes) for _ in range(2))
    ppo_update.verify(got, inputs, params, None)
    assert_same_bits(got, again, "the same call")


def test_the_emulated_launches_share_tiles_in_every_way_and_add_tiles_up():
    shares = {}
    for env, network, batch, _, sms in GROUPED:
        on = replace(launch.KNOWN["H100"], sms=sms)
        share = ppo_grid(env, network, batch, "bfloat16", on).share
        shares.setdefault(share, set()).add(tiles_of(batch) > sms)
    assert shares == {4: {False}, 2: {False}, 1: {False, True}}


def test_the_emulated_calls_take_tiles_of_every_size_in_one_and_in_several_rounds():
    tiles = [
        (update_tile(network, batch, precision, on), batch, on)
        for _, network, batch, on in EMULATED
        for precision in PRECISIONS
    ]
    assert {tile.resident for tile, *_ in tiles} == {True, False}
    assert {tile.rows for tile, *_ in tiles} == {64, 32, 16}
    rounds = {
        -(-tile.tiles(batch) // tile.grid(tile.tiles(batch), on)) for tile, batch, on in tiles
    }
    assert rounds == {1, 2, 3, 5}


@each_precision
def test_a_minibatch_in_parts_has_the_bits_of_one_that_is_whole_and_takes_less_memory(precision):
    env, network, _, on = EMULATED[-1]
    whole, *parts = (
        drawn(env, network, 2000, precision, accumulate=count) for count in (1, 2, 3, 1000)
    )
    tiles = update_tile(network, 2000, precision, on).tiles(2000)

    def held(params, sizes):
        with launch.recording(on):
            work = ppo_update.scratch_specs({d.name: n for d, n in sizes.items()}, params)
        return work["partials"][0][0]

    with emulating(on):
        once = run_launcher(ppo_update, *whole)
        # In whole eights of tiles, so that every sum has its terms in the same order.
        assert held(*whole[1:]) == tiles > 24
        for call, count in zip(parts, (-(-tiles // 16) * 8, -(-tiles // 24) * 8, 8)):
            assert held(*call[1:]) == count < tiles
            got = run_launcher(ppo_update, *call)
            for name in ("gradient", "statistics"):
                assert got[name].tobytes() == once[name].tobytes(), name
    assert_first_update(once, *whole[:2])


@each_precision
def test_an_empty_minibatch_is_a_zero_gradient_and_counts_as_a_step(precision):
    network = policy_network(8, 2, (16,))
    inputs, params, sizes = drawn(DRIFT, network, 0, precision)
    with emulating(FEW_SMS):
        emulated = run_launcher(ppo_update, inputs, params, sizes)
    got = run_numpy(ppo_update, inputs, params, sizes)
    for result in (emulated, got):
        assert not result["gradient"].any() and not result["statistics"].any()
    assert got["norm"] == 0 and got["step"] == inputs["step"] + 1


@each_precision
def test_the_update_is_what_its_five_ops_give_one_after_another(precision):
    network = policy_network(24, 3, (72, 40))
    inputs, params, sizes = drawn(WALK, network, 129, precision, updates=3)
    got = run_numpy(ppo_update, inputs, params, sizes)
    a = {n: None if x is None else x.copy() for n, x in inputs.items()}
    weights = {n: params[n] for n in LOSS}
    rates = {n: params[n] for n in ADAM}
    statistics, norms = [], []
    for k, rows in enumerate(a["index"]):
        x = observe(*(a[n] for n in STATES[:-1]), rows, env=WALK, precision=precision)
        y, hidden = mlp_forward(x, a["parameters"], network=network)
        taken = [a[n] for n in TAKEN[:-1]]
        moments = None if a["moments"] is None else a["moments"][k]
        grad_y, of_rows = ppo_loss(y, rows, *taken, moments, actions=3, **weights)
        gradient = mlp_backward(x, hidden, grad_y, a["parameters"], network=network)
        norms.append(adam(a["parameters"], gradient, a["m"], a["v"], a["step"], **rates))
        statistics.append(of_rows)
    statistics, norm = np.stack(statistics), np.concatenate(norms)
    want = {"gradient": gradient, "statistics": statistics, "norm": norm}
    for name, array in {**want, **{n: a[n] for n in ppo_update.changes}}.items():
        assert got[name].tobytes() == array.tobytes(), name


@each_precision
@pytest.mark.parametrize("wrong", ("index", "action", "table", "value"))
def test_one_row_gone_wrong_is_more_than_rounding_may_explain(precision, wrong):
    inputs, params, sizes = drawn(
        WALK, policy_network(24, 3, (32, 16)), 257, precision, value_clip=0
    )
    other = {**inputs, wrong: inputs[wrong].copy()}
    row = inputs["index"][0, 5]
    if wrong == "index":
        other["index"][0, 5] = (row + 1) % 300
    elif wrong == "action":
        other["action"][row] = (inputs["action"][row] + 1) % 3
    elif wrong == "value":
        other = {**inputs, "returns": inputs["returns"].copy()}
        other["returns"][row] += 1
    else:
        other["table"][inputs["state_ints"][row, 0]] *= 2
    got = run_numpy(ppo_update, other, params, sizes)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_first_update(got, inputs, params)


@pytest.mark.parametrize(
    "network, batch, on",
    (
        (policy_network(8, 2, (16,)), 65, FEW_SMS),
        (GROUPED[3][1], GROUPED[3][2], replace(launch.KNOWN["H100"], sms=GROUPED[3][4])),
    ),
    ids=("three launches", "one"),
)
def test_a_row_that_is_not_finite_is_counted_and_changes_nothing(network, batch, on):
    inputs, params, sizes = drawn(DRIFT, network, batch, "bfloat16")
    bad = {**inputs, "advantage": inputs["advantage"].copy(), "moments": None}
    bad["advantage"][inputs["index"][0, 64]] = np.inf
    with emulating(on):
        emulated = run_launcher(ppo_update, bad, params, sizes)
    count = (inputs["index"] == inputs["index"][0, 64]).sum()
    assert emulated["statistics"][0, STATISTICS.index("non_finite_rows")] == count
    with np.errstate(invalid="ignore"):
        got = run_numpy(ppo_update, bad, params, sizes)
    assert not np.isfinite(got["norm"][0])
    for name in ppo_update.changes:
        assert got[name].tobytes() == inputs[name].tobytes(), name


@each_precision
@pytest.mark.parametrize("part", ("A100", "L4", "H100"))
@pytest.mark.parametrize("batch", (2048, 8192))
def test_the_markets_kernels_keep_to_registers_and_use_tensor_cores(precision, part, batch):
    on = launch.KNOWN[part]
    env = make("market")
    network = policy_network(env.width, env.actions)
    tile = update_tile(network, batch, precision, on)
    kernels = tile_kernels(env, network, tile, precision)
    assert_tiles_fit(kernels, "ppo_update_tiles", tile, precision, on)


@pytest.mark.parametrize(
    "name, batch, share",
    (("market", 2048, 4), ("market", 8192, 1), ("market", 65536, 1), ("cartpole", 4096, 2)),
)
def test_the_kernel_of_all_updates_keeps_to_registers_and_its_products_overlap(name, batch, share):
    on, env = launch.KNOWN["H200"], make(name)
    network = policy_network(env.width, env.actions)
    whole = ppo_grid(env, network, batch, "bfloat16", on)
    assert whole.share == share
    assert_whole_fits(grid_kernel(env, network, whole), whole, on)


def test_all_updates_are_one_launch_only_where_warpgroups_multiply_and_the_network_fits():
    env, network = make("market"), policy_network(56, 3)
    assert ppo_grid(env, network, 8192, "bfloat16", launch.KNOWN["H100"]).grid == 132
    assert ppo_grid(env, network, 8192, "float32", launch.KNOWN["H100"]) is None
    assert ppo_grid(env, network, 8192, "bfloat16", launch.KNOWN["A100"]) is None
    wide = policy_network(56, 3, (512, 256))
    assert ppo_grid(env, wide, 8192, "bfloat16", launch.KNOWN["H100"]) is None


def test_few_tiles_are_shared_by_as_many_blocks_as_have_a_part_and_many_leave_a_vector_a_block():
    env, network, on = make("market"), policy_network(56, 3), launch.KNOWN["H100"]
    seen = {}
    for batch in (0, 1, 2112, 2113, 4224, 4225, 8448, 8449, 65536):
        whole = ppo_grid(env, network, batch, "bfloat16", on)
        seen[batch] = whole.share, whole.vectors(batch)
        assert whole.several == (batch > 8448)
    assert seen == {
        0: (4, 1),
        1: (4, 1),
        2112: (4, 33),
        2113: (2, 34),
        4224: (2, 66),
        4225: (1, 67),
        8448: (1, 132),
        8449: (1, 132),
        65536: (1, 132),
    }


def test_the_markets_weights_are_resident_where_there_is_room():
    network = policy_network(56, 3)
    parts = {name: launch.KNOWN[name] for name in ("H100", "A100", "L4")}
    tiles = {n: update_tile(network, 8192, "bfloat16", on) for n, on in parts.items()}
    assert {n: (t.rows, t.resident) for n, t in tiles.items()} == {
        "H100": (64, True),
        "A100": (32, True),
        "L4": (64, False),
    }
    assert not any(update_tile(network, 8192, "float32", on).resident for on in parts.values())


def test_a_network_that_does_not_fit_is_refused_with_its_bytes():
    network = Network(8, ((*[512] * 7, 2), (*[512] * 7, 1)))
    with pytest.raises(
        ValueError, match=r"network needs \d+ B of shared memory .* L4 has 101376 B"
    ):
        update_tile(network, 64, "bfloat16", launch.KNOWN["L4"])
