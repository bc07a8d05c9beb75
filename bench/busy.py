"""How busy `lowgpu train` keeps the GPU: `python -m bench.busy`.

Training runs in a process of its own for a while and NVML is asked ten times a second from here, so
that what measures takes nothing from what is measured. Counting begins once iterations finish.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench.streamed import save_bars
from bench.timing import device_facts, save_document
from lowgpu import config, hardware
from lowgpu.monitor import Monitor, current_uuid

RESULTS = Path(__file__).parent / "results"
BAR = 95  # percent that 95 % of the samples are to reach
HERTZ = 10.0
WINDOWS = 8  # of the table that streams; its training split has 70 % of them
START_SECONDS = 120.0  # until the first iterations: a cold start, on a machine that others use too


def watched(env, settings, algo="ppo"):
    """The trainer's settings of a run on a GPU that ends at once.

    Args:
        env: name of the environment.
        settings: name=value, as `lowgpu train` takes them.
        algo: name of the trainer.

    Raises:
        ConfigError: a setting that cannot be used.
    """
    one = {"env": env, "algo": algo, algo: {"total_steps": 1}}
    given = (config.setting(text, (algo, env)) for text in settings)
    with warnings.catch_warnings():
        # Of a run that ends before it learns: nobody starts it.
        warnings.simplefilter("ignore")
        preset = config.preset_of(env, algo, "cuda")
        return config.from_dict(config.merge(preset, *given, one)).trainer


def longest(env, settings, algo="ppo"):
    """The most env steps that a run on a GPU may have: more than a bench lasts. As `watched`."""
    trainer = watched(env, settings, algo)
    updates = trainer.updates * (trainer.rounds if algo == "dqn" else 1)
    return min((2**31 - 1) // updates * trainer.iteration_steps, 2**50)


def until_training(program, metrics, seconds=START_SECONDS):
    """Wait for the first finished iteration.

    Args:
        program: the process.
        metrics: the file it writes to.
        seconds: to wait at most.

    Raises:
        RuntimeError: it ended, or took longer.
    """
    end = time.monotonic() + seconds
    while not (metrics.exists() and metrics.stat().st_size):
        if program.poll() is not None:
            raise RuntimeError(f"lowgpu train ended with {program.returncode} before it trained")
        if time.monotonic() > end:
            raise RuntimeError(f"lowgpu train finished no iteration in {seconds:g} s")
        time.sleep(0.05)


def watch(arguments, seconds, monitor):
    """The Summary of a GPU over `seconds` of training.

    Args:
        arguments: of `lowgpu train`, without --run.
        seconds: of training to watch.
        monitor: a Monitor that was not started.

    Raises:
        RuntimeError: training ended by itself, or there is no NVML.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "lowgpu", "train", *arguments, "--run", str(run)]
        program = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until_training(program, run / "metrics.jsonl")
            with monitor:
                if monitor.reason:
                    raise RuntimeError(f"the GPU cannot be watched: {monitor.reason}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(seconds)
                    raise RuntimeError(
                        f"lowgpu train ended with {program.returncode} while watched"
                    )
        finally:
            if program.poll() is None:
                program.send_signal(signal.SIGINT)
            program.wait(60)
    return monitor.summary()


def main(
    seconds: Annotated[float, typer.Option(min=1, help="of training to watch")] = 60.0,
    env: Annotated[str, typer.Option(help="market or cartpole")] = "market",
    algo: Annotated[str, typer.Option(help="ppo or dqn")] = "ppo",
    stream: Annotated[
        int,
        typer.Option(min=0, help="rows of a window of a table that streams; 0 keeps it resident"),
    ] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value, as lowgpu train takes it")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
):
    """Train on the GPU and say how busy it was; end with 1 where the bar is missed."""
    hardware.choose("cuda")  # raises where there is none
    settings = settings or []
    arguments = ["--device", "cuda", "--env", env, "--algo", algo]
    arguments += ["--steps", str(longest(env, settings, algo))]
    arguments += [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        if stream:
            precision = watched(env, settings, algo).precision
            save_bars(f"{folder}/bars", WINDOWS * stream, precision)
            arguments += ["--data", f"{folder}/bars", "--set", f"stream.rows={stream}"]
        seen = watch(arguments, seconds, Monitor(current_uuid(), HERTZ))
    reached = seen.utilization_low is not None and seen.utilization_low >= BAR
    print(f"{seen}\nleast {seen.utilization_least} %, {seen.samples} samples")
    print(f"{'reached' if reached else 'missed'}: {BAR} % at the 5th percentile")
    named = "_".join(["busy", env, algo, *(["streamed"] if stream else [])])
    path = out or RESULTS / f"{named}.json"
    save_document(
        path,
        {
            "facts": device_facts(),
            "arguments": arguments,
            "summary": asdict(seen),
            "bar": BAR,
            "reached": reached,
        },
    )
    raise typer.Exit(0 if reached else 1)


if __name__ == "__main__":
    typer.run(main)
