"""Arrays taken by name, each once, with nothing missing and nothing left over."""

import numpy as np


class Reader:
    """Hands out a state_dict's arrays as float64.

    Args:
        state: {name: NumPy array}.
        aliases: (pattern, replacement) pairs: a tensor's other names, and the one it is read under.

    Raises:
        TypeError: an array that is not a NumPy array of floats.
        ValueError: two names of one tensor that differ, or a number that is not finite.
    """

    def __init__(self, state, aliases=()):
        self.state, self.first_name, self.taken = {}, {}, set()
        for name, array in state.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"state[{name!r}] must be a NumPy array, got {type(array).__name__}: give "
                    "tensor.detach().cpu().float().numpy()"
                )
            if array.dtype.kind != "f":
                raise TypeError(f"state[{name!r}] must be of floats, got {array.dtype}")
            own = name
            for pattern, replacement in aliases:
                own = pattern.sub(replacement, own)
            if own not in self.state:
                self.state[own], self.first_name[own] = array, name
            elif not np.array_equal(self.state[own], array):
                raise ValueError(
                    f"state[{name!r}] must be {self.first_name[own]!r} again, the same tensor "
                    "under another name, got other numbers"
                )

    def __contains__(self, name):
        return name in self.state

    def take(self, name, *shape):
        """The array of that name; None in the shape is any size."""
        array = self.state.get(name)
        if array is None:
            raise ValueError(f"state must have {name!r}, which is missing")
        fits = len(array.shape) == len(shape) and all(
            want in (None, size) for want, size in zip(shape, array.shape)
        )
        if not fits:
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"state[{name!r}] must be [{wanted}], got {list(array.shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"state[{name!r}] must be finite, got NaN or infinity")
        self.taken.add(name)
        return array.astype(np.float64)

    def finish(self):
        """Raise ValueError where an array was not taken."""
        left = sorted(self.first_name[n] for n in self.state if n not in self.taken)
        if left:
            raise ValueError(
                f"state has {len(left)} arrays that a Temporal Fusion Transformer of these "
                f"hyperparameters has not, first {left[0]!r}: do the hyperparameters belong to it?"
            )
