"""Proximal policy optimisation: its memory laid out, and its iteration as a list of ops."""

from dataclasses import dataclass

import numpy as np

from lowgpu.initialize import initial_parameters, network_of
from lowgpu.metrics import Curve
from lowgpu.monitor import in_stage, stage
from lowgpu.pools import allocate, staging
from lowgpu.ppo_plan import EPISODE, STATE, plan_of, settings_of
from lowgpu.streams import queue_of
from lowgpu_kernels import (
    episode_statistics,
    gae,
    minibatch_moments,
    permutation,
    ppo_update,
    reset,
    rollout,
)
from lowgpu_kernels.ops.ppo.ppo_loss import STATISTICS


class TrainingError(RuntimeError):
    """Training that cannot go on: one sentence with the iteration and the figure."""


@dataclass(frozen=True)
class Report:
    """One iteration in figures.

    Attributes:
        iteration: counted from 1.
        steps: env steps since the start of the run.
        figures: for the metrics file, by name; None where there is no value.
        mean_return: over at least 100 recent episodes; None before the first has finished.
    """

    iteration: int
    steps: int
    figures: dict
    mean_return: float | None


class PPO:
    """A trainer whose memory is all there before its first step.

    Args:
        config: a PPOConfig.
        env: an Env.
        table: float32 [R, I], the leading observation columns of each row, padded with zeros.
        series: float32 [S, R].
        kind: "cpu" or "cuda".

    Raises:
        ValueError: a table or series that does not fit the Env.
    """

    def __init__(self, config, env, table=None, series=None, kind="cpu"):
        self.config, self.env = config, env
        self.network = network_of(config, env)
        self.iteration, self.curve = 0, Curve()
        given = {"table": table, "series": series}
        rows = next((a.shape[-2 + (n == "series")] for n, a in given.items() if a is not None), 0)
        self.plan = plan_of(config, env, rows, kind)
        self._check(given)
        self._settings = settings_of(config, env, self.network)
        self.buffers = allocate(self.plan, kind)
        self._queue, self._call_op = queue_of(kind), in_stage
        self._lay_out(kind)
        self._fill(given)
        self._repeat, self._pending = None, None

    def _check(self, given):
        for name, array in given.items():
            declared = self.plan.declared.get(name)
            wanted = declared and declared.shape
            came = None if array is None else array.shape
            if wanted != came:
                raise ValueError(f"{name} must have shape {wanted} for {self.env.name}, got {came}")

    def _lay_out(self, kind):
        """Views into the buffers, made once: their addresses are in the graph."""
        b, config = self.buffers, self.config
        b.table, b.series = (getattr(b, n, None) for n in ("table", "series"))
        self._rollout = (
            b.state_floats,
            b.state_ints,
            b.action,
            b.log_probability,
            b.value,
            b.reward,
            b.terminated,
            b.truncated,
            b.final_value,
            b.last_value,
        )
        # The same memory by transition: row t * E + e.
        self._states = (
            b.state_floats.reshape(config.batch, -1),
            b.state_ints.reshape(config.batch, -1),
        )
        self._taken = tuple(
            a.reshape(-1) for a in (b.action, b.log_probability, b.value, b.advantage, b.returns)
        )
        self._advantage = b.advantage.reshape(-1)
        self._minibatches = b.index.reshape(config.minibatches, config.minibatch)
        self._episodes, losses, norms = _report_views(b.report, config.updates)
        epochs = config.epochs, config.minibatches
        self._learned = list(zip(losses.reshape(*epochs, -1), norms.reshape(epochs)))
        self._scratch = {
            op: {"scratch": [getattr(b, f"{op}.{name}") for name in op.scratch]}
            for op in self._settings
            if kind == "cuda" and op.scratch
        }
        self._reports = [staging(b.report.shape, np.float32, kind) for _ in range(2)]

    def _fill(self, given):
        """The first state: parameters, environments at their start, the data."""
        b = self.buffers
        values = {
            n: a.astype(self.plan.declared[n].dtype) for n, a in given.items() if a is not None
        }
        values["parameters"] = initial_parameters(self.network, self.env, self.config.seed)
        self._queue.write(vars(b), values)
        self._queue.prepare(self._start, self._iterate)
        with self._queue.running():
            self._start()

    def _start(self):
        b = self.buffers
        reset(b.floats, b.ints, b.series, b.clock, env=self.env, seed=self.config.seed)

    def _call(self, op, *arrays, out=None, **params):
        params = self._settings[op] | self._scratch.get(op, {}) | params
        return self._call_op(op, *arrays, out=out, **params)

    def _iterate(self):
        """One iteration: act, judge, learn. Every array is there, and stays where it is."""
        b, call = self.buffers, self._call
        data = b.table, b.series
        call(rollout, b.parameters, b.floats, b.ints, b.clock, *data, out=self._rollout)
        call(
            gae,
            b.reward,
            b.value,
            b.last_value,
            b.terminated,
            b.truncated,
            b.final_value,
            out=(b.advantage, b.returns, b.rollout_moments),
        )
        ended = b.reward, b.terminated, b.truncated
        call(episode_statistics, *ended, b.running_return, b.running_length, out=self._episodes)
        for epoch, learned in enumerate(self._learned):
            call(permutation, b.clock, epoch=epoch, out=b.index)
            call(minibatch_moments, self._advantage, b.index, out=b.moments)
            call(
                ppo_update,
                *(b.parameters, b.m, b.v, b.step),
                *(*self._states, *data, self._minibatches),
                *(*self._taken, b.moments),
                out=(b.gradient, *learned),
            )

    def walk(self, call_op):
        """Do one iteration op by op, not as a graph, and leave it out of every count and report.

        Args:
            call_op: (op, *arrays, **keywords), which calls the op; it may look and take the time.
        """
        before, self._call_op = self._call_op, call_op
        try:
            with self._queue.running():
                self._iterate()
        finally:
            self._call_op = before

    @property
    def queue(self):
        """The queue that its work goes to: a GpuQueue or a CpuQueue."""
        return self._queue

    @property
    def done(self):
        """Whether every iteration of the run has been queued."""
        return self.iteration >= self.config.iterations

    @property
    def steps(self):
        """Env steps since the start of the run."""
        return self.iteration * self.config.batch

    def advance(self):
        """Queue one iteration, and report the one before it while this one runs.

        Returns:
            The Report of the iteration before, None at first and after `drain`.

        Raises:
            TrainingError: a figure of the iteration before is not finite.
        """
        if self._repeat is None:
            changes = {name: getattr(self.buffers, name) for name in STATE}
            self._repeat = self._queue.repeatable(self._iterate, changes)
        with stage("iteration"):
            self._repeat()
        self.iteration += 1
        target = self._reports[self.iteration % 2]
        before = self._pending
        self._pending = self._queue.copy_out(self.buffers.report, target)
        return None if before is None else self._report(before, self.iteration - 1)

    def drain(self):
        """Wait for the last iteration queued, and report it; None when that has been done.

        Raises:
            TrainingError: a figure of it is not finite.
        """
        before, self._pending = self._pending, None
        return None if before is None else self._report(before, self.iteration)

    def _report(self, arrive, iteration):
        with stage("wait for figures"):
            arrive()
        config = self.config
        parts = _report_views(self._reports[iteration % 2], config.updates)
        episodes, losses, norms = parts
        for names, rows in zip((EPISODE, STATISTICS, ("norm",)), parts):
            rows = rows.reshape(-1, len(names))
            if not np.isfinite(rows).all():
                update, column = np.argwhere(~np.isfinite(rows))[0]
                raise TrainingError(
                    f"iteration {iteration}: {names[column]} is {rows[update, column]} "
                    f"in update {update + 1} of {len(rows)}; a smaller ppo.lr may help"
                )
        count, total, length, _ = map(float, episodes)
        self.curve.add(count, total)
        means = np.mean(losses, axis=0, dtype=np.float64)
        left = 1 - (iteration - 1) / config.iterations if config.anneal else 1
        figures = {
            "episodes": int(count),
            "return": total / count if count else None,
            "length": length / count if count else None,
            **{n: float(mean) for n, mean in zip(STATISTICS, means) if n != "non_finite_rows"},
            "norm": float(np.mean(norms, dtype=np.float64)),
            "lr": config.lr * left,
        }
        return Report(iteration, iteration * config.batch, figures, self.curve.mean)

    def state(self):
        """What a checkpoint holds: arrays by name, and a document. Drain first."""
        assert self._pending is None, "the last iteration's figures were not read"
        arrays = self._queue.read({name: getattr(self.buffers, name) for name in STATE})
        return arrays, {"iteration": self.iteration, "curve": self.curve.entries}

    def restore(self, arrays, document):
        """Go on from what `state` gave, bit for bit.

        Args:
            arrays: with the names, shapes and element types of `expected_arrays`.
            document: as `state` gave it.
        """
        assert self._pending is None, "an iteration is under way"
        self._queue.write(vars(self.buffers), {name: arrays[name] for name in STATE})
        self.iteration, self.curve = document["iteration"], Curve(document["curve"])


def _report_views(report, updates):
    """The parts of a report: sums over episodes [4], statistics [updates, 8], norms [updates]."""
    first, last = len(EPISODE), len(EPISODE) + updates * len(STATISTICS)
    return report[:first], report[first:last].reshape(updates, -1), report[last:]
