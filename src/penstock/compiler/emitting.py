"""Graphs that tell values while they run, also those of loops (``Session.stream``)."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import InvalidInput, suggest
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.emit import EMIT


def emit_values(graph: Graph, names: Mapping[str, str]) -> None:
    """Put an Emit behind values, in a graph or one that is nested in it. ``names`` maps the names
    that the run reports to those of values. Raises ``InvalidInput`` for a name that no value has,
    or that values of several graphs beside one another have."""
    found: dict[str, list[tuple[Graph, Value]]] = {name: [] for name in names.values()}
    known: list[str] = []
    for inner in graph.graphs():
        made = [value for node in inner.nodes for value in node.outputs if value is not None]
        for value in (*inner.inputs, *made):
            known.append(value.name)
            if value.name in found:
                found[value.name].append((inner, value))
    for name, own in names.items():
        places = found[own]
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
