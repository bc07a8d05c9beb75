"""What experience is held to: every transition on its own, element by element."""

import numpy as np

from lowgpu_kernels.device.philox import EXPLORE, numpy_draw
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS
from lowgpu_kernels.ops.rollout.acting_verify import outputs_of, verify_acting

# Epsilon takes four roundings of numbers of at most 1 in float32.
EPSILON_ROUNDING = 4 * 2.0**-24


def verify_experience(got, inputs, params, _eps=None):
    """Hold transitions to the env, and actions to the draw where they explore, and else to the largest
    value: one that rounding makes the largest will do (mlp/rounding.py).

    Args:
        got: outputs and what the op changed, by name.
        inputs, params: of the call, by name; inputs as they were before it.
    """

    def act(t, now, floats, ints):
        _verify_action(got["action"][t], floats, ints, now, inputs, params)

    def reach(t, floats, ints, _ended):
        at = f"step {t}"
        np.testing.assert_allclose(got["next_floats"][t], floats, 1e-6, 1e-6, err_msg=at)
        np.testing.assert_array_equal(got["next_ints"][t], ints, err_msg=at)

    verify_acting(got, inputs, params, act, reach)


def _verify_action(action, floats, ints, now, inputs, params):
    actions, every = params["env"].actions, np.arange(len(action))
    assert ((action >= 0) & (action < actions)).all(), f"action at {now}: {action}"
    words = numpy_draw(int(params["seed"]), EXPLORE, every, now)
    ahead = (words[0] >> np.uint64(8)) * 2.0**-24 - _epsilon(now, params)
    drawn = (words[1] * np.uint64(actions)) >> np.uint64(32)
    y, deviation = outputs_of(floats, ints, inputs, params)
    values, deviation = y[:, :actions], deviation[:, :actions]
    moves = 2 * DEVIATIONS * deviation.max(1, initial=0)
    best = values[every, action] >= values.max(1, initial=-np.inf) - moves
    explores, exploits = ahead < EPSILON_ROUNDING, ahead >= -EPSILON_ROUNDING
    right = (explores & (action == drawn)) | (exploits & best)
    assert right.all(), f"action at {now} of environments {np.flatnonzero(~right)}: {action}"


def _epsilon(now, params):
    start, end = float(params["epsilon_start"]), float(params["epsilon_end"])
    steps = int(params["epsilon_steps"])
    return start + (end - start) * (now / steps) if now < steps else end
