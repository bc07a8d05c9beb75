"""Post-training quantization of a transformer: its products over steps in int8, by what calibration sees."""

import functools
from dataclasses import asdict, dataclass

import numpy as np

from lowgpu import checkpoint
from lowgpu.checkpoint import CheckpointError
from lowgpu.quantization.ranges import SHRINKS
from lowgpu.tft.graph import Pass, rows_of
from lowgpu.tft.int8_layout import TABULATED, int8_arrays, int8_products
from lowgpu.tft.layout import SELECTIONS, Selection, TFTShape
from lowgpu.tft.model import TFT
from lowgpu.tft.tables import table_error
from lowgpu_kernels.ops.tft.linear import linear
from lowgpu_kernels.ops.tft.lstm_int8 import ONE

KIND = "quantized transformer"
HIGHEST = 127
SAMPLE = 1 << 16  # values of a batch that a product's range is chosen by. Untuned.
TINIEST = 1e-6  # a range is at least that, so that levels are finite


@dataclass(frozen=True, eq=False)
class QuantizedTFT:
    """A quantized transformer: what `TFT(shape, arrays, "int8")` takes, and where it comes from.

    Attributes:
        shape: a TFTShape.
        arrays: by name: int8 weights, scales, levels, and float32 for all else.
        summary: what calibration saw, for JSON.
    """

    shape: TFTShape
    arrays: dict
    summary: dict

    def save(self, path):
        """Write one safetensors file, whole or not at all.

        Raises:
            OSError: the disk refused; an old file is as it was.
        """
        document = {"kind": KIND, "shape": asdict(self.shape), "calibration": self.summary}
        checkpoint.save(path, self.arrays, document)

    @classmethod
    def load(cls, path):
        """Read a file that `save` wrote, on any machine.

        Raises:
            CheckpointError: a file that is damaged or of something else; an array that is missing,
                unexpected, of another shape or element type, or out of range.
        """
        saved = checkpoint.load(path)
        shape = _shape_of(path, saved.document)
        wanted = int8_arrays(shape)
        for name in sorted(set(wanted) | set(saved.arrays)):
            _check_array(path, name, wanted.get(name), saved.arrays.get(name))
        return cls(shape, saved.arrays, saved.document.get("calibration", {}))


def quantize_tft(model, batches):
    """Quantize a transformer by the ranges that its products' factors have over some batches.

    Weights are int8 with a scale a row, what they multiply is int8 with a scale a product: the part
    of its range whose levels are nearest to the values, squared. The network of a real variable
    becomes a table, closest at the reals that were seen. Norms, softmax and gates stay in float32.

    Args:
        model: a TFT in float32.
        batches: arguments of `model.predict`, a dict each, such as it will meet; at least one.

    Returns:
        a QuantizedTFT.

    Raises:
        TypeError: a model of another kind.
        ValueError: a model in another precision, no batch, or numbers of a product that are not finite.
    """
    if not isinstance(model, TFT):
        raise TypeError(f"model must be a TFT, got {type(model).__name__}")
    if model.precision != "float32":
        raise ValueError(f"model must be in float32, got {model.precision}: make it so to quantize")
    watched, count = _watched(model, batches)
    arrays = {n: model.on_cpu(n) for n in model.shape.arrays() if model.has(n)}
    ranges = {name: seen.range() for name, seen in watched.items()}
    for name, ends in ranges.items():
        if name.endswith(".spread"):
            arrays[name] = np.array(ends, np.float32)
        else:
            arrays[name] = np.array([HIGHEST / ends], np.float32)
    for name, levels in int8_products(model.shape).items():
        of_input = ONE if levels is None else arrays[levels].item()
        arrays[name], scale = rounded_rows(arrays[name])
        arrays[f"{name}_scale"] = (scale / of_input).astype(np.float32)
    summary = {
        "sequences": count,
        "ranges": {n: r for n, r in ranges.items() if not n.endswith(".spread")},
        "table_error": table_error(model.shape, arrays),
    }
    return QuantizedTFT(model.shape, arrays, summary)


def rounded_rows(weight):
    """(int8 weight, what a 1 is worth in each row) of rows along the last axis."""
    weight = np.asarray(weight, np.float64)
    most = np.abs(weight).max(-1, initial=0)
    scale = np.where(most > 0, most, 1) / HIGHEST
    return np.rint(weight / scale[..., None]).astype(np.int8), scale


class _Seen:
    """Values of one product's factor: the largest, and some of each batch."""

    def __init__(self, name):
        self.name, self.most, self.some = name, 0.0, []

    def add(self, values):
        if not np.isfinite(values).all():
            raise ValueError(f"batches give {self.name} a NaN or an infinity: leave such rows out")
        self.most = max(self.most, float(np.abs(values).max(initial=0)))
        flat = np.abs(values).ravel()
        self.some.append(flat[:: max(1, len(flat) // SAMPLE)].astype(np.float32))

    def range(self):
        """The end of the range whose levels are nearest to the values, squared."""
        if self.most < TINIEST:
            return 1.0
        values = np.concatenate(self.some)
        ends = self.most * SHRINKS
        errors = []
        for end in ends:
            step = np.float32(end / HIGHEST)
            levels = np.minimum(np.rint(values / step), HIGHEST)
            errors.append(float(np.square(values - levels * step).mean(dtype=np.float64)))
        return float(ends[int(np.argmin(errors))])


class _Most(_Seen):
    """Of what must not be cut off: the largest alone."""

    def range(self):
        return max(self.most, TINIEST)


class _Spread(_Seen):
    """Root mean squares of a selection's reals."""

    def __init__(self, name):
        super().__init__(name)
        self.squares, self.rows = 0.0, 0

    def add(self, values):
        if not np.isfinite(values).all():
            raise ValueError(f"batches give {self.name} a NaN or an infinity: leave such rows out")
        self.squares = self.squares + np.square(values.astype(np.float64)).sum(0)
        self.rows += len(values)

    def range(self):
        found = np.sqrt(np.atleast_1d(self.squares) / max(self.rows, 1))
        return [float(x) if x > TINIEST else 1.0 for x in found]


@dataclass(frozen=True)
class _WatchedPass(Pass):
    """A pass in float32 that looks at what int8 products would multiply."""

    look: object = None  # (name, kind of _Seen, values in the model's library) -> None

    def recurrence(self):
        for layer in range(self.shape.layers):
            first = self.into[f"context.hidden.{layer}"]
            self.look(f"lstm.{layer}.first_levels", _Most, first)
        self.look("lstm.0.levels", _Seen, self.into["selected"])
        super().recurrence()

    def _select(self, name, out):
        if name in TABULATED:
            columns = self.weights[f"{name}.columns"]
            reals = self.inputs[f"{name}.reals"][:, :, columns]
            self.look(f"{name}.spread", _Spread, rows_of(reals))
        super()._select(name, out)

    def _project(self, name, x, out, op=linear):
        if name in int8_products(self.shape):
            self.look("attention.levels", _Seen, x)
        super()._project(name, x, out, op)

    def _network(self, name, x, out, context=None):
        super()._network(name, x, out, context)
        if f"{name}.first" not in int8_products(self.shape):
            return
        self.look(f"{name}.levels", _Seen, x)
        units = x @ self.weights[f"{name}.first"].T + self.weights[f"{name}.first_bias"]
        if context is not None:
            units = units + context
        self.look(f"{name}.unit_levels", _Seen, units, elu=True)

    def _gate(self, name, x, residual, out):
        if int8_products(self.shape).get(f"{name}.gate"):
            self.look(f"{name}.levels", _Seen, x)
        super()._gate(name, x, residual, out)


def _watched(model, batches):
    """({name: _Seen}, sequences) after the batches."""
    seen, count = {}, 0

    def look(name, kind, values, elu=False):
        values = values if isinstance(values, np.ndarray) else values.get()
        if elu:
            values = np.where(values > 0, values, np.expm1(np.minimum(values, 0)))
        seen.setdefault(name, kind(name)).add(values)

    for batch in batches:
        found = model.predict(**batch, made_by=functools.partial(_WatchedPass, look=look))
        count += len(found.prediction)
    if count == 0:
        raise ValueError("batches must hold a sequence at least, got none")
    return seen, count


def _shape_of(path, document):
    try:
        if document["kind"] != KIND:
            raise ValueError(f"is a {document['kind']!r}")
        given = dict(document["shape"])
        for name in SELECTIONS:
            selection = {n: _tuples(v) for n, v in given[name].items()}
            given[name] = Selection(**selection)
        return TFTShape(**{n: _tuples(v) for n, v in given.items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is no quantized transformer: {error}") from None


def _tuples(value):
    return tuple(value) if isinstance(value, list) else value


def _check_array(path, name, wanted, array):
    """Raise CheckpointError where an array is not what int8 kernels may be given."""
    if wanted is None:
        raise CheckpointError(f"{path} has an unknown array, {name}")
    if array is None:
        if wanted.optional:
            return
        raise CheckpointError(f"{path} lacks {name}, {list(wanted.shape)}")
    kind = "int8" if wanted.kind == "int8" else "float32"
    if array.shape != wanted.shape or array.dtype != kind:
        came = f"{array.dtype.name}{list(array.shape)}"
        raise CheckpointError(f"{path}: {name} must be {kind}{list(wanted.shape)}, got {came}")
    above = wanted.kind == "number" or name.endswith((".spread", "_scale"))
    if above and not (array > 0).all():
        raise CheckpointError(f"{path}: {name} must be above 0")
    if kind == "int8" and (array < -HIGHEST).any():
        raise CheckpointError(f"{path}: {name} must be in [-127, 127]")
