"""Types that ONNX models declare, and attributes that are plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto

from penstock.errors import InvalidModel
from penstock.frontends.onnx_tensors import element_dtype, text
from penstock.types import (
    ANY,
    STRING,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
)

MAX_NESTING = 32
"""How deep sequences, optionals and maps may nest in one type."""


def value_type(proto: onnx.TypeProto, *, entry: bool = False) -> Type:
    """The type that a ``TypeProto`` declares.

    For an ``entry``, which callers feed, dims of 0 are unknown: exporters write them for dims that
    they leave open. Nobody declares an input that must be empty.
    """
    wrappers: list[Callable[[Type], Type]] = []
    kind = proto.WhichOneof("value")
    while kind in ("sequence_type", "optional_type", "map_type"):
        if len(wrappers) == MAX_NESTING:
            raise InvalidModel(f"its type nests more than {MAX_NESTING} types; declare a simpler")
        if kind == "map_type":
            key = element_dtype(proto.map_type.key_type)
            wrappers.append(lambda inner, key=key: MapType(key, inner))  # type: ignore[misc]
            proto = proto.map_type.value_type
        else:
            wrappers.append(SequenceType if kind == "sequence_type" else OptionalType)
            proto = getattr(proto, kind).elem_type
        kind = proto.WhichOneof("value")
    found: Type = ANY
    if kind in ("tensor_type", "sparse_tensor_type"):  # what is sparse in the file is dense here
        found = _tensor_type(getattr(proto, kind), entry)
    for wrapper in reversed(wrappers):
        found = wrapper(found)
    return found


def _tensor_type(proto: onnx.TypeProto.Tensor, entry: bool) -> TensorType:
    dtype = element_dtype(proto.elem_type) if proto.elem_type else None
    if not proto.HasField("shape"):
        return TensorType(dtype, None)
    return TensorType(dtype, tuple([_dim(dim, entry) for dim in proto.shape.dim]))


def _dim(proto: onnx.TensorShapeProto.Dimension, entry: bool) -> Dim:
    """Negative dims, and names that are only a question mark, stand for unknown dims."""
    kind = proto.WhichOneof("value")
    if kind == "dim_value":
        size = proto.dim_value
        return None if size < 0 or (entry and size == 0) else size
    if kind == "dim_param":
        name = text(proto.dim_param)
        return None if name in ("", "?") else name
    return None


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
