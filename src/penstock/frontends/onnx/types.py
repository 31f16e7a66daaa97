"""Types as ONNX models declare them."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from penstock.errors import InvalidModel
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.tensors import dtype_of_code
from penstock.types import ANY, Dim, MapType, OptionalType, SequenceType, TensorType, Type

MAX_NESTING = 32
"""The depth to which sequences, optionals and maps may nest in one type."""


def value_type(proto: onnx.TypeProto, *, entry: bool = False) -> Type:
    """The type that a ``TypeProto`` declares. For an ``entry``, which callers feed, dims of 0 are
    unknown: exporters write 0 for dims that they leave open, and an input that must be empty has no
    use. Raises ``InvalidModel``."""
    wrappers: list[Callable[[Type], Type]] = []
    form = proto.WhichOneof("value")
    while form in ("sequence_type", "optional_type", "map_type"):
        if len(wrappers) == MAX_NESTING:
            raise InvalidModel(
                f"its type nests more than {MAX_NESTING} types; declare a simpler one"
            )
        if form == "map_type":
            key = dtype_of_code(proto.map_type.key_type)
            wrappers.append(lambda inner, key=key: MapType(key, inner))  # type: ignore[misc]
            proto = proto.map_type.value_type
        else:
            wrappers.append(SequenceType if form == "sequence_type" else OptionalType)
            proto = getattr(proto, form).elem_type
        form = proto.WhichOneof("value")
    type_: Type = ANY
    if form in ("tensor_type", "sparse_tensor_type"):  # sparse tensors are made dense
        tensor = getattr(proto, form)
        dims = [_dim(dim, entry) for dim in tensor.shape.dim]
        dtype = dtype_of_code(tensor.elem_type) if tensor.elem_type else None
        type_ = TensorType(dtype, tuple(dims) if tensor.HasField("shape") else None)
    for wrapper in reversed(wrappers):
        type_ = wrapper(type_)
    return type_


def _dim(proto: onnx.TensorShapeProto.Dimension, entry: bool) -> Dim:
    """A size, a name, or ``None`` for an unknown dim: negative, unnamed, or named "?"."""
    form = proto.WhichOneof("value")
    if form == "dim_value":
        size = proto.dim_value
        return None if size < 0 or (entry and size == 0) else size
    if form == "dim_param":
        name = decode_text(proto.dim_param)
        return None if name in ("", "?") else name
    return None
