"""The walk that local passes share: once through the nodes in order, replacing as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.ir import Graph, Node, Value

Visit = Callable[[Node], Sequence[Value | None] | None]


def forward(graph: Graph, visit: Visit) -> bool:
    """Call ``visit`` for every node, nested graphs first; returns whether anything was replaced.

    ``visit`` returns ``None`` to keep the node (which it may have changed, inputs included), or a
    value for each of its outputs, of which every later use then becomes that value and the node is
    dropped. Inputs are already the replaced ones when a node is visited.
    """
    return _Forward(visit).run(graph)


class Substitution:
    """Which value stands for which; applied to nodes as a walk reaches them."""

    __slots__ = ("_map",)

    def __init__(self) -> None:
        self._map: dict[Value, Value] = {}

    def __setitem__(self, old: Value, new: Value) -> None:
        self._map[old] = new

    def __len__(self) -> int:
        return len(self._map)

    def of(self, value: Value) -> Value:
        """What ``value`` is now."""
        return self._map.get(value, value)

    def apply(self, node: Node) -> None:
        """Replace the inputs of ``node``."""
        found = self._map
        for i, value in enumerate(node.inputs):
            if value is not None and value in found:
                node.inputs[i] = found[value]

    def apply_outputs(self, graph: Graph) -> None:
        """Replace the outputs of ``graph``."""
        if self._map:
            graph.outputs = [self._map.get(value, value) for value in graph.outputs]


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
            if values is None:
                kept.append(node)
                continue
            self.changed = True
            for old, new in zip(node.outputs, values, strict=False):
                if old is not None and new is not None:
                    self.substitution[old] = new
        graph.nodes = kept
        self.substitution.apply_outputs(graph)
        return self.changed
