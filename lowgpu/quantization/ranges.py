"""What range of values the levels stand for: from extremes and histograms of calibration data."""

import numpy as np

LOWEST, HIGHEST = -128, 127
STEPS = HIGHEST - LOWEST  # between the first level and the last
TINY = float(np.finfo(np.float32).tiny)  # its reciprocal is finite; a denormal's need not be
BINS_A_STEP = 8  # so that a bin's width is small beside a step
SHRINKS = np.linspace(0.3, 1.0, 71)  # parts of the range that the least squared error is sought in


class Extremes:
    """Least and largest value of each column, 0 always among them."""

    def __init__(self, columns):
        self.low = np.zeros(columns)
        self.high = np.zeros(columns)

    def add(self, values):
        """Take in float32 [rows, columns]."""
        np.minimum(self.low, values.min(axis=0, initial=0), out=self.low)
        np.maximum(self.high, values.max(axis=0, initial=0), out=self.high)


class Histogram:
    """How often values of each column fall into equal parts of its range.

    Args:
        low, high: ends of each column's range, 0 within.
        steps: that the range will be cut into.
    """

    def __init__(self, low, high, steps=STEPS):
        self.low, self.span, self.steps = low, high - low, steps
        self.bins = steps * BINS_A_STEP
        self.counts = np.zeros((len(low), self.bins), np.int64)

    def add(self, values):
        """Take in [rows, columns] whose values lie within the range."""
        width = np.where(self.span > 0, self.span, 1)
        part = ((values - self.low) / width * self.bins).astype(np.int64)
        part = np.clip(part, 0, self.bins - 1) + np.arange(len(self.low)) * self.bins
        self.counts += np.bincount(part.ravel(), minlength=self.counts.size).reshape(-1, self.bins)

    def percentile(self, percent):
        """(low, high) between which all but 100 - percent of each end of a column's values lie."""
        tail = self.counts.sum(axis=1, keepdims=True) * (100 - percent) / 100
        below = self.counts.cumsum(axis=1)
        above = self.counts[:, ::-1].cumsum(axis=1)  # of the last bin, the last two, and so on
        first = np.argmax(below > tail, axis=1)
        last = self.bins - 1 - np.argmax(above > tail, axis=1)
        low = self.low + self.span * first / self.bins
        high = self.low + self.span * (last + 1) / self.bins
        return np.minimum(low, 0), np.maximum(high, 0)

    def least_error(self):
        """(low, high) of the part of the range whose levels are nearest to the values, squared."""
        high = self.low + self.span
        middle = self.low[:, None] + self.span[:, None] * (np.arange(self.bins) + 0.5) / self.bins
        best, least = np.ones(len(self.low)), np.full(len(self.low), np.inf)
        for part in SHRINKS[::-1]:
            scale, zero = levels(self.low * part, high * part, self.steps)
            scale, zero = scale.astype(np.float64)[:, None], zero[:, None]
            level = np.clip(np.rint(middle / scale) + zero, LOWEST, LOWEST + self.steps)
            error = (self.counts * np.square((level - zero) * scale - middle)).sum(axis=1)
            better = error < least
            best[better], least[better] = part, error[better]
        return self.low * best, high * best


def levels(low, high, steps=STEPS):
    """Scale and zero point of the levels from -128 on over a range that has 0 in it.

        scale = (high - low) / steps
        zero  = rint(-128 - low / scale), so that 0 is a level

    Args:
        low, high: ends of each range, low <= 0 <= high.
        steps: 255 for int8.

    Returns:
        (scale float32, zero int32).

    Source: Jacob et al. 2018, Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, section 2.1 and equation 13.
    """
    scale = np.maximum((high - low) / steps, TINY).astype(np.float32)
    zero = np.rint(LOWEST - low / scale.astype(np.float64))
    return scale, np.clip(zero, LOWEST, LOWEST + steps).astype(np.int32)
