"""Insert transfers where a node reads a value that is in the memory of another backend."""

from __future__ import annotations

from penstock.algorithms.checkpoints import paced
from penstock.ir.graph import Graph, Node, Value, captures
from penstock.ops.internal.transfer import HOST, TRANSFER
from penstock.ops.onnx.control_flow import is_control
from penstock.passes.context import Pass, PassContext, Place, Property
from penstock.passes.rewrite import Substitution


class InsertTransfers(Pass):
    """Insert a transfer node after each value for each other memory that it is read in.

    Each value is transferred to a memory once, however many nodes read it there. From one device to
    another it goes through the host's memory. The inputs and outputs of graphs, nested ones
    included, are in the host's memory; backends copy constants themselves. A transfer is placed on
    the device that it copies to, or from if it copies to the host.
    """

    name = "insert_transfers"
    requires = frozenset({Property.PLACED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        placement = context.placement
        if all(place.memory == HOST for place in placement.values()):
            return False
        before = len(placement)
        for inner in list(graph.graphs()):
            _insert(inner, placement)
        return len(placement) > before


def _insert(graph: Graph, placement: dict[Node, Place]) -> None:
    places: dict[Value, Place] = {}
    moved: dict[tuple[Value, str], Value] = {}
    nodes: list[Node] = []
    on_host = (
        place for n in graph.nodes if not is_control(n) and (place := placement[n]).memory == HOST
    )
    home = next(on_host, Place(HOST, HOST))

    def read(value: Value, there: Place) -> Value:
        """``value`` in the memory of ``there``."""
        source = places.get(value, home)
        if source.memory == there.memory or value.const is not None:
            return value
        if HOST not in (source.memory, there.memory):
            value, source = read(value, home), home
        key = (value, there.memory)
        if key not in moved:
            name = f"{value.name}/{there.memory}"
            copy = Value(name, value.type)
            attrs = {"source": source.backend, "target": there.backend}
            origin = value.producer.origin if value.producer is not None else ""
            node = Node(TRANSFER, [value], [copy], attrs, name=name, origin=origin)
            nodes.append(node)
            placement[node] = there if there.memory != HOST else source
            moved[key] = copy
        return moved[key]

    for node in paced(graph.nodes):
        place = home if is_control(node) else placement[node]
        for i, value in enumerate(node.inputs):
            if value is not None:
                node.inputs[i] = read(value, place)
        for _, inner in node.graphs:
            substitution = Substitution()
            for value in captures(inner):
                if (copy := read(value, home)) is not value:
                    substitution[value] = copy
            substitution.apply_throughout(inner)
        nodes.append(node)
        if place.memory != HOST:
            places.update((v, place) for v in node.outputs if v is not None)
    graph.outputs[:] = [read(value, home) for value in graph.outputs]
    graph.nodes[:] = nodes
