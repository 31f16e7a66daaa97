"""What can be known of shapes while a graph is imported, for rules that ask.

The file says little: the types of placeholders and constants. The rest follows, as far as what a
node reads has been imported before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.frontends.tensorflow.proto.graphdef_pb2 import NodeDef
from penstock.ir.graph import Node, Value
from penstock.ops.onnx.control_flow import is_control
from penstock.types import ANY, TensorType, Type

# Identities between a constant and who reads it.
_MOST_IDENTITIES = 8


def in_order(protos: Sequence[NodeDef]) -> list[NodeDef]:
    """Nodes behind what they read, as they stand where that is so; in a loop, somewhere."""
    by_name = {proto.name: proto for proto in protos}
    found: list[NodeDef] = []
    seen: set[str] = set()
    for first in protos:
        stack: list[tuple[NodeDef, Iterator[str]]] = []
        if first.name not in seen:
            seen.add(first.name)
            stack.append((first, iter(first.input)))
        while stack:
            proto, inputs = stack[-1]
            for text in inputs:
                name = text.removeprefix("^").partition(":")[0]
                if name in by_name and name not in seen:
                    seen.add(name)
                    stack.append((by_name[name], iter(by_name[name].input)))
                    break
            else:
                found.append(proto)
                stack.pop()
    return found


def made_constant(value: Value) -> np.ndarray | None:
    """The constant that ``value`` is, if the node that makes it is there already."""
    for _ in range(_MOST_IDENTITIES):
        node = value.producer
        if node is None:
            return value.const
        if node.op.name == "Const":
            found: np.ndarray | None = node.attrs.get("value")
            return found
        if node.op.name != "Identity" or node.inputs[0] is None:
            return None
        value = node.inputs[0]
    return None


class Shapes:
    """The types of values, by what makes them; each is worked out once, when it is asked for."""

    def __init__(self) -> None:
        self._known: dict[Value, Type] = {}

    def of(self, value: Value) -> Type:
        """The type of ``value``, as far as the nodes say that have been imported."""
        known = self._known
        stack = [value]
        begun: set[Node] = set()
        while stack:
            now = stack[-1]
            node = now.producer
            if now in known or node is None or _says_all(now.type) or is_control(node):
                known.setdefault(now, now.type)
                stack.pop()
                continue
            if node not in begun:
                begun.add(node)
                stack += [v for v in node.inputs if v is not None and v not in known]
                continue
            # Either all that it reads is known, or it is in a circle.
            for made, kind in zip(node.outputs, _inferred(node, known), strict=False):
                if made is not None:
                    known.setdefault(made, kind)
            known.setdefault(now, now.type)
            stack.pop()
        return known[value]


def _says_all(kind: Type) -> bool:
    return isinstance(kind, TensorType) and kind.static


def _inferred(node: Node, known: Mapping[Value, Type]) -> Sequence[Type]:
    types = [None if value is None else known.get(value, value.type) for value in node.inputs]
    constants = [None if value is None else made_constant(value) for value in node.inputs]
    try:
        return node.op.infer(types, node.attrs, constants)
    except Exception:  # what is wrong with the node, its own import or verification will say
        return [ANY] * len(node.outputs)
