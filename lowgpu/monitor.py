"""What the GPU does while it trains, by NVML; and named ranges for a timeline, by NVTX.

Both inform and nothing depends on them: without their packages there is no figure and no range.
"""

import contextlib
import functools
import threading
import time
from dataclasses import dataclass
from uuid import UUID

from lowgpu.hardware import MIG

HERTZ = 5.0  # NVML's utilization is itself a mean over 1/6 s to 1 s, by device
BUSY = 80  # percent of utilization; time under it is counted
LEAVE_SECONDS = 2.0  # that the end of training waits for a driver that does not answer


@dataclass(frozen=True)
class Sample:
    """The GPU at one moment; a figure that the device does not give is None.

    Attributes:
        utilization: percent of the recent past in which a kernel ran, 0 to 100; NVML gives none of
            a MIG slice.
        memory_nbytes: device memory in use, by every process; of a slice its own.
        power_watts: drawn by the board.
        sm_clock_mhz, memory_clock_mhz: clocks as they stand.
    """

    utilization: int | None = None
    memory_nbytes: int | None = None
    power_watts: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None

    def __str__(self):
        parts = (
            f"{self.utilization} %" if self.utilization is not None else "",
            f"{self.power_watts:.0f} W" if self.power_watts is not None else "",
            f"{self.sm_clock_mhz} MHz" if self.sm_clock_mhz is not None else "",
        )
        return " ".join(filter(None, parts)) or "-"


@dataclass(frozen=True)
class Summary:
    """A stretch of time; figures are None where no sample had them.

    Attributes:
        samples, seconds: how many, over how long.
        utilization: mean, in percent.
        utilization_low: the 5th percentile: 95 % of the samples are at it or above.
        utilization_least: the least.
        share_under_80: share of the samples with a utilization under 80 %, in [0, 1].
        memory_nbytes: the most.
        power_watts, sm_clock_mhz, memory_clock_mhz: means.
    """

    samples: int
    seconds: float
    utilization: float | None
    utilization_low: int | None
    utilization_least: int | None
    share_under_80: float | None
    memory_nbytes: int | None
    power_watts: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None

    def __str__(self):
        if self.utilization is None:
            return f"GPU utilization is not given by this device ({self.samples} samples)"
        parts = (
            f"GPU busy {self.utilization:.1f} % on average",
            f"{self.utilization_low} % at the 5th percentile",
            f"under {BUSY} % for {self.share_under_80:.1%} of {self.seconds:.0f} s",
            f"{self.power_watts:.0f} W" if self.power_watts is not None else "",
            f"{self.sm_clock_mhz:.0f} MHz" if self.sm_clock_mhz is not None else "",
        )
        return ", ".join(filter(None, parts))


class Tally:
    """Samples added up in memory that does not grow, however long a run is."""

    def __init__(self):
        self.samples, self.first, self.last = 0, None, None
        self.utilization = [0] * 101  # how many samples had each percentage
        self.memory_nbytes = None
        self.sums = dict.fromkeys(("power_watts", "sm_clock_mhz", "memory_clock_mhz"), (0, 0))

    def add(self, sample, now):
        """Take in a Sample taken at `now`, in seconds."""
        self.samples += 1
        self.first, self.last = now if self.first is None else self.first, now
        if sample.utilization is not None:
            self.utilization[min(max(sample.utilization, 0), 100)] += 1
        if sample.memory_nbytes is not None:
            self.memory_nbytes = max(self.memory_nbytes or 0, sample.memory_nbytes)
        for name, (count, total) in self.sums.items():
            value = getattr(sample, name)
            if value is not None:
                self.sums[name] = count + 1, total + value

    def summary(self):
        """The Summary, None before the first sample."""
        if not self.samples:
            return None
        counts = self.utilization
        known = sum(counts)
        means = {
            name: total / count if count else None for name, (count, total) in self.sums.items()
        }
        return Summary(
            samples=self.samples,
            seconds=self.last - self.first,
            utilization=sum(p * n for p, n in enumerate(counts)) / known if known else None,
            utilization_low=self._rank(-(-known // 20)) if known else None,
            utilization_least=self._rank(1) if known else None,
            share_under_80=sum(counts[:BUSY]) / known if known else None,
            memory_nbytes=self.memory_nbytes,
            **means,
        )

    def _rank(self, rank):
        """The utilization of the sample that is `rank`-th from below, counted from 1."""
        for percent, count in enumerate(self.utilization):
            rank -= count
            if rank <= 0:
                return percent
        raise AssertionError("fewer samples than the rank")


class Monitor:
    """Watches a GPU from a thread of its own while a `with` block runs.

    The thread sleeps between samples and shares nothing with training but a reference to the latest
    Sample. It ends with the block, however that ends.

    Args:
        uuid: of the GPU, as `current_uuid` gives it; None watches nothing.
        hertz: samples a second.
        nvml: the NVML module; `pynvml` of the package nvidia-ml-py when not given.

    Attributes:
        latest: the latest Sample; None before the first, and where nothing is watched.
        reason: why nothing is watched, for people; None where something is.

    Raises:
        ValueError: hertz is not above 0.
    """

    def __init__(self, uuid, hertz=HERTZ, nvml=None):
        if not hertz > 0:
            raise ValueError(f"hertz must be above 0, got {hertz!r}")
        self.uuid, self.period = uuid, 1 / hertz
        self.latest, self.reason = None, "no GPU is used" if uuid is None else None
        self._nvml, self._thread, self._end = nvml, None, threading.Event()
        self._tally = Tally()

    def __enter__(self):
        found = None if self.uuid is None else self._opened()
        if found is not None:
            self._thread = threading.Thread(
                target=self._watch, args=found, name="lowgpu monitor", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error):
        self._end.set()
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)

    def _opened(self):
        """NVML's handles of the GPU and its board; None, and a reason, where they cannot be had."""
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
            return None
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.reason = f"NVML does not start: {error}"
            return None
        try:
            return handles(self.uuid, nvml)
        except nvml.NVMLError as error:
            nvml.nvmlShutdown()
            self.reason = f"NVML does not know {self.uuid}: {error}"
            return None

    def _watch(self, handle, board):
        try:
            while not self._end.is_set():
                sample = _sample(self._nvml, handle, board)
                self._tally.add(sample, time.monotonic())
                self.latest = sample
                self._end.wait(self.period)
        finally:
            self._nvml.nvmlShutdown()

    def restart(self):
        """Forget the samples so far: what follows is what the summary is of."""
        self._tally = Tally()

    def summary(self):
        """The Summary of the samples since the start or `restart`; None where there are none."""
        return self._tally.summary()


def _sample(nvml, handle, board):
    def read(function, *arguments):
        # A device that does not measure something says so at every call, and a driver that is
        # being reset fails for a while: neither is a reason to end the training.
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError:
            return None

    rates = read("nvmlDeviceGetUtilizationRates", handle)
    memory = read("nvmlDeviceGetMemoryInfo", handle)
    milliwatts = read("nvmlDeviceGetPowerUsage", board)
    return Sample(
        utilization=None if rates is None else int(rates.gpu),
        memory_nbytes=None if memory is None else int(memory.used),
        power_watts=None if milliwatts is None else milliwatts / 1000,
        sm_clock_mhz=read("nvmlDeviceGetClockInfo", board, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=read("nvmlDeviceGetClockInfo", board, nvml.NVML_CLOCK_MEM),
    )


def handles(uuid, nvml):
    """NVML's handles of a GPU and of the board that it is, or is a slice of.

    Args:
        uuid: "GPU-..." or "MIG-...", as `current_uuid` gives it.
        nvml: the NVML module, started.

    Raises:
        NVMLError: it does not know the GPU.
    """
    if not uuid.startswith("MIG-"):
        return (nvml.nvmlDeviceGetHandleByUUID(uuid),) * 2
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        # Some versions of CUDA give a slice the UUID of its board.
        return (nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid[4:]}"),) * 2
    return handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)


def current_uuid():
    """The UUID of the current CUDA device, or of the slice that it is, as NVML spells it.

    NVML numbers all devices of the machine in its own order; CUDA numbers those that
    CUDA_VISIBLE_DEVICES names. A UUID means the same device to both.

    Raises:
        RuntimeError: the driver does not say.
    """
    # Not by cuda.core, which asks the same: importing it takes 0.1 s of every start (measured).
    from cuda.bindings import driver
    from cupy.cuda import runtime

    # CUDA 12's bindings name the question that a slice answers for itself apart from the older one.
    ask = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    index, error = runtime.getDevice(), driver.cuInit(0)[0]
    if not error:
        error, device = driver.cuDeviceGet(index)
    if not error:
        error, found = ask(device)
    if error:
        raise RuntimeError(f"the driver does not give the GPU's UUID: {error}")
    name = runtime.getDeviceProperties(index)["name"].decode()
    return f"{'MIG' if MIG in name else 'GPU'}-{UUID(bytes=found.bytes)}"


@functools.cache
def _annotate():
    """The NVTX package's context manager, None where it is not installed."""
    try:
        from nvtx import annotate
    except ImportError:
        return None
    return annotate


_NO_RANGE = contextlib.nullcontext()


def stage(name):
    """A context that is a range named `name` in a profiler's timeline; nothing without NVTX."""
    annotate = _annotate()
    return _NO_RANGE if annotate is None else annotate(name, domain="lowgpu")


def in_stage(op, *arrays, **keywords):
    """Call an op in a stage of its name."""
    with stage(str(op)):
        return op(*arrays, **keywords)
