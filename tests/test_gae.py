"""What GAE promises beyond agreeing with its spec."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lowgpu_kernels.ops.advantage.gae as module
from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import gae, launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.dims import E, T
from tests.emulator import emulating
from tests.harness import arrays_for, assert_agrees, run_launcher, run_numpy
from tests.test_gpu import run_gpu


def column(*values):
    return np.array(values, "f4").reshape(-1, 1)


def flags(*values):
    return np.array(values, bool).reshape(-1, 1)


def rollout(rng, steps, envs):
    reward, value = (rng.normal(size=(steps, envs)).astype("f4") for _ in range(2))
    return reward, value, rng.normal(size=envs).astype("f4")


def test_a_time_limit_bootstraps_from_the_final_value():
    """Case A1."""
    two = column(2, 2, 2)
    got = gae(
        column(1, 1, 1), two, two[0], flags(0, 0, 0), flags(0, 0, 1), two, gamma=0.99, lam=0.95
    )
    np.testing.assert_allclose(got.advantage[:, 0], [2.76853945, 1.90169, 0.98], rtol=1e-6)


def test_a_terminated_episode_does_not_use_what_follows():
    """Case A2."""
    two = column(2, 2, 2)
    got = gae(column(1, 1, 1), two, two[0], flags(0, 0, 1), gamma=0.99, lam=0.95)
    np.testing.assert_allclose(got.advantage[:, 0], [1.01714975, 0.0395, -1.0], atol=1e-6)


def test_a_nan_behind_a_termination_stays_there():
    """Case A4: select, don't multiply."""
    nan = np.full(1, np.nan, "f4")
    got = gae(column(1, 1), column(2, 2), nan, flags(0, 1), gamma=0.99, lam=0.95)
    np.testing.assert_allclose(got.advantage[:, 0], [0.0395, -1.0], atol=1e-6)


def test_a_truncation_without_a_finite_final_value_is_refused_by_place():
    """Case A4, second half."""
    one = column(1, 1)
    with pytest.raises(ValueError, match=r"final_value\[1, 0\] is nan where truncated"):
        gae(one, one, one[0], flags(0, 0), flags(0, 1), column(1, np.nan))
    for call in gae, gae.cuda:
        more = () if call is gae else (None, 0.9, 0.9, one, one, one[0], one, 0)
        with pytest.raises(ValueError, match="truncated and final_value together"):
            call(one, one, one[0], flags(0, 0), flags(0, 1), *more)


def test_every_step_of_a_rollout_gets_an_advantage():
    """Case A5."""
    zeros = np.zeros((64, 1), "f4")
    got = gae(zeros + 1, zeros, zeros[0], zeros.astype(bool))
    assert got.advantage.shape == (64, 1) and got.advantage[63, 0] == 1


def test_a_terminal_step_loses_its_own_value():
    """Case A6: the mask applies to the next value, not to A - V."""
    got = gae(column(1), column(2), np.ones(1, "f4"), flags(1))
    assert got.advantage[0, 0] == -1


seeds = st.integers(0, 2**32 - 1)


@given(st.integers(1, 40), seeds)
@settings(deadline=None, max_examples=30)
@example(64, 0)
def test_returns_are_advantage_plus_value_to_one_rounding(steps, seed):
    """Case A8."""
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps, 3)
    got = gae(reward, value, last, rng.random((steps, 3)) < 0.2)
    np.testing.assert_array_equal(got.returns, got.advantage + value)


@given(st.integers(1, 40), seeds)
@settings(deadline=None, max_examples=30)
def test_lambda_one_is_the_monte_carlo_return_minus_the_value(steps, seed):
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps, 4)
    terminated = rng.random((steps, 4)) < 0.15
    truncated = rng.random((steps, 4)) < 0.15
    final = rng.normal(size=(steps, 4)).astype("f4")
    got = gae(reward, value, last, terminated, truncated, final, gamma=0.9, lam=1.0)
    discounted = last.astype("f8")
    for t in reversed(range(steps)):
        discounted = np.where(truncated[t], final[t], discounted)
        discounted = reward[t] + 0.9 * np.where(terminated[t], 0, discounted)
        np.testing.assert_allclose(got.advantage[t], discounted - value[t], atol=1e-5)


@given(st.integers(1, 40), seeds)
@settings(deadline=None, max_examples=30)
def test_lambda_zero_is_the_td_error_at_every_boundary(steps, seed):
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps, 4)
    terminated = rng.random((steps, 4)) < 0.15
    truncated = rng.random((steps, 4)) < 0.15
    final = rng.normal(size=(steps, 4)).astype("f4")
    got = gae(reward, value, last, terminated, truncated, final, gamma=0.9, lam=0.0)
    following = np.concatenate([value[1:], last[None]])
    following = np.where(truncated, final, following)
    error = reward + 0.9 * np.where(terminated, 0, following) - value
    np.testing.assert_allclose(got.advantage, error, atol=2e-6)


@given(st.integers(1, 40), st.integers(1, 9), seeds)
@settings(deadline=None, max_examples=30)
def test_an_episode_end_hides_everything_after_it(steps, cut, seed):
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps + cut, 3)
    terminated = rng.random(reward.shape) < 0.1
    terminated[steps - 1] = True
    before = gae(reward, value, last, terminated).advantage[:steps]
    reward[steps:] += 7
    after = gae(reward, value, last, terminated).advantage[:steps]
    np.testing.assert_array_equal(before, after)


def test_says_which_array_has_the_wrong_shape():
    one = np.ones((4, 3), "f4")
    with pytest.raises(ValueError, match=r"last_value must be float32\[E\] with E=3, got shape"):
        gae(one, one, np.ones(2, "f4"), one > 2)


def drawn(steps, envs, limits=True):
    """Inputs by name, parameters and sizes of a call."""
    rng = np.random.default_rng(1000 * steps + envs)
    sizes = {T: steps, E: envs}
    params = gae.checked_params({"gamma": 0.97, "lam": 0.9})
    inputs = arrays_for(gae, rng, sizes, params)
    if not limits:
        inputs |= {"truncated": None, "final_value": None}
    return inputs, params, sizes


@given(st.integers(1, 40), st.integers(1, 9), seeds)
@settings(deadline=None, max_examples=30)
@example(1, 1, 0)
def test_the_moments_are_those_of_every_advantage(steps, envs, seed):
    rng = np.random.default_rng(seed)
    reward, value, last = rollout(rng, steps, envs)
    got = gae(100 + reward, value, last, rng.random((steps, envs)) < 0.2)
    wide = got.advantage.astype("f8")
    np.testing.assert_allclose(got.moments, [wide.mean(), wide.std()], rtol=1e-6)


def test_equal_advantages_have_exactly_their_value_and_no_deviation():
    """Case A7: normalising them gives zeros, not noise."""
    third = np.full((7, 3), 1 / 3, "f4")
    got = gae(third, 0 * third, third[0], third > 0)
    np.testing.assert_array_equal(got.moments, [third[0, 0], 0])


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0, 0)])
def test_no_advantages_have_moments_of_zero(shape):
    none = np.zeros(shape, "f4")
    got = gae(none, none, np.ones(shape[1], "f4"), none > 0)
    np.testing.assert_array_equal(got.moments, [0, 0])


# Which kernel runs, and that it is right: the simulator runs the one in Numba, the emulator those in
# CUDA C, a GPU all at every size.


def launched(part, steps, envs):
    """What a call with time limits launches on a known part."""

    def arrays(specs):
        return [Buffer(0x7F0000000000, s.resolve({T: steps, E: envs}), s.dtype({})) for s in specs]

    params = gae.checked_params({})
    with launch.recording(launch.KNOWN[part]) as made:
        shape, dtype = gae.scratch_specs({"T": steps, "E": envs}, params)["partials"]
        results = *arrays(gae.outputs.values()), Buffer(0x7E0000000000, shape, np.dtype(dtype))
        gae.cuda(*arrays(gae.inputs.values()), *params.values(), *results, 0)
    return made


recorded = pytest.mark.skipif(launch.SIMULATED, reason="the simulator runs what it is given")


def name_of(kernel):
    return kernel.entry or kernel.function.__name__


@recorded
@pytest.mark.parametrize(
    "part, steps, envs, kernel, grid, threads",
    [
        ("H200", 17, 186 * 132, "gae_kernel", 192, 128),
        ("H200", 17, 186 * 132 - 1, "gae_scan_kernel", 768, 64),
        ("H200", 16, 32, "gae_kernel", 1, 128),
        ("H200", 128, 33, "gae_scan_kernel", 2, 256),
        ("H200", 17, 1, "gae_scan_kernel", 1, 32),
        ("H200", 4100, 4, "gae_scan_kernel", 1, 256),
        ("L4", 17, 16384, "gae_kernel", 128, 128),
    ],
)
def test_many_environments_get_a_thread_each_and_few_long_ones_a_scan(
    part, steps, envs, kernel, grid, threads
):
    made = launched(part, steps, envs)
    found = [(name_of(m.kernel), m.grid[0], m.block[0]) for m in made]
    wide = kernel == "gae_kernel"
    merge = ("moments_kernel", 1, 256) if wide else ("gae_merge_kernel", 1, 128)
    assert found == [(kernel, grid, threads), merge]


@recorded
def test_131072_environments_run_in_one_wave_of_an_h200():
    h200 = launch.KNOWN["H200"]
    made, _ = launched("H200", 128, 131072)
    resident = launch.occupancy(made.resources(h200), made.block[0], made.shared, h200)
    assert resident.blocks_per_sm * h200.sms >= made.grid[0]


@recorded
@pytest.mark.parametrize("part, overlaps", [("A100", False), ("L4", False), ("H200", True)])
def test_both_launches_of_few_environments_may_begin_early_where_launches_overlap(
    monkeypatch, part, overlaps
):
    found = []
    monkeypatch.setattr(launch, "launch", lambda *_, early=None: found.append(early))
    launched(part, 128, 4096)
    # Nothing is read early: an array without elements.
    assert [e is not None for e in found] == [overlaps] * 2
    assert all(e.size == 0 and e.address == 0 for e in found if e is not None)


@recorded
@pytest.mark.parametrize("limits", (False, True))
@pytest.mark.parametrize("part", ("A100", "L4", "H200"))
def test_the_kernels_for_few_environments_keep_to_registers(part, limits):
    on = launch.KNOWN[part]
    overlaps = part == "H200"
    scan, merge = (module.scan_kernel(name, limits) for name in ("scan", "merge"))
    binary = scan.binary(on.architecture)
    for kernel, threads in ((scan, module.SCAN_THREADS), (merge, module.MERGE_THREADS)):
        found = binary.kernel(kernel.entry)
        assert found.spill_stores + found.spill_loads + found.stack == 0
        resident = launch.occupancy(found, threads, 0, on).blocks_per_sm
        assert resident >= (1 if limits else 2)
    code = disassemble(binary)
    assert not FLOAT64.search(code) and not CALL.search(code)
    for entry in (scan.entry, merge.entry):
        body = code.partition(f".text.{entry}:")[2].partition(".text.")[0]
        before, wait, after = body.partition("ACQBULK")
        assert bool(wait) == overlaps and "LDG" in body
        if overlaps:  # no global memory before the wait, and the next grid begins after it
            assert "LDG" not in before and "STG" not in before
            assert "PREEXIT" in after and "PREEXIT" not in before


# Steps of one tile are 16 a chunk: parts of one, a whole one less a step, and parts of several.
RAGGED = [*product((17, 31, 32, 33, 65, 81), (1, 3, 5)), (127, 7), (128, 32), (129, 33), (8191, 2)]
RAGGED += [(257, 133), (513, 100), (1025, 4)]


@recorded
@pytest.mark.parametrize("limits", (False, True))
def test_the_emulated_scan_agrees_with_the_spec_at_ragged_sizes_in_either_order(limits):
    for steps, envs in RAGGED:
        inputs, params, sizes = drawn(steps, envs, limits)
        bits = []
        for backwards in (False, True):
            got = run_emulated(gae, inputs, params, sizes, backwards)
            assert_agrees(gae, got, inputs, params, sizes)
            bits.append(b"".join(got[name].tobytes() for name in got))
        assert bits[0] == bits[1]


def run_emulated(op, inputs, params, sizes, backwards=False):
    with emulating(launch.KNOWN["H200"], backwards):
        return run_launcher(op, inputs, params, sizes)


@recorded
@pytest.mark.parametrize("chunks", (1, 2, 3, 4, 5))
def test_the_emulated_scan_is_right_at_every_number_of_tiles(monkeypatch, chunks):
    """Tiles of 4 chunks of 16 steps: parts of a tile, whole ones, and a step more."""
    monkeypatch.setattr(module, "shape_of", lambda *_: (8, 4))
    for steps in (64 * chunks - 1, 64 * chunks, 64 * chunks + 1):
        inputs, params, sizes = drawn(steps, 13, limits=steps % 2 == 0)
        got = run_emulated(gae, inputs, params, sizes)
        assert_agrees(gae, got, inputs, params, sizes)


@recorded
def test_the_emulated_moments_keep_a_small_deviation_beside_a_large_step():
    """A reward at the very end of each rollout: the one large advantage is where distances start."""
    inputs, params, sizes = drawn(300, 40, limits=False)
    params |= {"lam": np.float32(0), "gamma": np.float32(0)}
    inputs["value"][:] = 0
    inputs["reward"][:] = 0
    inputs["reward"][-1] = 0.1
    inputs["terminated"][:] = False
    got = run_emulated(gae, inputs, params, sizes)
    wide = got["advantage"].astype("f8")
    assert abs(got["moments"][0] - wide.mean()) < 2.0**-23 * 0.1  # a rounding of the largest
    np.testing.assert_allclose(got["moments"][1], wide.std(), rtol=2e-6)
    inputs["reward"][:] = 1 / 3
    got = run_emulated(gae, inputs, params, sizes)
    np.testing.assert_array_equal(got["moments"], [np.float32(1 / 3), 0])


# A tile of the scan is then 4 chunks of 16 steps.
SHAPES = {"gae_kernel": (32, 1), "gae_scan_kernel": (8, 4)}
either_kernel = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
simulated = pytest.mark.skipif(
    not launch.SIMULATED, reason="needs NUMBA_ENABLE_CUDASIM=1: make check runs it"
)


@simulated
@pytest.mark.parametrize("steps, envs", [*product((1, 7, 8, 9, 16, 17, 41), (1, 3, 32, 33))])
def test_the_simulated_kernel_agrees_with_the_spec(monkeypatch, steps, envs):
    monkeypatch.setattr(module, "shape_of", lambda *_: SHAPES["gae_kernel"])
    inputs, params, sizes = drawn(steps, envs, limits=(steps + envs) % 2 == 0)
    assert_agrees(gae, run_launcher(gae, inputs, params, sizes), inputs, params, sizes)


def assert_a_nan_stays_behind_an_end(run):
    """A NaN reward in the last step, and the end of an episode one chunk before that step's."""
    inputs, params, sizes = drawn(33, 3)
    end = 20
    inputs["reward"][-1] = np.nan
    inputs["terminated"][end:] = inputs["truncated"][end:] = False
    inputs["terminated"][end] = True
    advantage = run(gae, inputs, params, sizes)["advantage"]
    assert np.isfinite(advantage[: end + 1]).all() and np.isnan(advantage[end + 1 :]).all()


@simulated
def test_a_simulated_nan_behind_a_termination_stays_there(monkeypatch):
    """Case A4."""
    monkeypatch.setattr(module, "shape_of", lambda *_: SHAPES["gae_kernel"])
    assert_a_nan_stays_behind_an_end(run_launcher)


@recorded
@pytest.mark.parametrize("shape", [(8, 4), (32, 8), (4, 8)])
def test_an_emulated_nan_behind_a_termination_stays_there(monkeypatch, shape):
    """Case A4, also where a whole chunk lies between the NaN and what it must not reach."""
    monkeypatch.setattr(module, "shape_of", lambda *_: shape)
    assert_a_nan_stays_behind_an_end(run_emulated)


@pytest.mark.gpu
@either_kernel
def test_either_kernel_agrees_with_the_cpu_and_repeats(monkeypatch, shape):
    monkeypatch.setattr(module, "shape_of", lambda *_: shape)
    for steps, envs in product((1, 3, 4, 7, 8, 9, 16, 17, 131), (1, 3, 31, 32, 33, 257)):
        call = drawn(steps, envs, limits=(steps + envs) % 2 == 0)
        found, want = run_gpu(gae, *call), run_numpy(gae, *call)
        again = run_gpu(gae, *call)
        largest = max(1, np.abs(want["advantage"]).max())
        allowed = 2 * gae.error(T=steps, E=envs) * 2.0**-23 * largest
        for name in want:
            np.testing.assert_allclose(found[name], want[name], rtol=0, atol=allowed)
            assert again[name].tobytes() == found[name].tobytes()


@pytest.mark.gpu
@either_kernel
def test_a_nan_behind_a_termination_stays_there_on_the_gpu(monkeypatch, shape):
    """Case A4."""
    monkeypatch.setattr(module, "shape_of", lambda *_: shape)
    assert_a_nan_stays_behind_an_end(run_gpu)
