"""A graph as several, one for each device: what crosses from one to another is sent and received.

Each value that a device needs of another is one ``_Send`` there and one ``_Recv`` here, however
many read it. Keys of the rendezvous carry frame and iteration, and so it can only be a value that
comes once in each iteration of its frame. What an Enter or a NextIteration makes does not: these
are copied to each device that reads them, where their inputs are received instead. A control edge
sends no value, only whether its source was alive.

A frame with iterations that spans devices needs, on each of them, something that runs once in each
iteration, so that its Recvs do: a control loop (Enter, Merge, Switch, NextIteration) that goes on
as long as the loop's LoopCond says, which is sent to all. The device of the LoopCond itself can do
without if its LoopCond waits for no other device.

This follows *Implementation of Control Flow in TensorFlow* (2017), but for the copies. The parts
are graphs like others and can be partitioned again: by worker first, then each part by device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.analysis.frames import Frame, Frames
from penstock.errors import InvalidModel
from penstock.ir.graph import Graph, Node, Value, captures, clone, sort
from penstock.ir.op import Role
from penstock.ops.internal.send_recv import RECV, SEND
from penstock.ops.registry import TENSORFLOW, find
from penstock.types import BOOL, TensorType

Need = Value | Node
"""What comes from another device: a value, or the word that a node has run."""


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a graph that one device runs.

    ``inputs`` and ``outputs``: which inputs and outputs of the whole graph its own are. ``paths``:
    of each of its nodes, the names of the frames that it runs in, from the outermost one inwards.
    """

    device: str
    graph: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    paths: Mapping[Node, tuple[str, ...]]


def partition(graph: Graph, frames: Frames, devices: Mapping[Node, str]) -> list[Part]:
    """The parts of ``graph``, which must be sorted and is not changed, in the order in which its
    nodes first name their ``devices``. ``frames`` are those of the graph.

    Nodes keep the ``device`` that they have; those that are added have that of a node they serve.
    Raises ``InvalidModel`` where a loop spans devices that has no LoopCond.
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
    # What no node reads or makes is the business of the first.
    first.fed.update(dict.fromkeys(value for value in graph.outputs if value in whole.inputs))
    read = set[Value]().union(*[draft.fed for draft in drafts.values()])
    first.fed.update(dict.fromkeys(value for value in graph.inputs if value not in read))
    return [first.build(foremost=True), *[draft.build() for draft in others]]


class _Whole:
    """What is known of a graph. Of each node, ``frames`` has the frame that it runs in, ``after``
    that of what it makes. ``looping`` are the frames with iterations, ``pivots`` has what their
    LoopConds say, ``homes`` the devices of the nodes in each frame."""

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
                (said,) = node.outputs
                assert said is not None
                self.pivots[frame] = said

    def pivot(self, frame: Frame) -> Value:
        found = self.pivots.get(frame)
        if found is None:
            where = ", ".join(sorted(self.homes[frame]))
            raise InvalidModel(
                f"the loop in the frame {frame.name!r} spans devices ({where}) and has no LoopCond "
                "that could tell all of them when it ends; give it one, or one device"
            )
        return found


class _Draft:
    """One part on its way. ``received``, ``copied`` (Enters and NextIterations of others) and
    ``driven`` (frames in which something must run once in each iteration) each come with the
    ``device`` of the node that needs them first."""

    def __init__(self, whole: _Whole, device: str) -> None:
        self.whole = whole
        self.device = device
        self.own = [node for node in whole.graph.nodes if whole.devices[node] == device]
        self.fed: dict[Value, None] = {}
        self.received: dict[Need, str] = {}
        self.copied: dict[Node, str] = {}
        self.driven: dict[Frame, str] = {}
        self.sent: list[tuple[Need, str]] = []
        # In the part: what stands for values and nodes of the whole, and what drives frames.
        self.value_of: dict[Value, Value] = {}
        self.node_of: dict[Node, Node] = {}
        self.receives: dict[Need, Node] = {}
        self.triggers: dict[Frame, Node] = {}
        self.added: list[Node] = []
        self.paths: dict[Node, tuple[str, ...]] = {}

    # What is needed of others.

    def find_needs(self) -> None:
        controls: dict[Node, str] = {}
        for node in self.own:
            self.need(node, node.device, controls)
        # Who receives what a node has made knows whether it has run.
        for node, device in controls.items():
            if not self.told(node):
                self.received[node] = device
                self.drive(self.whole.after[node], device)

    def need(self, node: Node, device: str, controls: dict[Node, str]) -> None:
        """What ``node`` needs in order to run here."""
        for value in _read(node):
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
            # What it brings is for all iterations, and so there must be all of them.
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
            self.drive(frame.parent, device)
            if frame in self.whole.looping:
                self.receive(self.whole.pivot(frame), device)

    def told(self, node: Node) -> Value | None:
        """Something received that is alive when, and only when, ``node`` was."""
        if node.op.role is Role.SWITCH:
            return None
        return next((v for v in node.outputs if v is not None and v in self.received), None)

    # The graph.

    def build(self, *, foremost: bool = False) -> Part:
        whole = self.whole.graph
        inputs = [i for i, value in enumerate(whole.inputs) if value in self.fed]
        outputs = [i for i, value in enumerate(whole.outputs) if self.gives(value, foremost)]
        come = [whole.inputs[i] for i in inputs]
        come += [value for node in self.copied for value in node.outputs if value is not None]
        come += [need for need in self.received if isinstance(need, Value)]
        graph = clone(
            Graph([], [], self.own, whole.name),
            come,
            [whole.outputs[i] for i in outputs],
            [node for node in whole.targets if self.whole.devices[node] == self.device],
        )
        self.value_of = dict(zip(come, graph.inputs, strict=True))
        self.node_of = dict(zip(self.own, graph.nodes, strict=True))
        for node, mine in self.node_of.items():
            both = zip(node.outputs, mine.outputs, strict=True)
            self.value_of.update((a, b) for a, b in both if a is not None and b is not None)
        self.paths = {mine: self.whole.paths[node] for node, mine in self.node_of.items()}
        del graph.inputs[len(inputs) :]  # the others are made here
        self.add_receives()
        self.add_copies()
        for node, mine in self.node_of.items():
            mine.control_inputs = [self.runs(before) for before in node.control_inputs]
        for need in self.received:
            frame = self.whole.after[_source(need)]
            if frame.parent is not None:
                self.receives[need].control_inputs.append(self.trigger(frame))
        self.add_sends()
        graph.nodes += self.added
        sort(graph)
        return Part(self.device, graph, tuple(inputs), tuple(outputs), self.paths)

    def gives(self, value: Value, foremost: bool) -> bool:
        """Whether an output of the whole is one of this part."""
        if value.producer is None:
            return foremost
        return self.whole.devices[value.producer] == self.device

    def add_receives(self) -> None:
        for need, device in self.received.items():
            source = _source(need)
            name = need.name if isinstance(need, Value) else f"^{need.name}"
            value = self.value_of[need] if isinstance(need, Value) else Value(name)
            attrs = self.transfer(self.whole.devices[source], self.device, name)
            if need is self.whole.pivots.get(self.whole.after[source]):
                attrs["loop_cond"] = True
            node = Node(RECV, [], [value], attrs, name=f"{name} received", device=device)
            node.origin = f"the transfer of {name!r}"
            self.receives[need] = node
            self.add(node, self.whole.after[source])

    def add_sends(self) -> None:
        for need, target in self.sent:
            name = need.name if isinstance(need, Value) else f"^{need.name}"
            node = Node(
                SEND,
                [self.value_of[need]] if isinstance(need, Value) else [],
                [],
                self.transfer(self.device, target, name),
                name=f"{name} sent to {target}",
                control_inputs=[] if isinstance(need, Value) else [self.node_of[need]],
                device=_source(need).device,
                origin=f"the transfer of {name!r}",
            )
            self.add(node, self.whole.after[_source(need)])

    @staticmethod
    def transfer(source: str, target: str, name: str) -> dict[str, Any]:
        return {"send_device": source, "recv_device": target, "tensor_name": name}

    def add_copies(self) -> None:
        for node, device in self.copied.items():
            mine = Node(
                node.op,
                [self.here(value) for value in node.inputs],
                [self.here(value) for value in node.outputs],
                node.attrs,
                name=f"{node.name} on {self.device}",
                device=device,
                origin=node.origin,
            )
            self.node_of[node] = mine
            self.add(mine, self.whole.frames[node])

    def here(self, value: Value | None) -> Value | None:
        return value if value is None or value.const is not None else self.value_of[value]

    def runs(self, node: Node) -> Node:
        """What here is to be waited for by who waits for a node of the whole."""
        if node in self.node_of:
            return self.node_of[node]
        told = self.told(node)
        return self.receives[node if told is None else told]

    # What drives frames.

    def trigger(self, frame: Frame) -> Node:
        """A node that runs once in each iteration of ``frame``."""
        found = self.triggers.get(frame)
        if found is None:
            if frame not in self.whole.looping:
                found = self.enter(frame)
            elif self.leads(frame):
                found = self.node_of[_source(self.whole.pivot(frame))]
            else:
                found = self.control_loop(frame)
            self.triggers[frame] = found
        return found

    def leads(self, frame: Frame) -> bool:
        """Whether the LoopCond is here and, in each iteration, waits for nobody elsewhere."""
        stack = [_source(self.whole.pivot(frame))]
        seen: set[Node] = set()
        goes_on = False
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node not in self.node_of:
                return False
            if node.op.role is Role.NEXT_ITERATION:
                goes_on = True
            elif self.whole.frames[node] is frame:
                stack += [v.producer for v in _read(node) if v.producer is not None]
                stack += node.control_inputs
        return goes_on

    def enter(self, frame: Frame) -> Node:
        """A node that enters ``frame`` whenever that is entered."""
        assert frame.parent is not None
        around = [] if frame.parent.parent is None else [self.trigger(frame.parent)]
        attrs = {
            "frame_name": frame.name,
            "parallel_iterations": frame.parallel_iterations,
            "is_constant": False,
        }
        word = Value(f"{frame.name}#word", const=np.array(True))
        return self.primitive("Enter", frame, [word], ["entered"], attrs, around)

    def control_loop(self, frame: Frame) -> Node:
        """A loop that runs as long as another device's does; its Merge."""
        entered = self.enter(frame).outputs
        again = Value(f"{frame.name}#again", TensorType(BOOL, ()))
        merge = self.primitive("Merge", frame, [*entered, again], ["merged", "index"])
        goes_on = self.here(self.whole.pivot(frame))
        switch = self.primitive("Switch", frame, [merge.outputs[0], goes_on], ["ended", "going"])
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
        op = find(name, TENSORFLOW)
        assert op is not None
        node = Node(
            op,
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
        """Add a node of this part alone, that runs in ``frame``."""
        self.added.append(node)
        self.paths[node] = frame.path


def _source(need: Need) -> Node:
    """The node that makes what is needed."""
    node = need if isinstance(need, Node) else need.producer
    assert node is not None
    return node


def _read(node: Node) -> list[Value]:
    """What a node, or a graph within it, reads that is no constant."""
    read: list[Value | None] = list(node.inputs)
    for _, inner in node.graphs:
        read += captures(inner)
    return [value for value in dict.fromkeys(read) if value is not None and value.const is None]
