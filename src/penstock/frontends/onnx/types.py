"""Types as ONNX models declare them."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from penstock.errors import InvalidModel
from penstock.frontends.onnx.tensors import element_dtype, text
from penstock.types import ANY, Dim, MapType, OptionalType, SequenceType, TensorType, Type

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
