"""Run compute-sanitizer over every op, and over a planted fault that each tool must find.

    python -m tests.sanitize [--tool memcheck ...] [--op gae ...] [--logs FOLDER]

The exit status is 0 when every op is clean under every tool and every planted fault was found, 1
when not, 2 when compute-sanitizer is not installed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lowgpu_kernels import ops  # noqa: F401  fills OPS
from lowgpu_kernels.op import OPS
from tests.sanitize.report import calls_made, caught, faults, read

ROOT = Path(__file__).parents[2]
# Where toolkits put it when it is not on the PATH; the newest last.
PLACES = (
    ("/opt/nvidia", "**/compute-sanitizer"),
    ("/usr/local", "cuda*/compute-sanitizer/compute-sanitizer"),
    ("/usr/local", "cuda*/bin/compute-sanitizer"),
)
CANARY_SECONDS, OPS_SECONDS, COMPILE_SECONDS = 60, 120, 240  # limits of the parts; untuned
FOUND = 86  # exit status of a run with findings: no number Python or CuPy exits with
MOST_SHOWN = 10  # findings printed of one run; the logs hold all of them


@dataclass(frozen=True)
class Tool:
    """A tool, the planted fault it must find, and what it calls such a fault."""

    name: str
    canary: str
    kind: str
    options: tuple = ()


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "memcheck",
            "write_past_the_end",
            "Invalid __global__ write",
            # The padding is more than a row of any array, so a row too many is seen. Failed calls of
            # the driver raise in Python already; probing for functions that a driver lacks does not.
            ("--padding", "4096", "--report-api-errors", "no"),
        ),
        Tool("racecheck", "race_in_shared_memory", "Race reported"),
        Tool("initcheck", "read_before_write", "Uninitialized __global__ memory read"),
        Tool("synccheck", "barrier_of_a_few", "Barrier error detected"),
    )
}


@dataclass(frozen=True)
class Ran:
    """A finished process: what it printed, its exit status (None: over its limit), seconds."""

    output: str
    status: int | None
    seconds: float


def run(command, limit):
    """Run a command and all it starts for at most `limit` seconds."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, status = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = process.communicate()[0], None
    return Ran(output, status, time.monotonic() - start)


def find_sanitizer():
    """Path of compute-sanitizer, None where it is not installed."""
    found = shutil.which("compute-sanitizer")
    for folder, pattern in () if found else PLACES:
        files = (path for path in sorted(Path(folder).glob(pattern)) if path.is_file())
        found = next((str(path) for path in files if os.access(path, os.X_OK)), found)
    return found


def calls(*arguments):
    return [sys.executable, "-m", "tests.sanitize.calls", *arguments]


def watched(sanitizer, tool, command):
    """The command under a tool. Host backtraces would be Python's own frames, and are slow."""
    options = ["--tool", tool.name, "--target-processes", "all", "--show-backtrace", "no"]
    return [sanitizer, *options, "--error-exitcode", str(FOUND), *tool.options, *command]


def check(sanitizer, tool, names, expected, logs):
    """One row of the table for a tool: its name, what came of its canary and of the ops, seconds."""

    def part(name, command, limit):
        ran = run(watched(sanitizer, tool, command), limit)
        if logs:
            (logs / f"{tool.name}-{name}.log").write_text(ran.output)
        return ran

    planted = part("canary", calls("canary", tool.canary), CANARY_SECONDS)
    if not caught(planted.output, tool.kind, tool.canary):
        print(f"\n{tool.name} did not find {tool.canary}:\n{planted.output}", flush=True)
        return tool.name, "missed", "not run", planted.seconds
    over_ops = part("ops", calls("ops", *names), OPS_SECONDS)
    why = faults(over_ops.output, over_ops.status, expected)
    if why:
        show(tool, over_ops, why)
    seconds = planted.seconds + over_ops.seconds
    return tool.name, "caught", "; ".join(why) or f"clean, {expected} calls", seconds


def show(tool, ran, why):
    """Print what is wrong with a run: the findings, or how it ended when there are none."""
    print(f"\n{tool.name}: {'; '.join(why)}")
    findings = read(ran.output).findings
    for finding in findings[:MOST_SHOWN]:
        print(finding)
    if not findings:
        print(*ran.output.splitlines()[-30:], sep="\n")
    sys.stdout.flush()


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this tool; repeatable")
    parser.add_argument("--op", action="append", choices=OPS, help="only this op; repeatable")
    parser.add_argument("--logs", type=Path, help="a folder for everything the tools print")
    given = parser.parse_args(arguments)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer not found; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    if given.logs:
        given.logs.mkdir(parents=True, exist_ok=True)
    names = given.op or []
    # Without a tool first: it fills the disk cache, so no tool waits for a compiler, and says how
    # many calls there are.
    plain = run(calls("ops", *names), COMPILE_SECONDS)
    expected = calls_made(plain.output)
    if plain.status != 0 or not expected:
        print(plain.output)
        print(f"the ops do not run without a tool: exit status {plain.status}", file=sys.stderr)
        return 1
    tools = [TOOLS[name] for name in dict.fromkeys(given.tool or TOOLS)]
    rows = [check(sanitizer, tool, names, expected, given.logs) for tool in tools]
    rows.insert(0, ("none", "-", f"ran, {expected} calls", plain.seconds))
    print(f"\n{'tool':<10} {'canary':<7} {'seconds':>7}  ops")
    for name, canary, result, seconds in rows:
        print(f"{name:<10} {canary:<7} {seconds:7.1f}  {result}")
    clean = f"clean, {expected} calls"
    return 0 if all(row[1:3] == ("caught", clean) for row in rows[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
