"""Partition a graph into one part per device, connected by Sends and Recvs.

Each value that crosses devices has one ``_Send`` on its device and one ``_Recv`` on each reading
device, however many nodes read it::

    A: x ──> neg ──> _Send("neg:0", A to B)        B: _Recv("neg:0", A to B) ──> abs ──> y

Rendezvous keys contain a frame and an iteration, so a transferred value must be produced once per
iteration of its frame. Outputs of Enter and NextIteration are not: these nodes are copied to each
device that reads them, where their inputs are received instead. A control edge transfers no value,
only whether its source was alive.

A frame with iterations that spans devices needs, on each device, a node that runs once per
iteration and triggers the Recvs: a control loop (Enter, Merge, Switch, NextIteration) that
continues while the loop's LoopCond, which is sent to all devices, is true. The device of the
LoopCond itself needs none if the LoopCond depends on no other device.

This follows *Implementation of Control Flow in TensorFlow* (2017), except for the copies. Parts can
be partitioned again: first by worker, then by device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.analysis.frames import Frame, Frames
from penstock.core.errors import InvalidModel
from penstock.core.types import BOOL, TensorType
from penstock.ir.graph import Graph, GraphPart, Node, Value, all_reads, clone, sort
from penstock.ir.op import Role
from penstock.ops.internal.transfer import RECV, SEND
from penstock.ops.registry import TENSORFLOW, standard
from penstock.passes.context import Pass, PassContext

Need = Value | Node
"""An import from another device: a value, or a node whose completion is signaled."""


class Partition(Pass):
    """Partition a graph by the devices of its nodes (see ``partition``), if the ``FramePolicy``
    separates devices. The parts, or the whole graph, are recorded in the policy."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        frames, policy = Frames(graph), context.frames
        devices = {node: policy.home(node.device) for node in graph.nodes}
        several = policy.separates and len({*devices.values()}) > 1
        policy.parts = partition(graph, frames, devices) if several else [_whole(graph, frames)]
        return several


def _whole(graph: Graph, frames: Frames) -> GraphPart:
    """Return a graph as its only part."""
    inputs, outputs = range(len(graph.inputs)), range(len(graph.outputs))
    return GraphPart("", graph, tuple(inputs), tuple(outputs), frames.paths())


def partition(graph: Graph, frames: Frames, devices: Mapping[Node, str]) -> list[GraphPart]:
    """Return the parts of ``graph``, which must be sorted and is not changed, in the order in which
    its nodes first name their ``devices``. ``frames`` are its frames.

    Nodes keep their ``device``; added nodes have that of a node that they serve. Raises
    ``InvalidModel`` if a loop without a LoopCond spans devices.
    """
    whole = _Whole(graph, frames, devices)
    names = dict.fromkeys(devices[node] for node in graph.nodes)
    drafts = {name: _Draft(whole, name) for name in names or {"": None}}
    for draft in drafts.values():
        draft.find_needs()
    for draft in drafts.values():
        for need in draft.received:
            drafts[devices[_source(need)]].sent.append((need, draft.device))
    first, *others = drafts.values()
    # The first part has the inputs that no node reads, and the outputs that are inputs.
    first.fed.update(dict.fromkeys(value for value in graph.outputs if value in whole.inputs))
    read = set[Value]().union(*[draft.fed for draft in drafts.values()])
    first.fed.update(dict.fromkeys(value for value in graph.inputs if value not in read))
    return [first.build(foremost=True), *[draft.build() for draft in others]]


class _Whole:
    """Facts about the whole graph. ``frames`` maps each node to the frame that it runs in,
    ``after`` to that of its outputs. ``looping`` are the frames with iterations, ``pivots`` the
    outputs of their LoopConds, ``homes`` the devices of each frame's nodes."""

    def __init__(self, graph: Graph, frames: Frames, devices: Mapping[Node, str]) -> None:
        self.graph = graph
        self.devices = devices
        self.inputs = set(graph.inputs)
        self.frames, self.after = frames.of, frames.of_outputs
        self.paths = frames.paths()
        self.looping: set[Frame] = set()
        self.pivots: dict[Frame, Value] = {}
        self.homes: dict[Frame, set[str]] = {}
        for node, frame in self.frames.items():
            self.homes.setdefault(frame, set()).add(devices[node])
            if node.op.role is Role.NEXT_ITERATION:
                self.looping.add(frame)
            if frame.loop_cond is node or node.attrs.get("loop_cond"):
                (pivot,) = node.outputs
                assert pivot is not None
                self.pivots[frame] = pivot

    def pivot(self, frame: Frame) -> Value:
        pivot = self.pivots.get(frame)
        if pivot is None:
            where = ", ".join(sorted(self.homes[frame]))
            raise InvalidModel(
                f"the loop in the frame {frame.name!r} spans devices ({where}) and has no LoopCond "
                "that could tell all of them when it ends; give it one, or one device"
            )
        return pivot


class _Draft:
    """A part under construction.

    ``received`` imports, ``copied`` Enters and NextIterations of other devices, and ``driven``
    frames (those that need a node that runs once per iteration) have the ``device`` of the first
    node that needs them. ``value_of`` and ``node_of`` map values and nodes of the whole graph to
    those of the part.
    """

    def __init__(self, whole: _Whole, device: str) -> None:
        self.whole = whole
        self.device = device
        self.own = [node for node in whole.graph.nodes if whole.devices[node] == device]
        self.fed: dict[Value, None] = {}
        self.received: dict[Need, str] = {}
        self.copied: dict[Node, str] = {}
        self.driven: dict[Frame, str] = {}
        self.sent: list[tuple[Need, str]] = []
        self.value_of: dict[Value, Value] = {}
        self.node_of: dict[Node, Node] = {}
        self.receives: dict[Need, Node] = {}
        self.triggers: dict[Frame, Node] = {}
        self.added: list[Node] = []
        self.paths: dict[Node, tuple[str, ...]] = {}

    # Imports from other parts.

    def find_needs(self) -> None:
        controls: dict[Node, str] = {}
        for node in self.own:
            self.need(node, node.device, controls)
        # A received output of a node also signals that the node has run.
        for node, device in controls.items():
            if not self.received_signal(node):
                self.received[node] = device
                self.drive(self.whole.after[node], device)

    def need(self, node: Node, device: str, controls: dict[Node, str]) -> None:
        """Record the imports that ``node`` needs in order to run here."""
        for value in all_reads(node):
            producer = value.producer
            if producer is None:
                self.fed[value] = None
            elif self.is_copied(producer):
                self.copy(producer, device, controls)
            else:
                self.receive(value, device)
        for before in node.control_inputs:
            if self.is_copied(before):
                self.copy(before, device, controls)
            elif self.whole.devices[before] != self.device:
                controls.setdefault(before, device)
        if node.op.role is Role.ENTER and node.attrs.get("is_constant"):
            # Its value is for all iterations, so all iterations must take place here.
            frame = self.whole.after[node]
            homes = self.whole.homes.get(frame, set())
            if frame in self.whole.looping and self.device in homes and len(homes) > 1:
                self.drive(frame, device)

    def is_copied(self, node: Node) -> bool:
        foreign = self.whole.devices[node] != self.device
        return foreign and (node.op.role is Role.ENTER or node.op.role is Role.NEXT_ITERATION)

    def copy(self, node: Node, device: str, controls: dict[Node, str]) -> None:
        if node not in self.copied:
            self.copied[node] = device
            self.need(node, device, controls)

    def receive(self, value: Value, device: str) -> None:
        producer = _source(value)
        if self.whole.devices[producer] != self.device and value not in self.received:
            self.received[value] = device
            self.drive(self.whole.after[producer], device)

    def drive(self, frame: Frame, device: str) -> None:
        if frame.parent is not None and frame not in self.driven:
            self.driven[frame] = device
            # The frame is entered once per iteration of its parent frame, which must take place
            # here, too.
            self.drive(frame.parent, device)
            if frame in self.whole.looping:
                self.receive(self.whole.pivot(frame), device)

    def received_signal(self, node: Node) -> Value | None:
        """Return a received value that is alive if and only if ``node`` was, else None."""
        # A Switch that runs has one dead output.
        if node.op.role is Role.SWITCH:
            return None
        return next((v for v in node.outputs if v is not None and v in self.received), None)

    # The graph.

    def build(self, *, foremost: bool = False) -> GraphPart:
        whole = self.whole.graph
        inputs = [i for i, value in enumerate(whole.inputs) if value in self.fed]
        owners: set[Node | None] = {*self.own, None} if foremost else {*self.own}
        outputs = [i for i, value in enumerate(whole.outputs) if value.producer in owners]
        sources = [whole.inputs[i] for i in inputs]
        sources += [value for node in self.copied for value in node.outputs if value is not None]
        sources += [need for need in self.received if isinstance(need, Value)]
        targets = [node for node in whole.targets if self.whole.devices[node] == self.device]
        part = Graph([], [], self.own, whole.name)
        graph = clone(part, sources, [whole.outputs[i] for i in outputs], targets)
        self.value_of = dict(zip(sources, graph.inputs, strict=True))
        self.node_of = dict(zip(self.own, graph.nodes, strict=True))
        for node, own in self.node_of.items():
            both = zip(node.outputs, own.outputs, strict=True)
            self.value_of.update((a, b) for a, b in both if a is not None and b is not None)
        self.paths = {own: self.whole.paths[node] for node, own in self.node_of.items()}
        del graph.inputs[len(inputs) :]  # the removed ones are produced in this part
        self.add_receives()
        self.add_copies()
        for node, own in self.node_of.items():
            own.control_inputs = [self.local_control_source(n) for n in node.control_inputs]
        # A Recv reads nothing here: without a trigger it would run in the outermost frame, once.
        for need in self.received:
            frame = self.whole.after[_source(need)]
            if frame.parent is not None:
                self.receives[need].control_inputs.append(self.trigger(frame))
        self.add_sends()
        graph.nodes += self.added
        sort(graph)
        originals = {own: node for node, own in self.node_of.items()}
        return GraphPart(self.device, graph, tuple(inputs), tuple(outputs), self.paths, originals)

    def add_receives(self) -> None:
        for need, device in self.received.items():
            source, name = _source(need), _name(need)
            value = self.value_of[need] if isinstance(need, Value) else Value(name)
            attrs = _transfer(self.whole.devices[source], self.device, name)
            if isinstance(need, Value):
                attrs["type"] = need.type
            # Keep the LoopCond recognizable when this part is partitioned again.
            if need is self.whole.pivots.get(self.whole.after[source]):
                attrs["loop_cond"] = True
            origin = f"the transfer of {name!r}"
            self.receives[need] = node = Node(
                RECV, [], [value], attrs, name=f"{name} received", device=device, origin=origin
            )
            self.add(node, self.whole.after[source])

    def add_sends(self) -> None:
        for need, target in self.sent:
            name = _name(need)
            inputs = [self.value_of[need]] if isinstance(need, Value) else []
            waits = [] if isinstance(need, Value) else [self.node_of[need]]
            attrs = _transfer(self.device, target, name)
            node = Node(SEND, inputs, [], attrs, name=f"{name} sent to {target}")
            node.control_inputs, node.device = waits, _source(need).device
            node.origin = f"the transfer of {name!r}"
            self.add(node, self.whole.after[_source(need)])

    def add_copies(self) -> None:
        for node, device in self.copied.items():
            inputs = [self.local_value(value) for value in node.inputs]
            outputs = [self.local_value(value) for value in node.outputs]
            name = f"{node.name} on {self.device}"
            copy = self.node_of[node] = node.derived(inputs, outputs, name=name)
            copy.device = device
            self.add(copy, self.whole.frames[node])

    def local_value(self, value: Value | None) -> Value | None:
        return value if value is None or value.const is not None else self.value_of[value]

    def local_control_source(self, node: Node) -> Node:
        """Return the node of this part that represents ``node`` as a control input."""
        if node in self.node_of:
            return self.node_of[node]
        signal = self.received_signal(node)
        return self.receives[node if signal is None else signal]

    # Nodes that run once per iteration of a frame.

    def trigger(self, frame: Frame) -> Node:
        """Return a node that runs once per iteration of ``frame``."""
        if frame not in self.triggers:
            if frame not in self.whole.looping:
                self.triggers[frame] = self.enter(frame)
            elif self.leads(frame):
                self.triggers[frame] = self.node_of[_source(self.whole.pivot(frame))]
            else:
                self.triggers[frame] = self.control_loop(frame)
        return self.triggers[frame]

    def leads(self, frame: Frame) -> bool:
        """Whether the LoopCond is in this part and depends on no other in an iteration."""
        stack = [_source(self.whole.pivot(frame))]
        seen: set[Node] = set()
        has_back_edge = False
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node not in self.node_of:
                return False
            # A value from the previous iteration limits the LoopCond to one run per iteration.
            if node.op.role is Role.NEXT_ITERATION:
                has_back_edge = True
            elif self.whole.frames[node] is frame:
                stack += [v.producer for v in all_reads(node) if v.producer is not None]
                stack += node.control_inputs
        return has_back_edge

    def enter(self, frame: Frame) -> Node:
        """Return an Enter that enters ``frame`` whenever other parts do."""
        assert frame.parent is not None
        # The outermost frame has no iterations and needs no trigger.
        around = [] if frame.parent.parent is None else [self.trigger(frame.parent)]
        attrs = {
            "frame_name": frame.name,
            "parallel_iterations": frame.parallel_iterations,
            "is_constant": False,
        }
        signal = Value(f"{frame.name}#word", const=np.array(True))
        return self.primitive("Enter", frame, [signal], ["entered"], attrs, around)

    def control_loop(self, frame: Frame) -> Node:
        """Return the Merge of a new control loop, driven by the loop on another device."""
        entered = self.enter(frame).outputs
        again = Value(f"{frame.name}#again", TensorType(BOOL, ()))
        merge = self.primitive("Merge", frame, [*entered, again], ["merged", "index"])
        pivot = self.local_value(self.whole.pivot(frame))
        switch = self.primitive("Switch", frame, [merge.outputs[0], pivot], ["ended", "going"])
        # The Merge reads NextIteration's output, so that value existed before its node.
        following = self.primitive("NextIteration", frame, [switch.outputs[1]], [])
        following.outputs.append(again)
        again.producer = following
        return merge

    def primitive(
        self,
        name: str,
        frame: Frame,
        inputs: Sequence[Value | None],
        outputs: Sequence[str],
        attrs: Mapping[str, Any] | None = None,
        before: Sequence[Node] = (),
    ) -> Node:
        node = Node(
            standard(name, TENSORFLOW),
            inputs,
            [Value(f"{frame.name}#{word}", TensorType(BOOL, ())) for word in outputs],
            attrs,
            name=f"{frame.name}#{name}",
            control_inputs=before,
            device=self.driven[frame],
            origin=f"the control loop of {frame.name!r} on {self.device}",
        )
        self.add(node, frame.parent if name == "Enter" and frame.parent else frame)
        return node

    def add(self, node: Node, frame: Frame) -> None:
        """Add a node that exists in this part only, and runs in ``frame``."""
        self.added.append(node)
        self.paths[node] = frame.path


def _source(need: Need) -> Node:
    """Return the node of an import: the value's producer, or the node itself."""
    node = need if isinstance(need, Node) else need.producer
    assert node is not None
    return node


def _name(need: Need) -> str:
    return need.name if isinstance(need, Value) else f"^{need.name}"


def _transfer(source: str, target: str, name: str) -> dict[str, Any]:
    return {"send_device": source, "recv_device": target, "tensor_name": name}
