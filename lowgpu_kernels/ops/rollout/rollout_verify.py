"""What a rollout's outputs are held to: every transition on its own, element by element."""

import numpy as np

from lowgpu_kernels.device.philox import ACTION
from lowgpu_kernels.env import TRUNCATED
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, SUM, assert_within
from lowgpu_kernels.ops.rollout.acting import spec_units
from lowgpu_kernels.ops.rollout.acting_verify import outputs_of, verify_acting


def verify_transitions(got, inputs, params, _eps=None):
    """Hold transitions to the env, and what the network gives to what rounding explains, whatever the
    precision.

    Args:
        got: outputs and what the op changed, by name.
        inputs, params: of the call, by name; inputs as they were before it.
    """

    def act(t, now, floats, ints):
        y, deviation = outputs_of(floats, ints, inputs, params)
        assert_within(f"value, step {t}", got["value"][t], y[:, -1], deviation[:, -1])
        u = spec_units(int(params["seed"]), ACTION, np.arange(len(floats)), now)[0]
        _verify_action(got, t, y[:, :-1], deviation[:, :-1], u, params)

    def reach(t, floats, ints, ended):
        limit = ended == TRUNCATED
        y, deviation = outputs_of(floats, ints, inputs, params)
        final = y[:, -1] * limit, deviation[:, -1] * limit
        assert_within(f"final_value, step {t}", got["final_value"][t], *final)

    verify_acting(got, inputs, params, act, reach)
    y, deviation = outputs_of(got["floats"], got["ints"], inputs, params)
    assert_within("last_value", got["last_value"], y[:, -1], deviation[:, -1])


def _verify_action(got, t, logits, deviation, u, params):
    """Hold step t's actions and their log-probabilities to logits that may move by rounding."""
    every, action = np.arange(len(logits)), got["action"][t]
    assert ((action >= 0) & (action < params["env"].actions)).all(), f"action, step {t}"
    # No log-probability moves further than two logits do; exp and log round in float32.
    moves = 2 * deviation.max(1, initial=0)
    below = logits - logits.max(1, keepdims=True)
    probability = np.exp(below) / np.exp(below).sum(1, keepdims=True)
    chosen = probability[every, action]
    want = np.log(chosen)
    rounding = moves + 4 * SUM * (1 + abs(want))
    assert_within(f"log_probability, step {t}", got["log_probability"][t], want, rounding)
    if params["greedy"]:
        assert (below[every, action] >= -DEVIATIONS * moves).all(), f"greedy action, step {t}"
        return
    edge, allowed = np.cumsum(probability, 1)[every, action], DEVIATIONS * (moves + 4 * SUM)
    assert (u <= edge + allowed).all(), f"action, step {t}"
    assert (u >= edge - chosen - allowed).all(), f"action, step {t}"
