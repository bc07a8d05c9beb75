"""The replay ring: exact against a dense replay, across episodes, wrap-arounds and the write head."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from lowgpu_kernels import replay_gather, replay_sample, replay_write
from lowgpu_kernels.ops.replay.replay_write import spec_sums
from lowgpu_kernels.ops.replay.ring import ring_arrays, ring_nbytes
from tests.replay_model import Dense, call, each_executor, empty_ring

few = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
lengths = st.lists(st.integers(0, 23), min_size=1, max_size=6)


def clock_of(batches):
    return np.array([batches, 0], "u8")


def gathered(executor, ring, index, **params):
    return call(replay_gather, executor, ring | {"index": np.asarray(index, "i4")}, **params)


def assert_is_the_dense_replay(executor, ring, dense, slots, steps, gamma):
    written = len(dense.steps[0])
    held, envs = min(written, slots), dense.envs
    assert ring["head"].tolist() == [written % slots, held, 0]
    got = gathered(executor, ring, range(held * envs), steps=steps, gamma=gamma)
    for i in range(held * envs):
        slot, e = divmod(i, envs)
        time = max(t for t in range(written) if t % slots == slot)
        first = dense.steps[e][time]
        reward, discount, last = dense.window(e, time, steps, float(np.float32(gamma)))
        np.testing.assert_allclose(got["reward"][i], reward, rtol=0, atol=1e-5)
        np.testing.assert_allclose(got["discount"][i], discount, rtol=1e-6, atol=0)
        for name in ("state_floats", "state_ints", "action"):
            np.testing.assert_array_equal(got[name][i], first[name], err_msg=name)
        for name in ("next_floats", "next_ints"):
            np.testing.assert_array_equal(got[name][i], last[name], err_msg=name)
    np.testing.assert_array_equal(got["weight"], 1)


@each_executor
@few
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 13),
    st.integers(1, 5),
    lengths,
    st.integers(1, 5),
    st.booleans(),
)
@example(0, 10, 1, [12], 3, False)  # a write past the end, and a head in the middle
@example(1, 3, 2, [23], 5, True)  # a ring smaller than a rollout, and than a window
@example(2, 7, 3, [7, 7], 2, True)  # full to the slot
def test_every_transition_held_is_that_of_a_dense_replay(
    executor, seed, slots, envs, lengths, steps, prioritized
):
    dense = Dense(envs, np.random.default_rng(seed))
    ring = empty_ring(slots, envs, prioritized)
    for length in lengths:
        dense.write(executor, ring, length)
        if dense.steps[0]:
            assert_is_the_dense_replay(executor, ring, dense, slots, steps, 0.9)
    if prioritized:
        held = min(len(dense.steps[0]), slots) * envs
        assert (ring["priority"][:held] == 1).all() and (ring["priority"][held:] == 0).all()
        np.testing.assert_array_equal(ring["sums"], spec_sums(ring["priority"].astype("f8")))


@each_executor
@few
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), lengths)
def test_a_rollout_written_in_pieces_is_the_same_ring(executor, seed, slots, lengths):
    whole = Dense(3, np.random.default_rng(seed)).play(sum(lengths))
    one, other = empty_ring(slots, 3, True), empty_ring(slots, 3, True)
    call(replay_write, executor, whole | one)
    start = 0
    for length in lengths:
        piece = {name: array[start : start + length] for name, array in whole.items()}
        call(replay_write, executor, piece | other)
        start += length
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@each_executor
def test_a_window_stops_at_the_write_head(executor):
    """Case B1: what lies behind the head is ten steps older, not the next one."""
    dense, ring = Dense(1, np.random.default_rng(0)), empty_ring(10, 1)
    dense.write(executor, ring, 12, ends=0, reward=1)
    got = gathered(executor, ring, [0], steps=3, gamma=0.99)
    np.testing.assert_allclose([got["reward"][0], got["discount"][0]], [1.99, 0.9801], rtol=1e-6)
    np.testing.assert_array_equal(got["next_floats"][0], dense.steps[0][11]["next_floats"])


@each_executor
def test_a_whole_window_discounts_by_gamma_to_the_n(executor):
    """Case B2."""
    dense, ring = Dense(1, np.random.default_rng(0)), empty_ring(10, 1)
    dense.write(executor, ring, 10, ends=0, reward=1)
    got = gathered(executor, ring, [3], steps=3, gamma=0.99)
    np.testing.assert_allclose(
        [got["reward"][0], got["discount"][0]], [2.9701, 0.970299], rtol=1e-6
    )


@each_executor
def test_nothing_is_drawn_that_was_not_written(executor):
    """Case B3: storage is NaN where no step was written; three of four slots are."""
    dense, ring = Dense(1, np.random.default_rng(0)), empty_ring(4, 1)
    dense.write(executor, ring, 3)
    assert ring["head"][1] == 3
    index = call(
        replay_sample, executor, {"head": ring["head"], "clock": clock_of(0)}, envs=1, batch=10_000
    )
    assert set(index["out"].tolist()) == {0, 1, 2}
    got = gathered(executor, ring, index["out"], steps=2)
    assert np.isfinite(got["state_floats"]).all() and np.isfinite(got["reward"]).all()


@each_executor
def test_no_window_spans_two_episodes(executor):
    """Case B4: two episodes of two steps; the first is cut by a limit, the second terminates."""
    dense, ring = Dense(1, np.random.default_rng(0)), empty_ring(8, 1)
    steps = dense.play(4, ends=0, reward=1)
    steps["truncated"][1], steps["terminated"][3] = True, True
    steps["state_floats"][2] = 77  # a new episode does not start where the old one was cut
    call(replay_write, executor, steps | ring)
    got = gathered(executor, ring, range(4), steps=3, gamma=0.5)
    assert got["reward"].tolist() == [1.5, 1, 1.5, 1]
    assert got["discount"].tolist() == [0.25, 0.5, 0, 0]
    final = steps["next_floats"][[1, 1, 3, 3], 0]
    np.testing.assert_array_equal(got["next_floats"], final)
    assert (got["next_floats"] != 77).all()


@each_executor
def test_a_reward_past_the_end_of_an_episode_is_not_read(executor):
    dense, ring = Dense(1, np.random.default_rng(0)), empty_ring(4, 1)
    steps = dense.play(2, ends=0, reward=1)
    steps["terminated"][0], steps["reward"][1] = True, np.nan
    call(replay_write, executor, steps | ring)
    got = gathered(executor, ring, [0], steps=2)
    assert (got["reward"][0], got["discount"][0]) == (1, 0)


@each_executor
def test_a_batch_may_be_larger_than_the_ring_and_an_empty_ring_gives_nan(executor):
    """Case B9: draws are with replacement."""
    ring = empty_ring(3, 1)
    index = call(
        replay_sample, executor, {"head": ring["head"], "clock": clock_of(0)}, envs=1, batch=8
    )["out"]
    assert (index == -1).all()
    got = gathered(executor, ring, index)
    for name in ("reward", "discount", "weight"):
        assert np.isnan(got[name]).all()
    for name in ("state_floats", "next_floats", "action"):
        assert (got[name] == 0).all()
    Dense(1, np.random.default_rng(0)).write(executor, ring, 3)
    arrays = {"head": ring["head"], "clock": clock_of(0)}
    assert set(call(replay_sample, executor, arrays, envs=1, batch=99)["out"].tolist()) == {0, 1, 2}


def test_draws_are_uniform_over_what_was_written():
    """Chi-square at a fixed seed; p below 1e-4 would fail."""
    head, clock = np.array([2, 13, 0], "i4"), clock_of(5)
    counts = np.zeros(13 * 7)
    for _ in range(20):
        index = replay_sample(head, clock, envs=7, batch=20_000, seed=11)
        counts += np.bincount(index, minlength=len(counts))
    assert clock[0] == 25 and len(counts) == 91
    assert chisquare(counts).pvalue > 1e-4


@each_executor
def test_a_batch_depends_on_seed_and_clock_and_a_row_on_nothing_else(executor):
    head = np.array([0, 1000, 0], "i4")

    def draw(clock, batch, seed):
        arrays = {"head": head, "clock": clock_of(clock)}
        out = call(replay_sample, executor, arrays, envs=1000, batch=batch, seed=seed)["out"]
        assert arrays["clock"].tolist() == [clock + 1, 0]
        return out

    first = draw(2**40, 100, 1)
    np.testing.assert_array_equal(draw(2**40, 300, 1)[:100], first)
    for other in (draw(2**40 + 1, 100, 1), draw(2**40, 100, 2), draw(0, 100, 1)):
        assert (other != first).mean() > 0.9


def test_a_market_transition_takes_37_bytes_and_a_prioritized_one_less_than_42():
    """The state twice at 16 bytes, the reward at 4, a byte of action and flags; then the tree."""
    transitions = 24_415 * 4096
    assert transitions > 100_000_000
    assert ring_nbytes(24_415, 4096, 2, 2) == 37 * transitions + 12
    whole = ring_nbytes(24_415, 4096, 2, 2, prioritized=True)
    assert whole < 41.3 * transitions < 44 * transitions and whole < 4.5e9


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match=r"slots \* envs must be below 2\^31"):
        ring_arrays(2**20, 2**11, 2, 2)
    dense, ring = Dense(1, np.random.default_rng(0)), empty_ring(4, 1, True)
    steps = dense.play(2)
    steps["action"][1, 0] = 64
    with pytest.raises(ValueError, match=r"action\[1, 0\] must be in \[0, 64\), got 64"):
        replay_write(**steps, **ring)
    dense.write("cpu", ring, 2)
    for executor in ("cpu", "emulated"):
        with pytest.raises(ValueError, match="needs priority, sums and highest together"):
            call(replay_write, executor, dense.play(2) | ring | {"sums": None})
        with pytest.raises(ValueError, match="needs drawn and least together"):
            gathered(executor, ring | {"drawn": np.ones(1, "f4")}, [0])
    with pytest.raises(ValueError, match=r"index\[1\] must be in \[-1, 2\), got 2"):
        gathered("cpu", ring, [1, 2])


@pytest.mark.gpu
def test_what_is_written_on_one_stream_is_not_sampled_early_on_another():
    """The sampling stream waits for an event behind the write, which is queued behind long work."""
    import cupy

    writer, sampler = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    steps = {n: cupy.asarray(a) for n, a in Dense(1000, np.random.default_rng(0)).play(8).items()}
    big = cupy.ones((2048, 2048), "f4") / 2048
    for trial in range(20):
        ring = {n: cupy.asarray(a) for n, a in empty_ring(8, 1000).items()}
        clock = cupy.asarray(clock_of(trial))
        cupy.cuda.runtime.deviceSynchronize()
        with writer:
            x = big
            for _ in range(20):
                x = x @ big
            steps["reward"] += 0 * x[0, 0]
        replay_write(**steps, **ring, stream=writer)
        sampler.wait_event(writer.record())
        index = replay_sample(ring["head"], clock, envs=1000, batch=4096, stream=sampler)
        got = replay_gather(index, **ring, steps=3, stream=sampler)
        sampler.synchronize()
        assert int(index.min()) >= 0 and bool(cupy.isfinite(got.state_floats).all())
        assert bool(cupy.isfinite(got.reward).all()) and bool(cupy.isfinite(got.next_floats).all())
