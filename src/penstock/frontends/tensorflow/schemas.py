"""Schemas of TensorFlow's operations: arity, names of outputs, defaults of attributes.

``operations.txt`` lists them, and says how to read a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output. ``count`` is the attribute with the number of its values, "" for one
    value; ``type`` an attribute or an element type; ``ref`` marks a reference to a variable."""

    name: str
    count: str = ""
    type: str = "T"
    ref: bool = False

    def times(self, attrs: Mapping[str, Any]) -> int:
        """The number of values. Raises ``ValueError`` if the attributes do not define it."""
        if not self.count:
            return 1
        count = attrs.get(self.count)
        if isinstance(count, list):
            return len(count)
        if isinstance(count, int) and 0 <= count <= _MAX_VALUES:
            return count
        raise ValueError(
            f"attribute {self.count!r} is {count!r}, which is no number of values of {self.name}"
        )

    def types(self, attrs: Mapping[str, Any]) -> Sequence[str | None]:
        """The name of the element type of each value; ``None`` if it is unknown."""
        count = self.times(attrs)
        names = attrs.get(self.count) if self.count else None
        if isinstance(names, list):
            return [dtype if isinstance(dtype, str) else None for dtype in names]
        dtype = attrs.get(self.type, self.type if self.type in _TYPES else None)
        return [dtype if isinstance(dtype, str) else None] * count


@dataclass(frozen=True, slots=True)
class TfSchema:
    """The inputs and outputs of an operation, or of a function of the library."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    defaults: Mapping[str, Any]

    def inputs_of(self, attrs: Mapping[str, Any]) -> list[Argument]:
        """An argument for each input of a node with these attributes."""
        return [argument for argument in self.inputs for _ in range(argument.times(attrs))]

    def outputs_of(self, attrs: Mapping[str, Any]) -> Iterator[tuple[Argument, int, str | None]]:
        """Of each output: its argument, its number within that, its element type."""
        for argument in self.outputs:
            for i, dtype in enumerate(argument.types(attrs)):
                yield argument, i, dtype


_MAX_VALUES = 65536
_TYPES = frozenset({"bool", "int32", "int64", "float32", "resource", "variant"})


@cache
def schemas() -> Mapping[str, TfSchema]:
    """All operations by name."""
    text = Path(__file__).with_name("operations.txt").read_text("ascii")
    return dict(_schema(line) for line in text.splitlines() if line and line[0] != "#")


def _schema(line: str) -> tuple[str, TfSchema]:
    head, _, attributes = line.partition(" ;")
    name, _, arguments = head.partition(":")
    inputs, outputs = [tuple(map(_argument, side.split())) for side in arguments.split("->")]
    pairs = (attribute.split("=", 1) for attribute in attributes.split())
    return name, TfSchema(inputs, outputs, {key: json.loads(value) for key, value in pairs})


def _argument(word: str) -> Argument:
    label, _, dtype = word.removesuffix("&").partition(":")
    name, _, count = label.partition("*")
    return Argument(name, count, dtype or "T", word.endswith("&"))
