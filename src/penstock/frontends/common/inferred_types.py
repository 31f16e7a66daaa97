"""Types of values, inferred on demand while a graph is being built.

A file declares few types: those of inputs and constants. With more types, conversion rules can emit
simpler nodes; without, they emit nodes that are always correct. Only the producers of a value
that a rule asks about are inferred, each once.
"""

from __future__ import annotations

import numpy as np

from penstock.core.types import ANY, TensorType, Type, is_static
from penstock.ir.graph import Node, Value

_MAX_IDENTITIES = 64  # in a chain, which may be a cycle


def source_of(value: Value) -> Value:
    """Return the value of which ``value`` is a copy by Identity nodes."""
    for _ in range(_MAX_IDENTITIES):
        node = value.producer
        source = node.inputs[0] if node is not None and node.op.name == "Identity" else None
        if source is None:
            break
        value = source
    return value


def constant_of(value: Value) -> np.ndarray | None:
    """Return the array that a value holds in every run: of a constant, a Const node, or Identity
    nodes after these. ``None`` for a value with no producer yet, or another one."""
    value = source_of(value)
    node = value.producer
    array: np.ndarray | None = value.const if node is None else None
    return node.attrs.get("value") if node is not None and node.op.name == "Const" else array


class InferredTypes:
    """Types by value. A value whose producer has not been built yet has its declared type."""

    def __init__(self) -> None:
        self._types: dict[Value, Type] = {}
        self._entered: set[Node] = set()
        self._inferred: set[Node] = set()

    def of(self, value: Value) -> Type:
        """Return the type of ``value``: declared if that is static, else inferred if possible."""
        node = value.producer
        if node is None or is_static(value.type):
            return value.type
        if node not in self._inferred:
            self._infer_with_producers(node)
        return self._types.get(value, value.type)

    def tensor(self, value: Value) -> TensorType:
        """Return the type of a tensor; dtype and shape are unknown if nothing is known about it."""
        type_ = self.of(value)
        return type_ if isinstance(type_, TensorType) else TensorType()

    def _infer_with_producers(self, node: Node) -> None:
        """Infer a node after the nodes that it reads; within a cycle, some are still unknown."""
        stack = [node]
        while stack:
            node = stack[-1]
            if node in self._inferred:
                stack.pop()
            elif node in self._entered:
                stack.pop()
                self._inferred.add(node)
                self._infer(node)
            else:
                self._entered.add(node)  # a node that is met again is part of a cycle
                for value in filter(None, node.inputs):
                    producer = None if value.is_constant else value.producer
                    if producer is None or producer in self._entered:
                        continue
                    if value.type is ANY or not is_static(value.type):
                        stack.append(producer)

    def _infer(self, node: Node) -> None:
        if node.nests:  # nested graphs may not have been read yet
            return
        inferred = self._types
        types = [None if v is None else inferred.get(v, v.type) for v in node.inputs]
        constants = [None if v is None else constant_of(v) for v in node.inputs]
        try:
            output_types = node.op.infer(types, node.attrs, constants)
        except Exception:  # verification of the finished graph reports what is wrong
            return
        for output, type_ in zip(node.outputs, output_types, strict=False):
            if output is not None and type_ is not ANY:
                inferred[output] = type_
