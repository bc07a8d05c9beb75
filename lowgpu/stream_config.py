"""The settings of a table that streams through the device."""

from dataclasses import dataclass

from lowgpu.section import ConfigError, Section
from lowgpu_kernels.dims import Int


@dataclass(frozen=True)
class StreamConfig(Section):
    """How a market's table streams through the device where it does not stay there.

    Args:
        rows: of a window, from 2; the device holds two. 0 keeps the table on the device.
        every: iterations on a window; 0 chooses enough for whole episodes, and for DQN enough to fill
            the replay.
    """

    rows: Int(0, 2**30 - 1) = 0
    every: Int(0, 2**31 - 1) = 0

    def __post_init__(self):
        super().__post_init__()
        if self.rows == 1:
            raise ConfigError("rows must be 0 or at least 2, got 1")
