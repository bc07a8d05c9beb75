"""The policy report: figures worked by hand, and a gate that a NaN never passes."""

import copy
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from lowgpu import evaluate
from lowgpu.config import from_dict
from lowgpu.envs import make
from lowgpu.quantization import play, report
from lowgpu.quantization.calibration import Calibration, QuantizedArrays, calibrate
from lowgpu.quantization.report import Gate, compare, compare_returns
from lowgpu.quantization.run import Subject
from lowgpu_kernels import mlp_forward
from lowgpu_kernels.ops.int8.quantized_network import quantized_weights
from lowgpu_kernels.ops.mlp.examples import draw_parameters
from lowgpu_kernels.ops.mlp.network import Network, policy_network

NETWORK = Network(8, ((3,),))

# Two logits and a value; the quantized network rounds them to whole numbers.
ROWS = np.zeros((4, 8), "f4")
ROWS[:, :3] = [(3.0, 1.0, 2.0), (0.6, 0.9, 1.5), (-7.0, 2.0, 0.25), (1.5, 2.5, -1.0)]


def rounding_network():
    """(parameters, Calibration): the first three columns, in float32 and as whole numbers."""
    parameters = np.zeros(NETWORK.parameters, "f4")
    ((_, weight, _),) = NETWORK.views(parameters)
    weight[:] = np.eye(3, 8)
    levels = np.zeros(quantized_weights(NETWORK), np.int8)
    levels[:24] = np.eye(3, 8).ravel()
    ones, zeros = np.ones(8, "f4"), np.zeros(8, "i4")
    arrays = QuantizedArrays(levels, zeros[:3], ones[:3], ones, zeros, ones[:1], zeros[:1])
    columns = np.arange(8, dtype="i4")
    return parameters, Calibration(8, NETWORK, columns, arrays, parameters, {})


def test_figures_are_those_worked_by_hand():
    parameters, calibration = rounding_network()
    found = compare(NETWORK, parameters, calibration, ROWS, 2)
    # Rounded: (3, 1), (1, 1), (-7, 2), (2, 2): rows 1 and 3 are ties, whose first action is taken.
    assert (found["rows"], found["flips"], found["agreement"]) == (4, 2, 0.5)
    assert found["range"] == 10
    assert found["flips_past_gap"] == 1  # of gaps 0.3 and 1, past 0.05 * 10
    assert found["regret"]["mean"] == pytest.approx((0.3 + 1) / 4)
    assert (found["regret"]["largest"], found["regret"]["of_range"]) == (1, 0.1)
    assert found["value_error"]["largest"] == 0.5
    root = np.sqrt((0.5**2 + 0.25**2) / 4)
    assert found["value_error"]["root_mean_square"] == pytest.approx(root)
    assert found["value_error"]["of_deviation"] == pytest.approx(root / ROWS[:, 2].std())
    # The third row's logits are whole numbers, and the first's: no divergence there.
    p, q = 1 / (1 + np.exp(0.3)), 0.5
    second = p * np.log(p / q) + (1 - p) * np.log((1 - p) / q)
    p = 1 / (1 + np.exp(1.0))
    fourth = p * np.log(p / q) + (1 - p) * np.log((1 - p) / q)
    assert found["kl"]["mean"] == pytest.approx((second + fourth) / 4, rel=1e-6)
    assert found["kl"]["largest"] == pytest.approx(fourth, rel=1e-6)
    noise = 0.4**2 + 0.1**2 + 0.5**2 + 0.25**2 + 0.5**2 + 0.5**2
    signal = np.square(ROWS[:, :3].astype("f8")).sum()
    assert found["layers"] == {"head": pytest.approx(10 * np.log10(signal / noise), rel=1e-6)}


def test_action_values_have_regret_and_a_value_of_their_own_and_no_divergence():
    parameters, calibration = rounding_network()
    found = compare(NETWORK, parameters, calibration, ROWS, 3, values=True)
    assert found["kl"] is None
    assert found["flips"] == 1 and found["regret"]["largest"] == 1  # the last row
    # The best values 3, 1.5, 2 and 2.5 become 3, 2, 2 and 2.
    assert found["value_error"]["root_mean_square"] == pytest.approx(np.sqrt(2 * 0.5**2 / 4))


def test_advantages_and_a_value_are_put_together_as_a_dueling_network_does():
    each, state = report.action_values(np.array([[1, 3, 10.0]]), 2, True)
    np.testing.assert_array_equal(each, [[9, 11]])
    np.testing.assert_array_equal(state, [11])


@pytest.mark.parametrize("heads", [2, 3])
def test_a_run_of_action_values_takes_the_best_and_padding_is_none_of_them(heads):
    """Two values, or two advantages and a value; an output row has 8 columns."""
    network = Network(8, ((heads,),))
    parameters = np.zeros(network.parameters, "f4")
    ((_, weight, _),) = network.views(parameters)
    weight[:] = np.eye(heads, 8)
    subject = Subject(
        from_dict({"env": "cartpole"}),
        SimpleNamespace(network=network, parameters=parameters),
        True,
    )
    x = np.array([[-3, -1, 5], [-1, -3, -5]], "f4")
    np.testing.assert_array_equal(subject.decide(np.pad(x, ((0, 0), (0, 5)))), [1, 0])


def test_an_action_that_is_missing_is_a_flip():
    parameters, calibration = rounding_network()
    rows = ROWS.copy()
    rows[0, 7] = np.nan  # nobody's logit, so float32 gives NaN too: 0 * NaN
    found = compare(NETWORK, parameters, calibration, rows, 2)
    assert found["flips"] >= 1 and not found["agreement"] >= 0.99


def passing():
    """A report that the gate passes."""
    parameters, calibration = rounding_network()
    rows = np.zeros((4, 8), "f4")
    rows[:, :3] = np.arange(12).reshape(4, 3) % 5
    found = compare(NETWORK, parameters, calibration, rows, 2)
    returns = compare_returns(np.arange(9.0), np.arange(9.0), np.mean, 1)
    found["return"] = {"name": "mean return"} | returns
    return {"calibration": {"method": "mse", "copies": 1, "unit_copies": 1, "rows": 9}} | found


def test_a_network_without_noise_passes():
    made = report.finished(passing(), Gate())
    assert made["passed"] and made["failed"] == []
    assert made["layers"] == {"head": None}  # infinite, which JSON has not
    json.dumps(made, allow_nan=False)
    text = report.as_text(made)
    assert "passed" in text and "100.000% of 4 rows" in text


@pytest.mark.parametrize(
    "path",
    [
        ("agreement",),
        ("flips_past_gap",),
        ("range",),
        ("regret", "mean"),
        ("regret", "largest"),
        ("regret", "of_range"),
        ("value_error", "root_mean_square"),
        ("value_error", "largest"),
        ("kl", "mean"),
        ("kl", "largest"),
        ("layers", "head"),
        ("return", "quantized"),
    ],
    ids="-".join,
)
def test_a_nan_anywhere_fails_the_gate(path):
    """Case E8: a gate `error > tolerance` lets a NaN through."""
    broken = copy.deepcopy(passing())
    inner = broken
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = np.nan
    if path == ("return", "quantized"):
        broken["return"]["change_interval"] = [np.nan, np.nan]
    made = report.finished(broken, Gate())
    assert not made["passed"] and made["failed"]
    json.dumps(made, allow_nan=False)
    assert "failed" in report.as_text(made)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"agreement": 0.985}, r"agreement is 98\.5000%, below 99\.00%"),
        ({"flips_past_gap": 1}, "1 rows changed their action though"),
        ({"layers": {"head": 19.0}}, r"head has 19\.0 dB"),
    ],
)
def test_a_figure_below_its_bound_fails_the_gate_by_name(change, said):
    made = report.finished(passing() | change, Gate())
    assert len(made["failed"]) == 1
    assert re.search(said, made["failed"][0])


def test_equal_returns_have_no_change_and_a_loss_that_chance_does_not_explain_fails():
    rng = np.random.default_rng(0)
    mine = rng.normal(size=400)
    same = compare_returns(mine, mine, np.mean, 1)
    assert same["change"] == 0 and same["change_interval"] == [0, 0]
    # 95 % of means of 400 normal draws lie within 1.96 / 20.
    low, high = same["interval"]
    assert (high - low) / 2 == pytest.approx(1.96 * mine.std() / 20, rel=0.1)
    assert low < mine.mean() < high
    worse = compare_returns(mine, mine - 0.5, np.mean, 1)
    assert worse["change_interval"] == pytest.approx([-0.5, -0.5])
    made = passing()
    made["return"] |= worse
    assert "by more than chance explains" in report.failures(made, Gate())[0]
    made["return"] |= compare_returns(mine, mine - 0.05, np.mean, 1)  # within its own interval
    assert not report.failures(made, Gate())
    made["return"] |= compare_returns(mine, mine + 0.5, np.mean, 1)  # better is no fault
    assert not report.failures(made, Gate())


def test_resamples_repeat_with_their_seed_and_keep_neighbours_together():
    turns = np.tile([1.0, -1.0], 100)
    alone = compare_returns(turns, turns, np.mean, 1, seed=3)
    assert alone == compare_returns(turns, turns, np.mean, 1, seed=3)
    assert alone != compare_returns(turns, turns, np.mean, 1, seed=4)
    pairs = compare_returns(turns, turns, np.mean, 2)
    assert pairs["interval"] == [0, 0] and alone["interval"][1] > 0.1


def test_play_is_what_evaluation_plays():
    """The loop that both policies are played by gives an evaluation's episodes, bit for bit."""
    env = make("cartpole", max_steps=40)
    network = policy_network(8, 2, (8,), "relu")
    parameters = draw_parameters(np.random.default_rng(2), network).astype("f4")
    wanted = evaluate.episodes(env, network, parameters, 6, 40, 11)

    def decide(x):
        return mlp_forward(x, parameters, network=network).y[:, :2].argmax(1).astype("i4")

    returns, rows = play.episode_returns(env, decide, 6, 40, 11, keep=True)
    assert (returns.mean(), returns.min(), returns.max()) == (
        wanted["mean_return"],
        wanted["min_return"],
        wanted["max_return"],
    )
    assert len(rows) == returns.sum()  # a reward of 1 a row
    calibration = calibrate(network, parameters, rows)
    assert compare(network, parameters, calibration, rows, 2)["rows"] == len(rows)


def test_a_game_that_goes_on_after_an_end_starts_anew_each_time():
    env = make("cartpole", max_steps=3)
    state = play.starts(env, 2, None, 5)
    played = play.play(env, lambda x: np.zeros(len(x), "i4"), *state, 9, seed=5, keep=True)
    np.testing.assert_array_equal(np.flatnonzero(played.ended.all(axis=1)), [2, 5, 8])
    first = played.observation.reshape(9, 2, env.width)[::3, :, :4]
    assert len(np.unique(first.reshape(-1, 4), axis=0)) == 6  # no start comes twice
