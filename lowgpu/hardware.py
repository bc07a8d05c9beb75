"""What the machine is, read from the CUDA runtime; NVML is not needed."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

OLDEST = (8, 0)  # compute capability that the kernels are written for
MIG = " MIG "  # in the name of a slice, as in "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


class DeviceError(ValueError):
    """A device that was asked for and cannot be used: one sentence with the reason."""


@dataclass(frozen=True)
class Hardware:
    """The device that is used, and why.

    Attributes:
        kind: "cpu" or "cuda".
        name: the processor's or the GPU's.
        reason: why this one, for people.
        free_nbytes, total_nbytes: memory in bytes; None where the system does not say.
        cores: CPU cores that this process may use.
        capability, sms: of the GPU; None on a CPU.
    """

    kind: str
    name: str
    reason: str
    free_nbytes: int | None
    total_nbytes: int | None
    cores: int
    capability: tuple | None = None
    sms: int | None = None


def choose(asked="auto"):
    """The device to use.

    Args:
        asked: "cpu"; "cuda", which is an error where no GPU can be used; "auto", the GPU where one
            can be used and the CPU otherwise.

    Returns:
        The Hardware, with the reason.

    Raises:
        DeviceError: "cuda" without a GPU that can be used; another word.
    """
    if asked == "cpu":
        return _cpu("asked for")
    if asked not in ("auto", "cuda"):
        raise DeviceError(f"device must be auto, cpu or cuda, got {asked!r}")
    why_not = gpu_unusable()
    if why_not is None:
        return _gpu("asked for" if asked == "cuda" else "a GPU can be used")
    if asked == "cuda":
        raise DeviceError(f"device cuda was asked for and cannot be used: {why_not}")
    return _cpu(why_not)


def gpu_unusable():
    """Why no GPU can be used, in words; None where one can. Makes no CUDA context."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        missing = getattr(error, "name", None) in ("cupy", "cupy_backends")
        return "CuPy is not installed" if missing else f"CuPy cannot be imported ({error})"
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"the CUDA runtime finds no GPU ({error}){_left_visible()}"
    if count == 0:
        return f"the CUDA runtime finds no GPU{_left_visible()}"
    old = too_old(runtime.getDeviceProperties(runtime.getDevice()))
    if old:
        return old
    missing = [name for name in ("cuda-core", "numba-cuda") if installed(name) is None]
    if missing:
        return (
            f"kernels cannot be compiled without {' and '.join(missing)}; "
            "install lowgpu[cuda12] or lowgpu[cuda13]"
        )
    return None


def too_old(facts):
    """Why kernels cannot run on a GPU with these properties; None where they can."""
    capability = facts["major"], facts["minor"]
    if capability >= OLDEST:
        return None
    return (
        f"{facts['name'].decode()} has compute capability {capability[0]}.{capability[1]}, "
        f"and {OLDEST[0]}.{OLDEST[1]} is needed"
    )


def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _left_visible():
    return "" if visible() is None else f"; CUDA_VISIBLE_DEVICES is {visible()!r}"


def _gpu(reason):
    from cupy.cuda import runtime

    facts = runtime.getDeviceProperties(runtime.getDevice())
    # The runtime's own figures of the current device: NVML counts devices in another order.
    free, total = runtime.memGetInfo()
    return Hardware(
        kind="cuda",
        name=facts["name"].decode(),
        reason=reason,
        free_nbytes=free,
        total_nbytes=total,
        cores=_cores(),
        capability=(facts["major"], facts["minor"]),
        sms=facts["multiProcessorCount"],
    )


def _cpu(reason):
    free, total = _memory()
    return Hardware("cpu", _processor(), reason, free, total, _cores())


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor():
    try:
        with open("/proc/cpuinfo") as file:
            names = [line for line in file if line.startswith("model name")]
        return names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def _memory():
    """Available and total memory of the machine in bytes, None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
        return tuple(int(facts[k].split()[0]) * 1024 for k in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return None, None


def installed(name):
    for distribution in (name, f"{name}-cuda13x", f"{name}-cuda12x"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
