"""How long `lowgpu train` takes to its first finished iteration: `python -m bench.startup`.

Every start is a process of its own. A cold one finds an empty folder for compiled kernels, a warm
one what the cold one left there. Python's own bytecode and the system's file cache are warm in both.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.timing import device_facts, save_document

RESULTS = Path(__file__).parent / "results"
BARS = {"cold": 10.0, "warm": 2.0}  # seconds, on the GPU machine
# A folder for each cache that a start could fill.
CACHES = {"LOWGPU_CACHE": "kernels", "CUPY_CACHE_DIR": "cupy", "CUDA_CACHE_PATH": "driver"}


class Phases:
    """Seconds by phase; time within a phase that another one took counts for that one alone."""

    def __init__(self, start):
        self.start, self.seconds, self._inner = start, {}, [0.0]

    def timed(self, owner, name, phase):
        """Count the time of every call of `owner.name` as a phase."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def counting(*args, **kwargs):
            began = time.monotonic()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.monotonic() - began
                self._add(phase, taken - self._inner.pop())
                self._inner[-1] += taken

        setattr(owner, name, counting)

    def _add(self, phase, seconds):
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def imported(self):
        """Note that everything before this moment was Python starting and importing."""
        self._add("imports", time.monotonic() - self.start)

    def done(self):
        """{phase: seconds}, the rest as the first iteration, and all together."""
        total = time.monotonic() - self.start
        rest = total - sum(self.seconds.values())
        return {**self.seconds, "first iteration and rest": rest, "total": total}


def child(start, arguments):
    """Be `lowgpu train` up to its first metrics, then print the phases and end.

    Args:
        start: when the parent started this process, by time.monotonic, one clock for the machine.
        arguments: of the command line.
    """
    phases = Phases(start)
    from lowgpu import __main__, hardware, metrics, runs, streams, training

    phases.imported()
    phases.timed(hardware, "choose", "device")
    phases.timed(runs, "prepared", "data")
    phases.timed(__main__, "_plan", "plan")
    phases.timed(__main__, "_monitor", "monitor")
    phases.timed(streams, "build", "compile")
    phases.timed(training, "allocate", "allocation")
    phases.timed(training, "queue_of", "allocation")

    def finished(*_):
        sys.__stdout__.write(json.dumps(phases.done()) + "\n")
        sys.__stdout__.flush()
        # What follows is training, which is not what is measured.
        os._exit(0)

    metrics.MetricsFile.write = finished
    sys.argv = ["lowgpu", *arguments]
    sys.stdout = sys.stderr
    __main__.main()


def started(arguments, caches):
    """The phases of one start in a fresh process.

    Args:
        arguments: of `lowgpu train`.
        caches: the folder that holds every cache.

    Raises:
        RuntimeError: the process ended before its first iteration.
    """
    own = {name: str(Path(caches) / folder) for name, folder in CACHES.items()}
    with tempfile.TemporaryDirectory() as folder:
        run = ["train", *arguments, "--run", str(Path(folder) / "run")]
        command = [sys.executable, "-m", "bench.startup", "--child", repr(time.monotonic()), *run]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    if done.returncode or not done.stdout:
        raise RuntimeError(f"lowgpu train ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def medians(starts):
    """{phase: median seconds} of several starts."""
    return {phase: float(np.median([s[phase] for s in starts])) for phase in starts[0]}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    env: Annotated[str, typer.Option(help="market or cartpole")] = "market",
    warm: Annotated[int, typer.Option(min=1, help="warm starts, of which the median counts")] = 5,
    out: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
):
    """Print the seconds of every phase of a cold and a warm start; on a GPU, hold them to the bars."""
    arguments = ["--device", device, "--env", env]
    with tempfile.TemporaryDirectory() as caches:
        cold = started(arguments, caches)
        starts = [started(arguments, caches) for _ in range(warm)]
    found = {"cold": cold, "warm": medians(starts)}
    for phase in cold:
        print(f"{phase:26}" + "".join(f"{k:>8}{found[k][phase]:8.3f} s" for k in found))
    reached = {kind: found[kind]["total"] < bar for kind, bar in BARS.items()}
    path = out or RESULTS / f"startup_{env}_{device}.json"
    document = {"facts": device_facts(), **found, "warm_starts": starts, "bars": BARS}
    save_document(path, {**document, "reached": reached if device == "cuda" else None})
    if device == "cuda":
        for kind, bar in BARS.items():
            print(f"{kind}: {'reached' if reached[kind] else 'missed'} the bar of {bar:g} s")
        raise typer.Exit(0 if all(reached.values()) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), sys.argv[3:])
    else:
        typer.run(main)
