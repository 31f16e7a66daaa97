"""Keys that the copies of a node in several plans share."""

from __future__ import annotations

from collections.abc import Hashable

from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.op import SMALL, frozen


def node_key(node: Node) -> Hashable | None:
    """Return a key shared by the copies of a node that have the same kernels: in plans for other
    inputs, say. It holds as long as the constants of the node exist. None for nodes with state or
    nested graphs."""
    region = node.attrs.get("region")
    parts = [node] if region is None else region.nodes
    if any(part.nests or not part.op.pure for part in parts):
        return None
    places = {v: i for i, v in enumerate(node.inputs if region is None else region.inputs)}
    key: list[Hashable] = [node.label, *map(_value_key, (*node.inputs, *node.outputs))]
    for part in parts:
        attrs = tuple([(name, frozen(x)) for name, x in part.attrs.items()])
        key += [part.op, attrs, tuple([places.get(value) for value in part.inputs])]
        places.update({v: len(places) + i for i, v in enumerate(part.outputs)})
    try:
        hash(found := tuple(key))
    except TypeError:  # an attribute of a user's operation
        return None
    return found


def _value_key(value: Value | None) -> Hashable:
    if value is None:
        return None
    type_ = value.type
    if not value.is_constant:
        return type_  # with its contents, as far as they are known
    small = isinstance(type_, TensorType) and type_.static and type_.nbytes <= SMALL
    return frozen(value.const) if small else id(value)
