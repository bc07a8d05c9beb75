"""Metrics of a run: a JSON object a line in a file, and a line of progress for people."""

import json
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

EPISODES = 100  # finished episodes that a mean return is taken over, at least
LINE_SECONDS = 60.0  # between two lines of progress where the output is no terminal


class Curve:
    """The mean return over the most recent iterations that together hold 100 finished episodes.

        mean = sum of returns / count of episodes, over the shortest tail of iterations whose counts
               sum to 100 or more; over all of them until there are that many

    Args:
        entries: (count, sum of returns) of earlier iterations, as `entries` gave them.
    """

    def __init__(self, entries=()):
        self._entries = deque((float(count), float(total)) for count, total in entries)

    @property
    def entries(self):
        """(count, sum of returns) of the iterations that still count, oldest first."""
        return [list(entry) for entry in self._entries]

    def add(self, count, total):
        """Take in one iteration: how many episodes finished, and the sum of their returns."""
        if count:
            self._entries.append((float(count), float(total)))
        held = sum(c for c, _ in self._entries)
        while self._entries and held - self._entries[0][0] >= EPISODES:
            held -= self._entries.popleft()[0]

    @property
    def mean(self):
        """The mean return, None before the first episode has finished."""
        count = sum(c for c, _ in self._entries)
        return sum(s for _, s in self._entries) / count if count else None


class MetricsFile:
    """A JSONL file with one object an iteration, written as it happens.

    Opening one that exists keeps the iterations up to `iteration` and cuts off what follows: what a
    stopped run had done after its last checkpoint, or half a line that it was writing.

    Args:
        path: the file.
        iteration: the last iteration that counts.
    """

    def __init__(self, path, iteration=0):
        path = Path(path)
        kept = _kept_nbytes(path, iteration) if path.exists() else 0
        self._file = open(path, "ab")  # noqa: SIM115
        os.truncate(path, kept)

    def write(self, values):
        """Add one object and hand it to the system."""
        self._file.write(json.dumps(values, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self):
        self._file.close()


def _kept_nbytes(path, iteration):
    kept = 0
    with open(path, "rb") as file:
        for line in file:
            counted = None
            with suppress(ValueError, TypeError, KeyError):
                counted = json.loads(line)["iteration"]
            if not line.endswith(b"\n") or not isinstance(counted, int) or counted > iteration:
                break
            kept += len(line)
    return kept


class ProgressLine:
    """Progress on a console: a bar on a terminal, one line a minute elsewhere.

    Args:
        total_steps: env steps of the whole run.
        done_steps: env steps that were done before this process.
        memory: memory in use, for people; it does not change.
        console: a rich Console; standard error when not given.
    """

    def __init__(self, total_steps, done_steps, memory, console=None):
        self._console = console or Console(stderr=True)
        self._total, self._first, self._memory = total_steps, done_steps, memory
        self._start = self._line = time.monotonic()
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=done_steps)

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error):
        if self._bar:
            self._bar.stop()

    def show(self, steps, mean_return, gpu=None):
        """Show how far it is.

        Args:
            steps: env steps done, this process and earlier ones together.
            mean_return: of recent episodes, None before the first has finished.
            gpu: what a Monitor saw last; None where none watches.
        """
        now = time.monotonic()
        if not self._bar and now - self._line < LINE_SECONDS:
            return
        self._line = now
        rate = (steps - self._first) / max(now - self._start, 1e-9)
        reached = "-" if mean_return is None else f"{mean_return:.4g}"
        text = f"{steps:,} steps  {rate:,.0f} steps/s  return {reached}  memory {self._memory}"
        text += "" if gpu is None else f"  GPU {gpu}"
        if self._bar:
            self._bar.update(self._task, completed=steps, description=text)
        else:
            self._console.print(f"{text}  of {self._total:,} steps", highlight=False)
