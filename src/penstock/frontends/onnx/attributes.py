"""Attributes of nodes: plain values, tensors, graphs, and references to those of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto, TensorProto

from penstock.errors import InvalidModel
from penstock.frontends.onnx.file import Apart
from penstock.frontends.onnx.schemas import LEGACY
from penstock.frontends.onnx.scopes import Frame
from penstock.frontends.onnx.tensors import TensorError, TensorReader, text
from penstock.frontends.onnx.types import value_type
from penstock.ir.graph import Graph
from penstock.types import STRING

PLAIN: Mapping[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.FLOAT: lambda a: a.f,
    AttributeProto.INT: lambda a: a.i,
    AttributeProto.STRING: lambda a: text(a.s),
    AttributeProto.FLOATS: lambda a: list(a.floats),
    AttributeProto.INTS: lambda a: list(a.ints),
    AttributeProto.STRINGS: lambda a: [text(item) for item in a.strings],
    AttributeProto.TYPE_PROTO: lambda a: value_type(a.tp),
    AttributeProto.TYPE_PROTOS: lambda a: [value_type(item) for item in a.type_protos],
}
"""Readers of attributes by kind, but for those with tensors or graphs in them."""

_FIELDS: Mapping[str, int] = {
    "f": AttributeProto.FLOAT,
    "i": AttributeProto.INT,
    "s": AttributeProto.STRING,
    "t": AttributeProto.TENSOR,
    "g": AttributeProto.GRAPH,
    "tp": AttributeProto.TYPE_PROTO,
    "sparse_tensor": AttributeProto.SPARSE_TENSOR,
}
_LISTS: Mapping[str, int] = {
    "floats": AttributeProto.FLOATS,
    "ints": AttributeProto.INTS,
    "strings": AttributeProto.STRINGS,
    "tensors": AttributeProto.TENSORS,
    "graphs": AttributeProto.GRAPHS,
    "type_protos": AttributeProto.TYPE_PROTOS,
    "sparse_tensors": AttributeProto.SPARSE_TENSORS,
}


def kind_of(proto: AttributeProto) -> int:
    """The kind of an attribute; files of the first IR version do not say, but it can be seen."""
    if proto.type:
        return proto.type
    for name, kind in _FIELDS.items():
        if proto.HasField(name):
            return kind
    return next((kind for name, kind in _LISTS.items() if getattr(proto, name)), 0)


def _strings(value: Any) -> np.ndarray:
    return np.array(value, STRING)


CONSTANTS: Mapping[str, tuple[int, Callable[[Any], np.ndarray]]] = {
    "value": (AttributeProto.TENSOR, np.asarray),
    "sparse_value": (AttributeProto.SPARSE_TENSOR, np.asarray),
    "value_float": (AttributeProto.FLOAT, lambda value: np.array(value, np.float32)),
    "value_floats": (AttributeProto.FLOATS, lambda value: np.array(value, np.float32)),
    "value_int": (AttributeProto.INT, lambda value: np.array(value, np.int64)),
    "value_ints": (AttributeProto.INTS, lambda value: np.array(value, np.int64)),
    "value_string": (AttributeProto.STRING, _strings),
    "value_strings": (AttributeProto.STRINGS, _strings),
}
"""The kind of each attribute that gives a Constant its value, and what makes an array of it."""


class Attributes:
    """Reads the attributes of one model's nodes, and adds what is wrong with them to ``problems``.

    ``nested(proto, key, name, frame)`` makes the graph that is attribute ``key`` of node ``name``.
    """

    def __init__(
        self,
        tensors: TensorReader,
        problems: list[str],
        nested: Callable[[GraphProto, str, str, Frame], Graph],
    ) -> None:
        self.tensors = tensors
        self.problems = problems
        self.nested = nested

    def add(
        self,
        proto: AttributeProto,
        attrs: dict[str, Any],
        kinds: dict[str, int],
        name: str,
        frame: Frame,
    ) -> None:
        """Add one attribute of node ``name`` to its attributes and their kinds."""
        key = text(proto.name)
        if key in kinds:
            self.problems.append(f"{name} in {frame.where} has attribute {key!r} twice; remove one")
        if proto.ref_attr_name:
            found = self.referred(proto, name, frame)
            if found is None:
                return
            proto, frame = found
        kind = kind_of(proto)
        if key in LEGACY:
            return
        kinds[key] = kind
        read = PLAIN.get(kind)
        if read is not None:
            try:
                attrs[key] = read(proto)
            except InvalidModel as error:
                self.problems.append(f"attribute {key!r} of {name} in {frame.where}: {error}")
        elif kind == AttributeProto.GRAPH:
            attrs[key] = self.nested(proto.g, key, name, frame)
        elif kind in (AttributeProto.TENSOR, AttributeProto.SPARSE_TENSOR):
            tensor = proto.t if kind == AttributeProto.TENSOR else proto.sparse_tensor
            attrs[key] = self.tensor(tensor, "attribute", key, f"of {name} in {frame.where}")
        elif kind in (AttributeProto.TENSORS, AttributeProto.SPARSE_TENSORS):
            tensors = proto.tensors if kind == AttributeProto.TENSORS else proto.sparse_tensors
            where = f"of {name} in {frame.where}"
            attrs[key] = [self.tensor(tensor, "attribute", key, where) for tensor in tensors]
        else:
            what = "is a list of graphs" if kind == AttributeProto.GRAPHS else "has no value"
            self.problems.append(
                f"attribute {key!r} of {name} in {frame.where} {what}; no operation takes that"
            )

    def referred(
        self, proto: AttributeProto, name: str, frame: Frame
    ) -> tuple[AttributeProto, Frame] | None:
        """What an attribute within a function stands for, and where that was written; ``None`` if
        the call leaves it out.
        """
        while proto.ref_attr_name:
            wanted = proto.ref_attr_name
            if frame.call is None:
                self.problems.append(
                    f"attribute {text(proto.name)!r} of {name} in {frame.where} refers to "
                    f"attribute {text(wanted)!r} of a function, but is in none"
                )
                return None
            found = frame.call.attributes.get(wanted)
            if found is None or found[0] is proto:
                return None
            proto, frame = found
        return proto, frame

    def constant(self, proto: NodeProto, index: int, frame: Frame) -> np.ndarray | None:
        """The value of a Constant node, or ``None`` if something is wrong with it."""
        name = f"{frame.prefix}{text(proto.name) or f'Constant_{index}'}"
        attrs: dict[str, Any] = {}
        kinds: dict[str, int] = {}
        for attribute in proto.attribute:
            self.add(attribute, attrs, kinds, name, frame)
        given = [key for key in attrs if key in CONSTANTS]
        if len(given) != 1 or len(kinds) != 1:
            self.problems.append(
                f"{name} in {frame.where} is a Constant with attributes {sorted(kinds)}; it must "
                f"have one of {', '.join(CONSTANTS)}"
            )
            return None
        kind, make = CONSTANTS[given[0]]
        if kinds[given[0]] != kind:
            self.problems.append(f"{given[0]} of {name} in {frame.where} is of another kind")
            return None
        array = make(attrs[given[0]])
        array.flags.writeable = False
        return array

    def tensor(
        self, proto: TensorProto | Apart | SparseTensorProto, what: str, name: str, where: str
    ) -> np.ndarray:
        """The contents of a tensor, or of none if something is wrong with it."""
        try:
            if isinstance(proto, SparseTensorProto):
                return self.tensors.read_sparse(proto)
            return self.tensors.read(proto)
        except TensorError as error:
            self.problems.append(f"{what} {name!r} {where}: {error}")
            return np.empty(0, np.float32)
