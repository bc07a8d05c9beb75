"""What trainers share: memory laid out before the first step, iterations queued, figures read late."""

from dataclasses import dataclass

import numpy as np

from lowgpu.background import FeedError
from lowgpu.metrics import Curve
from lowgpu.monitor import in_stage, stage
from lowgpu.pools import allocate, staging
from lowgpu.streams import queue_of
from lowgpu.windows import Streaming, Windows
from lowgpu_kernels import reset

# Figures of the episodes that ended in an iteration, as `episode_statistics` gives them.
EPISODE = ("episodes", "sum of returns", "sum of lengths", "sum of squared returns")


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


class Trainer:
    """A trainer whose memory is all there before its first step.

    One that derives from it gives NAME, its section of a Config; the functions `network_of`,
    `plan_of`, `settings_of`, `expected_arrays`, `initial` and `state_names`; and the methods `_lay_out`,
    `_iterate`, `_repeat`, `_updates` and `_figures`.

    Args:
        config: the trainer's settings.
        env: an Env.
        table: float32 [R, I], the leading observation columns of each row, padded with zeros; or a
            Streaming, which brings the series with it. Where it streams, environments start anew on
            each window, and episodes under way are cut as by a limit.
        series: float32 [S, R].
        kind: "cpu" or "cuda".

    Raises:
        ValueError: a table or series that does not fit the Env.
    """

    def __init__(self, config, env, table=None, series=None, kind="cpu"):
        self.config, self.env = config, env
        self.network = self.network_of(config, env)
        self.iteration, self.curve = 0, Curve()
        streaming, given = None, {"table": table, "series": series}
        if isinstance(table, Streaming):
            self.check_streaming(config, table)
            streaming, given = table, {"series": Windows.blank(env, table.window)}
            rows = table.rows
        else:
            rows = next(
                (a.shape[-2 + (n == "series")] for n, a in given.items() if a is not None), 0
            )
        self.plan = self.plan_of(config, env, rows, kind)
        self._check(given)
        self._settings = self.settings_of(config, env, self.network)
        self.buffers = b = allocate(self.plan, kind)
        self._queue, self._call_op = queue_of(kind), in_stage
        b.table, b.series = (getattr(b, n, None) for n in ("table", "series"))
        self.windows, self._places, self._slot = None, [(b.table, b.series)], 0
        if streaming is not None:
            feed = {"kind": kind, "stream": getattr(self._queue, "stream", None)}
            self.windows = Windows(streaming, env, config, b, **feed)
            self._places = self.windows.slots
        self._scratch = {
            op: {"scratch": [getattr(b, f"{op}.{name}") for name in op.scratch]}
            for op in self._settings
            if kind == "cuda" and op.scratch
        }
        self._reports = [staging(b.report.shape, np.float32, kind) for _ in range(2)]
        self._pending = None
        self._lay_out()
        self._fill(given)

    def _check(self, given):
        for name, array in given.items():
            declared = self.plan.declared.get(name)
            wanted = declared and declared.shape
            came = None if array is None else array.shape
            if wanted != came:
                raise ValueError(f"{name} must have shape {wanted} for {self.env.name}, got {came}")

    def _fill(self, given):
        """The first state: parameters, environments at their start, the data."""
        self._write(given, **self.initial(self.config, self.env))
        self._queue.prepare(self._start, self._iterate)
        with self._queue.running():
            self._start()

    def _start(self):
        b, (_, series) = self.buffers, self._data
        reset(b.floats, b.ints, series, b.clock, env=self.env, seed=self.config.seed)

    @property
    def _data(self):
        """The table and the series that are trained on."""
        return self._places[self._slot]

    def _enter_window(self):
        """Have what the next iteration trains on; on a new window everything starts anew."""
        if self.windows is None:
            return
        with stage("window"):
            try:
                new = self.windows.enter(self.iteration)
            except FeedError as error:
                raise TrainingError(f"iteration {self.iteration + 1}: {error}") from error
            self._slot = self.windows.slot
            if new:
                with self._queue.running():
                    self._start()
                    self._forget()

    def change_data(self, table, series):
        """Go on with other data in place of what is there, such as the next epoch's.

        Every environment starts anew on it, and what belongs to the data before is forgotten: returns
        of the episodes under way, and DQN's replay, which it fills again before it learns on. Waits
        for the device.

        Args:
            table, series: as the trainer was given them, of the same shapes.

        Raises:
            ValueError: a table or series of another shape; a table that streams.
            RuntimeError: the last iteration's figures were not read: drain first.
        """
        if self.windows is not None:
            raise ValueError("table streams: its windows change by themselves, so give it no other")
        if self._pending is not None:
            raise RuntimeError("the last iteration's figures were not read: call drain() first")
        given = {"table": table, "series": series}
        self._check(given)
        self._write(given)
        with self._queue.running():
            self._start()
            self._forget()

    def _write(self, given, **more):
        """Copy data, and more by name, to the buffers."""
        values = {
            n: a.astype(self.plan.declared[n].dtype) for n, a in given.items() if a is not None
        }
        self._queue.write(vars(self.buffers), values | more)

    def _forget(self):
        """What belongs to the window before."""
        self.buffers.running_return.fill(0)
        self.buffers.running_length.fill(0)

    def _call(self, op, *arrays, out=None, **params):
        params = self._settings[op] | self._scratch.get(op, {}) | params
        return self._call_op(op, *arrays, out=out, **params)

    def walk(self, call_op):
        """Do one iteration op by op, not as a graph, and leave it out of every count and report.

        Args:
            call_op: (op, *arrays, **keywords), which calls the op; it may look and take the time.
        """
        self._enter_window()
        before, self._call_op = self._call_op, call_op
        try:
            with self._queue.running():
                self._iterate()
        finally:
            self._call_op = before

    def skip_warm_up(self):
        """Learn from the first iteration on, as a profile wants to see it."""

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
        return self.iteration * self.config.iteration_steps

    def advance(self):
        """Queue one iteration, and report the one before it while this one runs.

        Returns:
            The Report of the iteration before, None at first and after `drain`.

        Raises:
            TrainingError: a figure of the iteration before is not finite; a window that cannot be read.
        """
        self._enter_window()
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
        report = self._reports[iteration % 2]
        episodes, learned = report[: len(EPISODE)], self._updates(report, iteration)
        for names, rows in ((EPISODE, episodes), *learned):
            rows = rows.reshape(-1, len(names))
            if not np.isfinite(rows).all():
                update, column = np.argwhere(~np.isfinite(rows))[0]
                raise TrainingError(
                    f"iteration {iteration}: {names[column]} is {rows[update, column]} "
                    f"in update {update + 1} of {len(rows)}; a smaller {self.NAME}.lr may help"
                )
        count, total, length, _ = map(float, episodes)
        self.curve.add(count, total)
        figures = {
            "episodes": int(count),
            "return": total / count if count else None,
            "length": length / count if count else None,
            **self._figures(learned, iteration),
        }
        if self.windows is not None:
            figures["window"] = self.windows.number_of(iteration - 1)
        steps = iteration * self.config.iteration_steps
        return Report(iteration, steps, figures, self.curve.mean)

    def state(self):
        """What a checkpoint holds: arrays by name, and a document. Drain first."""
        assert self._pending is None, "the last iteration's figures were not read"
        names = self.state_names(self.config)
        arrays = self._queue.read({name: getattr(self.buffers, name) for name in names})
        return arrays, {"iteration": self.iteration, "curve": self.curve.entries}

    def restore(self, arrays, document):
        """Go on from what `state` gave, bit for bit where that holds everything.

        Args:
            arrays: with the names, shapes and element types of `expected_arrays`.
            document: as `state` gave it.
        """
        assert self._pending is None, "an iteration is under way"
        names = self.state_names(self.config)
        self._queue.write(vars(self.buffers), {name: arrays[name] for name in names})
        self.iteration, self.curve = document["iteration"], Curve(document["curve"])
        self.close()

    @classmethod
    def window_iterations(cls, config, episode):
        """Iterations on a window of a table that streams: enough for whole episodes.

        Args:
            config: the trainer's settings.
            episode: steps of an episode.
        """
        return -(-episode * config.envs // config.iteration_steps)

    @classmethod
    def check_streaming(cls, config, streaming):
        """Refuse a Streaming that the trainer could not learn on.

        Raises:
            ConfigError: its windows are too short.
        """

    def close(self):
        """End the thread that reads a table which streams; `advance` begins another."""
        if self.windows is not None:
            self.windows.close()


def means(names, rows):
    """The mean over updates of each column of a report, by name; None without updates."""
    if not len(rows):
        return dict.fromkeys(names)
    return {n: float(m) for n, m in zip(names, np.mean(rows, axis=0, dtype=np.float64))}
