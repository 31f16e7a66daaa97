"""Elimination of common subexpressions: equal pure nodes are merged into one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import frozen
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Substitution


class CommonSubexpressions(Pass):
    """Merge nodes with equal operation, inputs and attributes. A nested graph may reuse values of
    the graphs around it, never the other way round."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        eliminator = _Eliminator()
        eliminator.run(graph)
        return bool(eliminator.substitution)


class _Scope:
    """The nodes of one graph so far: by rough key, and by full key if several nodes share a rough
    key. None marks rough keys whose nodes all have entries in ``equal``."""

    def __init__(self) -> None:
        self.alone: dict[Hashable, Node | None] = {}
        self.equal: dict[Hashable, Node] = {}


class _Eliminator:
    def __init__(self) -> None:
        self.substitution = Substitution()
        self.scopes: list[_Scope] = []
        self.constants: dict[Value, tuple[Hashable, np.ndarray]] = {}

    def run(self, graph: Graph) -> None:
        own, is_outermost = _Scope(), not self.scopes
        self.scopes.append(own)
        kept = []
        for node in with_checkpoints(graph.nodes):
            if node.control_inputs or not self.substitution.replaced.isdisjoint(node.inputs):
                self.substitution.apply(node)
            for _, inner in node.graphs if node.nests else ():
                self.run(inner)
            # A node with control inputs may have to run later than an equal one.
            mergeable = node.op.pure and not node.control_inputs and not node.nests
            computed: list[Any] = [node.op]
            for value in node.inputs:
                if value is None or value.is_constant:
                    computed.append(None)
                else:
                    computed.append(value)
            rough = tuple(computed)
            # Most nodes share operation and inputs with no other one, and need no full key of their
            # attributes and constants.
            alone = not mergeable or (is_outermost and own.alone.setdefault(rough, node) is node)
            equal = None if alone else self.seen(node, rough)
            if equal is None:
                kept.append(node)
                continue
            self.substitution.drop(node, [equal])
            self.substitution.replace(node.outputs, equal.outputs)
        graph.nodes = kept
        self.substitution.apply_outputs(graph)
        self.scopes.pop()

    def seen(self, node: Node, rough: Hashable) -> Node | None:
        """Return an earlier equal node; if there is none, record this one."""
        own = self.scopes[-1]
        same = [scope for scope in self.scopes if rough in scope.alone]
        if not same:
            own.alone[rough] = node
            return None
        for scope in same:
            if (alone := scope.alone[rough]) is not None:
                scope.equal[self.key(alone)] = alone
                scope.alone[rough] = None
        key = self.key(node)
        equal = next((scope.equal[key] for scope in same if key in scope.equal), None)
        if equal is None:
            own.alone[rough] = None
            own.equal[key] = node
        return equal

    def key(self, node: Node) -> Hashable:
        """Return a key that equal nodes share."""
        # A node without an optional output cannot replace one that has it.
        present = tuple([value is not None for value in node.outputs])
        inputs = tuple([self.input_key(value) for value in node.inputs])
        attrs = node.attrs and tuple([(k, frozen(v)) for k, v in sorted(node.attrs.items())])
        # Nodes on different devices must compute on each of them.
        return node.op, inputs, attrs or (), present, node.device

    def input_key(self, value: Value | None) -> Hashable:
        if value is None or not value.is_constant:
            return value
        if not value.is_held:  # released, so large and compared by identity
            return id(value.resident_in or value)
        const = value.const
        assert const is not None
        if value not in self.constants:
            # Keep the array alive: the key of a large one is its id, which could be reused.
            self.constants[value] = frozen(const), const
        return self.constants[value][0]
