"""Attributes of TensorFlow's nodes as Python values.

Element types become their names ("float32", "resource"), shapes tuples with ``None`` for unknown
dims (``None`` for an unknown rank), strings ``str``, functions ``FunctionReference``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.tensorflow.proto.graphdef_pb2 import AttrValue, NameAttrList
from penstock.frontends.tensorflow.tensors import decode_shape, decode_tensor, type_name
from penstock.limits import Limits


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A function of the library by name, with the attributes that its body refers to."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTensor:
    """A ``TensorProto``, which is decoded when its elements are needed."""

    proto: Any


def decode_attribute(proto: AttrValue, bound: Mapping[str, Any], limits: Limits) -> Any:
    """The value of an attribute; ``bound`` has those of a function, by the name
    with which its body refers to them.

    Raises ``TensorError``.
    """
    field_name = proto.WhichOneof("value")
    if field_name is None:
        return None
    if field_name == "list":
        return _list(proto.list, bound, limits)
    if field_name == "placeholder":
        if proto.placeholder not in bound:
            raise TensorError(f"stands for {proto.placeholder!r}, which has no value here")
        return bound[proto.placeholder]
    if field_name == "s":
        return decode_text(proto.s)
    if field_name == "type":
        return type_name(proto.type)
    if field_name == "shape":
        return decode_shape(proto.shape, limits)
    if field_name == "tensor":
        return EncodedTensor(proto.tensor)
    if field_name == "func":
        return _function(proto.func, bound, limits)
    return getattr(proto, field_name)


def _function(proto: NameAttrList, bound: Mapping[str, Any], limits: Limits) -> FunctionReference:
    attrs = {key: decode_attribute(value, bound, limits) for key, value in proto.attr.items()}
    return FunctionReference(proto.name, attrs)


def _list(proto: AttrValue.ListValue, bound: Mapping[str, Any], limits: Limits) -> list[Any]:
    if proto.s:
        return [decode_text(element) for element in proto.s]
    if proto.type:
        return [type_name(element) for element in proto.type]
    if proto.shape:
        return [decode_shape(element, limits) for element in proto.shape]
    if proto.tensor:
        return [decode_tensor(element, limits) for element in proto.tensor]
    if proto.func:
        return [_function(element, bound, limits) for element in proto.func]
    return list(proto.i or proto.f or proto.b)
