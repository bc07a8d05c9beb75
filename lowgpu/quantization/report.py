"""What a quantized policy loses against its float32 original, and the gate that it must pass."""

from dataclasses import asdict, dataclass

import numpy as np

from lowgpu.quantization.calibration import layer_name, parts_of
from lowgpu.quantization.fine_tuning import Student
from lowgpu.quantization.forward import ROWS, layer_values
from lowgpu_kernels import mlp_forward

RESAMPLES = 2000
INTERVAL = 2.5, 97.5  # percentiles of the resamples: 95 %


@dataclass(frozen=True)
class Gate:
    """What a quantized policy must reach.

    Args:
        agreement: share of rows with the same greedy action, at least.
        gap: rows whose two best actions lie further apart than this share of the range of all
            outputs must have the same action, every one.
        sqnr: signal to quantization noise of every layer, dB, at least.
    """

    agreement: float = 0.99
    gap: float = 0.05
    sqnr: float = 35.0


def action_values(outputs, actions, values):
    """(values of actions [rows, actions], value of the state [rows]) of rows of heads, float64.

    Args:
        outputs: the heads side by side: actions alone, or actions and a value.
        actions: how many.
        values: whether they are action values, those of a dueling network made of advantages and
            the value; else logits.
    """
    wide = outputs.astype(np.float64)
    each, state = wide[:, :actions], wide[:, actions:]
    if not values:
        return each, state[:, 0]
    if state.size:
        each = state + each - each.mean(axis=1, keepdims=True)
    return each, each.max(axis=1)


def compare(network, parameters, calibration, observations, actions, *, values=False, gate=None):
    """Hold a quantized network's outputs to those of its float32 original, row by row.

    Args:
        network, parameters: the original.
        calibration: the Calibration made of it.
        observations: float32 [rows, network.inputs], held out from calibration.
        actions: columns that are logits or action values.
        values: whether they are action values.
        gate: whose `gap` the flips are counted by.

    Returns:
        A dictionary of figures, NaN where one cannot be had:
        activation: of the network.
        rows, agreement, flips: rows, the share whose best action is the same, and how many differ.
        range: largest less smallest logit or action value of the original over all rows.
        flips_past_gap: of rows whose two best lie further apart than gap * range.
        regret: what the original's best action is worth more than the quantized one's, mean and
            largest, by the original's outputs, and the largest as a share of the range.
        value_error: root of the mean square and largest, and the root as a share of the deviation
            of the original's values.
        kl: of the softmax of the original's logits to that of the quantized, nats, mean and
            largest; None for action values.
        layers: {name: dB} of 10 log10(sum x^2 / sum (x - quantized x)^2); infinite without noise. x is
            the original's; of a fine-tuned hidden layer, what its integers give of exact activations.
    """
    gate = gate or Gate()
    source = calibration.source or network
    mine, theirs, signal, noise = [], [], {}, {}
    for first in range(0, len(observations), ROWS):
        x = np.ascontiguousarray(observations[first : first + ROWS])
        heads = []
        for layer, wanted, z, made in _layers(calibration, source, x):
            name, wanted = layer_name(source, layer), wanted.astype(np.float64)
            signal[name] = signal.get(name, 0) + np.square(wanted).sum()
            noise[name] = noise.get(name, 0) + np.square(wanted - made).sum()
            heads += [z] if layer.head else []
        theirs.append(np.concatenate(heads, axis=1))
        y = mlp_forward(x, parameters, network=network).y
        mine.append(y[:, : sum(widths[-1] for widths in network.towers)])
    each, state = action_values(np.concatenate(mine), actions, values)
    its_each, its_state = action_values(np.concatenate(theirs), actions, values)
    found = _figures(each, state, its_each, its_state, gate.gap)
    found["activation"] = network.activation
    found["kl"] = None if values else _kl(each, its_each)
    found["layers"] = {name: _decibels(signal[name], noise[name]) for name in signal}
    return found


def _layers(calibration, source, x):
    """(layer, exact values, sums in their unit, quantized values) of every layer of a quantized network."""
    exact = mlp_forward(x, calibration.parameters, network=source)
    tuned = Student(calibration).unrounded(x) if calibration.tuned else []
    layers = layer_values(calibration.network, calibration.arrays, x[:, calibration.columns])
    for n, (layer, (_, z, made)) in enumerate(zip(source.layers, layers)):
        own = slice(layer.column, layer.column + layer.fan_out)
        if layer.head:
            yield layer, exact.y[:, own], z, made
        elif n < len(tuned):
            yield layer, tuned[n], z, made
        else:  # copies of a unit of relu add up, those of tanh have a mean
            made = made.reshape(len(x), -1, layer.fan_out)
            made = made.sum(axis=1) / (made.shape[1] // parts_of(source, made.shape[1]))
            yield layer, exact.hidden[:, own], z, made


def _figures(each, state, its_each, its_state, gap):
    rows = np.arange(len(each))
    best, its_best = each.argmax(axis=1), its_each.argmax(axis=1)
    flipped = (best != its_best) | ~np.isfinite(its_each).all(axis=1)
    second, first = np.partition(each, -2, axis=1)[:, -2:].T
    span = each.max() - each.min()
    regret = first - each[rows, its_best]
    off = its_state - state
    root = np.sqrt(np.square(off).mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        of_range, of_deviation = regret.max() / span, root / state.std()
    return {
        "rows": len(each),
        "agreement": 1 - flipped.mean(),
        "flips": int(flipped.sum()),
        "range": span,
        "flips_past_gap": int((flipped & ~(first - second <= gap * span)).sum()),
        "regret": {"mean": regret.mean(), "largest": regret.max(), "of_range": of_range},
        "value_error": {
            "root_mean_square": root,
            "largest": np.abs(off).max(),
            "of_deviation": of_deviation,
        },
    }


def _kl(logits, its_logits):
    log_p, log_q = _log_softmax(logits), _log_softmax(its_logits)
    each = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    return {"mean": each.mean(), "largest": each.max()}


def _log_softmax(logits):
    below = logits - logits.max(axis=1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=1, keepdims=True))


def _decibels(signal, noise):
    if noise == 0:
        return np.inf
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(signal / noise))


def compare_returns(mine, theirs, total, block, seed=0):
    """A return of both policies, and how far chance alone would move it.

    Both series are drawn again in the same blocks, with replacement and around the end, so that
    what happened to both at once stays together.

    Args:
        mine, theirs: what the original and the quantized policy earned: a bar's return or an
            episode's, one after another, as many each.
        total: what makes one figure of [..., n] of them.
        block: how many neighbours are drawn together: 1 where they do not depend on each other.
        seed: of the draws.

    Returns:
        float32, quantized, change: the figure of each and their difference.
        interval, change_interval: 95 % of the resamples of the original's figure and of the change.

    Source: Politis & Romano 1992, A circular block-resampling procedure for stationary data.
    """
    rng = np.random.default_rng(seed)
    n = len(mine)
    figures = np.empty((2, RESAMPLES))
    for k in range(RESAMPLES):
        start = rng.integers(n, size=-(-n // block))
        drawn = ((start[:, None] + np.arange(block)) % n).ravel()[:n]
        figures[:, k] = total(mine[drawn]), total(theirs[drawn])
    own, its = float(total(mine)), float(total(theirs))
    return {
        "float32": own,
        "quantized": its,
        "change": its - own,
        "interval": np.percentile(figures[0], INTERVAL).tolist(),
        "change_interval": np.percentile(figures[1] - figures[0], INTERVAL).tolist(),
    }


def failures(report, gate):
    """What of a report the gate refuses, a sentence each; a NaN is refused everywhere."""
    found = []
    if not report["agreement"] >= gate.agreement:
        hint = "" if "fine_tuning" in report["calibration"] else "; fine-tuning may help"
        found.append(f"agreement is {report['agreement']:.4%}, below {gate.agreement:.2%}{hint}")
    if not report["flips_past_gap"] <= 0:
        found.append(
            f"{report['flips_past_gap']} rows changed their action though their two best lie "
            f"further apart than {gate.gap:.0%} of the range"
        )
    figures = [report["range"], *report["regret"].values(), *report["value_error"].values()]
    figures += (report["kl"] or {}).values()
    if not np.isfinite(figures).all():
        found.append("a figure of the outputs is not finite")
    for name, decibels in report["layers"].items():
        if not decibels >= gate.sqnr:
            found.append(f"{name} has {decibels:.1f} dB of signal to noise, below {gate.sqnr:g}")
    returns = report["return"]
    # Chance explains a figure within the original's own interval, and a difference that may be 0.
    within = returns["quantized"] >= returns["interval"][0]
    if not (within or returns["change_interval"][1] >= 0):
        found.append(
            f"return {returns['quantized']:.6g} is below that of float32, {returns['float32']:.6g}, "
            f"by more than chance explains"
        )
    return found


def for_json(value):
    """A report without NaN and infinities, which JSON has not: None stands for both."""
    if isinstance(value, dict):
        return {name: for_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(inner) for inner in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return value


def finished(report, gate):
    """The report with the gate and what it says, as it goes into JSON."""
    failed = failures(report, gate)
    return for_json(report | {"gate": asdict(gate), "failed": failed, "passed": not failed})


def as_text(report):
    """A finished report as lines for people."""
    seen, returns, kl = report["calibration"], report["return"], report["kl"]
    regret, error = report["regret"], report["value_error"]
    rows = [
        (
            "calibration",
            f"{seen['method']}, {seen['rows']:,} rows; copies: {seen['copies']} of a column, "
            f"{seen['unit_copies']} of a hidden unit{', written anew' * seen.get('rewritten', False)}",
        ),
        *_tuning_rows(seen.get("fine_tuning")),
        ("same greedy action", f"{_figure(report['agreement'], '.3%')} of {report['rows']:,} rows"),
        (
            "",
            f"{report['flips']:,} differ, {_figure(report['flips_past_gap'], ',')} of them past a "
            f"gap of {report['gate']['gap']:.0%} of the range",
        ),
        ("regret", f"mean {_figure(regret['mean'])}, largest {_figure(regret['largest'])}"),
        ("", f"of a range of {_figure(report['range'])}"),
        (
            "value",
            f"off by {_figure(error['root_mean_square'])} (root mean square), "
            f"at most {_figure(error['largest'])}",
        ),
    ]
    if kl:
        rows.append(("KL", f"mean {_figure(kl['mean'])} nats, largest {_figure(kl['largest'])}"))
    for name, decibels in report["layers"].items():
        shown = "no noise, or not finite" if decibels is None else f"{decibels:.1f} dB"
        rows.append((name, f"{shown} signal to noise"))
    rows += [
        (
            returns["name"],
            f"{_figure(returns['quantized'])}, {_figure(returns['float32'])} in float32",
        ),
        (
            "",
            f"change {_figure(returns['change'])}, 95% in {_interval(returns['change_interval'])}",
        ),
        ("", f"float32's own 95% {_interval(returns['interval'])}"),
        ("gate", "passed" if report["passed"] else "failed: " + "; ".join(report["failed"])),
    ]
    return "".join(f"{name:20}{text}\n" for name, text in rows)


def _tuning_rows(told):
    if not told:
        return []
    text = (
        f"{told['taken']:,} of {told['steps']:,} steps taken; on {told['checked_rows']:,} rows that"
    )
    changed = f"{told['agreement_before']:.3%} to {told['agreement']:.3%}"
    return [("fine-tuning", text), ("", f"choose them the same action went from {changed}")]


def _figure(value, form=".4g"):
    return "not finite" if value is None else format(value, form)


def _interval(ends):
    return f"[{', '.join(map(_figure, ends))}]"
