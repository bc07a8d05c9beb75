"""Features brought to mean 0 and deviation 1 by the figures of the training rows."""

import warnings
from dataclasses import dataclass

import numpy as np

from lowgpu.data.feature_columns import CLIP, FEATURES


@dataclass(frozen=True, eq=False)
class Normalizer:
    """Subtract the mean and divide by the standard deviation of the rows it was fitted on.

    out = clip((features − mean) / std, −10, 10), and 0 in a column whose std is 0.

    Args:
        mean: of each column.
        std: standard deviation of each column, 0 where the column was constant.

    Raises:
        TypeError: not float32 arrays.
        ValueError: shapes that differ, a value that is not finite, a negative std.
    """

    mean: np.ndarray  # float32 [F]
    std: np.ndarray  # float32 [F]

    def __post_init__(self):
        for name in ("mean", "std"):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != np.float32:
                came = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{name}: wanted a NumPy array of float32, got {came}")
            if array.ndim != 1 or array.shape != self.mean.shape:
                raise ValueError(f"{name}: wanted shape [F] = {self.mean.shape}, got {array.shape}")
            if not np.isfinite(array).all():
                column = int(np.flatnonzero(~np.isfinite(array))[0])
                raise ValueError(f"{name}: wanted finite values, got {array[column]} at {column}")
        if np.any(self.std < 0):
            raise ValueError(f"std: wanted values >= 0, got {self.std.min()}")

    @classmethod
    def fit(cls, features: np.ndarray) -> "Normalizer":
        """Measure mean and standard deviation of each column of float32 [N, F].

        Fit on the training split only; a constant column is named in one warning.

        Args:
            features: finite values, at least one row.

        Returns:
            The normalizer; sums are taken in float64.

        Raises:
            TypeError: features is not a float32 array.
            ValueError: not two dimensions, no rows, or a column with a value that is not finite.
        """
        _check_features(features)
        if len(features) == 0:
            raise ValueError("features: wanted at least one row, got none")
        bad = np.flatnonzero(~np.isfinite(features).all(axis=0))
        if len(bad):
            raise ValueError(f"features: wanted finite values, got others in {_named(bad)}")
        # Float64 adds up to 2^29 equal float32 values without rounding, so a constant column has
        # itself as its mean and a deviation of exactly 0.
        mean = features.mean(axis=0, dtype=np.float64)
        square = np.zeros_like(mean)
        # In steps, so that the float64 copy stays small.
        for start in range(0, len(features), 16_384):
            apart = features[start : start + 16_384] - mean
            square += (apart * apart).sum(axis=0)
        std = np.sqrt(square / len(features)).astype(np.float32)
        if np.any(std == 0):
            warnings.warn(
                f"features: {_named(np.flatnonzero(std == 0))} constant, and normalized to 0",
                stacklevel=2,
            )
        return cls(mean.astype(np.float32), std)

    def apply(self, features: np.ndarray) -> np.ndarray:
        """Return the normalized copy of float32 [N, F], float32 [N, F].

        Args:
            features: rows of any split, in the column order of the fit.

        Raises:
            TypeError: features is not a float32 array.
            ValueError: another number of columns.
        """
        _check_features(features)
        if features.shape[1] != len(self.mean):
            raise ValueError(f"features: wanted {len(self.mean)} columns, got {features.shape[1]}")
        constant = self.std == 0
        out = features - self.mean
        out /= np.where(constant, np.float32(1), self.std)
        np.clip(out, -CLIP, CLIP, out=out)
        out[:, constant] = 0
        return out

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the arrays by name, for a checkpoint."""
        return {"mean": self.mean.copy(), "std": self.std.copy()}

    @classmethod
    def from_dict(cls, arrays: dict[str, np.ndarray]) -> "Normalizer":
        """Make the normalizer that to_dict described.

        Raises:
            TypeError: not float32 arrays.
            ValueError: a name missing or unknown, or arrays that __init__ refuses.
        """
        if set(arrays) != {"mean", "std"}:
            raise ValueError(f"arrays: wanted the names mean and std, got {sorted(arrays)}")
        return cls(arrays["mean"].copy(), arrays["std"].copy())


def _check_features(features: np.ndarray):
    if not isinstance(features, np.ndarray) or features.dtype != np.float32:
        came = getattr(features, "dtype", type(features).__name__)
        raise TypeError(f"features: wanted a NumPy array of float32, got {came}")
    if features.ndim != 2:
        raise ValueError(f"features: wanted shape [N, F], got {features.shape}")


def _named(columns: np.ndarray) -> str:
    """Name columns by number, and by feature where there is one; the verb follows."""
    names = [FEATURES[c].name if c < len(FEATURES) else str(c) for c in columns]
    return ", ".join(names) + (" is" if len(names) == 1 else " are")
