"""Graphs that report values while they run, also values inside loops (``Session.stream``)."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import InvalidInput, suggest
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.emit import EMIT


def emit_values(graph: Graph, names: Mapping[str, str]) -> None:
    """Insert an Emit after each named value of a graph or its nested graphs. ``names`` maps the
    names that the run reports to those of values. Raises ``InvalidInput`` for a name of no value,
    or of several values in different graphs."""
    places_of: dict[str, list[tuple[Graph, Value]]] = {name: [] for name in names.values()}
    known: list[str] = []
    for inner in graph.graphs():
        outputs = [value for node in inner.nodes for value in node.outputs if value is not None]
        for value in (*inner.inputs, *outputs):
            known.append(value.name)
            if value.name in places_of:
                places_of[value.name].append((inner, value))
    for name, own in names.items():
        places = places_of[own]
        if not places:
            raise InvalidInput(f"cannot stream {name!r}: {suggest(name, known)}")
        if len(places) > 1:
            graphs = ", ".join([repr(inner.name) for inner, _ in places])
            raise InvalidInput(f"{len(places)} values are named {name!r}, in graphs {graphs}")
        ((inner, value),) = places
        producer = value.producer
        emit = Node(EMIT, [value], [], {"name": name}, origin=f"stream of {name!r}")
        at = 0 if producer is None or producer not in inner.nodes else inner.nodes.index(producer)
        inner.nodes.insert(at + (producer is not None), emit)
        inner.targets.append(emit)
