"""A Temporal Fusion Transformer that predicts, on the CPU or on a GPU."""

from dataclasses import dataclass

import numpy as np

from lowgpu.tft.graph import Pass, buffers, forward
from lowgpu.tft.graph_int8 import Int8Pass, int8_buffers
from lowgpu.tft.int8_layout import int8_arrays
from lowgpu.tft.layout import SELECTIONS
from lowgpu.tft.tables import with_tables
from lowgpu_kernels.dims import REAL

PRECISIONS = "float32", "bfloat16", "int8"
LIBRARIES = "numpy", "cupy"


@dataclass(frozen=True)
class Prediction:
    """What a pass gives, [sequences, steps, ...], in the library of the model's arrays.

    Attributes:
        prediction: float32 [sequences, future, outputs], quantiles of one target after the other.
        attention: float32 [sequences, future, history + future], where each predicted step looks.
        static_share, history_share, future_share: float32 [sequences, steps, variables], how much each
            variable counts, as `shape.<selection>.variables` names them.
    """

    prediction: object
    attention: object
    static_share: object
    history_share: object
    future_share: object


class TFT:
    """The transformer with its weights in place.

    Arrays of a batch are allocated at its first pass and used again by the next of the same sizes: what
    a pass returned is good until then. A pass of other sizes lets them go, so a CUDA graph of a pass
    needs a model that sees no other sizes. A pass queues kernels and waits for nothing.

    Args:
        shape: a TFTShape, as an importer gives it.
        arrays: the arrays that belong to it, by name, float64; for "int8" those of `quantize_tft`.
        precision: "float32"; "bfloat16" for products and what is stored between them; "int8" for the
            products over steps, and bfloat16 for the rest of these.
        library: "numpy" runs on the CPU, "cupy" on its current GPU.

    Raises:
        ValueError: another precision or library; an array that is missing, unexpected or of another
            shape.
    """

    def __init__(self, shape, arrays, precision="float32", library="numpy"):
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
        if library not in LIBRARIES:
            raise ValueError(f"library must be one of {LIBRARIES}, got {library!r}")
        self.shape, self.precision, self.library = shape, precision, library
        self._types = {
            "real": REAL[()].dtype({REAL.dtypes: "bfloat16" if precision == "int8" else precision}),
            "float32": np.dtype(np.float32),
            "int32": np.dtype(np.int32),
            "int8": np.dtype(np.int8),
        }
        self._made_by = Int8Pass if precision == "int8" else Pass
        self._xp = np
        if library == "cupy":
            import cupy

            self._xp = cupy
        self._weights = {
            n: a.item() if kind == "number" else self._placed(a, self._types[kind])
            for n, (a, kind) in checked_weights(shape, arrays, precision).items()
        }
        # What static variables would have said, where there are none.
        self._said = {} if shape.static.variables else _contexts(shape, arrays)
        self._made = {}

    def _placed(self, array, dtype):
        return self._xp.asarray(np.ascontiguousarray(array).astype(dtype))

    def predict(
        self,
        history_reals,
        future_reals,
        history_categories=None,
        future_categories=None,
        lengths=None,
        future_lengths=None,
        *,
        made_by=None,
    ):
        """The quantiles of every future step of a batch of sequences.

        Args:
            history_reals: float32 [sequences, history, reals], scaled as in training, columns as
                `shape.reals` names them; steps past a sequence's length may hold any finite number.
            future_reals: float32 [sequences, future, reals]; only what the future's selection reads counts.
            history_categories, future_categories: int32, columns as `shape.categoricals` names them;
                not needed where there are none.
            lengths: int32 [sequences], steps of each history that are there; all where left out.
            future_lengths: int32 [sequences], steps of each future that are there; of use only where
                predicted steps see later ones. What is predicted past them means nothing.
            made_by: makes the pass of the arguments of `graph.Pass`: what calibration watches with.

        Returns:
            a Prediction. Static variables are read from step 0 of the history.

        Raises:
            TypeError: an array of another kind or element type.
            ValueError: shapes that do not go together, no step, a length or a category out of range.
        """
        given = {
            "history.reals": history_reals,
            "future.reals": future_reals,
            "history.categories": history_categories,
            "future.categories": future_categories,
            "lengths": lengths,
            "future_lengths": future_lengths,
        }
        inputs = checked_inputs(self.shape, given, self._xp)
        sizes = *inputs["history.reals"].shape[:2], inputs["future.reals"].shape[1]
        into = self._buffers(sizes)
        for kind in ("reals", "categories"):
            if f"static.{kind}" in into:
                into[f"static.{kind}"][:] = inputs[f"history.{kind}"][:, :1]
                inputs[f"static.{kind}"] = into[f"static.{kind}"]
        real = self._types["real"].name
        forward(self.shape, self._weights, inputs, into, self.run, real, made_by or self._made_by)
        return _prediction(into)

    def has(self, name):
        """Whether the transformer has an array of that name."""
        return name in self._weights

    def on_cpu(self, name):
        """An array of the transformer's as a NumPy array; waits for a GPU."""
        array = self._weights[name]
        return array.copy() if isinstance(array, np.ndarray) else array.get()

    def run(self, op, arrays, out, **parameters):
        """One op of a pass, in the order of `lowgpu.tft.graph`: a subclass may time or watch it."""
        op(*arrays, **parameters, out=out)

    def _buffers(self, sizes):
        if sizes not in self._made:
            self._made = {}  # of one batch size at a time
            wanted = (int8_buffers if self.precision == "int8" else buffers)(self.shape, *sizes)
            made = {n: self._xp.empty(s, self._types[t]) for n, (s, t) in wanted.items()}
            for name, constant in self._said.items():
                rows = np.tile(constant, (sizes[0], 1))
                made[name] = self._placed(rows, self._types["real"])
            self._made[sizes] = made
        return self._made[sizes]


def reference(shape, arrays, **given):
    """The same prediction by the ops' specs in float64, for tests: arguments as of `predict`."""
    names = {f"{n.replace('_', '.', 1)}" if "lengths" not in n else n: a for n, a in given.items()}
    optional = ("history.categories", "future.categories", "lengths", "future_lengths")
    inputs = checked_inputs(shape, {n: None for n in optional} | names, np)
    weights = {
        n: np.asarray(a, np.int32 if kind == "int32" else np.float64)
        for n, (a, kind) in checked_weights(shape, arrays).items()
    }
    sequences, history = inputs["history.reals"].shape[:2]
    wanted = buffers(shape, sequences, history, inputs["future.reals"].shape[1])
    into = {n: np.full(s, np.nan) for n, (s, _) in wanted.items()}
    if not shape.static.variables:
        said = _contexts(shape, arrays).items()
        into |= {n: np.tile(a, (sequences, 1)) for n, a in said}
    for kind in ("reals", "categories"):
        inputs[f"static.{kind}"] = inputs[f"history.{kind}"][:, :1]

    def run(op, arrays, out, **parameters):
        found = op.spec(*arrays, **parameters)
        outs, found = (out, found) if isinstance(out, tuple) else ((out,), (found,))
        for array, values in zip(outs, found):
            array[:] = values

    forward(shape, weights, inputs, into, run)
    return _prediction(into)


def _contexts(shape, arrays):
    return {f"context.{n}": arrays[f"context.{n}"] for n in shape.contexts}


def _prediction(into):
    names = "prediction", "attention", *(f"{n}.share" for n in SELECTIONS)
    return Prediction(*(into[n].swapaxes(0, 1) for n in names))


def checked_weights(shape, arrays, precision="float32"):
    """{name: (array, kind of element)} with what says which inputs each selection reads."""
    int8 = precision == "int8"
    wanted = int8_arrays(shape) if int8 else shape.arrays()
    unexpected = sorted(set(arrays) - set(wanted))
    if unexpected:
        raise ValueError(f"arrays has {unexpected[0]!r}, which a transformer of this shape has not")
    found = {}
    for name, array in wanted.items():
        if name not in arrays:
            if array.optional:
                continue
            raise ValueError(f"arrays must have {name!r}, {list(array.shape)}, which is missing")
        if np.shape(arrays[name]) != array.shape:
            raise ValueError(
                f"arrays[{name!r}] must be {list(array.shape)}, got {list(np.shape(arrays[name]))}"
            )
        found[name] = arrays[name], array.kind
    if int8:
        found = with_tables(shape, found)
    for name in SELECTIONS:
        selection = getattr(shape, name)
        columns = [shape.reals.index(n) for n in selection.reals]
        categories = [shape.categoricals.index(n) for n in selection.categoricals]
        bounds = np.cumsum([0, *selection.cardinalities])
        read = {"columns": columns, "category_columns": categories, "bounds": bounds}
        for kind, array in read.items():
            found[f"{name}.{kind}"] = np.array(array, np.int32), "int32"
    return found


def checked_inputs(shape, given, xp):
    """The inputs by name, shapes and types checked against each other."""
    found = {}
    for part in ("history", "future"):
        for kind, names in (("reals", shape.reals), ("categories", shape.categoricals)):
            array = given[f"{part}.{kind}"]
            if array is None and kind == "categories" and not names:
                array = xp.zeros((*found[f"{part}.reals"].shape[:2], 0), np.int32)
            _check_input(f"{part}_{kind}", array, names, xp)
            found[f"{part}.{kind}"] = array
        reals, categories = found[f"{part}.reals"], found[f"{part}.categories"]
        if reals.shape[1] == 0 or categories.shape[:2] != reals.shape[:2]:
            raise ValueError(
                f"{part}_reals and {part}_categories must have the same sequences and steps, one step "
                f"at least, got {list(reals.shape[:2])} and {list(categories.shape[:2])}"
            )
    sequences = [len(found[f"{part}.reals"]) for part in ("history", "future")]
    if sequences[0] != sequences[1]:
        raise ValueError(f"future_reals must have {sequences[0]} sequences, got {sequences[1]}")
    for name, part in (("lengths", "history"), ("future_lengths", "future")):
        array, most = given[name], found[f"{part}.reals"].shape[1]
        # On a GPU nothing can be looked at without waiting.
        looked_at = array is not None and xp is np and array.size
        if looked_at and not 0 <= array.min() <= array.max() <= most:
            raise ValueError(f"{name} must be in [0, {most}], got {array.min()} to {array.max()}")
        found[name] = array
    return found


def _check_input(name, array, columns, xp):
    dtype = np.dtype(np.int32 if name.endswith("categories") else np.float32)
    if not isinstance(array, xp.ndarray) or array.dtype != dtype:
        raise TypeError(
            f"{name} must be a {xp.__name__} array of {dtype}, got {type(array).__name__} of "
            f"{getattr(array, 'dtype', None)}"
        )
    if array.ndim != 3 or array.shape[2] != len(columns):
        raise ValueError(
            f"{name} must be [sequences, steps, {len(columns)}], columns {list(columns)}, got "
            f"{list(array.shape)}"
        )
