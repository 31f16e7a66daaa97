"""Insertion of transfers where a node reads a value in another backend's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.core.checkpoints import with_checkpoints
from penstock.ir.graph import Graph, Node, Value, captures
from penstock.ir.op import Role
from penstock.ops.internal.transfer import HOST, STACK, TRANSFER, Place
from penstock.ops.onnx.control_flow import ScanLayout, is_control, loop_carried
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.rewrite import Substitution


class InsertTransfers(Pass):
    """Insert a transfer node after each value for each other memory space in which it is read.

    Each value is transferred to a memory space once, however many nodes of a graph read it there:
    directly from device to device where the backends can (``Placing.direct``), else through host
    memory. Inputs and outputs of the whole graph are in host memory, unless the caller has them on
    devices (``Placing.ports``); backends copy constants themselves. Inputs and outputs of loop
    bodies and branches stay where they are used: a captured value that is read on one device only
    is transferred before the loop or branch, and a value that a body computes on a device is
    carried on that device. Scan outputs that a loop collects on a device stay there if its backend
    can concatenate them after the loop (``Placing.stacks``). Host operands of a device kernel, such
    as shapes, stay on the host, and a node of a device group has each value on another member
    (``Placing.other_places``). A transfer is placed on its target, or on its source if that is the
    host.
    """

    requires = frozenset({Property.PLACED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        placement, ports = context.placing.placement, context.placing.ports
        before = len(placement)
        on_host = (place for place in placement.values() if place.memory == HOST)
        transfers = _Transfers(placement, next(on_host, Place(HOST, HOST)), context)
        if ports is not None:
            transfers.places.update((graph.inputs[i], place) for i, place in ports.fed.items())
        for inner in graph.graphs():  # outer graphs before nested ones
            transfers.insert(inner, stay=inner is graph and ports is not None and ports.stay)
        return len(placement) > before


class _Transfers:
    """``places`` maps values outside host memory to their places, ``leaving`` outputs of nested
    graphs to their required places outside host memory."""

    def __init__(self, placement: dict[Node, Place], home: Place, context: PassContext) -> None:
        self.placement = placement
        self.home = home
        self.placing = context.placing
        self.places: dict[Value, Place] = {}
        self.leaving: dict[Graph, dict[int, Place]] = {}
        self.nodes: list[Node] = []
        self.moved: dict[tuple[Value, str], Value] = {}

    def insert(self, graph: Graph, stay: bool = False) -> None:
        """Insert the transfers of one graph; if ``stay``, outputs may stay on devices."""
        self.nodes, self.moved = [], {}
        for node in with_checkpoints(graph.nodes):
            if is_control(node):
                self.control(node)
                continue
            place = self.placement[node]
            others = self.placing.other_places(node)
            self.read_inputs(node, others.inputs, place)
            self.nodes.append(node)
            for i, value in enumerate(node.outputs):
                there = others.outputs.get(i, place)
                if value is not None and there.memory != HOST:
                    self.places[value] = there
        leaving = self.leaving.get(graph, {})
        if not stay:
            graph.outputs[:] = [
                self.read(value, leaving.get(i, self.home)) for i, value in enumerate(graph.outputs)
            ]
        graph.nodes[:] = self.nodes

    def read_inputs(self, node: Node, places: Mapping[int, Place], place: Place) -> None:
        carries = is_control(node)
        for i, value in enumerate(node.inputs):
            if value is not None:
                carried = carries and i in places
                node.inputs[i] = self.read(value, places.get(i, place), carried)

    def read(self, value: Value, there: Place, carried: bool = False) -> Value:
        """Return ``value`` in the memory of ``there``. A constant that initializes a ``carried``
        value is transferred too: backends copy constants for kernels only."""
        source = self.places.get(value, self.home)
        if source.memory == there.memory or (value.const is not None and not carried):
            return value
        remote = HOST not in (source.memory, there.memory)
        if remote and not self.placing.direct(source.backend, there.backend):
            # Through the host, where other readers on devices share the copy.
            value, source = self.read(value, self.home), self.home
        key = (value, there.memory)
        if key not in self.moved:
            name = f"{value.name}/{there.memory}"
            copy = Value(name, value.type)
            attrs = {"source": source.backend, "target": there.backend}
            origin = value.producer.origin if value.producer is not None else ""
            node = Node(TRANSFER, [value], [copy], attrs, name=name, origin=origin)
            self.add(node, there if there.memory != HOST else source)
            if there.memory != HOST:
                self.places[copy] = there
            self.moved[key] = copy
        return self.moved[key]

    def add(self, node: Node, place: Place) -> None:
        self.nodes.append(node)
        self.placement[node] = place

    def control(self, node: Node) -> None:
        """Decide the places of the inputs and outputs of the graphs of an If or a loop."""
        entering: dict[int, Place] = {}
        joined: list[tuple[Node, Place]] = []
        graphs = [graph for _, graph in node.graphs]
        computed, reading = list(map(self.computed, graphs)), list(map(self.readers, graphs))
        if node.op.name == "If":
            first, *others = computed
            same = [p if all(o[i] == p for o in others) else None for i, p in enumerate(first)]
            self.leave(node, graphs, {i: (i, p) for i, p in enumerate(same) if p is not None})
        elif node.op.name != "SequenceMap":
            (body,), (carried, leaving) = graphs, loop_carried(node)
            start, before = carried.start, leaving.start
            for i in range(start, carried.stop):
                place = computed[0][i - start + before]
                # If the body read it elsewhere, it would be copied in each iteration anyway.
                if place is not None and reading[0][body.inputs[i]] <= {place}:
                    entering[i] = self.places[body.inputs[i]] = place
            outputs = {i - start + before: (i - start, p) for i, p in entering.items()}
            self.leave(node, graphs, outputs)
            joined = self.rows(node, body, computed[0])
        self.read_inputs(node, entering, self.home)
        for graph, places in zip(graphs, reading, strict=True):
            substitution = Substitution()
            for value in captures(graph):
                there = next(iter(places[value])) if len(places[value]) == 1 else self.home
                if (copy := self.read(value, there)) is not value:
                    substitution[value] = copy
            substitution.apply_throughout(graph)
        self.nodes.append(node)
        for stack, place in joined:
            self.add(stack, place)

    def rows(
        self, node: Node, body: Graph, computed: Sequence[Place | None]
    ) -> list[tuple[Node, Place]]:
        """Keep a loop's scan outputs where they are computed; return the nodes after the loop that
        concatenate them there, with their places."""
        joined = []
        scan = ScanLayout(node) if node.op.role is Role.SCAN else None
        _, leaving = loop_carried(node)
        carried = leaving.stop - leaving.start
        for i, place in enumerate(computed[leaving.stop :]):
            position = carried + i
            rows = node.outputs[position] if position < len(node.outputs) else None
            if rows is None or place is None or not self.placing.stacks(place.backend):
                continue
            self.leaving[body][leaving.stop + i] = place
            axis, backward = (scan.output_axes[i], scan.output_backward[i]) if scan else (0, 0)
            node.outputs[position] = Value(f"{rows.name}/rows", rows.type, node)
            attrs = {"axis": axis, "backward": backward}
            inputs, name = [node.outputs[position]], f"{rows.name}/stack"
            stack = Node(STACK, inputs, [rows], attrs, name=name, origin=node.origin)
            joined.append((stack, place))
            self.places[rows] = place
        return joined

    def leave(
        self, node: Node, graphs: Sequence[Graph], outputs: Mapping[int, tuple[int, Place]]
    ) -> None:
        """Keep outputs of ``graphs`` where they are computed; ``outputs`` maps their positions to
        the corresponding output index of ``node`` and the place."""
        for graph in graphs:
            self.leaving[graph] = {i: place for i, (_, place) in outputs.items()}
        for result, place in outputs.values():
            value = node.outputs[result] if result < len(node.outputs) else None
            if value is not None:
                self.places[value] = place

    def computed(self, graph: Graph) -> list[Place | None]:
        """Return the device on which a node of the graph computes each output."""
        own = set(graph.nodes)

        def place(value: Value) -> Place | None:
            node = value.producer
            if node is None or node not in own or is_control(node):
                return None
            others = self.placing.other_places(node).outputs
            there = others.get(node.outputs.index(value), self.placement.get(node))
            return None if there is None or there.memory == HOST else there

        return list(map(place, graph.outputs))

    def readers(self, graph: Graph) -> dict[Value, set[Place]]:
        """Return the places where each value is read in ``graph``, nested graphs included."""
        places: dict[Value, set[Place]] = defaultdict(set)
        for node in graph.walk():
            others = {} if is_control(node) else self.placing.other_places(node).inputs
            for i, value in enumerate(node.inputs):
                if value is not None:
                    places[value].add(others.get(i, self.placement.get(node, self.home)))
        # Results of a nested graph are in host memory unless ``leaving`` says otherwise.
        for inner in graph.graphs():
            for value in inner.outputs:
                places[value].add(self.home)
        return places
