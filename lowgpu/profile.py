"""Where the time of an iteration goes: every op of it timed on its own, and the whole beside them."""

import statistics
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from lowgpu.monitor import in_stage
from lowgpu_kernels import launch
from lowgpu_kernels.dims import REAL, B, Dim, E, N, R, T

ROUNDS = 10

# Floating-point operations an SM does in a clock, float32 and bfloat16 with float32 sums, by
# compute capability. Source: CUDA C++ Programming Guide, throughput of arithmetic instructions, and
# the parts' architecture papers for tensor cores.
FLOPS_A_CLOCK = {
    (8, 0): {"float32": 128, "bfloat16": 2048},
    (8, 6): {"float32": 256, "bfloat16": 512},
    (8, 9): {"float32": 256, "bfloat16": 1024},
    (9, 0): {"float32": 256, "bfloat16": 4096},
}


@dataclass(frozen=True)
class Peak:
    """What a device can do at most: bytes a second, and operations a second by element type."""

    bytes_per_second: float
    flops_per_second: dict

    def least_seconds(self, flops, nbytes, real):
        """The time that a call cannot beat; None where neither figure is known."""
        times = [nbytes / self.bytes_per_second] if self.bytes_per_second else []
        if flops is not None and self.flops_per_second.get(real):
            times.append(flops / self.flops_per_second[real])
        return max(times, default=None)


NO_PEAK = Peak(0.0, {})


@dataclass(frozen=True)
class Line:
    """One op of an iteration, all its calls together.

    Attributes:
        op: its name.
        calls: in an iteration.
        launches: of kernels; None on a CPU.
        seconds: of device time an iteration, median over rounds.
        share: of the time of all ops.
        flops: floating-point operations, None where the op declares none.
        nbytes: that must be moved: inputs and outputs once, what is changed in place twice.
        tflop_per_second, gb_per_second: what follows.
        share_of_peak: the least time that the device's peak allows, over the time. Above 1, data
            stayed in the cache. None where the peak is not known.
    """

    op: str
    calls: int
    launches: int | None
    seconds: float
    share: float
    flops: int | None
    nbytes: int
    tflop_per_second: float | None
    gb_per_second: float
    share_of_peak: float | None


@dataclass(frozen=True)
class Profile:
    """A stage report of one iteration.

    Attributes:
        device: its name.
        kind: "cpu" or "cuda".
        rounds: iterations measured.
        lines: a Line for each op, the slowest first.
        ops_seconds: of all ops one by one.
        iteration_seconds: of an iteration as training does it, median: on a GPU one graph.
        env_steps: of an iteration.
    """

    device: str
    kind: str
    rounds: int
    lines: tuple
    ops_seconds: float
    iteration_seconds: float
    env_steps: int

    def to_dict(self):
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """What one call of an op is: kernels launched, operations, bytes, and its element type."""

    launches: int | None
    flops: int | None
    nbytes: int
    real: str


def measure(trainer, hardware, rounds=ROUNDS):
    """Time every op of a trainer's iteration.

    The trainer learns from every round, so take one that is not needed afterwards. Ops are whatever
    it calls, in its order.

    Args:
        trainer: a Trainer, or another with its `walk`, `advance`, `drain`, `queue`, `skip_warm_up` and
            `config.iteration_steps`.
        hardware: the Hardware that it is on.
        rounds: iterations to take the median of, 1 or more.

    Returns:
        The Profile.

    Raises:
        ValueError: rounds below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    trainer.skip_warm_up()
    on_gpu, calls = hardware.kind == "cuda", []
    # The first iteration compiles; the work of each call is the same in every iteration.
    trainer.walk(lambda op, *arrays, **given: calls.append((op, _made(op, arrays, given, on_gpu))))
    taken = [[] for _ in calls]
    for _ in range(rounds):
        places = iter(taken)

        def timed(op, *arrays, places=places, **given):
            seconds = trainer.queue.seconds(lambda: in_stage(op, *arrays, **given))
            next(places).append(seconds)

        trainer.walk(timed)
    whole = _whole(trainer, rounds)
    lines = _lines(calls, taken, peak_of(hardware))
    return Profile(
        device=hardware.name,
        kind=hardware.kind,
        rounds=rounds,
        lines=lines,
        ops_seconds=sum(line.seconds for line in lines),
        iteration_seconds=whole,
        env_steps=trainer.config.iteration_steps,
    )


def _made(op, arrays, given, on_gpu):
    """Make a call, and say what it was."""
    launches = None
    if on_gpu:
        with launch.recording(launch.device()) as made:
            op(*arrays, **given)
        launches = len(made)
    op(*arrays, **given)
    return work_of(op, arrays, given, launches)


def work_of(op, arrays, given, launches=None):
    """The Work of one call, from what the op declares.

    Args:
        op: an op.
        arrays: its positional arguments.
        given: its keyword arguments, with `out`, which holds every output, and perhaps `scratch`.
        launches: kernels it launches, where that is known.
    """
    out = given.get("out")
    out = out if isinstance(out, tuple) else (out,)
    own = {name: value for name, value in given.items() if name in op.signature.parameters}
    bound = op.signature.bind_partial(*arrays, **own).arguments
    params = op.checked_params(bound)
    there = {n: bound.get(n) for n in op.inputs} | dict(zip(op.outputs, out))
    there = {name: array for name, array in there.items() if array is not None}
    sizes, real = {}, params.get("precision")
    for name, array in there.items():
        spec = op.inputs.get(name) or op.outputs[name]
        sizes |= {dim: size for dim, size in zip(spec.shape, array.shape) if isinstance(dim, Dim)}
        if real is None and spec.dtypes == REAL.dtypes:
            real = np.dtype(array.dtype).name
    sizes = op.sizes_of(sizes, params)
    flops = op.flops and int(op.flops(**{dim.name: size for dim, size in sizes.items()}))
    return Work(launches, flops, nbytes_of(op, there, sizes), real or "float32")


def nbytes_of(op, arrays, sizes):
    """Bytes a call must move: inputs and outputs once, what is changed in place twice.

    Of rows that are picked out of N transitions or of a table, only as many as are worked on.

    Args:
        op: an op.
        arrays: inputs and outputs by name.
        sizes: {Dim: size}.
    """
    worked_on = sizes.get(B, sizes.get(N, sizes.get(T, 1) * sizes.get(E, 1)))
    picked = {d for d in (N, R) if d in sizes and not (d is N and B not in sizes)}
    total = 0
    for name, array in arrays.items():
        spec = op.inputs.get(name) or op.outputs[name]
        rows = next((n for d, n in zip(spec.shape, array.shape) if d in picked), 0)
        part = min(worked_on, rows) / rows if rows else 1
        total += int(array.nbytes * part) * (2 if name in op.changes else 1)
    return total


def _whole(trainer, rounds):
    """Seconds of an iteration as training does it: the median, queued one after the other."""
    trainer.advance()
    trainer.drain()
    seconds = [trainer.queue.seconds(trainer.advance) for _ in range(rounds)]
    trainer.drain()
    return statistics.median(seconds)


def _lines(calls, taken, peak):
    """A Line for each op, from the Work and the seconds of each call."""
    by_op = {}
    for (op, work), seconds in zip(calls, taken):
        by_op.setdefault(str(op), []).append((work, seconds))
    medians = {
        name: statistics.median(map(sum, zip(*(seconds for _, seconds in made))))
        for name, made in by_op.items()
    }
    total = sum(medians.values())
    lines = [
        _line(name, [work for work, _ in made], medians[name], total, peak)
        for name, made in by_op.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.seconds))


def _line(name, works, seconds, total, peak):
    known = works[0].flops is not None
    flops = sum(work.flops for work in works) if known else None
    nbytes = sum(work.nbytes for work in works)
    launches = None if works[0].launches is None else sum(work.launches for work in works)
    least = [peak.least_seconds(work.flops, work.nbytes, work.real) for work in works]
    return Line(
        op=name,
        calls=len(works),
        launches=launches,
        seconds=seconds,
        share=seconds / total,
        flops=flops,
        nbytes=nbytes,
        tflop_per_second=flops / seconds / 1e12 if known else None,
        gb_per_second=nbytes / seconds / 1e9,
        share_of_peak=None if None in least else sum(least) / seconds,
    )


def peak_of(hardware):
    """The Peak of the GPU in use, from its clocks and its memory's; NO_PEAK on a CPU.

    flops = SMs * clock * operations an SM does in a clock; bytes = memory clock * 2 transfers *
    bus width. The clocks are the most that the device runs at.
    """
    if hardware.kind != "cuda":
        return NO_PEAK
    from cupy.cuda import runtime

    def attribute(name):
        return runtime.deviceGetAttribute(getattr(runtime, name), runtime.getDevice())

    # Both clocks are in kHz.
    clocks = hardware.sms * attribute("cudaDevAttrClockRate") * 1e3
    transfers = 2e3 * attribute("cudaDevAttrMemoryClockRate")
    a_clock = FLOPS_A_CLOCK.get(tuple(hardware.capability), {})
    return Peak(
        bytes_per_second=transfers * attribute("cudaDevAttrGlobalMemoryBusWidth") / 8,
        flops_per_second={real: count * clocks for real, count in a_clock.items()},
    )


def show(profile, console=None):
    """Print a Profile as a table."""
    table = Table("op")
    headings = "calls", "launches", "time", "share", "GFLOP", "MB", "TFLOP/s", "GB/s", "of peak"
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in profile.lines:
        table.add_row(
            line.op,
            str(line.calls),
            "-" if line.launches is None else str(line.launches),
            _milliseconds(line.seconds),
            f"{line.share:.1%}",
            _number(line.flops, 1e9),
            _number(line.nbytes, 1e6),
            _number(line.tflop_per_second),
            _number(line.gb_per_second),
            "-" if line.share_of_peak is None else f"{line.share_of_peak:.1%}",
        )
    console = console or Console(width=None if Console().is_terminal else 120)
    console.print(table)
    way = "as one graph" if profile.kind == "cuda" else "as training does it"
    console.print(
        f"{profile.device}: ops one by one {_milliseconds(profile.ops_seconds)}, the iteration "
        f"{way} {_milliseconds(profile.iteration_seconds)}: "
        f"{profile.env_steps / profile.iteration_seconds:,.0f} env steps/s "
        f"(medians of {profile.rounds})",
        highlight=False,
        soft_wrap=True,
    )


def _milliseconds(seconds):
    return f"{seconds * 1e3:.4g} ms"


def _number(value, unit=1.0):
    return "-" if value is None else f"{value / unit:.4g}"
