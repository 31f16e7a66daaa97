"""Attributes of TensorFlow's nodes as Python values.

Element types become their names ("float32", "resource"), shapes tuples with ``None`` for unknown
dims (``None`` for an unknown rank), strings ``str``; the name of a function with its attributes is
a ``Function``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.frontends.tensorflow.proto.graphdef_pb2 import AttrValue, NameAttrList
from penstock.frontends.tensorflow.tensors import TensorError, array_of, shape_of, text, type_name
from penstock.limits import Limits


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the library by name, with the attributes that its body refers to."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor that nobody has decoded yet."""

    proto: Any


def attribute(proto: AttrValue, bound: Mapping[str, Any], limits: Limits) -> Any:
    """The value of an attribute; ``bound`` has those of a function by the names of placeholders.

    Raises ``TensorError``.
    """
    kind = proto.WhichOneof("value")
    if kind is None:
        return None
    if kind == "list":
        return _list(proto.list, bound, limits)
    if kind == "placeholder":
        if proto.placeholder not in bound:
            raise TensorError(f"stands for {proto.placeholder!r}, which nobody gives a value")
        return bound[proto.placeholder]
    if kind == "s":
        return text(proto.s)
    if kind == "type":
        return type_name(proto.type)
    if kind == "shape":
        return shape_of(proto.shape, limits)
    if kind == "tensor":
        return Tensor(proto.tensor)
    if kind == "func":
        return _function(proto.func, bound, limits)
    return getattr(proto, kind)


def _function(proto: NameAttrList, bound: Mapping[str, Any], limits: Limits) -> Function:
    attrs = {key: attribute(value, bound, limits) for key, value in proto.attr.items()}
    return Function(proto.name, attrs)


def _list(proto: AttrValue.ListValue, bound: Mapping[str, Any], limits: Limits) -> list[Any]:
    if proto.s:
        return [text(each) for each in proto.s]
    if proto.type:
        return [type_name(each) for each in proto.type]
    if proto.shape:
        return [shape_of(each, limits) for each in proto.shape]
    if proto.tensor:
        return [array_of(each, limits) for each in proto.tensor]
    if proto.func:
        return [_function(each, bound, limits) for each in proto.func]
    return list(proto.i or proto.f or proto.b)
