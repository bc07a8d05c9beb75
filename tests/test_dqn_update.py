"""The DQN update: the kernels emulated against the spec, and what the whole promises."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import adam, dqn_update, launch, mlp_backward, mlp_forward, observe
from lowgpu_kernels.dims import B, M, R
from lowgpu_kernels.ops.dqn.dqn_launch import dqn_grid, grid_kernel, update_kernels
from lowgpu_kernels.ops.dqn.dqn_update import STATISTICS
from lowgpu_kernels.ops.dqn.dqn_verify import ADAM, assert_first_update
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.ppo.update_tile import update_tile
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK
from tests import harness
from tests.emulator import emulating
from tests.harness import arrays_for, run_launcher, run_numpy
from tests.updates import assert_same_bits, assert_tiles_fit, assert_whole_fits, lone_updates

# So that small batches get full tiles, in rounds; without warpgroups' products.
FEW_SMS = replace(launch.KNOWN["H100"], sms=1, capability=(8, 0))
# With them: DUEL in bfloat16 is one launch.
GROUPS = replace(launch.KNOWN["H100"], sms=9)
NO_ROOM = replace(FEW_SMS, shared_per_block=24 * 1024, shared_per_sm=50 * 1024)
DUEL = Network(8, ((16, 2), (16, 1)), "tanh")
EMULATED = (
    (WALK, Network(24, ((136, 72, 3),)), 70, FEW_SMS, True),
    (WALK, Network(24, ((32, 16, 3),)), 129, FEW_SMS, False),
    (WALK, Network(24, ((40, 24, 4),), "tanh"), 1, FEW_SMS, True),
    (WALK, Network(24, ((72, 40, 3),)), 33, NO_ROOM, True),
    (DRIFT, DUEL, 257, FEW_SMS, True),
    (DRIFT, Network(8, ((2,),)), 127, FEW_SMS, False),
)
GROUPED = (  # sms: enough blocks for a thread to own little of the gradient; then whether double
    (WALK, Network(24, ((136, 72, 3),)), 70, 2, 28, True),
    (WALK, Network(24, ((32, 16, 3),)), 513, 3, 7, False),
    (WALK, Network(24, ((40, 24, 4),), "tanh"), 1, 2, 7, True),
    (DRIFT, DUEL, 129, 2, 9, True),
    (DRIFT, Network(8, ((56, 24, 2), (1,))), 64, 1, 9, False),
    (DRIFT, Network(8, ((2,),)), 127, 3, 3, True),
)
ROWS = (
    *("state_floats", "state_ints", "action", "reward", "discount"),
    *("next_floats", "next_ints", "weight"),
)

RESULTS = "error", "statistics", "norm"

each_precision = pytest.mark.parametrize("precision", ("float32", "bfloat16"))


def named(value):
    return str(value).replace(" ", "") if isinstance(value, Network) else None


def drawn(env, network, batch, precision, updates=1, **given):
    """(inputs, params, sizes) of a call, with weights."""
    settings = {"lr": 0.01, "max_norm": 0.5, **given}
    params = dqn_update.checked_params(
        {"env": env, "network": network, "precision": precision, **settings}
    )
    sizes = dqn_update.sizes_of({M: updates, B: batch, R: 40}, params)
    inputs = arrays_for(dqn_update, np.random.default_rng(batch), sizes, params)
    inputs["weight"] = np.random.default_rng(1).uniform(0.1, 1, (updates, batch)).astype("f4")
    return inputs, params, sizes


def emulated(inputs, params, sizes, on=FEW_SMS, backwards=False):
    with emulating(on, backwards):
        return run_launcher(dqn_update, inputs, params, sizes)


@pytest.mark.parametrize("env, network, batch, on, double", EMULATED, ids=named)
@each_precision
def test_the_kernels_agree_with_the_spec_in_either_order_of_threads(
    env, network, batch, on, double, precision
):
    call = drawn(env, network, batch, precision, double=double)
    one, other = (emulated(*call, on, backwards) for backwards in (False, True))
    assert_same_bits(one, other, "who goes first?")
    dqn_update.verify(one, *call[:2], None)


def test_the_emulated_calls_take_tiles_of_every_size_in_one_and_in_several_rounds():
    tiles = [
        (update_tile(network, batch, precision, on), batch, on)
        for _, network, batch, on, _ in EMULATED
        for precision in ("float32", "bfloat16")
    ]
    assert {tile.resident for tile, *_ in tiles} == {True, False}
    assert {tile.rows for tile, *_ in tiles} >= {64, 32}
    rounds = {
        -(-tile.tiles(batch) // tile.grid(tile.tiles(batch), on)) for tile, batch, on in tiles
    }
    assert 1 in rounds and max(rounds) > 2


@pytest.mark.parametrize("precision, count", [("float32", 5), ("bfloat16", 3)])
def test_a_minibatch_in_parts_has_the_bits_of_one_that_is_whole(precision, count):
    env, network, _, on, double = EMULATED[4]
    calls = [
        drawn(env, network, 1300, precision, 2, double=double, accumulate=parts)
        for parts in (1, count)
    ]
    with launch.recording(on):
        whole, parts = (
            dqn_update.scratch_specs({d.name: n for d, n in sizes.items()}, params)
            for _, params, sizes in calls
        )
    assert parts["partials"][0][0] < whole["partials"][0][0] and not whole["carried"][0][0]
    once, again = (emulated(*call, on) for call in calls)
    assert_same_bits(once, again, "the minibatch was taken in parts")
    dqn_update.verify(again, *calls[1][:2], None)


@pytest.mark.parametrize("env, network, batch, updates, sms, double", GROUPED, ids=named)
def test_updates_in_one_launch_are_lone_updates_one_after_another_and_the_specs(
    env, network, batch, updates, sms, double
):
    on = replace(launch.KNOWN["H100"], sms=sms)
    assert dqn_grid(env, network, batch, "bfloat16", on) is not None
    moves = {"tau": 1.0, "target_every": 2} if updates == 3 else {"tau": 0.01}
    call = drawn(env, network, batch, "bfloat16", updates, double=double, **moves)
    inputs, params, _ = call
    if not double:
        inputs["weight"] = None
    whole, other = (emulated(*call, on, backwards) for backwards in (False, True))
    assert_same_bits(whole, other, "who goes first?")
    dqn_update.verify(whole, inputs, params, None)
    lone_updates(dqn_update, lambda *c: emulated(*c, on), whole, call, ROWS, RESULTS)


def test_what_lay_in_the_working_memory_of_one_launch_does_not_show():
    env, network, batch, updates, sms, double = GROUPED[2]
    on = replace(launch.KNOWN["H100"], sms=sms)
    call = drawn(env, network, batch, "bfloat16", updates, double=double)
    clean = emulated(*call, on)
    with mock.patch.object(harness, "_scratch", nans):
        assert_same_bits(clean, emulated(*call, on), "NaN in whatever it is read as")


def nans(shape, dtype):
    made = np.empty(shape, dtype)
    made.view(np.uint8)[...] = 0xFF
    return made


@each_precision
@pytest.mark.parametrize("run", (emulated, lambda *call: run_numpy(dqn_update, *call)))
@pytest.mark.parametrize("tau, target_every", ((0.005, 1), (1.0, 3)))
def test_updates_of_one_call_are_lone_updates_one_after_another(precision, run, tau, target_every):
    given = {"tau": tau, "target_every": target_every}
    inputs, params, sizes = drawn(DRIFT, DUEL, 65, precision, updates=4, **given)
    inputs["step"][0] = 1
    call = inputs, params, sizes
    made = lone_updates(dqn_update, run, run(*call), call, ROWS, RESULTS)
    targets = [inputs["target"], *(got["target"] for got in made)]
    moved = [bool((new != old).any()) for old, new in pairwise(targets)]
    # Case C4: steps 2, 3, 4 and 5, whatever call they are part of.
    assert moved == ([True] * 4 if target_every == 1 else [False, True, False, False])


def by_hand(double, **given):
    """One row of a network without hidden layers whose values are its biases: Q = 1, 3; Q' = 10, -20."""
    network = Network(8, ((2,),))
    inputs, params, sizes = drawn(DRIFT, network, 1, "float32", double=double, lr=1e-3, **given)
    for name, values in (("parameters", (1, 3)), ("target", (10, -20))):
        inputs[name][:] = 0
        inputs[name][16:18] = values
    inputs |= {"weight": None, "action": np.zeros((1, 1), "i4")}
    for name, value in (("reward", 0.5), ("discount", 0.9)):
        inputs[name][:] = value
    return inputs, params, sizes


@pytest.mark.parametrize("run", (emulated, lambda *call: run_numpy(dqn_update, *call)))
@pytest.mark.parametrize("double, goal", ((True, 0.5 + 0.9 * -20), (False, 0.5 + 0.9 * 10)))
def test_the_parameters_choose_and_the_target_values_where_double(run, double, goal):
    for delta, loss, slope in (
        (2, 2 * (abs(1 - goal) - 1), 2 * np.sign(1 - goal)),
        (0, (1 - goal) ** 2 / 2, 1 - goal),
    ):
        got = run(*by_hand(double, delta=delta, max_norm=0.0))
        np.testing.assert_allclose(got["error"], [[1 - goal]], rtol=1e-6)
        np.testing.assert_allclose(got["statistics"], [[loss, 1, goal, 0]], rtol=1e-6)
        np.testing.assert_allclose(got["gradient"][16:18], [slope, 0], rtol=1e-6)


@pytest.mark.parametrize("run", (emulated, lambda *call: run_numpy(dqn_update, *call)))
def test_nothing_counts_for_a_state_that_follows_a_termination(run):
    inputs, params, sizes = by_hand(True)
    inputs["discount"][:] = 0
    inputs["target"][16:18] = np.inf, np.nan
    got = run(inputs, params, sizes)
    np.testing.assert_array_equal(got["statistics"][0, 2:], [0.5, 0])
    assert np.isfinite(got["norm"]).all()


def test_nothing_counts_for_such_a_state_in_one_launch():
    inputs, params, sizes = drawn(DRIFT, DUEL, 65, "bfloat16", updates=2)
    inputs["discount"][:] = 0
    inputs["target"][0] = np.inf
    got = emulated(inputs, params, sizes, GROUPS)
    np.testing.assert_allclose(got["statistics"][:, 2], inputs["reward"].mean(1), atol=1e-6)
    assert np.isfinite(got["norm"]).all() and np.isfinite(got["error"]).all()


@each_precision
def test_a_dueling_network_moves_its_advantages_against_each_other_and_its_value(precision):
    network = Network(8, ((2,), (1,)))
    inputs, params, sizes = drawn(DRIFT, network, 31, precision)
    got = run_numpy(dqn_update, inputs, params, sizes)
    (_, _, advantages), (_, _, value) = network.views(got["gradient"])
    np.testing.assert_allclose(advantages.sum(), 0, atol=1e-3 if precision == "bfloat16" else 1e-6)
    assert abs(value[0]) > 1e-3 and abs(advantages[0]) > 1e-3


@each_precision
def test_the_update_is_what_its_ops_give_one_after_another(precision):
    network = Network(24, ((72, 40, 3),))
    inputs, params, sizes = drawn(WALK, network, 129, precision, delta=0.0, tau=1.0)
    got = run_numpy(dqn_update, inputs, params, sizes)
    a = {n: x.copy() for n, x in inputs.items()}
    world = a["table"], a["series"]
    with_params = {"env": WALK, "precision": precision}
    x = observe(a["state_floats"][0], a["state_ints"][0], *world, **with_params)
    x_next = observe(a["next_floats"][0], a["next_ints"][0], *world, **with_params)
    y, hidden = mlp_forward(x, a["parameters"], network=network)
    online, held = (mlp_forward(x_next, a[n], network=network)[0] for n in ("parameters", "target"))
    rows = np.arange(129)
    goal = a["reward"][0] + a["discount"][0] * held[rows, online[:, :3].argmax(1)]
    error = y[rows, a["action"][0]] - goal
    grad_y = np.zeros_like(y)
    grad_y[rows, a["action"][0]] = a["weight"][0] * error * (np.float32(1) / np.float32(129))
    gradient = mlp_backward(x, hidden, grad_y, a["parameters"], network=network)
    rates = {n: params[n] for n in ADAM}
    norm = adam(a["parameters"], gradient, a["m"], a["v"], a["step"], **rates)
    want = {n: a[n] for n in ("parameters", "m", "v", "step")} | {"target": a["parameters"]}
    for name, array in {**want, "gradient": gradient, "error": error[None], "norm": norm}.items():
        assert got[name].tobytes() == array.tobytes(), name


@each_precision
@pytest.mark.parametrize("wrong", ("action", "reward", "discount", "weight", "next_floats"))
def test_one_row_gone_wrong_is_more_than_rounding_may_explain(precision, wrong):
    inputs, params, sizes = drawn(WALK, Network(24, ((32, 16, 3),)), 257, precision)
    inputs["discount"][0, 5] = 0.9
    other = {**inputs, wrong: inputs[wrong].copy()}
    row = other[wrong][0, 5:6]
    row[:] = (row + 1) % 3 if wrong == "action" else row + 2
    got = run_numpy(dqn_update, other, params, sizes)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_first_update(dqn_update.spec, got, inputs, params)


@each_precision
def test_an_empty_minibatch_is_a_zero_gradient_and_counts_as_a_step(precision):
    call = drawn(DRIFT, DUEL, 0, precision)
    for got in (emulated(*call), emulated(*call, GROUPS), run_numpy(dqn_update, *call)):
        assert not got["gradient"].any() and not got["statistics"].any()
        assert got["norm"] == 0 and got["step"] == call[0]["step"] + 1


@pytest.mark.parametrize("delta", (0.0, 1.0))
@pytest.mark.parametrize("reward", (np.inf, np.nan))
def test_a_row_that_is_not_finite_is_counted_and_changes_nothing(delta, reward):
    inputs, params, sizes = drawn(DRIFT, DUEL, 65, "bfloat16", delta=delta)
    inputs["reward"][0, 64] = reward
    with np.errstate(invalid="ignore"):
        results = [emulated(inputs, params, sizes, on) for on in (FEW_SMS, GROUPS)]
        results.append(run_numpy(dqn_update, inputs, params, sizes))
    for got in results:
        assert got["statistics"][0, STATISTICS.index("non_finite_rows")] == 1
        assert not np.isfinite(got["norm"][0])
        for name in dqn_update.changes:
            assert got[name].tobytes() == inputs[name].tobytes(), name


def test_an_action_out_of_range_is_refused_with_its_place():
    inputs, params, _ = drawn(DRIFT, DUEL, 3, "float32")
    inputs["action"][0, 2] = 2
    with pytest.raises(ValueError, match=r"action\[0, 2\] must be in \[0, 2\), got 2"):
        dqn_update(**inputs, **params)


@each_precision
@pytest.mark.parametrize("part", ("A100", "L4", "H100"))
@pytest.mark.parametrize("batch", (2048, 8192))
def test_the_markets_kernels_keep_to_registers_and_use_tensor_cores(precision, part, batch):
    on = launch.KNOWN[part]
    env = make("market")
    network = Network(env.width, ((256, 128, 64, env.actions),))
    tile = update_tile(network, batch, precision, on)
    kernels = update_kernels(env, network, tile, precision, True)
    assert_tiles_fit(kernels, "dqn_update_tiles", tile, precision, on)


@pytest.mark.parametrize(
    "double, batch, share", ((True, 8192, 1), (True, 65536, 1), (False, 4096, 2), (True, 230, 4))
)
def test_the_kernel_of_all_updates_keeps_to_registers_and_its_products_overlap(
    double, batch, share
):
    on, env = launch.KNOWN["H200"], make("market")
    # The wider head: advantages and a value.
    network = Network(env.width, ((256, 128, 64, env.actions + double),))
    whole = dqn_grid(env, network, batch, "bfloat16", on)
    assert whole.share == share
    assert_whole_fits(grid_kernel(env, network, whole, double), whole, on)


def test_all_updates_are_one_launch_only_where_warpgroups_multiply_and_the_network_fits():
    for name in ("market", "cartpole"):
        env = make(name)
        network, wide = (Network(env.width, ((*w, 3),)) for w in ((256, 128, 64), (512, 256)))
        assert dqn_grid(env, network, 8192, "bfloat16", launch.KNOWN["H100"]).grid == 132
        assert dqn_grid(env, network, 8192, "float32", launch.KNOWN["H100"]) is None
        assert dqn_grid(env, network, 8192, "bfloat16", launch.KNOWN["A100"]) is None
        assert dqn_grid(env, wide, 8192, "bfloat16", launch.KNOWN["H100"]) is None
