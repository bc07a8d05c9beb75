"""What every batch of a feed looks like: its names, shapes and element types."""

from collections.abc import Mapping

import numpy as np

from lowgpu.pools import Declared
from lowgpu_kernels.arrays import library_of

LAST = "refuse", "pad"


class BatchForm:
    """The form of a batch, taken from the first: every later one must have it.

    A batch is a dict, a tuple or a list of arrays, or one array; NumPy arrays, or torch or JAX arrays
    in host memory. A batch given out is of the same kind.

    Args:
        batch: the first.
        last: "refuse" a batch with fewer rows; "pad" the last one with rows of zeros.

    Attributes:
        declared: {name: Declared} of a batch's arrays.

    Raises:
        TypeError, ValueError: no batch, or no arrays that can be copied bit for bit.
    """

    def __init__(self, batch, last="refuse"):
        if last not in LAST:
            raise ValueError(f"last must be 'refuse' or 'pad', got {last!r}")
        self._last, self._kind, self._ended = last, _kind(batch), False
        parts = _parts(batch)
        if not parts:
            raise ValueError("a batch must hold at least one array, got none")
        self.declared = {
            name: Declared(part.shape, part.dtype, f"{name} of a batch")
            for name, part in parts.items()
        }

    def parts(self, batch, number):
        """The arrays of a batch by name, and its rows; None for the rows of a full one.

        Args:
            batch: as the source gave it.
            number: of the batch, for the message.

        Raises:
            TypeError, ValueError: another form, or a short batch that is refused.
        """
        parts = _parts(batch)
        if list(parts) != list(self.declared):
            raise ValueError(f"batch {number} must hold {list(self.declared)}, got {list(parts)}")
        if self._ended:
            raise ValueError(f"batch {number} came after a short one, which must be the last")
        for name, wanted in self.declared.items():
            came = parts[name]
            if came.dtype != wanted.dtype:
                raise TypeError(
                    f"{name} of batch {number} must be {wanted.dtype} as in the first, got "
                    f"{came.dtype}"
                )
        if all(parts[name].shape == wanted.shape for name, wanted in self.declared.items()):
            return parts, None
        rows = self._short(parts, number)
        self._ended = True
        return parts, rows

    def _short(self, parts, number):
        """The rows of a batch that has fewer of them, in every array alike."""
        sizes = {part.shape[:1] for part in parts.values()}
        full = {wanted.shape[:1] for wanted in self.declared.values()}
        same = all(
            parts[name].shape[1:] == wanted.shape[1:] for name, wanted in self.declared.items()
        )
        if not (same and len(sizes) == len(full) == 1 and max(sizes) < max(full)):
            wanted = {name: d.shape for name, d in self.declared.items()}
            came = {name: part.shape for name, part in parts.items()}
            raise ValueError(f"batch {number} must have the shapes {wanted}, got {came}")
        (rows,), (most,) = max(sizes), max(full)
        if self._last == "refuse":
            raise ValueError(
                f"batch {number} has {rows} of {most} rows; leave it out, or give last='pad'"
            )
        return rows

    def again(self):
        """Expect a source that begins anew."""
        self._ended = False

    def built(self, arrays):
        """A batch of the kind that came, of arrays in the order of `declared`."""
        if self._kind is dict:
            return dict(zip(self.declared, arrays))
        return arrays[0] if self._kind is None else self._kind(arrays)


def _kind(batch):
    """What a batch is rebuilt with: dict, a function of a list, or None for one array."""
    if isinstance(batch, Mapping):
        return dict
    if isinstance(batch, (tuple, list)):
        return getattr(type(batch), "_make", tuple if isinstance(batch, tuple) else list)
    return None


def _parts(batch):
    if isinstance(batch, Mapping):
        named = dict(batch)
        if odd := [name for name in named if not isinstance(name, str)]:
            raise TypeError(f"a batch's names must be strings, got {odd[0]!r}")
    elif isinstance(batch, (tuple, list)):
        fields = getattr(batch, "_fields", None)
        named = dict(zip(fields or (f"batch[{i}]" for i in range(len(batch))), batch))
    else:
        named = {"batch": batch}
    return {name: _host(name, array) for name, array in named.items()}


def _host(name, array):
    """A NumPy view of an array in host memory."""
    library = library_of(name, array)
    if library.name == "cupy" or library.device(name, array) is not None:
        raise TypeError(f"{name} must be in host memory, to be copied to a device; it is on one")
    if library.name != "numpy":
        return library.buffer(name, array, 0, False)
    if array.dtype.hasobject or not array.dtype.isnative:
        raise TypeError(f"{name} must hold numbers in native byte order, got {array.dtype.str}")
    return np.asarray(array)
