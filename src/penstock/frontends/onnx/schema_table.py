"""ONNX's schemas as a text file, since the onnx package takes 7 MB to look one up.

``schemas.txt`` has all versions of all operations of the release to which the package is pinned;
``python -m tools.onnx_schemas`` writes it. The first line lists sets of types; each other line is
an operation: its domain, its name, and the fields of a ``SchemaRecord`` from ``version`` on for
each version, the newest first. Sets of types are numbers there::

     Sign [[13,1,1,1,1,false,{},[["input","T",0,true,7]],[["output","T",0,true,7]]],[9,...]]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import AttributeProto, FunctionProto

FILE = Path(__file__).with_name("schemas.txt")
OPTIONAL, VARIADIC = 1, 2
"""The ``option`` of a port that may be left out, and of one that stands for any number of values"""


class SchemaAttribute(NamedTuple):
    """``default``: an ``AttributeProto`` in the hexadecimal digits of its encoding."""

    type: int
    required: bool
    default: str


class SchemaPort(NamedTuple):
    """An input or an output. ``types`` are those that it may have; empty if any."""

    name: str
    type_str: str
    option: int
    is_homogeneous: bool
    types: frozenset[str]

    @property
    def variable(self) -> str:
        """What its type is called: equal names, equal types; "" if it stands for itself."""
        return "" if self.option == VARIADIC and not self.is_homogeneous else self.type_str

    def takes(self, type_: str) -> bool:
        return type_ in self.types or not self.types


class SchemaRecord(NamedTuple):
    """What the package says of one version of an operation."""

    name: str
    domain: str
    version: int
    min_input: int
    max_input: int
    min_output: int
    max_output: int
    has_function: bool
    attributes: Mapping[str, SchemaAttribute]
    inputs: Sequence[SchemaPort]
    outputs: Sequence[SchemaPort]

    @property
    def function(self) -> FunctionProto | None:
        """The body that defines the operation, which only the package has."""
        if not self.has_function:
            return None
        return onnx.defs.get_schema(self.name, self.version, self.domain).function_body


def schema_record(name: str, domain: str, opset: int) -> SchemaRecord | None:
    """The newest version of an operation up to that of an opset."""
    lines, sets = _table()
    versions = json.loads(lines.get((domain, name), "[]"))
    for version, *numbers, attributes, inputs, outputs in versions:
        if version <= opset:
            ports = [
                [SchemaPort._make([*port, sets[i]]) for *port, i in side]
                for side in (inputs, outputs)
            ]
            attrs = {key: SchemaAttribute(*fields) for key, fields in attributes.items()}
            return SchemaRecord._make([name, domain, version, *numbers, attrs, *ports])
    return None


def newest_versions() -> Mapping[str, int]:
    """By domain, the newest version of any operation."""
    newest: dict[str, int] = {}
    for (domain, _), line in _table()[0].items():
        newest[domain] = max(newest.get(domain, 0), json.loads(line)[0][0])
    return newest


@cache
def _table() -> tuple[Mapping[tuple[str, str], str], Sequence[frozenset[str]]]:
    """The lines of operations by domain and name, and the sets of types."""
    sets, *lines = FILE.read_text("ascii").splitlines()
    keys = [line.split(" ", 2) for line in lines]
    return {(d, n): text for d, n, text in keys}, [frozenset(s) for s in json.loads(sets)]


def default_of(attribute: SchemaAttribute) -> AttributeProto:
    return AttributeProto.FromString(bytes.fromhex(attribute.default))
