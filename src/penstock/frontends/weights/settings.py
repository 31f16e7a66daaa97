"""Sizes and flags by name, from configurations and metadata, with their types checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.core.errors import InvalidModel, Unsupported, quoted
from penstock.core.records import dataclass

_MOST = 1 << 31


def unsupported(feature: str, advice: str, where: str) -> Unsupported:
    """Return the error for a valid model with a feature that graphs built here cannot express."""
    return Unsupported.of([(feature, f"not supported here: {advice}", where)])


@dataclass(frozen=True, eq=False)
class Settings:
    """Values by name, with the prefix ``prefix`` in the file; ``label`` names the file in messages.
    ``defaults`` are those of the architecture."""

    label: str
    values: Mapping[str, object]
    prefix: str = ""
    defaults: Mapping[str, object] | None = None

    def get(self, key: str) -> object:
        """Return a value or its default; None if there is neither. A value that is null in the file
        has no default: it means that there is no window, or no cap."""
        if self.prefix + key in self.values:
            return self.values[self.prefix + key]
        return (self.defaults or {}).get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self._or(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MOST:
            raise self.wrong(key, value, "a whole number of at least 1")
        return value

    def optional_count(self, key: str) -> int:
        """``count``, but 0 if there is no value."""
        return self.count(key) if self.get(key) else 0

    def number(self, key: str, default: float | None = None) -> float:
        value = self._or(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, value, "a number")
        if not math.isfinite(value):
            raise self.wrong(key, value, "a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.wrong(key, value, "a number above 0")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return default if value is None else value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def elements(self, key: str, count: int) -> Sequence[object] | None:
        """Return a list of ``count`` elements, or None if there is none."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != count:
            raise self.wrong(key, value, f"a list of {count} elements")
        return value

    def inner(self, key: str) -> Settings | None:
        """Return the settings of a nested group, or None if there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "a group of settings")
        return Settings(f"{key} of {self.label}", value)

    def wrong(self, key: str, value: object, needed: str) -> InvalidModel:
        """Return the error for a value that is missing, or is not what is needed."""
        state = f"is {value!r:.60}" if value is not None else "is missing"
        return InvalidModel(
            f"{quoted(self.prefix + key)} of {self.label} {state}, but {needed} is needed; get the "
            "file from where the weights are from"
        )

    def _or(self, key: str, default: object) -> object:
        value = self.get(key)
        return default if value is None else value
