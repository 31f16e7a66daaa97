"""Validation of a graph after each pass, for tests and for debugging."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.analysis.type_inference import infer_types
from penstock.analysis.verify import verify
from penstock.core.errors import InternalError, InvalidModel
from penstock.core.types import accepts
from penstock.ir.graph import Graph, Model, captures, clone, dependencies, is_framed
from penstock.ops.internal.segment import is_frame, is_segment

if TYPE_CHECKING:
    from penstock.passes.context import Pass


class GraphChecks:
    """Run ``check_graph`` after each pass that changed the graph. Most passes change nothing, and a
    check takes longer than they do."""

    def __init__(self) -> None:
        self._seen: dict[int, list[object]] = {}

    def __call__(self, after: Pass, graph: Graph) -> None:
        facts = _facts(graph)
        if self._seen.get(id(graph)) != facts:
            check_graph(after, graph)
            self._seen[id(graph)] = _facts(graph)


def _facts(graph: Graph) -> list[object]:
    """Return everything in a graph that a pass may change, for comparison."""
    facts: list[object] = [graph, *graph.inputs, *graph.outputs, *[v.type for v in graph.inputs]]
    for node in graph.walk():
        facts += (node, node.op, id(node.attrs), len(node.attrs), len(node.inputs))
        facts += (*node.inputs, *node.outputs, *node.control_inputs)
        facts += [value.type for value in node.outputs if value is not None]
    return facts


def check_graph(after: Pass, graph: Graph) -> None:
    """Raise ``InternalError``, naming the pass ``after``, unless ``graph`` is valid and
    topologically sorted and the types of its values agree with type inference."""
    try:
        for each in _apart(graph):
            verify(Model({each.name: each}, each.name), partial=True)
    except InvalidModel as error:
        raise InternalError(f"pass {after.name} left an invalid graph: {error}") from error
    _check_order(after, graph)
    # In a graph with frames, a node that cannot run is legal, since its inputs may always be dead;
    # strict inference would report it as an error.
    if not is_framed(graph):
        _check_types(after, graph)


def _apart(graph: Graph) -> list[Graph]:
    """Return a graph without the bodies of its segments and frames, then those bodies. They capture
    nothing, and may reuse names of values in the graph."""
    copy = graph
    if any(is_segment(node) or is_frame(node) for node in graph.walk()):
        copy = clone(graph)
    closed = [node for node in copy.walk() if is_segment(node) or is_frame(node)]
    closed = [node for node in closed if not captures(node.attrs["body"])]
    bodies = [node.attrs["body"] for node in closed]
    for node in closed:
        node.attrs["body"] = Graph([], [], [])
    return [copy, *bodies]


def _check_order(after: Pass, graph: Graph) -> None:
    for inner, edges in dependencies(graph):
        for i, j in edges:
            if i >= j:
                source, node = inner.nodes[i], inner.nodes[j]
                raise InternalError(
                    f"pass {after.name} left {node.label} before {source.label}, "
                    "which it depends on"
                )


def _check_types(after: Pass, graph: Graph) -> None:
    # Inference overwrites the types of values, and a check must not modify the graph.
    copy = clone(graph)
    infer_types(copy)
    for node, inferred in zip(graph.walk(), copy.walk(), strict=True):
        for value, other in zip(node.outputs, inferred.outputs, strict=True):
            if value is not None and other is not None and not accepts(value.type, other.type):
                raise InternalError(
                    f"pass {after.name} left {value!r} as an output of {node.label}, whose "
                    f"operation infers {other.type}"
                )
