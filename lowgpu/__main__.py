"""The command line: train, evaluate, quantize, profile, info.

Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C or SIGTERM. Errors are one sentence
on standard error.

On a CPU one thread is used, unless OPENBLAS_NUM_THREADS and NUMBA_NUM_THREADS ask for more.
"""

import json
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lowgpu import hardware
from lowgpu.quantization.command import after_training, refuse_failed
from lowgpu.quantization.command import register as register_quantize
from lowgpu.start import importing, wake_gpu

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning on one GPU.",
)

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
DATA = Annotated[
    Path | None,
    typer.Option(
        help="Bars as CSV, a Parquet table or a folder of save_table; without it the built-in sample."
    ),
]
ENV = Annotated[
    str | None, typer.Option(help="market (default), cartpole, acrobot or mountain_car.")
]
ALGO = Annotated[str | None, typer.Option(help="ppo (default) or dqn.")]
DEVICE = Annotated[
    str | None, typer.Option(help="auto (default: a GPU where one can be used), cpu or cuda.")
]
CONFIG = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
PRECISION = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
SETTINGS = Annotated[
    list[str] | None, typer.Option("--set", help="name=value of any setting; repeatable.")
]
FAILED, BAD_INPUT, STOPPED = 1, 2, 130


@contextmanager
def _in_one_sentence():
    """Turn what can go wrong into a sentence and an exit code; our own mistakes keep a traceback."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(f"warning: {message}", sys.stderr)
        try:
            with importing():
                from lowgpu.checkpoint import CheckpointError
                from lowgpu.config import ConfigError
                from lowgpu.pools import MemoryPlanError
                from lowgpu.runs import RunError
                from lowgpu.training import TrainingError

            refused = ConfigError, CheckpointError, MemoryPlanError, RunError, hardware.DeviceError
            try:
                yield
            except refused as error:
                _end(error, BAD_INPUT)
            except (TrainingError, OSError) as error:
                _end(error, FAILED)
        except KeyboardInterrupt:
            _end("stopped; a run that had begun keeps its last checkpoint", STOPPED)


def _say(text, file=None):
    print(text, file=file or sys.stdout, flush=True)


def _end(error, code):
    _say(f"lowgpu: {error}", sys.stderr)
    raise typer.Exit(code) from None


@app.command()
def train(
    data: DATA = None,
    env: ENV = None,
    algo: ALGO = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Env steps, rounded up to whole iterations."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the parameters and all draws.")] = None,
    device: DEVICE = None,
    config: CONFIG = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/... by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run.")] = False,
    precision: PRECISION = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Choose ppo.minibatches or dqn.batch for this machine: measured (the smallest "
            "minibatch near the best throughput) or tier (by the GPU's memory). Without it as configured."
        ),
    ] = None,
    settings: SETTINGS = None,
    hertz: Annotated[
        float, typer.Option(min=0, max=1000, help="Samples of the GPU a second; 0 takes none.")
    ] = 5.0,
    as_json: JSON = False,
):
    """Train a policy, then evaluate it.

    Settings come from a preset for the environment and the device, then from --config, then from
    the options, then from --set; what comes later wins. The resolved settings are printed and kept
    in the run's config.toml. Ctrl-C leaves a checkpoint that --resume goes on from, bit for bit.
    """
    say = sys.stderr if as_json else sys.stdout
    set_there = any(text.partition("=")[0].strip() == "device" for text in settings or [])
    wake_gpu(device, elsewhere=resume or config or set_there)
    with _in_one_sentence():
        from lowgpu import runs

        options = _options(data, env, algo, steps, seed, precision)
        if resume:
            options |= {"--batch": batch} if batch else {}
            given = [name for name, value in (("--config", config), ("--set", settings)) if value]
            resolved, chosen = _resumed(run, device, [*given, *options])
        else:
            runs.refuse_existing(run)
            resolved, chosen = _resolved(device, config, options, settings or [])
        _say(f"Device: {chosen.name} ({chosen.kind}; {chosen.reason})\n", say)
        if resume:
            task = runs.training_task(resolved)
        else:
            resolved, task = runs.prepared(resolved, chosen)
        if batch:
            resolved = _fitted(resolved, task, chosen, batch, say)
        directory, resolved, trainer, seen = _until_done(
            resolved, task, chosen, run, resume, say, lambda: _monitor(chosen, hertz)
        )
        if seen:
            _say(f"{seen}\n", say)
        if not trainer.done:
            _say(
                f"Stopped after iteration {trainer.iteration} of {resolved.trainer.iterations}; go on "
                f"with: lowgpu train --run {directory} --resume",
                sys.stderr,
            )
            raise typer.Exit(STOPPED)
        report, text, notes = runs.evaluation(directory, resolved)
        for note in notes:
            _say(f"note: {note}", sys.stderr)
        quantized, its_text = after_training(directory, resolved)
        if as_json:
            _say(_trained(directory, trainer, seen, report, quantized))
        else:
            _say(f"{text}\n{its_text and its_text + chr(10)}Run: {directory}")
        if quantized:
            refuse_failed(quantized)


def _until_done(resolved, task, chosen, run, resume, say, monitor_of):
    """Train; where memory runs out, go on from the checkpoint with more accumulation, and say so.

    Returns:
        (directory, resolved, trainer, seen): the run's folder, the Config that fitted, the trainer at
        the end, and the monitor's summary.
    """
    from dataclasses import replace

    from lowgpu import runs
    from lowgpu.budget import accumulating
    from lowgpu.config import in_use, to_toml
    from lowgpu.pools import one_error

    directory = run if resume else None

    def attempt(trainer_config):
        nonlocal directory
        fitted = replace(resolved, **{resolved.algo: trainer_config})
        _say(to_toml(in_use(fitted)), say)
        plan = _plan(fitted, task, chosen, say)
        if directory is None:
            directory = runs.create(run, fitted)
        elif trainer_config != resolved.trainer:
            runs.keep(directory, fitted)
        going_on = resume or (directory / runs.CHECKPOINT).exists()
        memory = one_error(plan, chosen.name)
        with memory, runs.Stop() as stop, monitor_of() as monitor:
            if monitor.uuid and monitor.reason:
                _say(f"note: the GPU is not watched: {monitor.reason}", sys.stderr)
            trainer, _ = runs.train(directory, fitted, task, chosen, going_on, stop, monitor)
        return directory, fitted, trainer, monitor.summary()

    def plan_for(trainer_config):
        kind = runs.trainer_of(resolved)
        return kind.plan_of(trainer_config, task.env, task.rows, chosen.kind)

    def note(text):
        _say(f"note: {text}", sys.stderr)

    return accumulating(resolved.trainer, plan_for, attempt, note)


def _trained(directory, trainer, seen, report, quantized):
    """A finished run as one JSON object."""
    return json.dumps(
        {
            "run": str(directory),
            "iterations": trainer.iteration,
            "steps": trainer.steps,
            "mean_return": trainer.curve.mean,
            "gpu": asdict(seen) if seen else None,
            "evaluation": report,
            "quantized": quantized,
        }
    )


def _options(data, env, algo, steps, seed, precision):
    """The settings that have an option of their own, as far as they were given."""
    path = os.path.abspath(data) if data else None
    given = {"data": path, "env": env, "algo": algo}
    given |= {"total_steps": steps, "seed": seed, "precision": precision}
    return {name: value for name, value in given.items() if value is not None}


def _resolved(device, file, options, settings):
    """The Config of a new run, and the Hardware it runs on."""
    from lowgpu import config

    named = [text for text in settings if text.partition("=")[0].strip() in ("env", "algo")]
    top = {n: v for n, v in options.items() if n in ("data", "env", "algo")}
    asked = config.merge(config.read_toml(file) if file else {}, top, *map(config.setting, named))
    algo, env = config.used_by(asked)
    inner = {algo: {n: v for n, v in options.items() if n not in top}}
    asked = config.merge(asked, inner, *(config.setting(text, (algo, env)) for text in settings))
    with importing():  # CuPy is
        chosen = hardware.choose(device or asked.get("device", "auto"))
    preset = config.preset_of(env, algo, chosen.kind)
    resolved = config.from_dict(config.merge(preset, asked, {"device": chosen.kind}))
    if resolved.data and resolved.env != "market":
        raise config.ConfigError(f"data is for the market, and env is {resolved.env}")
    return resolved, chosen


def _resumed(run, device, given):
    """The Config of a run that is gone on with, and the Hardware it runs on."""
    from lowgpu import runs

    if run is None:
        raise runs.RunError("--resume needs --run, the folder to go on with")
    if given:
        raise runs.RunError(
            f"--resume takes every setting from {run}/{runs.CONFIG}: leave out {', '.join(given)}"
        )
    resolved = runs.opened(run)
    with importing():  # CuPy is
        return resolved, hardware.choose(device or resolved.device)


def _monitor(chosen, hertz):
    """The Monitor of the device; it watches nothing on a CPU, nor with 0 samples a second."""
    from lowgpu.monitor import HERTZ, Monitor, current_uuid

    watched = chosen.kind == "cuda" and hertz > 0
    return Monitor(current_uuid() if watched else None, hertz or HERTZ)


def _fitted(resolved, task, chosen, policy, say):
    """The Config with the minibatch that suits the machine."""
    from dataclasses import replace

    from lowgpu.budget import batch_for, minibatches_for

    ways = {"ppo": ("minibatches", minibatches_for), "dqn": ("batch", batch_for)}
    name, choose = ways[resolved.algo]
    count, text = choose(resolved.trainer, task, chosen, policy)
    _say(text, say)
    return replace(resolved, **{resolved.algo: replace(resolved.trainer, **{name: count})})


def _plan(resolved, task, chosen, say):
    """Print what every buffer takes, and refuse what does not fit, before anything is allocated."""
    from lowgpu.budget import beside_nbytes
    from lowgpu.pools import shown
    from lowgpu.runs import trainer_of

    plan = trainer_of(resolved).plan_of(resolved.trainer, task.env, task.rows, chosen.kind)
    _say(str(plan), say)
    if chosen.free_nbytes is not None:
        _say(f"{'free':24} {shown(chosen.free_nbytes):>10}  on {chosen.name}\n", say)
    plan.check(chosen.free_nbytes, chosen.name, beside_nbytes(chosen.kind))
    return plan


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: DATA = None,
    as_json: JSON = False,
):
    """Evaluate a run's last checkpoint on the test split, or on greedy episodes.

    Evaluation is float32 on the CPU wherever a run was trained, so its figures are the same
    everywhere.
    """
    with _in_one_sentence():
        from dataclasses import replace

        from lowgpu import runs
        from lowgpu.config import ConfigError

        resolved = runs.opened(run)
        if data and resolved.env != "market":
            raise ConfigError(f"data is for the market, and the run's env is {resolved.env}")
        if data:
            resolved = replace(resolved, data=os.path.abspath(data))
        report, text, notes = runs.evaluation(run, resolved)
        for note in notes:
            _say(f"note: {note}", sys.stderr)
        _say(json.dumps(report) if as_json else text)


@app.command()
def profile(
    data: DATA = None,
    env: ENV = None,
    algo: ALGO = None,
    device: DEVICE = None,
    config: CONFIG = None,
    precision: PRECISION = None,
    settings: SETTINGS = None,
    rounds: Annotated[int, typer.Option(min=1, help="Iterations to take the median of.")] = 10,
    as_json: JSON = False,
):
    """Show where the time of a training iteration goes, op by op, beside the whole iteration.

    Settings come from where train takes them. Nothing is written; what is learned is thrown away.
    """
    say = sys.stderr if as_json else sys.stdout
    with _in_one_sentence():
        from lowgpu import profile as profiles
        from lowgpu import runs
        from lowgpu.budget import beside_nbytes

        options = _options(data, env, algo, None, None, precision)
        resolved, chosen = _resolved(device, config, options, settings or [])
        _say(f"Device: {chosen.name} ({chosen.kind}; {chosen.reason})\n", say)
        task = runs.training_task(resolved)
        kind, own = runs.trainer_of(resolved), resolved.trainer
        plan = kind.plan_of(own, task.env, task.rows, chosen.kind)
        plan.check(chosen.free_nbytes, chosen.name, beside_nbytes(chosen.kind))
        trainer = kind(own, task.env, task.table, task.series, chosen.kind)
        measured = profiles.measure(trainer, chosen, rounds)
        if as_json:
            _say(json.dumps(measured.to_dict()))
        else:
            profiles.show(measured)


@app.command()
def info(algo: ALGO = None, as_json: JSON = False):
    """Show the machine, its libraries, what would be used and why, and what would fit there.

    The plan is that of the market's preset with a million bars.
    """
    with _in_one_sentence():
        from lowgpu import machine, outlook

        found = machine.HardwareBudget.detect()
        report, seen = machine.report(found), outlook.outlook(found, algo or "ppo")
        _say(json.dumps(report | {"outlook": seen}) if as_json else outlook.described(report, seen))


register_quantize(app, _in_one_sentence)


def main():
    """The entry point."""
    # Before NumPy and Numba are imported, which is in the commands. A minibatch of a small network
    # takes a core microseconds, and a thread that waits for others takes as long: on two cores under
    # a load of 7, CartPole's iterations took 27 times as long with two threads of OpenBLAS and 14
    # times with two of Numba (measured, one run each).
    for threads in ("OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(threads, "1")
    # TA-Lib imports both where they are installed, to take their tables too; here it gets arrays.
    for tables in ("pandas", "polars"):
        sys.modules.setdefault(tables, None)
    app()


if __name__ == "__main__":
    main()
