"""Whole rounds of DQN in one launch, emulated: bit for bit what the ops give one after another."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import dqn_rounds, launch, target_move
from lowgpu_kernels.dims import E, K, R
from lowgpu_kernels.ops.dqn import dqn_rounds_launch
from lowgpu_kernels.ops.dqn.dqn_launch import dqn_grid
from lowgpu_kernels.ops.dqn.dqn_rounds_launch import rounds_kernel
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK
from tests.emulator import emulating
from tests.harness import arrays_for, run_launcher, run_numpy
from tests.updates import assert_same_bits, assert_whole_fits

DUEL = Network(8, ((16, 2), (16, 1)), "tanh")
PLAIN = Network(24, ((32, 16, 3),))
ON = replace(launch.KNOWN["H100"], sms=9)
FALLS = {"epsilon_start": 0.8, "epsilon_end": 0.2, "epsilon_steps": 4, "lr": 0.01}


def drawn(env, network, envs, slots, filled, precision="bfloat16", **given):
    """(inputs, params, sizes) of a call on a ring of which so many slots are filled."""
    settings = {"env": env, "network": network, "precision": precision, **FALLS, **given}
    params = dqn_rounds.checked_params(settings)
    sizes = dqn_rounds.sizes_of({E: envs, K: slots, R: 40}, params)
    inputs = arrays_for(dqn_rounds, np.random.default_rng(envs), sizes, params)
    inputs["head"][:] = filled % slots, filled, 0
    inputs["clock"][0] = 1
    return inputs, params, sizes


def emulated(call, backwards=False, on=ON):
    with emulating(on, backwards):
        return run_launcher(dqn_rounds, *call)


def in_turn(call, on=ON):
    """The same by a launch an op; target_move is Numba's, which is not emulated."""
    move = mock.patch.object(target_move, "cuda", lambda *args: target_move.cpu(*args[:-1]))
    with mock.patch.object(dqn_rounds_launch, "_grid_of", lambda _: None), move:
        return emulated(call, on=on)


# Steps of an episode are 5. Slots and those filled, so that the ring wraps; soft and hard moves.
CASES = (
    (DRIFT, DUEL, 3, 8, 0, {"rounds": 3, "updates": 1, "batch": 7, "n_steps": 3}),
    (DRIFT, DUEL, 100, 6, 5, {"rounds": 3, "steps": 2, "updates": 3, "batch": 129, "n_steps": 3}),
    (DRIFT, DUEL, 700, 2, 2, {"rounds": 1, "steps": 3, "batch": 600, "n_steps": 3}),
    (WALK, PLAIN, 65, 4, 3, {"rounds": 5, "warm": 2, "batch": 1, "target_every": 150}),
    (WALK, PLAIN, 3, 4, 1, {"rounds": 3, "warm": 3, "target_every": 2, "tau": 0.5}),
)


@pytest.mark.parametrize("env, network, envs, slots, filled, given", CASES)
def test_rounds_in_one_launch_are_the_ops_one_after_another(
    env, network, envs, slots, filled, given
):
    call = drawn(env, network, envs, slots, filled, double=env is DRIFT, **given)
    whole, other = (emulated(call, backwards) for backwards in (False, True))
    assert_same_bits(whole, other, "who goes first?")
    dqn_rounds.verify(whole, *call[:2], None)
    apart = in_turn(call)
    if given.get("warm") == given["rounds"]:
        del whole["gradient"], apart["gradient"]
    assert_same_bits(whole, apart, "one launch differs from many")
    assert not whole["head"][2]
    assert whole["truncated"].any() or given["rounds"] < 3


def test_the_ops_in_turn_are_what_runs_where_a_grid_cannot_hold_an_update():
    call = drawn(DRIFT, DUEL, 3, 4, 2, "float32", rounds=2, updates=2, batch=5)
    names = {d.name: n for d, n in call[2].items()}
    with launch.recording(ON):
        apart = dqn_rounds.scratch_specs(names, call[1])
        whole = dqn_rounds.scratch_specs(names, {**call[1], "precision": "bfloat16"})
    assert apart["row_floats"][0] == (10, 3) and whole["row_floats"][0] == (0,)
    got = emulated(call)
    want = run_numpy(dqn_rounds, *call)
    for name in ("head", "clock", "draws", "step", "kept_mark", "terminated", "truncated"):
        assert got[name].tobytes() == want[name].tobytes(), name
    np.testing.assert_allclose(got["norm"], want["norm"], 1e-3)


@pytest.mark.parametrize("name, batch, double", (("market", 8192, True), ("cartpole", 230, False)))
def test_the_kernel_of_all_rounds_keeps_to_registers_and_its_products_overlap(name, batch, double):
    on, env = launch.KNOWN["H200"], make(name)
    hidden = (256, 128, 64) if name == "market" else (120, 88)
    network = Network(env.width, ((*hidden, env.actions + double),))
    whole = dqn_grid(env, network, batch, "bfloat16", on)
    assert_whole_fits(rounds_kernel(env, network, whole, double, 3), whole, on)


def test_more_updates_than_a_call_may_have_are_refused():
    with pytest.raises(ValueError, match=r"rounds \* updates must be at most 1048576"):
        drawn(DRIFT, DUEL, 3, 4, 2, rounds=1 << 11, updates=1 << 10)


def test_a_head_outside_its_ring_is_refused():
    inputs, params, _ = drawn(DRIFT, DUEL, 3, 4, 2)
    inputs["head"][0] = 4
    with pytest.raises(ValueError, match="head must hold a slot below 4"):
        dqn_rounds(**inputs, **params)
