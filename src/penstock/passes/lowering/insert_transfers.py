"""Transfers between the memories of backends, where a node cannot read what another has made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.ir.graph import Graph, Node, Value, captures
from penstock.ops.internal.transfer import HOST, TRANSFER
from penstock.ops.onnx.control_flow import is_control


class Place(NamedTuple):
    """A backend, and the memory (with its layout) that its values are in."""

    backend: str
    memory: str


def insert_transfers(graph: Graph, place_of: Callable[[Node], Place]) -> dict[Node, str]:
    """Put a transfer node behind each value for each other memory that it is read in.

    One for each value and memory, however many read it there; none where the memory is the same.
    From one memory to another that is not the host's it goes through that.
    What enters or leaves a graph, nested ones included, is in the host's memory; constants are the
    backends' own business. Returns the new nodes, with the backend that each brings its value to,
    or fetches it from if it brings it to the host.
    """
    made: dict[Node, str] = {}
    for each in list(graph.graphs()):
        _insert(each, place_of, made)
    return made


def _insert(graph: Graph, place_of: Callable[[Node], Place], made: dict[Node, str]) -> None:
    places: dict[Value, Place] = {}
    moved: dict[tuple[Value, str], Value] = {}
    nodes: list[Node] = []
    host = next(
        (p for n in graph.nodes if not is_control(n) and (p := place_of(n)).memory == HOST), None
    )
    home = host or Place(HOST, HOST)

    def read(value: Value, there: Place) -> Value:
        """``value`` in the memory of ``there``."""
        source = places.get(value, home)
        if source.memory == there.memory or value.const is not None:
            return value
        if HOST not in (source.memory, there.memory):
            value, source = read(value, home), home
        key = (value, there.memory)
        if key not in moved:
            copy = Value(f"{value.name}/{there.memory}", value.type)
            attrs = {"source": source.backend, "target": there.backend}
            origin = value.producer.origin if value.producer is not None else ""
            node = Node(
                TRANSFER, [value], [copy], attrs, name=f"{value.name}/{there.memory}", origin=origin
            )
            nodes.append(node)
            made[node] = there.backend if there.memory != HOST else source.backend
            moved[key] = copy
        return moved[key]

    for node in graph.nodes:
        place = home if is_control(node) else place_of(node)
        for i, value in enumerate(node.inputs):
            if value is not None:
                node.inputs[i] = read(value, place)
        for _, inner in node.graphs:
            _rewire(inner, {v: new for v in captures(inner) if (new := read(v, home)) is not v})
        nodes.append(node)
        if place.memory != HOST:
            places.update((v, place) for v in node.outputs if v is not None)
    graph.nodes[:] = nodes
    graph.outputs[:] = [read(value, home) for value in graph.outputs]
    graph.nodes[:] = nodes


def _rewire(graph: Graph, new: dict[Value, Value]) -> None:
    """Let a nested graph take other values from around it."""
    if not new:
        return

    def changed(values: Iterable[Value | None]) -> list[Value | None]:
        return [v if v is None else new.get(v, v) for v in values]

    for node in graph.walk():
        node.inputs[:] = changed(node.inputs)
    for each in graph.graphs():
        each.outputs[:] = [new.get(v, v) for v in each.outputs]
