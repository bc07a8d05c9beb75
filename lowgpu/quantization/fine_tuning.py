"""Quantization-aware fine-tuning: the integers of a calibrated network learn what float32 would decide."""

from dataclasses import replace

import numpy as np

from lowgpu.quantization.ranges import HIGHEST, LOWEST
from lowgpu.quantization.rounding import LARGEST_BIAS, LARGEST_WEIGHT
from lowgpu_kernels import adam, fake_quantize, fake_quantize_gradient, mlp_forward
from lowgpu_kernels.dims import SEED, Choice, Int
from lowgpu_kernels.ops.int8.quantized_network import quantized_views

ROWS = 4096  # observations whose activations are held at once. Untuned.
STEPS = Int(1, 2**30)
DEVICE = Choice("cpu", "cuda")
BATCH = 512
CHECKS = 10  # times that the steps so far are judged on rows that nothing is learned from
# Of Adam, in steps of int8 weights, falling to 0. Units of relu start near what they are to be; those of tanh
# must find new places. With what follows chosen on calibration rows of CartPole: docs/quantization.md.
RATE = {"relu": 0.02, "tanh": 2.0}
BETA2, EPS = 0.99, 1e-12
BIAS_UNIT = np.float32(128)  # so that a step moves sums about as far as a step of a weight
CLOSE = 0.2  # share of the rows whose two best actions are nearest: these decide agreement
FAR_WEIGHT = 0.005  # of a row that is nowhere near, beside one in which two actions tie
VALUE_WEIGHT = 0.1
LEAST = 1e-15  # of what errors are divided by


class Student:
    """The first tower of a calibrated network, as float32 weights and biases that become its integers.

        sum    = rint(weight) . (level - zero) + rint(bias)
        z      = sum * scale;    level as calibrated, of relu(z) or tanh(z)

    Args:
        calibration: a Calibration, whose scales and zero points stay as they are.
        xp: NumPy or CuPy.

    Attributes:
        parameters: float32, flat: each layer's weight in levels, then its bias in units of
            BIAS_UNIT * scale.
    """

    def __init__(self, calibration, xp=np):
        arrays, self.network, self.xp = calibration.arrays, calibration.network, xp
        self.columns = xp.asarray(calibration.columns)
        self.layers = [layer for layer in self.network.layers if layer.tower == 0]
        self.input = tuple(map(xp.asarray, (1 / arrays.input_scale, arrays.input_zero)))
        self.scales, self.hidden, packed = [], [], []
        views = quantized_views(self.network, *arrays[:3])
        for layer, (_, weight, bias, scale) in zip(self.layers, views):
            zero = _zero_points(layer, arrays, len(self.hidden))
            exact = bias + weight.astype(np.int64) @ zero
            packed += [weight.ravel(), exact / BIAS_UNIT]
            self.scales.append(xp.asarray(scale))
            if not layer.head:
                h = len(self.hidden)
                whole = np.full(layer.fan_out, arrays.hidden_zero[h], np.int32)
                inverse = np.float32(1) / arrays.hidden_scale[h]
                self.hidden.append((inverse, arrays.hidden_scale[h], xp.asarray(whole)))
        self.parameters = xp.asarray(np.concatenate(packed).astype(np.float32))

    def views(self, flat):
        """(layer, weight, bias) of each layer, as views of a flat array."""
        at = 0
        for layer in self.layers:
            count = layer.fan_out * layer.fan_in
            weight = flat[at : at + count].reshape(layer.fan_out, layer.fan_in)
            yield layer, weight, flat[at + count : at + count + layer.fan_out]
            at += count + layer.fan_out

    def levels(self, observation, rounded=True):
        """The inputs' levels above those of 0, float32."""
        inverse, zero = self.input
        level = self.xp.asarray(observation)[:, self.columns] * inverse
        level = (self.xp.rint(level) if rounded else level) + zero.astype(np.float32)
        return level.clip(LOWEST, HIGHEST) - zero.clip(LOWEST, HIGHEST).astype(np.float32)

    def forward(self, levels, rounded=True):
        """(heads, kept): the head's values, and (what was read, weight, activation, steps) of each layer."""
        xp, kept, hidden = self.xp, [], iter(self.hidden)
        for (layer, weight, bias), scale in zip(self.views(self.parameters), self.scales):
            whole = fake_quantize(weight, low=-LARGEST_WEIGHT)
            sums = levels @ whole.T + xp.rint(bias * BIAS_UNIT)
            z = sums * scale
            if layer.head:
                return z, [*kept, (levels, whole, z, None)]
            inverse, _, zero = next(hidden)
            if self.network.activation == "tanh":
                active = xp.tanh(z)
                steps = active * inverse
            else:
                active = xp.maximum(z, 0)
                steps = xp.maximum(sums * (scale * inverse), 0)  # rounded as level_factors are
            steps = xp.ascontiguousarray(steps)
            kept.append((levels, whole, active, steps))
            if rounded:
                levels = fake_quantize(steps, column_zero=zero)
            else:
                levels = (steps + zero).clip(LOWEST, HIGHEST) - zero
            levels = levels.astype(np.float32)
        raise AssertionError("a tower without a head")

    def gradient(self, kept, into_head):
        """d loss / d parameters, straight through the rounding, given d loss / d heads."""
        xp, made, grad = self.xp, self.xp.empty_like(self.parameters), into_head
        into, own = list(self.views(made)), list(self.views(self.parameters))
        for n in reversed(range(len(self.layers))):
            levels, whole, active, steps = kept[n]
            if steps is not None:
                inverse, _, zero = self.hidden[n]
                grad = fake_quantize_gradient(steps, grad, column_zero=zero) * inverse
                tanh = self.network.activation == "tanh"
                grad *= 1 - active * active if tanh else active > 0
            grad = grad * self.scales[n]
            (_, to_weight, to_bias), weight = into[n], own[n][1]
            product = xp.ascontiguousarray(grad.T @ levels)
            to_weight[:] = fake_quantize_gradient(weight, product, low=-LARGEST_WEIGHT)
            to_bias[:] = grad.sum(axis=0) * BIAS_UNIT
            grad = xp.ascontiguousarray(grad @ whole)
        return made

    def heads(self, levels):
        """The head's values of many rows, in the integers' arithmetic."""
        parts = range(0, len(levels), ROWS)
        return self.xp.concatenate([self.forward(levels[at : at + ROWS])[0] for at in parts])

    def unrounded(self, observation):
        """Each hidden layer's values without rounding of activations: float32 [rows, fan_out], in order."""
        _, kept = self.forward(self.levels(observation, rounded=False), rounded=False)
        return [levels * scale for (levels, *_), (_, scale, _) in zip(kept[1:], self.hidden)]

    def write(self, arrays, parameters):
        """Round parameters into the weights and biases of QuantizedArrays, in place."""
        views = zip(self.views(parameters), quantized_views(self.network, *arrays[:3]))
        hidden = 0
        for (layer, weight, bias), (_, to_weight, to_bias, _) in views:
            zero = _zero_points(layer, arrays, hidden)
            to_weight[:] = np.clip(np.rint(weight), -LARGEST_WEIGHT, LARGEST_WEIGHT)
            exact = np.clip(np.rint(bias * BIAS_UNIT), -LARGEST_BIAS, LARGEST_BIAS)
            to_bias[:] = exact.astype(np.int64) - to_weight.astype(np.int64) @ zero
            hidden += not layer.head


def _zero_points(layer, arrays, hidden):
    """int64 levels of 0 that a layer reads, after as many hidden layers."""
    if layer.source < 0:
        return np.clip(arrays.input_zero, LOWEST, HIGHEST).astype(np.int64)
    return np.full(layer.fan_in, arrays.hidden_zero[hidden - 1], np.int64)


def fine_tuned(calibration, observations, checked, actions, *, steps, seed=0, device="cpu"):
    """Let a calibrated network's integers learn from its float32 original, and keep the best that came.

        loss = mean over rows of weight * |e|^2,  e = (a - mean a) - (a' - mean a') over the actions
        weight = 1 / (1 + (margin / close)^2) + FAR_WEIGHT

    in units of what the actions differ by on the rows that count, plus VALUE_WEIGHT times the squared
    error of the value's column, in deviations, where the first tower has one. `margin` is between
    the two best actions of the original and `close` its quantile CLOSE: only there can rounding change
    an action. Weights and activations are rounded going forward and not going back; scales and zero
    points stay, so the integers are the student's to the bit with relu, and on a device of its own
    tanh to a level. A tower of the value alone stays as it was calibrated.

    With the same arguments a CPU gives the same bits, as long as its BLAS has as many threads.

    Args:
        calibration: a Calibration.
        observations: float32 [rows, columns], to learn from.
        checked: others of the same kind, which choose among CHECKS moments and the start.
        actions: columns of the first head that are logits, action values or advantages.
        steps: of Adam, BATCH rows each.
        seed: of the rows drawn.
        device: "cpu" or "cuda".

    Returns:
        A Calibration, never of fewer equal actions on `checked` than the one given.

    Raises:
        TypeError, ValueError: steps, a seed or a device out of range.

    Source: Jacob et al. 2018, section 3; Bengio, Leonard & Courville 2013 (arXiv:1308.3432).
    """
    steps, seed = int(STEPS("steps", steps)), int(SEED("seed", seed))
    xp = np
    if DEVICE("device", device) == "cuda":
        import cupy as xp
    student = Student(calibration, xp)
    target = xp.asarray(_targets(calibration, observations, student))
    wanted = xp.asarray(_targets(calibration, checked, student)[:, :actions].argmax(axis=1))
    check = student.levels(checked)

    def agreement():
        best = student.heads(check)[:, :actions].argmax(axis=1)
        return float((best == wanted).mean())

    kept, found = _learn(
        student, student.levels(observations), target, actions, steps, seed, agreement
    )
    arrays = calibration.arrays._replace(
        weight=calibration.arrays.weight.copy(), bias=calibration.arrays.bias.copy()
    )
    student.write(arrays, kept if xp is np else kept.get())
    told = {"steps": steps, "seed": seed, "rows": len(observations), "checked_rows": len(checked)}
    summary = calibration.summary | {"fine_tuning": told | found}
    return replace(calibration, arrays=arrays, summary=summary, tuned=True)


def _learn(student, levels, target, actions, steps, seed, agreement):
    """The parameters of the moment with the best `agreement()`, and what to tell of it."""
    xp, p = student.xp, student.parameters
    loss = _Loss(xp, target, actions)
    m, v, done = xp.zeros_like(p), xp.zeros_like(p), xp.zeros(1, np.int32)
    how = {"lr": RATE[student.network.activation], "beta2": BETA2, "eps": EPS}
    rng, every = np.random.default_rng(seed), -(-steps // CHECKS)
    before = most = agreement()
    kept, taken = p.copy(), 0
    for step in range(1, steps + 1):
        rows = xp.asarray(rng.integers(len(levels), size=BATCH))
        y, read = student.forward(levels[rows])
        gradient = student.gradient(read, loss.gradient(y, target[rows], rows))
        adam(p, gradient, m, v, done, decay_updates=steps, **how)
        if step % every == 0 or step == steps:
            found = agreement()
            if found > most:
                most, kept, taken = found, p.copy(), step
    return kept, {"taken": taken, "agreement_before": before, "agreement": most}


class _Loss:
    """Weights of rows, and what errors are measured in."""

    def __init__(self, xp, target, actions):
        self.xp, self.actions = xp, actions
        own = self._centred(target)
        two = xp.sort(own, axis=1)[:, -2:]
        margin = two[:, -1] - two[:, 0]
        close = max(float(xp.quantile(margin, CLOSE)), LEAST)
        weight = 1 / (1 + (margin / close) ** 2) + FAR_WEIGHT
        spread = float((weight[:, None] * own * own).sum() / weight.sum() / actions) ** 0.5
        self.weight = (weight / weight.mean()).astype(np.float32)[:, None]
        self.spread = max(spread, LEAST)
        self.deviation = target[:, actions:].std(axis=0).clip(LEAST, None)

    def _centred(self, y):
        each = y[:, : self.actions]
        return each - each.mean(axis=1, keepdims=True)

    def gradient(self, y, target, rows):
        """d loss / d y, without the factor of 2."""
        error = self._centred(y) - self._centred(target)
        made = self.xp.empty_like(y)
        made[:, : self.actions] = self.weight[rows] * error / self.spread**2
        off = (y[:, self.actions :] - target[:, self.actions :]) / self.deviation**2
        made[:, self.actions :] = VALUE_WEIGHT * off
        return made / np.float32(len(y))


def _targets(calibration, observations, student):
    """The first tower's heads of the float32 original, some thousand rows at a time."""
    parts = range(0, len(observations), ROWS)
    given = (np.ascontiguousarray(observations[at : at + ROWS]) for at in parts)
    network, own = calibration.source, calibration.parameters
    heads = student.layers[-1].fan_out
    return np.concatenate([mlp_forward(x, own, network=network).y[:, :heads] for x in given])
