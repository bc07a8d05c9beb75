"""What a DQN update is held to: the first update to the spec, as far as rounding lets it, and what moved
to what Adam makes of the gradient that came out."""

import numpy as np

from lowgpu_kernels.ops.dqn.action_values import duels
from lowgpu_kernels.ops.mlp.rounding import DEVIATIONS, SUM, assert_within
from lowgpu_kernels.ops.optim.adam import adam
from lowgpu_kernels.ops.ppo.deviations import SCALARS, update_deviations
from lowgpu_kernels.ops.ppo.spec_network import forward, observed

LEARNED = "parameters", "target", "m", "v", "step"
ADAM = "lr", "beta1", "beta2", "eps", "max_norm"


def verify_update(spec, got, inputs, params, _eps=None):
    """Hold the first update to the spec, and a lone update's changes to its own gradient and norm.

    What an update makes of the next is not compared: where v is near zero Adam turns a rounding into
    a whole step. Tests hold updates of one call to those of many, bit for bit.

    Args:
        spec: of the op.
        got: outputs and what the op changed, by name.
        inputs, params: of the call, by name; inputs as they were before it.
    """
    assert_first_update(spec, got, inputs, params)
    assert got["step"][0] == inputs["step"][0] + np.isfinite(got["norm"]).sum()
    if len(inputs["action"]) == 1:
        assert_moved(got, inputs, params)


def assert_moved(got, inputs, params):
    """Hold what a lone update changed to Adam's spec, given the gradient, and the target to that."""
    given = got["gradient"].astype(np.float64)
    wide = {n: inputs[n].astype(np.float64) for n in LEARNED[:-1]}
    step = inputs["step"].copy()
    largest = max(1.0, np.abs(given).max(), *(np.abs(a).max() for a in wide.values()))
    learned = wide["parameters"], given, wide["m"], wide["v"], step
    norm = adam.spec(*learned, **{n: params[n].item() for n in ADAM})
    largest = max(largest, *(np.abs(a).max() for a in (*wide.values(), norm)))
    atol = adam.error(P=len(given)) * 2 * SUM * largest
    for name, want in {**{n: wide[n] for n in ("parameters", "m", "v")}, "norm": norm}.items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=atol, err_msg=name)
    before, tau = wide["target"], params["tau"].item()
    if step[0] % params["target_every"]:
        np.testing.assert_array_equal(got["target"], inputs["target"])
    elif tau == 1:
        np.testing.assert_array_equal(got["target"], got["parameters"])
    else:
        want = before + tau * (got["parameters"].astype(np.float64) - before)
        np.testing.assert_allclose(got["target"], want, rtol=0, atol=8 * SUM * largest)


def assert_first_update(spec, got, inputs, params):
    """Hold the first update's errors, statistics and gradient to the spec."""
    wide = {
        n: a if a is None or a.dtype.kind == "i" else a.astype(np.float64)
        for n, a in inputs.items()
    }
    lone = {n: a[:1] if a is not None and a.ndim > 1 else a for n, a in wide.items()}
    lone |= {n: wide[n] for n in ("table", "series")}
    lone |= {n: wide[n].copy() for n in LEARNED}
    plain = {n: v.item() if isinstance(v, np.generic) else v for n, v in params.items()}
    gradient, error, statistics, _ = spec(**lone, **plain)
    rows = {n: a[0] if a is not None and a.ndim > 1 else a for n, a in lone.items()}
    rows |= {n: wide[n] for n in (*LEARNED, "table", "series")}
    deviations = _Deviations(rows, plain, error[0])
    assert_within("dqn_update.error", got["error"][0], error[0], deviations.of_error)
    of_statistics = deviations.of_statistics
    of_statistics += SUM * np.sqrt(1 + error.shape[1]) * (1 + np.abs(statistics[0]))
    of_statistics[-1] = 0  # a count
    assert_within("dqn_update.statistics", got["statistics"][0], statistics[0], of_statistics)
    if len(inputs["action"]) == 1:
        assert_within("dqn_update.gradient", got["gradient"], gradient, deviations.of_gradient)


class _Deviations:
    """Standard deviations of a minibatch's errors [B], statistics [4] and gradient [P]."""

    def __init__(self, rows, params, error):
        self.rows, self.params, self.error = rows, params, error
        self.network, self.precision = params["network"], params["precision"]
        self.actions, self.duels = params["env"].actions, duels(params["env"], self.network)
        x, learned = self._observed("state"), rows["parameters"]
        _, self.y = forward(x, learned, self.network, self.precision)
        self.goal, self.of_goal = self._goal()
        self.value = error + self.goal
        grad_y = self._grad_y(self._slope(error))
        about = self.network, self.precision, grad_y, self._through_loss
        self.of_gradient, self.of_statistics = update_deviations(x, learned, *about)

    def _observed(self, name):
        rows = self.rows
        states = rows[f"{name}_floats"], rows[f"{name}_ints"], rows["table"], rows["series"]
        return observed(*states, None, self.params["env"], self.precision)

    def _slope(self, error):
        """Gradient of the loss by each row's value."""
        delta, weight = self.params["delta"], self.rows["weight"]
        slope = np.clip(error, -delta, delta) if delta > 0 else error
        return slope * (1 if weight is None else weight) / max(len(error), 1)

    def _grad_y(self, slope):
        """The gradient by the output rows; or, of sizes, a bound on its size."""
        made = np.zeros((len(slope), self.network.outputs))
        made[np.arange(len(slope)), self.rows["action"]] = slope
        if self.duels:
            made[:, : self.actions] -= slope[:, None] / self.actions
            made[:, self.actions] = slope
        return made

    def _values(self, y, of_y):
        """Action values, and their deviations, of output rows and theirs."""
        values, of_values = y[:, : self.actions], of_y[:, : self.actions]
        rounding = SCALARS * SUM * np.abs(y).max(1, initial=0)[:, None]
        if self.duels:
            values = values + y[:, self.actions, None] - values.mean(1, keepdims=True)
            of_values = of_values + of_y[:, self.actions, None] + of_values.mean(1, keepdims=True)
        return values, of_values + rounding

    def _of_next(self, x, parameters):
        """Action values of the next states by some parameters, and their deviations."""
        found = []

        def keep(of_y):
            found.append(of_y)
            return np.zeros_like(of_y), np.zeros(4)

        _, y = forward(x, parameters, self.network, self.precision)
        update_deviations(x, parameters, self.network, self.precision, np.zeros_like(y), keep)
        return self._values(y, found[0])

    def _goal(self):
        rows, every = self.rows, np.arange(len(self.error))
        x = self._observed("next")
        held, of_held = self._of_next(x, rows["target"])
        by, of_by = held, of_held
        if self.params["double"]:
            by, of_by = self._of_next(x, rows["parameters"])
        best = by.argmax(1) if len(every) else every
        # Another action may be taken for the best one; the goal is then that one's.
        moves = 2 * DEVIATIONS * of_by.max(1, initial=0)
        as_good = by >= (by.max(1, initial=-np.inf) - moves)[:, None]
        value = held[every, best]
        of_value = of_held[every, best]
        of_value += (as_good * np.abs(held - value[:, None])).max(1, initial=0)
        goal = rows["reward"] + rows["discount"] * value
        rounding = SCALARS * SUM * (np.abs(rows["reward"]) + np.abs(value))
        return goal, rows["discount"] * of_value + rounding

    def _through_loss(self, of_y):
        """Deviations of the gradient by the output rows, and of the statistics."""
        count = max(len(self.error), 1)
        _, of_values = self._values(self.y, of_y)
        of_value = of_values[np.arange(len(of_y)), self.rows["action"]]
        rounding = SCALARS * SUM * (np.abs(self.value) + np.abs(self.goal))
        self.of_error = of_value + self.of_goal + rounding
        weight = 1 if self.rows["weight"] is None else self.rows["weight"]
        slope = np.abs(self._slope(self.error))
        of_slope = weight * self.of_error / count + SCALARS * SUM * slope
        of_loss = (slope + DEVIATIONS * of_slope) * self.of_error + SCALARS * SUM * np.abs(
            slope * self.error
        )
        of_means = of_loss.sum(), of_value.sum() / count, self.of_goal.sum() / count, 0
        return np.abs(self._grad_y(of_slope)), np.array(of_means)
