"""Dead code: what no output needs is not run."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir import Graph, Node, Value, captures, clone


def prune(graph: Graph) -> bool:
    """Drop the nodes that no output needs, in nested graphs too; ``graph`` must be sorted."""
    changed = False
    needed: set[Value | None] = set(graph.outputs)
    controls: set[Node] = set()
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.outputs) and node not in controls:
            changed = True
            continue
        kept.append(node)
        needed.update(node.inputs)
        needed.discard(None)  # an optional input left out
        controls.update(node.control_inputs)
        for _, inner in node.graphs:
            changed |= prune(inner)
            needed.update(captures(inner))
    kept.reverse()
    graph.nodes = kept
    return changed


def cut(graph: Graph, feeds: Sequence[Value], fetches: Sequence[Value]) -> Graph:
    """A copy of what ``fetches`` need when ``feeds`` are given: nothing upstream of a feed runs.

    The inputs of the copy are the feeds, its outputs the fetches. An input of ``graph`` that is
    needed but not fed is read in the copy though it is no input there (see ``unfed``).
    """
    copy = clone(graph, feeds, fetches)
    prune(copy)
    return copy


def unfed(graph: Graph) -> list[Value]:
    """Values that are needed but neither fed, produced nor constant."""
    return [v for v in captures(graph) if v not in set(graph.inputs)]
