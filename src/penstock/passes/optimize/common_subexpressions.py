"""Elimination of common subexpressions: equal pure nodes are merged into one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from penstock.ir.graph import Graph, Node, Value
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Substitution

_SMALL = 4096  # bytes up to which constants are compared by content rather than identity


class CommonSubexpressions(Pass):
    """Merge nodes with equal operation, inputs and attributes.

    A nested graph may use what the graphs around it have computed, never the other way round.
    """

    name = "common_subexpressions"

    def run(self, graph: Graph, context: PassContext) -> bool:
        eliminator = _Eliminator()
        eliminator.run(graph)
        return eliminator.changed


class _Eliminator:
    def __init__(self) -> None:
        self.substitution = Substitution()
        self.scopes: list[dict[Hashable, Node]] = []
        self.constants: dict[Value, Hashable] = {}
        self.changed = False

    def run(self, graph: Graph) -> None:
        self.scopes.append({})
        kept = []
        for node in graph.nodes:
            if self.substitution:
                self.substitution.apply(node)
            if node.graphs:
                for _, inner in node.graphs:
                    self.run(inner)
                kept.append(node)
                continue
            key = self.key(node)
            equal = self.find(key) if key is not None else None
            if equal is None:
                if key is not None:
                    self.scopes[-1][key] = node
                kept.append(node)
                continue
            self.changed = True
            self.substitution.drop(node, [equal])
            for old, new in zip(node.outputs, equal.outputs, strict=True):
                if old is not None and new is not None:
                    self.substitution[old] = new
        graph.nodes = kept
        self.substitution.apply_outputs(graph)
        self.scopes.pop()

    def find(self, key: Hashable) -> Node | None:
        for scope in self.scopes:
            if key in scope:
                return scope[key]
        return None

    def key(self, node: Node) -> Hashable:
        """A key that equal nodes share; ``None`` if ``node`` must not be merged with any other."""
        if not node.op.pure or node.control_inputs:
            return None
        present = tuple([value is not None for value in node.outputs])
        inputs = tuple([self.input_key(value) for value in node.inputs])
        attrs = node.attrs and tuple([(k, _frozen(v)) for k, v in sorted(node.attrs.items())])
        return node.op, inputs, attrs or (), present, node.device

    def input_key(self, value: Value | None) -> Hashable:
        if value is None or value.const is None:
            return value
        key = self.constants.get(value)
        if key is None:
            array = value.const
            if array.nbytes <= _SMALL and array.dtype != object:
                key = (array.dtype, array.shape, array.tobytes())
            else:
                key = id(array)
            self.constants[value] = key
        return key


def _frozen(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _SMALL and value.dtype != object
        return (value.dtype, value.shape, value.tobytes()) if small else id(value)
    if isinstance(value, list | tuple):
        return tuple([_frozen(x) for x in value])
    # As attributes, -0.0 differs from 0.0 and 1 from 1.0, though they compare equal.
    return (type(value), repr(value)) if isinstance(value, float) else value
