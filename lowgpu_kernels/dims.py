"""The words every signature is written in: dimensions, element types, parameter ranges, the row."""

import functools
from dataclasses import dataclass, replace

import numpy as np

try:  # NumPy has no bfloat16; ml_dtypes is what JAX and CuPy use for it
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

# A market row is 54 features and two zero columns: 112 B in bfloat16, seven 16 B loads.
# Columns past the logical width are zero on entry to every op and zero on exit.
ROW = 56


@dataclass(frozen=True)
class Dim:
    """A named array dimension. Equal names in one call must have equal sizes."""

    name: str
    meaning: str

    def __repr__(self):
        return self.name


A = Dim("A", "discrete actions")
B = Dim("B", "rows in a minibatch")
D = Dim("D", "groups of 64 drawn rows of a minibatch")
E = Dim("E", "environments stepped side by side")
F = Dim("F", "float32 fields of an environment's state")
G = Dim("G", "int32 fields of an environment's state")
H = Dim("H", "stored hidden units of a network, all layers of all towers side by side")
I = Dim("I", "columns of a network's input row, a multiple of 8")  # noqa: E741
K = Dim("K", "slots of a replay ring: steps kept of each environment")
L = Dim("L", "leaves of a priority tree, whole groups of 32")
M = Dim("M", "minibatches in an epoch")
N = Dim("N", "transitions in a rollout, time-major: row t * E + e")
O = Dim("O", "columns of a network's output row, a multiple of 8")  # noqa: E741
P = Dim("P", "parameters of a network, all tensors flat")
R = Dim("R", "rows of an environment's table")
S = Dim("S", "read-only series of an environment, each R long")
T = Dim("T", "time steps in a rollout")
V = Dim("V", "bytes of a network's packed image")
W = Dim("W", "sums of a priority tree, all levels one after another")
X = Dim("X", "rows of an int8 product, M of a GEMM")
Y = Dim("Y", "columns of an int8 product, N of a GEMM")
Z = Dim("Z", "terms of each sum of an int8 product, K of a GEMM")


_name_of = functools.cache(lambda dtype: dtype.name)  # NumPy builds the name anew, slowly


@dataclass(frozen=True)
class Spec:
    """What an op expects of one array: element type and shape.

    `dtypes` with more than one entry means the caller chooses; within one call every array whose
    Spec lists the same choices must have the same element type.
    """

    dtypes: tuple
    shape: tuple
    optional: bool = False

    def __or__(self, none):
        assert none is None, "a Spec can only be joined with None"
        return replace(self, optional=True)

    def __repr__(self):
        return f"{' or '.join(self.dtypes)}[{', '.join(map(str, self.shape))}]"

    def dims(self):
        return [d for d in self.shape if isinstance(d, Dim)]

    def resolve(self, sizes):
        """The shape in numbers."""
        return tuple(sizes[d] if isinstance(d, Dim) else d for d in self.shape)

    def dtype(self, chosen):
        """The element type, given what each set of choices was fixed to in this call."""
        return np.dtype(chosen.get(self.dtypes, self.dtypes[0]))

    def check(self, name, shape, dtype, sizes, chosen):
        """Refuse an array that does not fit; record its dimensions and element type."""
        given = _name_of(dtype)
        if given not in self.dtypes:
            raise TypeError(f"{name} must be {self}, got {given}{list(shape)}")
        if chosen.setdefault(self.dtypes, given) != given:
            raise TypeError(
                f"{name} must be {chosen[self.dtypes]} like the arrays before it, got {given}"
            )
        if len(shape) != len(self.shape):
            raise ValueError(f"{name} must be {self}, got shape {shape}")
        for want, size in zip(self.shape, shape):
            expected = sizes.setdefault(want, size) if isinstance(want, Dim) else want
            if expected != size:
                raise ValueError(
                    f"{name} must be {self} with {want}={expected}, got shape {shape}"
                    if isinstance(want, Dim)
                    else f"{name} must be {self}, got shape {shape}"
                )


class Element:
    """An element type; indexing it with dimensions makes a Spec."""

    def __init__(self, *dtypes):
        self.dtypes = dtypes

    def __getitem__(self, shape):
        return Spec(self.dtypes, shape if isinstance(shape, tuple) else (shape,))


BOOL, U8, I32, U32, U64 = map(Element, ("bool", "uint8", "int32", "uint32", "uint64"))
I8 = Element("int8")
F32, BF16 = Element("float32"), Element("bfloat16")
REAL = Element("float32", "bfloat16")  # the precision an op computes in follows its input


@dataclass(frozen=True)
class Outputs:
    """Several named outputs; the op returns them as a named tuple in this order."""

    specs: dict

    def __init__(self, **specs):
        object.__setattr__(self, "specs", specs)


@dataclass(frozen=True)
class Float:
    """A float32 parameter in [low, high], or in (low, high] when `above`."""

    low: float = -np.inf
    high: float = np.inf
    above: bool = False

    def __call__(self, name, value):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise TypeError(f"{name} must be a number in {self}, got {type(value).__name__}")
        inside = self.low < value if self.above else self.low <= value
        if not (inside and value <= self.high and np.isfinite(value)):
            raise ValueError(f"{name} must be in {self}, got {value!r}")
        return np.float32(value)

    def __repr__(self):
        return f"{'(' if self.above else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class Int:
    """An integer parameter in [low, high]; `dtype` is its width in the kernel."""

    low: int = -(2**31)
    high: int = 2**31 - 1
    dtype: type = np.int32

    def __call__(self, name, value):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer in {self}, got {type(value).__name__}")
        if not self.low <= value <= self.high:
            raise ValueError(f"{name} must be in {self}, got {value!r}")
        return self.dtype(value)

    def __repr__(self):
        return f"[{self.low}, {self.high}]"


SEED = Int(0, 2**64 - 1, np.uint64)


@dataclass(frozen=True)
class Choice:
    """A parameter that is one of a few values; a kernel is compiled for each."""

    values: tuple

    def __init__(self, *values):
        object.__setattr__(self, "values", values)

    def __call__(self, name, value):
        for known in self.values:
            if type(known) is type(value) and known == value:
                return value
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, self.values))}, got {value!r}"
        )

    def __repr__(self):
        return " or ".join(map(repr, self.values))


FLAG = Choice(False, True)


@dataclass(frozen=True)
class Static:
    """A parameter that is a hashable description, such as a network; compiled into the kernel.

    `examples` is a function giving the values that tests and benches use.
    """

    kind: type
    examples: object

    def __call__(self, name, value):
        if not isinstance(value, self.kind):
            raise TypeError(f"{name} must be a {self.kind.__name__}, got {type(value).__name__}")
        return value

    def __repr__(self):
        return self.kind.__name__
