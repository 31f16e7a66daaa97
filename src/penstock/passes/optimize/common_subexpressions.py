"""Elimination of common subexpressions: equal pure nodes are merged into one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from penstock.algorithms.checkpoints import paced
from penstock.ir.graph import Graph, Node, Value
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Substitution

# Elements of an attribute beyond which it is equal only to itself.
_MOST_ELEMENTS = 64
_SMALL = 4096  # bytes up to which constants are compared by content rather than identity


class CommonSubexpressions(Pass):
    """Merge nodes with equal operation, inputs and attributes. A nested graph may use what the
    graphs around it have computed, never the other way round."""

    name = "common_subexpressions"

    def run(self, graph: Graph, context: PassContext) -> bool:
        eliminator = _Eliminator()
        eliminator.run(graph)
        return bool(eliminator.substitution)


class _Eliminator:
    def __init__(self) -> None:
        self.substitution = Substitution()
        self.scopes: list[dict[Hashable, Node]] = []
        self.constants: dict[Value, tuple[Hashable, np.ndarray]] = {}

    def run(self, graph: Graph) -> None:
        self.scopes.append({})
        kept = []
        for node in paced(graph.nodes):
            if self.substitution:
                self.substitution.apply(node)
            for _, inner in node.graphs:
                self.run(inner)
            key = self.key(node)
            equal = next((scope[key] for scope in self.scopes if key in scope), None)
            if equal is None:
                kept.append(node)
                if key is not None:
                    self.scopes[-1][key] = node
                continue
            self.substitution.drop(node, [equal])
            self.substitution.replace(node.outputs, equal.outputs)
        graph.nodes = kept
        self.substitution.apply_outputs(graph)
        self.scopes.pop()

    def key(self, node: Node) -> Hashable:
        """A key that equal nodes share; ``None`` if ``node`` must not be merged with any other."""
        if not node.op.pure or node.control_inputs or node.graphs:
            return None
        present = tuple([value is not None for value in node.outputs])
        inputs = tuple([self.input_key(value) for value in node.inputs])
        attrs = node.attrs and tuple([(k, _frozen(v)) for k, v in sorted(node.attrs.items())])
        return node.op, inputs, attrs or (), present, node.device

    def input_key(self, value: Value | None) -> Hashable:
        const = None if value is None else value.const
        if value is None or const is None:
            return value
        if value not in self.constants:
            self.constants[value] = _frozen(const), const
        return self.constants[value][0]


def _frozen(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _SMALL and value.dtype != object
        return (value.dtype, value.shape, value.tobytes()) if small else id(value)
    if isinstance(value, list | tuple):
        if len(value) > _MOST_ELEMENTS:  # such as the nodes of trees: equal ones are rare
            return id(value)
        if {*map(type, value)} <= {int, str}:
            return tuple(value)
        return tuple([_frozen(x) for x in value])
    # As attributes, -0.0 differs from 0.0 and 1 from 1.0, though they compare equal.
    return (type(value), repr(value)) if isinstance(value, float) else value
