"""Quantizing a run: what its policy meets in training, what is held out, and the files it leaves."""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lowgpu import evaluate, runs
from lowgpu.hardware import choose
from lowgpu.policy import Policy
from lowgpu.quantization import quantized, report
from lowgpu.quantization.calibration import calibrate
from lowgpu.quantization.fine_tuning import fine_tuned
from lowgpu.quantization.forward import outputs
from lowgpu.quantization.onnx_export import OnnxError, onnx_model
from lowgpu.quantization.play import episode_returns, market_positions, play, starts
from lowgpu.quantization.policy import FILE
from lowgpu.quantization.rewriting import condensed, parted
from lowgpu_kernels import mlp_forward
from lowgpu_kernels.dims import Float, Int
from lowgpu_kernels.ops.int8.pack_int8 import image_nbytes

REPORT_JSON, REPORT_TEXT, ONNX = "quantized.json", "quantized.txt", "quantized.onnx"
ENVS, STEPS = 64, 512  # that calibration is played on: 32,768 rows
CHECKED = 64  # more environments, whose rows choose among what fine-tuning made
# Of columns and of units, as they are tried; those below, of a network written anew.
COPIES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2))
FINEST = ((16, 1), (16, 2), (16, 4), (16, 8))
FINE_TUNE = Int(0, 2**30)
MOST_NBYTES = 96 * 1024  # of an image with copies, which a block of every GPU holds


@dataclass(frozen=True, eq=False)
class Subject:
    """A run's policy and what it acts in.

    Attributes:
        settings: the run's Config.
        policy: its Policy, for network, parameters and normalizer.
        values: whether the network's outputs are action values.
    """

    settings: object
    policy: Policy
    values: bool

    @classmethod
    def of_run(cls, directory):
        """The last checkpoint of a run.

        Raises:
            RunError, ConfigError, CheckpointError: as `Policy.of_run`.
        """
        settings = runs.opened(directory)
        return cls(settings, Policy.of_run(directory, device="cpu"), settings.algo == "dqn")

    @property
    def actions(self):
        """How many the policy chooses from."""
        return runs.environment(self.settings).actions

    @property
    def seed(self):
        """The run's."""
        return self.settings.trainer.seed

    def best(self, heads):
        """The greedy action of rows of heads."""
        each, _ = report.action_values(heads, self.actions, self.values)
        return each.argmax(axis=1).astype(np.int32)

    def decide(self, x):
        """The greedy action of the float32 policy."""
        network = self.policy.network
        heads = sum(widths[-1] for widths in network.towers)
        return self.best(mlp_forward(x, self.policy.parameters, network=network).y[:, :heads])

    def decide_quantized(self, calibration):
        """The same of the quantized policy, as a function of observations."""
        return lambda x: self.best(
            outputs(calibration.network, calibration.arrays, x[:, calibration.columns])
        )

    def compared(self, calibration, observations, gate):
        """`report.compare` of the float32 policy and a quantized one."""
        original = self.policy.network, self.policy.parameters
        about = dict(values=self.values, gate=gate)
        return report.compare(*original, calibration, observations, self.actions, **about)

    def names(self):
        """What the columns of an observation are called."""
        env = runs.environment(self.settings)
        if not env.series:
            return env.floats if len(env.floats) == env.observation else ()
        from lowgpu.data.feature_columns import FEATURES

        features = (feature.name for feature in FEATURES)
        return *features, "position", "unrealised return", "share of the episode"

    def rewritten(self, observations):
        """(network, parameters) of the same policy, which rounding hurts less."""
        own = self.policy.network, self.policy.parameters
        return condensed(*parted(*own, self.actions, self.values), observations)

    def observations(self, data=None, envs=ENVS):
        """What the greedy policy meets: on training bars, or in episodes of its own seed.

        Args:
            data: bars whose training split is played instead of that of the run's.
            envs: played side by side; a row's is its number modulo envs.

        Raises:
            RunError: data that cannot be used, or given without a market.
        """
        env = runs.environment(self.settings)
        table = series = None
        if env.series:
            _, table, series = self._split(env, 0, data)
        elif data:
            raise runs.RunError(f"--data is bars, and the run's env is {self.settings.env}")
        seed = self.seed ^ 1  # no start is one of those that an evaluation plays
        state = starts(env, envs, series, seed)
        with_data = dict(table=table, series=series, seed=seed, keep=True)
        return play(env, self.decide, *state, STEPS, **with_data).observation

    def held_out(self):
        """What calibration has not seen: the test split, or the episodes of an evaluation.

        Returns:
            (observations, play, total, block, name): what the float32 policy meets there; a function
            of a policy's decisions that gives its returns, bar by bar or episode by episode; and
            what `report.compare_returns` makes of them.
        """
        env = runs.environment(self.settings, start="first")
        if not env.series:
            own = self.settings.world
            game = functools.partial(
                episode_returns, env, count=own.episodes, most_steps=own.max_steps, seed=self.seed
            )
            observations = game(self.decide, keep=True)[1]
            return observations, lambda decide: game(decide)[0], _mean, 1, "mean return"
        test, table, series = self._split(env, 2)
        segments = _segments(test)
        own = self.settings.market
        game = functools.partial(
            market_positions,
            env,
            segments=segments,
            episode=own.episode,
            table=table,
            series=series,
        )

        def returns(decide):
            curve = evaluate.market(game(decide)[0], segments, own.cost)[2]["policy"]
            before, after = curve[:-1], curve[1:]
            return np.divide(after, before, np.ones(len(after)), where=before > 0) - 1

        observations = game(self.decide, keep=True)[1]
        block = max(1, round(len(np.unique(test.date)) ** (1 / 3)))
        return observations, returns, _compound, block, "total return"

    def _split(self, env, which, data=None):
        """A split of the bars, and its table and series by the run's normalizer."""
        settings = self.settings
        if data:
            settings = replace(settings, data=str(Path(data).absolute()))
        splits, normalizer_of = runs.splits_of(settings)
        normalizer = normalizer_of.from_dict(self.policy.normalizer)
        return splits[which], *runs.arrays_of(env, splits[which], normalizer)


def _segments(table):
    """Where each symbol lies in a split."""
    present, starts_at, lengths = np.unique(table.segment, return_index=True, return_counts=True)
    return evaluate.Segments(
        symbols=tuple(table.symbol[s] for s in present),
        starts=starts_at,
        lengths=lengths,
        price=table.price,
        date=table.date,
    )


def _mean(returns):
    return returns.mean(axis=-1)


def _compound(returns):
    return np.prod(1 + returns, axis=-1) - 1


def fitted(subject, observations, gate, copies=None, rewrite=False, **how):
    """The Calibration with the fewest copies that passes on its own observations.

    It passes with half of the changed actions that the gate allows, since held-out rows have more.

    Args:
        subject: a Subject.
        observations: to calibrate on.
        gate: whose agreement and gap it must reach; where none does, the nearest is taken.
        copies: (of columns, of hidden units) instead.
        rewrite: for fine-tuning, which comes after: always from the network written anew, as
            `rewriting` does, instead of trying that last; and where none passes the finest.
        how: method and percentile, for `calibrate`.
    """
    best, most = None, -1.0
    forms = {False: lambda: (subject.policy.network, subject.policy.parameters)}
    forms[True] = functools.cache(lambda: subject.rewritten(observations))
    for anew, (columns, units) in _tries(copies, rewrite):
        try:
            made = calibrate(
                *forms[anew](),
                observations,
                copies=columns,
                unit_copies=units,
                names=subject.names(),
                **how,
            )
        except ValueError:
            if best is None:
                raise
            continue  # wider than a network may be, or units of tanh
        made.summary["rewritten"] = anew
        if copies is not None:
            return made
        if best is not None and image_nbytes(made.network) > MOST_NBYTES:
            continue
        found = subject.compared(made, observations, gate)
        if found["agreement"] > most or rewrite:
            best, most = made, found["agreement"]
        if 1 - most <= (1 - gate.agreement) / 2 and not found["flips_past_gap"]:
            return made
    return best


def _tries(copies, rewrite):
    """(whether written anew, copies), in the order that they are tried in."""
    if copies is not None:
        return [(rewrite, copies)]
    return [*((rewrite, each) for each in COPIES), *((True, each) for each in FINEST)]


def tuned(subject, data, gate, copies, steps, device, how):
    """A Calibration of the network written anew, and its integers fine-tuned for some steps."""
    rows = subject.observations(data, ENVS + CHECKED)
    rows = rows.reshape(STEPS, ENVS + CHECKED, -1)
    own, checked = (
        np.ascontiguousarray(part.reshape(-1, rows.shape[-1]))
        for part in (rows[:, :ENVS], rows[:, ENVS:])
    )
    made = fitted(subject, own, gate, copies, rewrite=True, **how)
    about = {"steps": steps, "seed": subject.seed, "device": device}
    return fine_tuned(made, own, checked, subject.actions, **about)


def quantize_run(
    directory,
    *,
    data=None,
    agreement=0.99,
    copies=None,
    fine_tune=0,
    device="cpu",
    onnx=False,
    **how,
):
    """Quantize a run's last checkpoint, and write what came of it beside it.

    quantized.safetensors is the policy, quantized.json and quantized.txt are the report, and
    quantized.onnx is the policy for other runtimes.

    Args:
        directory: the run's folder.
        data: bars to calibrate on, their training split; the run's own where left out.
        agreement: share of held-out rows that must keep their greedy action, in [0, 1].
        copies: (of each column, of each hidden unit); chosen by the gate where left out.
        fine_tune: steps of fine-tuning, in [0, 2^30]; 0 is none.
        device: that they run on: "cpu", "cuda", or "auto", a GPU where there is one.
        onnx: whether to write quantized.onnx.
        how: method and percentile, for `calibrate`.

    Returns:
        (report, text): the finished report, for JSON, and for people.

    Raises:
        RunError: no such run; data, observations or parameters that cannot be used; an argument out
            of range; the onnx package is missing. Nothing is written.
        ConfigError, CheckpointError: as `Policy.of_run`.
        DeviceError: no such device.
    """
    directory = Path(directory)
    subject = Subject.of_run(directory)
    policy = subject.policy
    try:
        gate = report.Gate(Float(0, 1)("agreement", agreement).item())
        if FINE_TUNE("fine_tune", fine_tune):
            device = choose(device).kind
            calibration = tuned(subject, data, gate, copies, fine_tune, device, how)
        else:
            calibration = fitted(subject, subject.observations(data), gate, copies, **how)
        model = onnx_model(calibration, subject.actions) if onnx else None
    except (ValueError, OnnxError) as error:
        raise runs.RunError(str(error)) from None
    observations, returns, total, block, name = subject.held_out()
    made = subject.compared(calibration, observations, gate)
    mine, theirs = returns(subject.decide), returns(subject.decide_quantized(calibration))
    made["return"] = {"name": name} | report.compare_returns(mine, theirs, total, block)
    made = {"env": subject.settings.env, "calibration": calibration.summary} | made
    made = report.finished(made, gate)
    text = report.as_text(made)
    quantized.save(
        directory / FILE,
        calibration,
        subject.actions,
        policy.parameters,
        normalizer=policy.normalizer,
        about={"env": subject.settings.env, "report": made},
    )
    if model:
        (directory / ONNX).write_bytes(model.SerializeToString())
    (directory / REPORT_JSON).write_text(json.dumps(made, indent=2, allow_nan=False) + "\n")
    (directory / REPORT_TEXT).write_text(text, encoding="utf-8")
    return made, text
