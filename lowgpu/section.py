"""A group of settings whose fields are annotated with their ranges, and the ranges only settings have."""

import dataclasses
from dataclasses import dataclass

from lowgpu_kernels.dims import Float, Int

WIDEST, DEEPEST = 512, 7


class ConfigError(ValueError):
    """A setting that cannot be used: one sentence with its name, what was wanted and what came."""


@dataclass(frozen=True)
class Widths:
    """A parameter that is a list of hidden widths, each a multiple of `multiple`."""

    multiple: int = 8

    def __call__(self, name, value):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be {self}, got {value!r}")
        whole = all(isinstance(w, int) and not isinstance(w, bool) for w in value)
        inside = whole and all(
            self.multiple <= w <= WIDEST and w % self.multiple == 0 for w in value
        )
        if not inside or not 1 <= len(value) <= DEEPEST:
            raise ValueError(f"{name} must be {self}, got {list(value)!r}")
        return tuple(value)

    def __repr__(self):
        what = "whole numbers" if self.multiple == 1 else f"multiples of {self.multiple}"
        return f"a list of 1 to {DEEPEST} {what} in [{self.multiple}, {WIDEST}]"


@dataclass(frozen=True)
class Text:
    """A parameter that is any text on one line."""

    def __call__(self, name, value):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be {self}, got {type(value).__name__}")
        if not value.isprintable():
            raise ValueError(f"{name} must be {self}, got {value!r}")
        return value

    def __repr__(self):
        return "text on one line"


class Section:
    """A group of settings; every field's annotation is the range that its value is checked with."""

    def __post_init__(self):
        for setting in dataclasses.fields(self):
            kind, value = setting.type, getattr(self, setting.name)
            if isinstance(kind, type):
                if not isinstance(value, kind):
                    raise ConfigError(f"{setting.name} must be a table, got {value!r}")
                continue
            try:
                checked = kind(setting.name, value)
            except (TypeError, ValueError) as error:
                raise ConfigError(str(error)) from None
            # Float and Int give the kernel's width; a config keeps the number that was written.
            plain = {Float: float, Int: int}.get(type(kind))
            object.__setattr__(self, setting.name, plain(value) if plain else checked)
