"""Schemas of TensorFlow's operations: inputs, outputs and attributes, with their types.

``operations.txt`` lists them, and explains the format of its lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

from penstock.core.records import cached_property, dataclass
from penstock.frontends.tensorflow.proto.graphdef_pb2 import TensorProto
from penstock.frontends.tensorflow.tensors import TYPE_NAMES, FunctionReference
from penstock.ir.op import Attrs


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output. ``count`` is the attribute with the number of its values, "" for one
    value; ``type`` an attribute or an element type; ``ref`` marks a reference to a variable."""

    name: str
    count: str = ""
    type: str = "T"
    ref: bool = False

    def times(self, attrs: Attrs) -> int:
        """Return the number of values. ``ValueError``: the attributes do not define it."""
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

    def types(self, attrs: Attrs) -> Sequence[str | None]:
        """Return the element type's name of each value; ``None`` if it is unknown."""
        count = self.times(attrs)
        names = attrs.get(self.count) if self.count else None
        if isinstance(names, list):
            return [dtype if isinstance(dtype, str) else None for dtype in names]
        return [self.type_name(attrs)] * count

    def type_name(self, attrs: Attrs) -> str | None:
        """Return the element type's name of each value, if it does not come from a list."""
        dtype = attrs.get(self.type, self.type if self.type in TYPE_NAMES else None)
        return dtype if isinstance(dtype, str) else None


@dataclass(frozen=True, slots=True)
class AttributeType:
    """The values of an attribute: of Python's ``types``, as ``tensors`` decodes them, or a list of
    these; ``allowed`` has the permitted values, if not all are."""

    types: tuple[type, ...]
    is_list: bool = False
    allowed: frozenset[str] = frozenset()

    def check(self, value: Any) -> None:
        """Raise ``ValueError`` unless the attribute may have this value."""
        is_list = type(value) is list
        for element in value if is_list else (value,):
            # Not isinstance, since True is an int in Python.
            if type(element) not in self.types or is_list is not self.is_list:
                raise ValueError(f"is {value!r:.100}, of another type")
            if self.allowed and element not in self.allowed:
                raise ValueError(
                    f"is {element!r:.100}, not one of {', '.join(sorted(self.allowed))}"
                )


@dataclass(frozen=True)
class TfSchema:
    """The inputs, outputs and attributes of an operation, or of a function of the library."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    attributes: Mapping[str, AttributeType]
    defaults: Mapping[str, Any]

    @cached_property
    def required(self) -> Sequence[str]:
        """The attributes without default that determine the number and types of values."""
        named = {name for x in (*self.inputs, *self.outputs) for name in (x.count, x.type)}
        return sorted(named & self.attributes.keys() - self.defaults.keys())

    def inputs_of(self, attrs: Attrs) -> list[tuple[Argument, str | None]]:
        """Return the argument and element type of each input of a node with these attributes."""
        return [(argument, dtype) for argument, _, dtype in _values(self.inputs, attrs)]

    def outputs_of(self, attrs: Attrs) -> Iterator[tuple[Argument, int, str | None]]:
        """Yield the argument, the index within it, and the element type of each output."""
        return _values(self.outputs, attrs)


def _values(
    arguments: Sequence[Argument], attrs: Attrs
) -> Iterator[tuple[Argument, int, str | None]]:
    for argument in arguments:
        if argument.count:
            for i, dtype in enumerate(argument.types(attrs)):
                yield argument, i, dtype
        else:
            yield argument, 0, argument.type_name(attrs)


_MAX_VALUES = 65536
_KINDS: Mapping[str, tuple[type, ...]] = {
    "type": (str,),
    "string": (str,),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "shape": (tuple, NoneType),
    "func": (FunctionReference,),
    "tensor": (TensorProto,),
}


@cache
def schemas() -> Mapping[str, TfSchema]:
    """Return all operations by name."""
    text = Path(__file__).with_name("operations.txt").read_text("ascii")
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    sets = dict(line.split(" = ") for line in lines if line[0] == "$")
    return dict(_schema(line, sets) for line in lines if line[0] != "$")


def _schema(line: str, sets: Mapping[str, str]) -> tuple[str, TfSchema]:
    head, _, attributes = line.partition(" ;")
    name, _, arguments = head.partition(":")
    inputs, outputs = [tuple(map(_argument, side.split())) for side in arguments.split("->")]
    types: dict[str, AttributeType] = {}
    defaults: dict[str, Any] = {}
    for attribute in attributes.split():
        key, _, rest = attribute.partition(":")
        kind, _, default = rest.partition("=")
        types[key] = type_of_attribute(kind, sets)
        if default:
            defaults[key] = json.loads(default)
    return name, TfSchema(inputs, outputs, types, defaults)


def type_of_attribute(kind: str, sets: Mapping[str, str]) -> AttributeType:
    """Return the values of an attribute of this kind, in the notation of ``operations.txt``."""
    is_list = kind.startswith("list(")
    element = kind[5:-1] if is_list else kind
    if element in _KINDS:
        return AttributeType(_KINDS[element], is_list)
    return AttributeType((str,), is_list, frozenset(sets.get(element, element).split("|")))


def _argument(word: str) -> Argument:
    label, _, dtype = word.removesuffix("&").partition(":")
    name, _, count = label.partition("*")
    return Argument(name, count, dtype or "T", word.endswith("&"))
