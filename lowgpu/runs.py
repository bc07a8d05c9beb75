"""A run: its folder, its loop, and what is written of it."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np

from lowgpu import checkpoint, config, evaluate, plots
from lowgpu.checkpoint import CheckpointError
from lowgpu.metrics import MetricsFile, ProgressLine
from lowgpu.monitor import Monitor, Sample, stage
from lowgpu.pools import shown
from lowgpu.tasks import (
    TRAINERS,
    RunError,
    Task,
    arrays_of,
    environment,
    network_of,
    prepared,
    splits_of,
    test_data,
    trainer_of,
    training_task,
)

__all__ = [
    "TRAINERS",
    "RunError",
    "Stop",
    "Task",
    "arrays_of",
    "create",
    "environment",
    "evaluation",
    "keep",
    "network_of",
    "opened",
    "prepared",
    "refuse_existing",
    "splits_of",
    "train",
    "trainer_of",
    "training_task",
]

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"
EVALUATION_JSON, EVALUATION_TEXT, EQUITY = "evaluation.json", "evaluation.txt", "equity.png"
RUNS = "runs"


def create(directory, settings):
    """Make a run's folder and write its config; a folder that exists is left alone.

    Args:
        directory: where; None for the first free one of runs/<env>-<algo>-<n>.
        settings: the Config.

    Returns:
        The folder.

    Raises:
        RunError: the folder exists, or cannot be made.
    """
    names = [Path(directory)] if directory else _free_names(settings)
    for path in names:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{path} cannot be made: {error.strerror}") from None
        return keep(path, settings)
    refuse_existing(directory)
    raise AssertionError("every name was taken")


def keep(directory, settings):
    """Write a run's config into its folder, which is given back."""
    path = Path(directory)
    (path / CONFIG).write_text(config.to_toml(config.in_use(settings)), encoding="utf-8")
    return path


def _free_names(settings):
    number = 1
    while True:
        yield Path(RUNS) / f"{settings.env}-{settings.algo}-{number}"
        number += 1


def refuse_existing(directory):
    """Raise RunError when a run's folder is there already."""
    if directory and os.path.lexists(directory):
        raise RunError(f"{directory} exists: give --resume to go on with it, or another --run")


def opened(directory):
    """The Config of an existing run.

    Raises:
        RunError: no such run.
        ConfigError: its config cannot be used.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise RunError(f"{directory} is no run: it has no {CONFIG}")
    return config.from_dict(config.read_toml(path))


class Stop:
    """Within this context SIGINT and SIGTERM ask for a stop; a second one acts as it always does."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame):
        self.asked = True
        signal.signal(number, self._before[number])

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(directory, settings, task, hardware, resume, stop, monitor=None):
    """Train to the end of the run, or until a stop is asked for; either way a checkpoint is left.

    Args:
        directory: the run's folder.
        settings: its Config.
        task: what to train on.
        hardware: the device.
        resume: whether to go on from the folder's checkpoint.
        stop: a Stop.
        monitor: a Monitor that watches; its figures go to the metrics and the progress, and its
            summary is of what follows the first iteration, which compiles.

    Returns:
        (trainer, path): the trainer as it is at the end, and the last checkpoint.

    Raises:
        TrainingError: a figure is not finite; the last good checkpoint is there.
        CheckpointError: the checkpoint to go on from cannot be used.
    """
    path = Path(directory) / CHECKPOINT
    saved = _loaded(path, settings, task.env) if resume else None
    trainer = trainer_of(settings)(
        settings.trainer, task.env, task.table, task.series, hardware.kind
    )
    if saved:
        trainer.restore(saved.arrays, saved.document)
    else:
        _save(path, trainer, settings, task)
    first = trainer.iteration + 1
    every = -(-settings.trainer.iterations // settings.trainer.checkpoints)
    metrics = MetricsFile(Path(directory) / METRICS, trainer.iteration)
    total = settings.trainer.iterations * settings.trainer.iteration_steps
    monitor = monitor or Monitor(None)
    start = time.monotonic()
    with ProgressLine(total, trainer.steps, shown(trainer.plan.nbytes)) as progress:

        def note(report):
            if report is None:
                return
            metrics.write(_line(report, time.monotonic() - start, monitor.latest))
            progress.show(report.steps, report.mean_return, monitor.latest)

        try:
            while not trainer.done and not stop.asked:
                note(trainer.advance())
                if trainer.iteration == first:
                    monitor.restart()
                if trainer.iteration % every == 0 or trainer.done or stop.asked:
                    # The figures must be read before the state they belong to is kept.
                    note(trainer.drain())
                    _save(path, trainer, settings, task)
        finally:
            metrics.close()
            trainer.close()
    return trainer, path


def _line(report, seconds, sample):
    """A line of the metrics; the GPU's figures are None where there is no Sample."""
    return {
        "iteration": report.iteration,
        "steps": report.steps,
        "seconds": round(seconds, 3),
        "mean_return": report.mean_return,
        **report.figures,
        **{f"gpu_{name}": value for name, value in vars(sample or Sample()).items()},
    }


def _save(path, trainer, settings, task):
    with stage("checkpoint"):
        arrays, document = trainer.state()
        normalizer = {f"normalizer.{name}": array for name, array in task.normalizer.items()}
        document["config"] = config.in_use(settings)
        checkpoint.save(path, {**arrays, **normalizer}, document)


def _loaded(path, settings, env):
    """The checkpoint of a run, when it is one of this configuration."""
    wanted = trainer_of(settings).expected_arrays(settings.trainer, env)
    if env.series:
        column = (env.table_columns,), np.float32
        wanted |= {"normalizer.mean": column, "normalizer.std": column}
    saved = checkpoint.load(path, wanted)
    # Through JSON, as the document went: it makes lists of tuples.
    mine = json.loads(json.dumps(config.in_use(settings)))
    theirs = saved.document.get("config")
    if not isinstance(theirs, dict) or not _learns_alike(mine, theirs):
        raise CheckpointError(f"{path} was written with another config than the {CONFIG} beside it")
    iteration, curve = saved.document.get("iteration"), saved.document.get("curve")
    counted = type(iteration) is int and 0 <= iteration <= settings.trainer.iterations
    if not counted or not isinstance(curve, list):
        raise CheckpointError(f"{path} does not say how far it is")
    return saved


def _learns_alike(mine, theirs):
    """Whether two configs as dictionaries differ in nothing that changes what is learned."""
    for name in mine.keys() | theirs.keys():
        value, other = mine.get(name), theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            if not _learns_alike(value, other):
                return False
        elif name not in ("device", "data", "accumulate") and value != other:
            return False
    return True


def evaluation(directory, settings):
    """Evaluate a run's checkpoint, and write evaluation.json, evaluation.txt and equity.png.

    The market's policy plays the test split of the data, each symbol from its first bar to its
    last; others play greedy episodes.

    Args:
        directory: the run's folder.
        settings: its Config; `data` may be another file, of which the test split is used too.

    Returns:
        (report, text, notes): for JSON, for people, and what could not be done.
    """
    directory = Path(directory)
    env = environment(settings, start="first")
    saved = _loaded(directory / CHECKPOINT, settings, env)
    policy = env, network_of(settings, env), saved.arrays["parameters"]
    notes = []
    if env.series:
        report, date, curves = _market(settings, saved, *policy)
        pictured = {name.replace("_", " "): curves[name] for name in ("policy", "buy_and_hold")}
        try:
            plots.equity_png(directory / EQUITY, date, pictured)
        except plots.PlotsError as error:
            notes.append(str(error))
    else:
        own = settings.world
        report = evaluate.episodes(*policy, own.episodes, own.max_steps, settings.trainer.seed)
    report["steps"] = saved.document["iteration"] * settings.trainer.iteration_steps
    text = evaluate.as_text(report)
    (directory / EVALUATION_JSON).write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    (directory / EVALUATION_TEXT).write_text(text, encoding="utf-8")
    return report, text, notes


def _market(settings, saved, env, network, parameters):
    arrays = {name: saved.arrays[f"normalizer.{name}"] for name in ("mean", "std")}
    table, series, segments = test_data(settings, env, arrays)
    positions = evaluate.greedy_positions(
        env, network, parameters, table, series, segments, settings.market.episode
    )
    return evaluate.market(positions, segments, settings.market.cost)
