"""Tools for writing a node of an older operator version as nodes of the current ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.errors import InternalError
from penstock.frontends.onnx.schemas import Schema, find_schema, newest_opset
from penstock.ir.graph import Node, Value
from penstock.ir.op import Op
from penstock.ops import find
from penstock.ops.common.reference import reference_op
from penstock.types import ANY, FLOAT32, INT64, TensorType, Type


class InexpressibleError(Exception):
    """The node means something that no current operation does; the message says what."""


class NodeError(Exception):
    """The node breaks a rule of its version; the message says which, after the node's name."""


@cache
def current(name: str) -> tuple[Op, Schema]:
    """The newest version of an operation of ONNX."""
    schema = find_schema(name, "", newest_opset(""))
    if schema is None:
        raise InternalError(f"{name} is no operation of ONNX")
    op = find(name) or reference_op(name, "", schema.version)
    if op is None:
        raise InternalError(f"there is no kernel of {schema}")
    return op, schema


class Types:
    """What can be known of values while a graph is being read, by inference from their producers.

    Rewritings use it to write less where more is known, and are right where nothing is.
    """

    def __init__(self) -> None:
        self.known: dict[Value, Type] = {}
        self.entered: set[Node] = set()
        self.done: set[Node] = set()

    def of(self, value: Value) -> TensorType:
        """The type of a tensor; all of it unknown where nothing is known, or it is none."""
        stack = [value]
        while stack:
            node = stack[-1].producer
            if node is None or node in self.done:
                stack.pop()
            elif node in self.entered or node.graphs:
                self.infer(node)
            else:
                self.entered.add(node)
                stack += [v for v in node.inputs if v is not None and self.waits(v.producer)]
        kind = self.known.get(value, value.type)
        return kind if isinstance(kind, TensorType) else TensorType()

    def waits(self, node: Node | None) -> bool:
        return node is not None and node not in self.entered

    def infer(self, node: Node) -> None:
        self.done.add(node)
        if node.graphs:  # they have not been read yet
            return
        types = [None if v is None else self.known.get(v, v.type) for v in node.inputs]
        consts = [None if v is None else v.const for v in node.inputs]
        try:
            inferred = node.op.infer(types, node.attrs, consts)
        except Exception:
            return  # what is wrong is reported by those who check the finished graph
        for output, kind in zip(node.outputs, inferred, strict=False):
            if output is not None and kind is not ANY:
                self.known[output] = kind


class Rewriting:
    """A node of an older version, and the nodes of current versions that it becomes.

    ``inputs``, ``outputs`` and ``attrs`` are those of the old node. ``emit`` makes a node in front
    of the last one, ``become`` makes the last one, which has the old one's name and outputs.
    """

    def __init__(
        self,
        name: str,
        version: int,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        attrs: Mapping[str, Any],
        *,
        origin: str = "",
        types: Types | None = None,
        unique: Callable[[str], str] = str,
    ) -> None:
        self.name = name
        self.version = version
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.attrs = attrs
        self.origin = origin
        self.types = types or Types()
        self.unique = unique
        self.nodes: list[Node] = []

    def input(self, index: int) -> Value:
        """An input that the old version requires."""
        value = self.inputs[index]
        assert value is not None, "checked against the schema"
        return value

    def optional(self, index: int) -> Value | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def rank(self, value: Value) -> int | None:
        return self.types.of(value).rank

    def fresh(self, hint: str) -> str:
        """A name for a new value that nothing in the model has."""
        made = next((v.name for v in self.outputs if v is not None), self.name)
        return self.unique(f"{made}/{hint}")

    def constant(self, data: Any, dtype: np.dtype = INT64) -> Value:
        """A constant; numbers that the dtype cannot hold become infinite, as in a Cast."""
        with np.errstate(all="ignore"):
            array = np.asarray(data, np.float64 if dtype.kind not in "iub" else None).astype(dtype)
        return Value(self.fresh("constant"), const=array)

    def like(self, number: float, value: Value) -> Value:
        """A scalar of the dtype of ``value``, cast during the run where that is not known here."""
        dtype = self.types.of(value).dtype
        if dtype is not None:
            return self.constant(number, dtype)
        return self.emit("CastLike", [self.constant(number, FLOAT32), value])

    def emit(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Value:
        """A new node with one new output, which is returned."""
        output = Value(self.fresh(op.lower()))
        name = f"{self.name}/{op}"
        self.node(op, inputs, [output], {**(attrs or {}), **more}, name)
        return output

    def become(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        outputs: Sequence[Value | None] | None = None,
    ) -> None:
        """The last node. Its attributes are those of ``attrs`` that the current version has."""
        _, schema = current(op)
        kept = {k: v for k, v in (attrs or {}).items() if k in schema.attributes}
        self.node(op, inputs, self.outputs if outputs is None else outputs, kept, self.name)

    def node(
        self,
        op: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        attrs: Mapping[str, Any],
        name: str,
    ) -> None:
        found, schema = current(op)
        attrs = {**schema.defaults, **attrs}
        self.nodes.append(Node(found, inputs, outputs, attrs, name=name, origin=self.origin))
