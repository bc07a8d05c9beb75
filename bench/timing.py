"""Time several arms in turn in one process, say what machine it was, and report."""

import importlib.metadata
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Sample:
    """The times of one arm, in seconds a call, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self):
        return float(np.median(self.seconds))

    @property
    def minimum(self):
        return float(np.min(self.seconds))

    @property
    def interquartile_range(self):
        """The width of the middle half, quartiles interpolated linearly."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(high - low)

    def per(self, count):
        """The same times a unit, for an arm that does `count` units a call."""
        return Sample(tuple(s / count for s in self.seconds))


def interleaved(arms, rounds=20, warmup=3, clock="wall", repeats=1, before=None):
    """Time the arms round-robin, so that drifting clocks and neighbours touch all of them alike.

    Every other round goes backwards, so no arm always follows the same one.

    Args:
        arms: name -> callable without arguments.
        rounds: samples an arm.
        warmup: rounds run first in the same way and not recorded.
        clock: "wall" times a blocking callable on the host. "events" times what a callable queues
            on the current CUDA stream; see `event_clock`. Or a function that is given a callable,
            runs it and returns its seconds; or a dict of clocks by arm, where one arm queues
            through CuPy and another through torch.
        repeats: calls a sample, which is then their mean. It spreads the cost of reading the clock
            over short work; from the second call on the work finds its data in the cache.
        before: called before every sample and not timed, to empty a cache, say.

    Returns:
        name -> `Sample`, in seconds a call.

    Raises:
        ValueError: no arms, no rounds, a negative warm-up, no repeats, or an unknown clock.
    """
    if not arms:
        raise ValueError("arms must name at least one callable, got none")
    for name, value, least in (
        ("rounds", rounds, 1),
        ("warmup", warmup, 0),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    clocks = clock if isinstance(clock, dict) else dict.fromkeys(arms, clock)
    if missing := [name for name in arms if name not in clocks]:
        raise ValueError(f"clock must name every arm, {missing} are missing")
    made = {c: _clock(c) for c in {clocks[name] for name in arms}}

    def repeated(arm):
        def calls():
            for _ in range(repeats):
                arm()

        return calls if repeats > 1 else arm

    timed = [(name, made[clocks[name]], repeated(arm)) for name, arm in arms.items()]
    seconds = {name: [] for name in arms}
    for turn in range(warmup + rounds):
        for name, measure, arm in timed if turn % 2 == 0 else reversed(timed):
            if before is not None:
                before()
            taken = measure(arm) / repeats
            if turn >= warmup:
                seconds[name].append(taken)
    return {name: Sample(tuple(taken)) for name, taken in seconds.items()}


def wall_clock(now=time.perf_counter):
    """A clock that reads `now`, in seconds, around a blocking callable."""

    def measure(arm):
        start = now()
        arm()
        return now() - start

    return measure


def event_clock(library):
    """A clock of two CUDA events on the current stream of `library`, "cupy" or "torch".

    It waits for the second event, so an arm's work is over before the next begins. An arm must
    queue on that stream: both libraries start on the device's default stream, XLA has its own. The
    time runs from the first event being reached, so it holds the host's delays in queuing the rest.

    Raises:
        ValueError: another library.
        RuntimeError: the library finds no CUDA device.
    """
    if library == "torch":
        return _torch_event_clock()
    if library == "cupy":
        return _cupy_event_clock()
    raise ValueError(f"library must be 'cupy' or 'torch', got {library!r}")


def _clock(clock):
    """The function behind a clock's name."""
    if callable(clock):
        return clock
    if clock == "wall":
        return wall_clock()
    if clock == "events":
        # The library that the arms already use; with both there, either sees the default stream.
        return event_clock("cupy" if "cupy" in sys.modules else "torch")
    raise ValueError(f"clock must be 'wall', 'events', a function or a dict, got {clock!r}")


def _torch_event_clock():
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; use clock='wall'")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure(arm):
        start.record()
        arm()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    return measure


def _cupy_event_clock():
    import cupy

    if not cupy.cuda.is_available():
        raise RuntimeError("cupy finds no CUDA device; use clock='wall'")
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def measure(arm):
        start.record()
        arm()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) * 1e-3

    return measure


def device_facts():
    """What the figures were taken on; a fact that cannot be had is None.

    Returns:
        `gpu` name, `compute_capability` as "9.0", `driver`, `cuda_driver` and `cuda_runtime` as
        "13.0", `sm_count`, clocks in MHz as they stand (`sm_clock_mhz`, `memory_clock_mhz`) and at
        most (`..._max_mhz`), `power_limit_watts`, `temperature_celsius`, the Python version, and
        `versions` of the libraries.
    """
    libraries = ("numpy", "cupy", "torch", "jax", "numba")
    return {
        **_runtime_facts(),
        **_nvml_facts(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in libraries},
    }


def _or_none(read):
    """What `read` returns, or None. Drivers and libraries fail in more ways than can be listed."""
    try:
        return read()
    except Exception:
        return None


def _version(library):
    """An installed version, without importing the library; CuPy's wheels carry the CUDA version."""
    for name in (library, f"{library}-cuda13x", f"{library}-cuda12x"):
        if (version := _or_none(lambda name=name: importlib.metadata.version(name))) is not None:
            return version
    return None


def _dotted(version):
    """CUDA's 13000 as "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _runtime_facts():
    """What the CUDA runtime knows, by CuPy, else by torch."""
    cupy = _or_none(lambda: __import__("cupy"))
    if cupy is not None and _or_none(cupy.cuda.is_available):
        properties = _or_none(lambda: cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id))
        return {
            "gpu": _or_none(lambda: properties["name"].decode()),
            "compute_capability": _or_none(lambda: f"{properties['major']}.{properties['minor']}"),
            "sm_count": _or_none(lambda: properties["multiProcessorCount"]),
            "cuda_runtime": _or_none(lambda: _dotted(cupy.cuda.runtime.runtimeGetVersion())),
        }
    torch = _or_none(lambda: __import__("torch"))
    properties = _or_none(lambda: torch.cuda.get_device_properties(torch.cuda.current_device()))
    return {
        "gpu": _or_none(lambda: properties.name),
        "compute_capability": _or_none(lambda: f"{properties.major}.{properties.minor}"),
        "sm_count": _or_none(lambda: properties.multi_processor_count),
        "cuda_runtime": _or_none(lambda: torch.version.cuda),
    }


def _nvml_facts():
    """What NVML knows about the device in use."""
    nvml = _or_none(lambda: __import__("pynvml"))
    _or_none(lambda: nvml.nvmlInit())
    handle = _or_none(lambda: _nvml_handle(nvml))

    def clock(read, kind):
        return _or_none(lambda: getattr(nvml, read)(handle, getattr(nvml, kind)))

    return {
        "driver": _or_none(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        "cuda_driver": _or_none(lambda: _dotted(nvml.nvmlSystemGetCudaDriverVersion())),
        "sm_clock_mhz": clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
        "sm_clock_max_mhz": clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
        "memory_clock_mhz": clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
        "memory_clock_max_mhz": clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
        "power_limit_watts": _or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "temperature_celsius": _or_none(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
    }


def _nvml_handle(nvml):
    """NVML's handle of the current device: it numbers devices its own way, the bus does not."""
    cupy = _or_none(lambda: __import__("cupy"))
    bus = _or_none(lambda: cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id))
    if bus is not None:
        return nvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
    return nvml.nvmlDeviceGetHandleByIndex(0)


def _text(value):
    """NVML's strings are bytes in some versions."""
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True)
class Row:
    """One line of the comparison: the same work done by us and by the peer.

    Attributes:
        what: the work, with its sizes.
        ours, peer: seconds a call; None where a side was not run.
        floor_seconds: the least the machine allows a call to take.
        bar_ratio: times faster than the peer we want to be, or
        bar_seconds: seconds a call we want to stay under; give one of the two, or none.
        items, unit: what a call gets through, such as 1048576 "env-steps", to print rates in
            place of times.
        note: anything a reader must know, such as which peer, or that the cache was cold.
    """

    what: str
    ours: Sample | None = None
    peer: Sample | None = None
    floor_seconds: float | None = None
    bar_ratio: float | None = None
    bar_seconds: float | None = None
    items: float | None = None
    unit: str = ""
    note: str = ""

    def __post_init__(self):
        if self.bar_ratio is not None and self.bar_seconds is not None:
            raise ValueError("give bar_ratio or bar_seconds, got both")

    @property
    def ratio(self):
        """Times faster than the peer, by medians."""
        if self.ours is None or self.peer is None:
            return None
        return self.peer.median / self.ours.median

    @property
    def passed(self):
        """Whether the bar is met; None where it cannot be told."""
        if self.bar_seconds is not None and self.ours is not None:
            return self.ours.median <= self.bar_seconds
        if self.bar_ratio is not None and self.ratio is not None:
            return self.ratio >= self.bar_ratio
        return None


def report(rows, console=None):
    """Print the rows as a table of medians: what, ours, peer, ratio, bar and floor."""
    table = Table("what")
    for heading in ("ours", "peer", "ratio", "bar", "floor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        colour = {True: "green", False: "red", None: ""}[row.passed]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
        bar = "-" if row.bar_ratio is None else f"{row.bar_ratio:g}x"
        if row.bar_seconds is not None:
            bar = _shown(row.bar_seconds, row)
        table.add_row(
            escape(f"{row.what}\n  {row.note}" if row.note else row.what),
            _shown(row.ours and row.ours.median, row),
            _shown(row.peer and row.peer.median, row),
            f"[{colour}]{ratio}[/]" if colour else ratio,
            f"[{colour}]{bar}[/]" if colour else bar,
            _shown(row.floor_seconds, row),
        )
    (console or Console(width=None if sys.stdout.isatty() else 140)).print(table)


def _shown(seconds, row):
    """A time, or the rate of a row that counts items."""
    if seconds is None:
        return "-"
    if row.items:
        return f"{_scaled(row.items / seconds)}{row.unit}/s"
    return f"{_scaled(seconds)}s"


def _scaled(value):
    """Four digits and an SI prefix: 0.0000142 as "14.2 µ"."""
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"))
    for scale, prefix in (*prefixes, (1e-9, "n")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {prefix}"
    return f"{value:.4g} "


def save(path, rows, facts):
    """Write facts and rows, every sample included, as JSON."""
    save_document(path, {"facts": facts, "rows": [_plain(row) for row in rows]})


def save_document(path, content):
    """Write a document as JSON; the file appears whole or not at all."""
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _plain(row):
    """A row as JSON takes it, with its statistics."""
    sides = {"ours": row.ours, "peer": row.peer}
    return {
        **asdict(row),
        **{side: sample and _statistics(sample) for side, sample in sides.items()},
        "ratio": row.ratio,
        "passed": row.passed,
    }


def _statistics(sample):
    """A sample with its median, minimum and interquartile range, all in seconds."""
    return {
        "median": sample.median,
        "minimum": sample.minimum,
        "interquartile_range": sample.interquartile_range,
        "seconds": list(sample.seconds),
    }
