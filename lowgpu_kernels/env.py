"""The env contract: scalar Python functions over a small state, written once for CPU and GPU."""

from collections.abc import Callable
from dataclasses import dataclass

TERMINATED, TRUNCATED = 1, 2


@dataclass(frozen=True)
class Env:
    """An environment as scalar functions; see docs/architecture.md for their arguments.

    Attributes:
        name: what it is called on the command line and in errors.
        observation: columns of an observation, unpadded.
        actions: number of discrete actions, at least 2.
        floats, ints: names of the float32 and int32 state fields, at least one of each.
        reset, step, observe: the functions.
        table_columns: leading observation columns that are copied from a row of the table.
        table_row: which row; needed with table_columns.
        series: names of the read-only float32 series the functions read; at least one with
            table_columns, because `rows` is their length.

    Raises:
        ValueError: counts out of range, or a table without table_row or series.
    """

    name: str
    observation: int
    actions: int
    floats: tuple
    ints: tuple
    reset: Callable
    step: Callable
    observe: Callable
    table_columns: int = 0
    table_row: Callable | None = None
    series: tuple = ()

    def __post_init__(self):
        if not 1 <= self.observation <= 512:
            raise ValueError(f"observation must be in 1..512, got {self.observation}")
        if not 2 <= self.actions <= 64:
            raise ValueError(f"actions must be in 2..64, got {self.actions}")
        if not self.floats or not self.ints:
            raise ValueError(f"{self.name} needs at least one float and one int state field")
        if not 0 <= self.table_columns <= self.observation:
            raise ValueError(
                f"table_columns must be in 0..{self.observation}, got {self.table_columns}"
            )
        if (self.table_row is None) != (self.table_columns == 0):
            raise ValueError(f"{self.name} needs table_row and table_columns together")
        if self.table_columns and not self.series:
            raise ValueError(f"{self.name} has a table and no series: `rows` would be unknown")

    def __repr__(self):
        return f"Env({self.name})"

    @property
    def width(self):
        """Columns of a stored observation row: the next multiple of 8."""
        return -(-self.observation // 8) * 8
