"""Every op at the sizes it declares: time, GB/s, TFLOP/s, and the share of what the device allows.

    python -m pytest bench -q --benchmark-only --sizes declared --benchmark-json ops.json

Each call reads what the call before it read, so arrays that fit the cache are found there. On a GPU
the calls are recorded in a CUDA graph and replayed: the times hold no Python.
"""

import inspect
import time

import numpy as np
import pytest

from bench.timing import device_facts
from lowgpu_kernels.dims import REAL, B, Choice, E, Float, Int, N, R, Static, T
from tests.harness import arrays_for, dims_of, every_op, kinds_of_real

# Calls in one graph; reading the clock and launching the graph cost as much as a small kernel.
CALLS = 10
SMALL = 512  # what every number of a declared size is cut to by --sizes small
COPY_NBYTES = {"cpu": 1 << 27, "cuda": 1 << 30}  # more than a cache holds

# Floating-point operations an SM does in a clock, float32 and bfloat16 with float32 sums, by
# compute capability. Source: CUDA C++ Programming Guide, throughput of arithmetic instructions, and
# the parts' architecture papers for tensor cores.
FLOPS_A_CLOCK = {
    "8.0": {"float32": 128, "bfloat16": 2048},
    "8.6": {"float32": 256, "bfloat16": 512},
    "8.9": {"float32": 256, "bfloat16": 1024},
    "9.0": {"float32": 256, "bfloat16": 4096},
}


def cpu_clock():
    """Seconds for one of CALLS calls."""
    return time.perf_counter() / CALLS


def cuda_clock():
    """Seconds for one of CALLS calls, read once the device has nothing left to do."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    return time.perf_counter() / CALLS


def pytest_generate_tests(metafunc):
    """A case for each op, size and element type. Times are those of one call, so 1/CALLS of all."""
    config = metafunc.config
    clock = {"cpu": cpu_clock, "cuda": cuda_clock}[config.getoption("device")]
    mark = pytest.mark.benchmark(timer=clock, min_time=1e-4, max_time=0.05, min_rounds=5)
    cases = {}
    for op in every_op:
        assert op.bench, f"{op} declares no bench sizes"
        for declared in op.bench:
            counts = counts_of(declared, config.getoption("sizes"))
            shown = " ".join(f"{name}={count}" for name, count in counts.items())
            for real in reals_of(op):
                cases[f"{op} {shown} {real}"] = (op, counts, real)
    metafunc.parametrize(
        "op, counts, real", [pytest.param(*c, id=name, marks=mark) for name, c in cases.items()]
    )


def counts_of(declared, sizes):
    """{name: count} of a declared size such as "T=128 E=4096"."""
    pairs = (pair.split("=") for pair in declared.split())
    counts = {name: int(count) for name, count in pairs}
    return counts if sizes == "declared" else {n: min(c, SMALL) for n, c in counts.items()}


def reals_of(op):
    """The element types that an op is timed in."""
    return op.params["precision"].values if "precision" in op.params else kinds_of_real(op, {})


def params_of(op, counts, real):
    """Parameters: those the size names, defaults, the first example, else the least there is."""
    given = dict(op.examples()[0]) if op.examples is not None else {}
    for name, kind in op.params.items():
        default = op.signature.parameters[name].default
        if name in counts:
            given[name] = counts[name]
        elif name == "precision":
            given[name] = real
        elif name in given or default is not inspect.Parameter.empty:
            continue
        elif isinstance(kind, Static):
            given[name] = kind.examples()[0]
        elif isinstance(kind, Choice):
            given[name] = kind.values[0]
        else:
            assert isinstance(kind, (Int, Float)), f"{op} needs {name}"
            given[name] = max(kind.low, 1e-3) if isinstance(kind, Float) else kind.low
    return op.checked_params(given)


def sizes_of(op, counts, params):
    """{Dim: size} of every dimension, from the counts and what follows from them."""
    sizes = {d: counts[d.name] for d in dims_of(op) if d.name in counts}
    sizes = op.sizes_of(sizes, params)
    missing = [d for d in dims_of(op) if d not in sizes]
    assert not missing, f"the bench sizes of {op} must say {missing}"
    return sizes


def nbytes_of(op, arrays, outputs, sizes):
    """Bytes a call must move: inputs once, outputs once, what is changed in place twice.

    Of rows that are picked out of N transitions or of a table, only as many as are worked on.
    """
    worked_on = sizes.get(B, sizes.get(N, sizes.get(T, 1) * sizes.get(E, 1)))
    picked = {d for d in (N, R) if d in sizes and not (d is N and B not in sizes)}
    total = sum(a.nbytes for a in outputs)
    for name, array in arrays.items():
        if array is not None:
            rows = next((n for d, n in zip(op.inputs[name].shape, array.shape) if d in picked), 0)
            part = min(worked_on, rows) / rows if rows else 1
            total += int(array.nbytes * part) * (2 if name in op.changes else 1)
    return total


@pytest.fixture(scope="module")
def ceilings(pytestconfig):
    """Bytes a second of a large copy, read and written, and operations a second by element type."""
    device = pytestconfig.getoption("device")
    xp = library(device)
    source = xp.ones(COPY_NBYTES[device], "u1")
    target = xp.empty_like(source)
    clock = {"cpu": cpu_clock, "cuda": cuda_clock}[device]
    seconds = []
    for _ in range(5):
        start = clock()
        for _ in range(CALLS):
            xp.copyto(target, source)
        seconds.append(clock() - start)
    facts = device_facts() if device == "cuda" else {}
    known = FLOPS_A_CLOCK.get(facts.get("compute_capability"), {})
    clocks = (facts.get("sm_count") or 0) * (facts.get("sm_clock_max_mhz") or 0) * 1e6
    flops = {kind: count * clocks for kind, count in known.items() if clocks}
    return 2 * source.nbytes / min(seconds), flops


def library(device):
    """NumPy or CuPy."""
    if device == "cpu":
        return np
    import cupy

    return cupy


def replayed(op, arrays, params, outputs, sizes, real):
    """CALLS calls on a GPU as one CUDA graph: a function that launches it."""
    import cupy

    named = {d.name: size for d, size in sizes.items()}
    work = [
        cupy.empty(shape, dtype) for shape, dtype in op.scratch_specs(named, params, real).values()
    ]
    stream = cupy.cuda.Stream(non_blocking=True)

    def call():
        op(**arrays, **params, out=outputs or None, scratch=work, stream=stream)

    cupy.cuda.runtime.deviceSynchronize()
    call()  # loads the kernels, which a capture forbids
    stream.synchronize()
    stream.begin_capture()
    for _ in range(CALLS):
        call()
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def test_op(benchmark, pytestconfig, ceilings, op, counts, real):
    device = pytestconfig.getoption("device")
    xp = library(device)
    params = params_of(op, counts, real)
    sizes = sizes_of(op, counts, params)
    inputs = arrays_for(op, np.random.default_rng(0), sizes, params, real)
    arrays = {n: None if a is None else xp.asarray(a) for n, a in inputs.items()}
    chosen = op.chosen_by(params) or {REAL.dtypes: real}
    outputs = tuple(xp.empty(s.resolve(sizes), s.dtype(chosen)) for s in op.outputs.values())

    def calls():
        for _ in range(CALLS):
            op(**arrays, **params, out=outputs or None)

    run = calls if device == "cpu" else replayed(op, arrays, params, outputs, sizes, real)
    run()  # compiles on a CPU
    benchmark(run)

    nbytes = nbytes_of(op, arrays, outputs, sizes)
    flops = op.flops(**{d.name: n for d, n in sizes.items()}) if op.flops else None
    benchmark.extra_info.update(
        op=str(op),
        sizes={d.name: int(n) for d, n in sizes.items()},
        real=real,
        device=device,
        cache="warm",
        bytes=nbytes,
        flops=flops,
    )
    if benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info.update(rates(benchmark.stats["median"], nbytes, flops, real, ceilings))


def rates(seconds, nbytes, flops, real, ceilings):
    """GB/s and TFLOP/s of a call, and the time the device would need by its ceilings over its time.

    A share above 1 is a call that lives in the cache. Where the device's peak is not known, only
    its memory counts.
    """
    bandwidth, peaks = ceilings
    least = nbytes / bandwidth
    if flops is not None and real in peaks:
        least = max(least, flops / peaks[real])
    return {
        "gb_per_second": nbytes / seconds / 1e9,
        "tflop_per_second": None if flops is None else flops / seconds / 1e12,
        "share_of_peak": least / seconds,
        "copy_gb_per_second": bandwidth / 1e9,
        "peak_tflop_per_second": peaks[real] / 1e12 if real in peaks else None,
    }
