"""What every op is held to. An op joins by being in `OPS`; nothing here names one."""

import inspect

import numpy as np

from lowgpu_kernels import ops  # noqa: F401  fills OPS
from lowgpu_kernels.dims import REAL, Choice, Dim, Float, Int, Static
from lowgpu_kernels.op import OPS

ODD_SIZES = (0, 1, 2, 3, 31, 33, 127, 129, 255, 257)
MOST_ELEMENTS = 40_000  # specs are loops: keep one call under a second
MOST_VERIFIED = 1_500  # each of these is a network and an env step in plain Python
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


def dims_of(op):
    """Every dimension of an op's inputs, in order of first use."""
    return list(dict.fromkeys(d for s in op.inputs.values() for d in s.dims()))


def params_for(op, rng):
    """Random parameters within their declared ranges; the default half of the time."""
    drawn = {}
    for name, kind in op.params.items():
        default = op.signature.parameters[name].default
        if default is not inspect.Parameter.empty and rng.random() < 0.5:
            drawn[name] = default
        elif isinstance(kind, Choice):
            drawn[name] = kind.values[rng.integers(len(kind.values))]
        elif isinstance(kind, Static):
            examples = kind.examples()
            drawn[name] = examples[rng.integers(len(examples))]
        elif isinstance(kind, Float):
            low, high = max(kind.low, -2.0), min(kind.high, 2.0)
            drawn[name] = float(rng.uniform(max(low, 1e-3) if kind.above else low, high))
        elif isinstance(kind, Int):
            drawn[name] = int(rng.integers(kind.low, min(kind.high, kind.low + 60) + 1))
    if op.examples is not None:
        together = op.examples()
        drawn |= together[rng.integers(len(together))]
    return op.checked_params(drawn)


def sizes_for(op, rng, params, sizes=ODD_SIZES, most=None):
    """Random odd sizes that go together; no array has more than `most` elements but a fixed one."""
    if most is None:
        most = MOST_ELEMENTS if op.verify is None else MOST_VERIFIED
    specs = [*op.inputs.values(), *op.outputs.values()]
    while True:
        drawn = {d: int(rng.choice(sizes)) for d in dims_of(op)}
        fixed = op.derived(params, drawn) if op.derived is not None else {}
        drawn.update(fixed)
        free = set(dims_of(op)) - set(fixed)
        counted = [s for s in specs if free & set(s.dims())]
        largest = max((np.prod(s.resolve(drawn), dtype=np.int64) for s in counted), default=0)
        if largest <= most or not any(sizes):
            return drawn
        sizes = [s for s in sizes if s < max(sizes)] or [0]


def arrays_for(op, rng, sizes, params, real="float32"):
    """NumPy inputs by name: the op's own draws, the rest standard normal, 0/1 or small integers."""
    chosen = op.chosen_by(params) or {REAL.dtypes: real}
    drawn = {}
    for name, spec in op.inputs.items():
        shape, dtype = spec.resolve(sizes), spec.dtype(chosen)
        if dtype.kind in "iu":
            drawn[name] = rng.integers(0, 4, shape).astype(dtype)
        elif dtype.kind == "b":
            drawn[name] = rng.random(shape) < 0.2
        else:
            drawn[name] = rng.normal(size=shape).astype(dtype)
    if op.draw_inputs is not None:
        for name, array in op.draw_inputs(rng, sizes, params).items():
            drawn[name] = (
                None if array is None else np.asarray(array, op.inputs[name].dtype(chosen))
            )
    return drawn


def poisoned(spec, sizes, chosen):
    """An output no executor may leave untouched: NaN, the smallest integer, or a flag of 255."""
    dtype = spec.dtype(chosen)
    shape = spec.resolve(sizes)
    if dtype.kind == "b":
        return np.full(shape, 255, "u1").view(bool)
    fill = np.iinfo(dtype).min + 7 if dtype.kind in "iu" else np.nan
    return np.full(shape, fill, dtype)


def poisoned_outputs(op, sizes, params, real="float32"):
    chosen = op.chosen_by(params) or {REAL.dtypes: real}
    return tuple(poisoned(s, sizes, chosen) for s in op.outputs.values())


def spec_results(op, inputs, params):
    """What the spec says: {name: float64 or exact array} of outputs and of arrays changed in place."""
    wide = {n: _widened(a) for n, a in inputs.items()}
    plain = {n: _plain(v) for n, v in params.items()}
    returned = op.spec(**wide, **plain)
    if len(op.outputs) == 1:
        returned = (returned,)
    results = dict(zip(op.outputs, returned or (), strict=True))
    return results | {n: wide[n] for n in op.changes}


def _widened(array):
    if array is None:
        return None
    real = array.dtype.kind not in "iub"
    return array.astype(np.float64) if real else array.copy()


def _plain(value):
    return value.item() if isinstance(value, np.generic) else value


def assert_agrees(op, got, inputs, params, sizes, real="float32"):
    """Hold what an executor made, {name: array}, to the spec's answer for the same inputs."""
    real = params.get("precision", real)
    if op.verify is not None:
        op.verify(got, inputs, params, EPS[real])
        return
    want = spec_results(op, inputs, params)
    named = {d.name: n for d, n in sizes.items()}
    floats = [a for a in inputs.values() if a is not None and a.dtype.kind not in "iub"]
    for name, expected in want.items():
        expected = np.asarray(expected)
        found = got[name]
        assert found.shape == expected.shape, f"{op}.{name}: {found.shape}, not {expected.shape}"
        magnitudes = [np.abs(_finite(a)).max(initial=0) for a in [*floats, expected]]
        allowed = op.error(**named, **params) * EPS[real] * max(1.0, *map(float, magnitudes))
        if op.compare is not None:
            op.compare(name, found, expected, {**inputs, **params}, allowed)
        elif found.dtype.kind in "iub":
            np.testing.assert_array_equal(
                found.view("u1") if found.dtype == bool else found,
                expected.astype(bool).view("u1") if found.dtype == bool else expected,
                err_msg=f"{op}.{name} at {named}",
            )
        else:
            np.testing.assert_allclose(
                found.astype(np.float64),
                expected,
                rtol=0,
                atol=allowed,
                err_msg=f"{op}.{name} at {named} with {params}",
            )


def _finite(array):
    wide = np.asarray(array, np.float64)
    return wide[np.isfinite(wide)]


def run_numpy(op, inputs, params, sizes, real="float32"):
    """The public call on NumPy arrays into poisoned outputs: {name: array}."""
    given = {n: None if a is None else a.copy() for n, a in inputs.items()}
    outs = poisoned_outputs(op, sizes, params, real)
    op(**given, **params, out=outs or None)
    return dict(zip(op.outputs, outs)) | {n: given[n] for n in op.changes}


def run_launcher(op, inputs, params, sizes, real="float32"):
    """The CUDA launcher on NumPy arrays, for the simulator: {name: array}."""
    given = {n: None if a is None else a.copy() for n, a in inputs.items()}
    outs = poisoned_outputs(op, sizes, params, real)
    wanted = op.scratch_specs({d.name: s for d, s in sizes.items()}, params)
    work = [_scratch(shape, dtype) for shape, dtype in wanted.values()]
    op.cuda(*given.values(), *params.values(), *outs, *work, 0)
    return dict(zip(op.outputs, outs)) | {n: given[n] for n in op.changes}


def _scratch(shape, dtype):
    dtype = np.dtype(dtype)
    return np.full(shape, np.nan if dtype.kind not in "iub" else 77, dtype)


def seeded(data):
    """A NumPy generator whose seed hypothesis chooses, so a failure is repeatable."""
    from hypothesis import strategies

    return np.random.default_rng(data.draw(strategies.integers(0, 2**32 - 1), label="seed"))


def kinds_of_real(op, params):
    """Element types to run an op in: both when its REAL arrays may be either."""
    specs = [*op.inputs.values(), *op.outputs.values()]
    if "precision" in params or all(s.dtypes != REAL.dtypes for s in specs):
        return ("float32",)
    return REAL.dtypes


every_op = sorted(OPS.values(), key=str)
assert every_op and all(isinstance(d, Dim) for o in every_op for d in dims_of(o))
