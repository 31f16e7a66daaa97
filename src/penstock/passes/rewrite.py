"""The walk that local passes share: once through the nodes in order, replacing as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.ir.graph import Graph, Node, Value

Replacement = Sequence[Value | None] | None
Visit = Callable[[Node], Replacement | bool]


def forward(graph: Graph, visit: Visit) -> bool:
    """Call ``visit`` for every node, nested graphs first; return whether anything changed.

    ``visit`` returns a value for each of the node's outputs, which then replaces every later use of
    that output, and the node is dropped; or ``None`` or ``False`` to keep the node as it is; or
    ``True`` if it changed the node in place. When a node is visited, replacements have already been
    applied to its inputs.
    """
    return _Forward(visit).run(graph)


class Substitution:
    """Which value stands for which, and which nodes are gone; applied to nodes as a walk comes by.

    Who waited for a node that is gone (``Node.control_inputs``) waits for all that it waited for.
    """

    __slots__ = ("_gone", "_values", "used")

    def __init__(self) -> None:
        self._values: dict[Value, Value] = {}
        self._gone: dict[Node, Sequence[Node]] = {}
        self.used = False
        """whether anything was replaced"""

    def __setitem__(self, old: Value, new: Value) -> None:
        self._values[old] = new

    def __len__(self) -> int:
        return len(self._values) + len(self._gone)

    def of(self, value: Value) -> Value:
        """What ``value`` is now."""
        return self._values.get(value, value)

    def drop(self, node: Node, instead: Sequence[Node] = ()) -> None:
        """``node`` is gone, and ``instead`` runs in its place."""
        made = [v.producer for v in node.inputs if v is not None and v.producer is not None]
        self._gone[node] = (*node.control_inputs, *made, *instead)

    def apply(self, node: Node) -> None:
        """Replace what ``node`` reads and what it waits for."""
        found = self._values
        for i, value in enumerate(node.inputs):
            if value is not None and value in found:
                node.inputs[i] = found[value]
                self.used = True
        if node.control_inputs and not self._gone.keys().isdisjoint(node.control_inputs):
            node.control_inputs = self._left(node.control_inputs)

    def apply_outputs(self, graph: Graph) -> None:
        """Replace the outputs and the targets of ``graph``."""
        if not self._gone.keys().isdisjoint(graph.targets):
            # A node around this graph, which has computed the same, is no target of it.
            own = set(graph.nodes)
            graph.targets = [node for node in self._left(graph.targets) if node in own]
        if not self._values.keys().isdisjoint(graph.outputs):
            graph.outputs = [self.of(value) for value in graph.outputs]
            self.used = True

    def _left(self, nodes: Sequence[Node]) -> list[Node]:
        """``nodes``, and for those that are gone what they waited for."""
        found: dict[Node, None] = {}
        seen: set[Node] = set()
        stack = list(reversed(nodes))
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._gone:
                stack.extend(reversed(self._gone[node]))
            else:
                found[node] = None
        return list(found)


class _Forward:
    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.substitution = Substitution()
        self.changed = False

    def run(self, graph: Graph) -> bool:
        kept = []
        for node in graph.nodes:
            if self.substitution:
                self.substitution.apply(node)
            for _, inner in node.graphs:
                self.run(inner)
            values = self.visit(node)
            if values is None or isinstance(values, bool):
                kept.append(node)
                self.changed |= bool(values)
                continue
            self.changed = True
            self.substitution.drop(node)
            for old, new in zip(node.outputs, values, strict=False):
                if old is not None and new is not None:
                    self.substitution[old] = new
        graph.nodes = kept
        self.substitution.apply_outputs(graph)
        return self.changed
