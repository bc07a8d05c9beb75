"""What the PPO loss promises beyond agreeing with its spec."""

import math

import numba
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowgpu_kernels import categorical, launch, minibatch_moments, ppo_loss
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.ops.ppo.ppo_loss import STATISTICS, policy_term, value_term
from tests.harness import arrays_for

EPS = 2.0**-23
F32 = np.float32
seeds = st.integers(0, 2**32 - 1)


def named(statistics):
    return dict(zip(STATISTICS, statistics.tolist()))


def minibatch(rng, rows, transitions, actions, **params):
    """Inputs away from the edges of the clips, and checked parameters."""
    params = ppo_loss.checked_params({"actions": actions, **params})
    sizes = {d: rows for d in ppo_loss.inputs["index"].dims()}
    sizes |= {d: transitions for d in ppo_loss.inputs["action"].dims()}
    sizes = {**sizes, **{d: s for d, s in ppo_loss.derived(params, sizes).items()}}
    return arrays_for(ppo_loss, rng, sizes, params), params


def rows_of(logits, v, old_log_probability, action=0, old=None, advantage=1.0, returns=0.0):
    """Inputs of hand-worked rows: one row of `logits` and `v`, and one transition, each."""
    count = len(v)
    y = np.zeros((count, -(-(len(logits[0]) + 1) // 8) * 8), "f4")
    y[:, : len(logits[0])] = logits
    y[:, len(logits[0])] = v

    def column(x, dtype="f4"):
        return np.broadcast_to(np.asarray(x, dtype), (count,)).copy()

    return {
        "y": y,
        "index": np.arange(count, dtype="i4"),
        "action": column(action, "i4"),
        "log_probability": column(old_log_probability),
        "value": column(v if old is None else old),
        "advantage": column(advantage),
        "returns": column(returns),
    }


def torch_loss(inputs, params, dtype):
    """The loss as a researcher would write it, and its gradient by autograd."""
    y = torch.from_numpy(inputs["y"]).to(dtype).requires_grad_()
    index = torch.from_numpy(inputs["index"]).long()

    def taken(name):
        return torch.from_numpy(inputs[name])[index]

    advantage = taken("advantage").to(dtype)
    if inputs.get("moments") is not None:
        mean, deviation = torch.from_numpy(inputs["moments"]).to(dtype)
        advantage = (advantage - mean) / (deviation + 1e-8)
    clip, value_clip = float(params["clip"]), float(params["value_clip"])
    policy = torch.distributions.Categorical(logits=y[:, : int(params["actions"])])
    ratio = (policy.log_prob(taken("action")) - taken("log_probability").to(dtype)).exp()
    policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    v, old = y[:, int(params["actions"])], taken("value").to(dtype)
    target = taken("returns").to(dtype)
    value_loss = (v - target) ** 2
    if value_clip > 0:
        clipped = old + (v - old).clamp(-value_clip, value_clip)
        value_loss = torch.max(value_loss, (clipped - target) ** 2)
    loss = (
        policy_loss.mean()
        + float(params["value_weight"]) * 0.5 * value_loss.mean()
        - float(params["entropy_weight"]) * policy.entropy().mean()
    )
    loss.backward()
    return loss.item(), y.grad.numpy()


PARAMS = st.fixed_dictionaries(
    {
        "clip": st.sampled_from([0.1, 0.2, 0.5, 3.0]),
        "value_clip": st.sampled_from([0.0, 0.2, 1.0]),
        "value_weight": st.sampled_from([0.0, 0.5, 1.0]),
        "entropy_weight": st.sampled_from([0.0, 0.01, 0.5]),
    }
)


@given(st.integers(1, 300), st.integers(2, 64), PARAMS, seeds)
@settings(deadline=None, max_examples=40)
@example(257, 7, {}, 0)
def test_the_gradient_is_the_one_autograd_finds(rows, actions, params, seed):
    inputs, params = minibatch(np.random.default_rng(seed), rows, rows + 3, actions, **params)
    loss, gradient = torch_loss(inputs, params, torch.float64)
    got = ppo_loss(**inputs, **params)
    # RELIABILITY.md asks for 1e-4; a row has a log-sum-exp of O terms and a dozen roundings.
    allowed = (2 * actions + 64) * EPS
    assert allowed < 1e-4
    np.testing.assert_allclose(got.grad_y, gradient, rtol=0, atol=allowed * np.abs(gradient).max())
    assert named(got.statistics)["loss"] == pytest.approx(loss, abs=allowed * (1 + abs(loss)))


@given(st.integers(1, 12), st.integers(2, 9), PARAMS, seeds)
@settings(deadline=None, max_examples=20)
def test_the_gradient_of_the_spec_is_the_slope_of_its_loss(rows, actions, params, seed):
    inputs, params = minibatch(np.random.default_rng(seed), rows, rows, actions, **params)
    wide = {
        n: a.astype("f8") if a is not None and a.dtype.kind == "f" else a for n, a in inputs.items()
    }
    plain = {n: p.item() for n, p in params.items()}
    gradient, _ = ppo_loss.spec(**wide, **plain)
    y, step = wide["y"], 1e-5
    for b, j in np.ndindex(y.shape):
        ends = []
        for sign in (1, -1):
            moved = y.copy()
            moved[b, j] += sign * step
            ends.append(ppo_loss.spec(**{**wide, "y": moved}, **plain)[1][-1])
        # The third derivative times step^2 is below 1e-8 for logits, ratios and values of order 1.
        assert gradient[b, j] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


HALF = math.log(0.5)  # log-probability of either of two equal logits


@pytest.mark.parametrize(
    "old_probability, advantage, loss, slope",
    [
        (1 / 3, 1, -1.2, 0),  # ratio 1.5, better than expected: clipped
        (1 / 3, -1, 1.5, 0.75),  # ratio 1.5, worse: pushed back down
        (1, 1, -0.5, -0.25),  # ratio 0.5, better: pushed back up
        (1, -1, 0.8, 0),  # ratio 0.5, worse: clipped
        (0.5, 2, -2, -1),  # ratio 1: not clipped
        (0.5, 0, 0, 0),  # nothing to gain
    ],
)
def test_every_branch_of_the_policy_clip_by_hand(old_probability, advantage, loss, slope):
    inputs = rows_of([[0, 0]], [0.0], math.log(old_probability), advantage=advantage)
    got = ppo_loss(**inputs, actions=2, clip=0.2, value_weight=0.0, entropy_weight=0.0)
    assert named(got.statistics)["policy_loss"] == pytest.approx(loss, abs=4 * EPS)
    np.testing.assert_allclose(got.grad_y[0], [slope, -slope] + [0] * 6, atol=4 * EPS)
    outside = abs(0.5 / old_probability - 1) > 0.2
    assert named(got.statistics)["clip_fraction"] == outside


@pytest.mark.parametrize(
    "v, old, target, loss, slope",
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # has not moved
        (2.0, 1.0, 3.0, 1.125, 0.0),  # moved towards the target past the clip: V held at 1.5
        (0.0, 1.0, 3.0, 4.5, -3.0),  # moved away past the clip: the whole error counts
        (1.5, 1.0, 3.0, 1.125, -1.5),  # on the upper edge, which is inside
        (0.5, 1.0, -1.0, 1.125, 1.5),  # on the lower edge
        (1.0, 0.0, 0.75, 0.03125, 0.125),  # both errors 0.25 in size: half of each branch
    ],
)
def test_every_branch_of_the_value_clip_by_hand(v, old, target, loss, slope):
    inputs = rows_of([[0, 0]], [v], HALF, old=old, advantage=0.0, returns=target)
    params = dict(actions=2, value_clip=0.5, value_weight=1.0, entropy_weight=0.0)
    got = ppo_loss(**inputs, **params)
    assert named(got.statistics)["value_loss"] == loss
    assert got.grad_y[0, 2] == slope
    wanted, gradient = torch_loss(inputs, ppo_loss.checked_params(params), torch.float32)
    assert wanted == loss and gradient[0, 2] == slope
    assert ppo_loss(**inputs, **{**params, "value_clip": 0.0}).grad_y[0, 2] == v - target


@pytest.mark.parametrize("clip", [0.25, 0.5])
@pytest.mark.parametrize("gain", [-2.0, -1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0])
def test_edges_and_ties_of_the_policy_clip_are_those_of_torch(ratio, gain, clip):
    leaf = torch.tensor(ratio, requires_grad=True)
    loss = torch.max(-leaf * gain, -leaf.clamp(1 - clip, 1 + clip) * gain)
    loss.backward()
    assert policy_term(F32(ratio), F32(gain), F32(clip)) == (loss.item(), leaf.grad.item())


def test_a_tie_that_rounding_makes_outside_the_clip_is_halved():
    tiny = F32(2.0**-149)  # 1.25 and 1.3 of it both round to itself
    assert policy_term(F32(1.3), tiny, F32(0.25)) == (-tiny, F32(-0.5) * tiny)


@pytest.mark.parametrize("place", range(2))
def test_a_nan_is_not_lost_in_a_comparison(place):
    arguments = [F32(1), F32(1)]
    arguments[place] = F32(np.nan)
    assert all(map(math.isnan, policy_term(*arguments, F32(0.2))))
    for ratio in (0.1, 9):
        assert math.isnan(policy_term(F32(ratio), F32(np.nan), F32(0.2))[0])
    for k in range(3):
        arguments = [F32(3), F32(1), F32(2)]
        arguments[k] = F32(np.nan)
        assert all(map(math.isnan, value_term(*arguments, F32(0.2))))


@given(st.integers(1, 200), st.integers(2, 9), seeds)
@settings(deadline=None, max_examples=20)
def test_before_the_first_update_the_ratio_is_one_and_nothing_is_clipped(rows, actions, seed):
    inputs, params = minibatch(np.random.default_rng(seed), rows, rows, actions)
    inputs["index"] = np.arange(rows, dtype="i4")
    logits = np.ascontiguousarray(inputs["y"][:, :actions])
    drawn = categorical(logits, np.array([seed], "u8"), seed=seed)
    inputs |= {"action": drawn.action, "log_probability": drawn.log_probability}
    got = named(ppo_loss(**inputs, **params).statistics)
    assert (got["ratio"], got["approximate_kl"], got["clip_fraction"]) == (1, 0, 0)


def test_the_statistics_of_two_rows_by_hand():
    inputs = rows_of(
        [[0, 0], [math.log(3), 0]],
        [1.0, 2.0],
        [math.log(1 / 3), math.log(0.75)],
        advantage=[1, 2],
        returns=[2.0, 2.0],
    )
    got = ppo_loss(**inputs, actions=2, clip=0.2, value_weight=0.5, entropy_weight=0.1)
    entropy = (math.log(2) - 0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / 2
    want = {
        "policy_loss": (-1.2 - 2) / 2,
        "value_loss": 0.25,
        "entropy": entropy,
        "approximate_kl": (0.5 - math.log(1.5)) / 2,
        "clip_fraction": 0.5,
        "ratio": 1.25,
        "non_finite_rows": 0,
        "loss": -1.6 + 0.125 - 0.1 * entropy,
    }
    assert named(got.statistics) == pytest.approx(want, abs=8 * EPS)


def test_a_masked_action_gets_nothing_and_changes_nothing():
    rng = np.random.default_rng(2)
    inputs, params = minibatch(rng, 40, 40, 5)
    inputs["action"] = rng.integers(0, 4, 40).astype("i4")
    without = {**inputs, "y": inputs["y"].copy()}
    without["y"][:, 4], without["y"][:, 5] = inputs["y"][:, 5], 0
    inputs["y"][:, 4] = -np.inf
    got = ppo_loss(**inputs, **params)
    fewer = ppo_loss(**without, **{**params, "actions": 4})
    assert not got.grad_y[:, 4].any()
    np.testing.assert_array_equal(got.grad_y[:, :4], fewer.grad_y[:, :4])
    np.testing.assert_array_equal(got.grad_y[:, 5], fewer.grad_y[:, 4])
    np.testing.assert_array_equal(got.statistics, fewer.statistics)
    assert got.grad_y[:, :4].all() and named(got.statistics)["non_finite_rows"] == 0


def test_an_action_too_unlikely_for_its_probability_to_be_a_float_is_still_pushed():
    inputs = rows_of([[0, -150]], [0.0], -150.0, action=1)
    got = ppo_loss(**inputs, actions=2, entropy_weight=0.0)
    np.testing.assert_array_equal(got.grad_y[0, :2], [1, -1])
    assert named(got.statistics)["ratio"] == 1


def test_a_row_whose_actions_are_all_masked_is_counted():
    inputs = rows_of([[-np.inf, -np.inf]], [0.0], 0.0)
    got = ppo_loss(**inputs, actions=2)
    assert np.isnan(got.grad_y[0, :2]).all() and named(got.statistics)["non_finite_rows"] == 1


def test_a_minibatch_of_one_is_finite_without_moments():
    """Case A7: the last minibatch of 65 transitions taken 64 at a time."""
    inputs, params = minibatch(np.random.default_rng(4), 65, 65, 3)
    inputs |= {"y": inputs["y"][64:], "index": np.array([64], "i4"), "moments": None}
    inputs["advantage"][64] = 3.7
    got = ppo_loss(**inputs, **params)
    assert np.isfinite(got.grad_y).all() and np.isfinite(got.statistics).all()
    order = np.arange(65, dtype="i4")
    moments = minibatch_moments(inputs["advantage"], order, minibatch=64, unbiased=True)
    same = ppo_loss(**{**inputs, "moments": moments[1]}, **params)
    np.testing.assert_array_equal(got.grad_y, same.grad_y)
    unbiased = np.array([3.7, np.nan], "f4")  # what torch.std says of one number
    with pytest.raises(ValueError, match=r"moments\[1\] must be .* got nan; leave moments out"):
        ppo_loss(**{**inputs, "moments": unbiased}, **params)


def test_equal_advantages_are_normalised_to_zero():
    """Case A7, second half."""
    inputs, params = minibatch(np.random.default_rng(4), 33, 33, 3, entropy_weight=0.0)
    inputs["advantage"][:] = 3.7
    inputs["moments"] = np.array([inputs["advantage"][0], 0], "f4")
    got = ppo_loss(**inputs, **params)
    assert named(got.statistics)["policy_loss"] == 0
    assert not got.grad_y[:, :3].any() and got.grad_y[:, 3].any()


def test_moments_are_subtracted_and_divided_by():
    inputs, params = minibatch(np.random.default_rng(6), 20, 20, 3)
    inputs["advantage"] = np.random.default_rng(0).integers(-4, 5, 20).astype("f4")
    inputs["moments"] = np.array([1, 2], "f4")
    by_hand = {**inputs, "moments": None, "advantage": (inputs["advantage"] - 1) / 2}
    np.testing.assert_array_equal(
        ppo_loss(**inputs, **params).grad_y, ppo_loss(**by_hand, **params).grad_y
    )


def test_an_empty_minibatch_gives_zeros():
    for transitions in (0, 5):
        inputs, params = minibatch(np.random.default_rng(1), 0, transitions, 4)
        got = ppo_loss(**inputs, **params, out=(np.empty((0, 8), "f4"), np.full(8, np.nan, "f4")))
        assert got.grad_y.shape == (0, 8) and not got.statistics.any()


def test_a_row_is_the_transition_its_index_names():
    rng = np.random.default_rng(7)
    inputs, params = minibatch(rng, 150, 400, 6)
    gathered = {**inputs, "index": np.arange(150, dtype="i4")}
    for name in ("action", "log_probability", "value", "advantage", "returns"):
        gathered[name] = inputs[name][inputs["index"]]
    for one, other in zip(ppo_loss(**inputs, **params), ppo_loss(**gathered, **params)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("actions", [2, 6, 7, 8, 15])
def test_padding_is_not_read_and_comes_out_zero(actions):
    inputs, params = minibatch(np.random.default_rng(8), 30, 30, actions)
    clean = ppo_loss(**inputs, **params)
    inputs["y"][:, actions + 1 :] = np.nan
    poison = np.full_like(inputs["y"], np.nan), np.full(8, np.nan, "f4")
    got = ppo_loss(**inputs, **params, out=poison)
    np.testing.assert_array_equal(got.grad_y, clean.grad_y)
    assert not got.grad_y[:, actions + 1 :].any()


def test_bad_rows_are_counted_and_leave_the_others_alone():
    inputs, params = minibatch(np.random.default_rng(9), 300, 300, 4)
    clean = ppo_loss(**inputs, **params)
    inputs["y"][7, 1], inputs["y"][200, 4] = np.nan, np.inf
    got = ppo_loss(**inputs, **params)
    assert named(got.statistics)["non_finite_rows"] == 2
    others = np.delete(np.arange(300), [7, 200])
    np.testing.assert_array_equal(got.grad_y[others], clean.grad_y[others])
    assert np.isnan(got.grad_y[7]).any() and not np.isfinite(got.grad_y[200]).all()


def test_an_infinite_ratio_that_is_clipped_has_gradient_zero():
    inputs = rows_of([[0, 0]], [0.0], -200.0)
    got = ppo_loss(**inputs, actions=2, entropy_weight=0.0)
    assert not got.grad_y.any() and named(got.statistics)["policy_loss"] == F32(-1.2)


def test_the_number_of_threads_does_not_change_the_bits():
    inputs, params = minibatch(np.random.default_rng(10), 1031, 2000, 5)
    found = set()
    threads = numba.get_num_threads()
    for count in {1, threads}:
        numba.set_num_threads(count)
        found.add(b"".join(a.tobytes() for a in ppo_loss(**inputs, **params)))
    numba.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize(
    "name, place, value, end",
    [("index", 3, -1, 9), ("index", 4, 9, 9), ("action", 2, 3, 3), ("action", 0, -2, 3)],
)
def test_a_number_out_of_range_is_refused_by_place(name, place, value, end):
    inputs, params = minibatch(np.random.default_rng(11), 9, 9, 3)
    inputs[name][place] = value
    message = rf"^{name}\[{place}\] must be in \[0, {end}\), got {value}"
    with pytest.raises(ValueError, match=message):
        ppo_loss(**inputs, **params)


def test_a_row_that_does_not_fit_the_actions_and_an_empty_rollout_are_refused():
    inputs, params = minibatch(np.random.default_rng(11), 9, 9, 7)
    with pytest.raises(ValueError, match=r"ppo_loss needs O=16 .*got arrays with O=8"):
        ppo_loss(**inputs, **{**params, "actions": 8})
    empty = {n: inputs[n][:0] for n in ppo_loss.inputs if n not in ("y", "index", "moments")}
    with pytest.raises(ValueError, match=r"ppo_loss needs N=1 .*got arrays with N=0"):
        ppo_loss(**{**inputs, **empty}, **params)


@pytest.mark.parametrize("rows, grids", [(0, [1]), (1, [1, 1]), (128, [1, 1]), (129, [2, 1])])
def test_a_block_takes_128_rows_and_one_block_sums_up(rows, grids):
    inputs, params = minibatch(np.random.default_rng(12), rows, max(rows, 1), 4)

    def buffer(shape, dtype):
        return Buffer(0x7F0000000000, shape, np.dtype(dtype))

    def given(array):
        return None if array is None else buffer(array.shape, array.dtype)

    work = ppo_loss.scratch_specs({"B": rows}, params)
    scratch = [buffer(*spec) for spec in work.values()]
    outputs = buffer(inputs["y"].shape, "f4"), buffer((8,), "f4")
    with launch.recording(launch.KNOWN["H100"]) as made:
        ppo_loss.cuda(*map(given, inputs.values()), *params.values(), *outputs, *scratch, 0)
    assert [m.grid[0] for m in made] == grids
