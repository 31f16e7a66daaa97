"""What the frames executor knows of a graph before it runs: nodes as items, frames, and edges.

Positions of inputs and counts of what is pending are numbered within each frame, so that a run
allocates a few lists for an iteration, and nothing for a node.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np

from penstock.executors.frames.rendezvous import edge
from penstock.ir.graph import Graph, Node, Value, captures, clone
from penstock.ir.op import Kernel
from penstock.ops.internal.send_recv import RECV, SEND
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.control_flow import is_framed
from penstock.plan.plan import Plan, Slot, SlotKind, Step

DEATH = 1 << 29
"""Added to what an item waits for when something of that is dead."""


class Kind(IntEnum):
    """How tokens pass a node."""

    ORDINARY = 0
    SWITCH = 1
    MERGE = 2
    ENTER = 3
    EXIT = 4
    NEXT_ITERATION = 5
    IDENTITY = 6
    TRIGGER = 7
    FETCH = 8
    FEED = 9
    CALL = 10
    RETURN = 11
    ASYNCHRONOUS = 20
    SEND = 21
    RECV = 22


KINDS: Mapping[str, Kind] = {
    "Switch": Kind.SWITCH,
    "RefSwitch": Kind.SWITCH,
    "_SwitchN": Kind.SWITCH,
    "Merge": Kind.MERGE,
    "RefMerge": Kind.MERGE,
    "Enter": Kind.ENTER,
    "RefEnter": Kind.ENTER,
    "Exit": Kind.EXIT,
    "RefExit": Kind.EXIT,
    "NextIteration": Kind.NEXT_ITERATION,
    "RefNextIteration": Kind.NEXT_ITERATION,
    "LoopCond": Kind.IDENTITY,
    "ControlTrigger": Kind.TRIGGER,
    SEND.name: Kind.SEND,
    RECV.name: Kind.RECV,
    "Call": Kind.CALL,
}
_DOMAINS = frozenset({TENSORFLOW, SEND.domain})


def kind_of(node: Node) -> Kind:
    """How tokens pass ``node``."""
    return KINDS.get(node.op.name, Kind.ORDINARY) if node.op.domain in _DOMAINS else Kind.ORDINARY


class FrameNode:
    """A node as tokens meet it.

    ``first`` to ``end``: where its inputs stand among those of its frame; ``place``: where what it
    waits for is counted. ``waits``: how much that is at first: for a Merge 1 for its data, and 2
    for each control input; else one for each input. ``data``: how many of its inputs are no
    constants. A Merge has two inputs, the value that it takes and the index of that, and counts
    behind its ``place`` how many are dead.

    ``edges``: for each output who reads it, where that counts what it waits for and where its input
    stands; apart from these the Merges, with the index that they then make. ``controls``: who waits
    for it. ``passes``: whether it makes what it reads; ``leaves``: whether that goes to another
    iteration or frame. ``port``: of a fetch, which output of the graph it is.
    """

    __slots__ = (
        "child",
        "constant",
        "controls",
        "cost",
        "data",
        "edges",
        "end",
        "first",
        "frame",
        "function",
        "index",
        "key",
        "kind",
        "leaves",
        "left",
        "nested",
        "node",
        "outputs",
        "passes",
        "place",
        "port",
        "single",
        "step",
        "waits",
    )

    def __init__(self, index: int, node: Node | None, kind: Kind, frame: FrameInfo) -> None:
        self.index = index
        self.node = node
        self.kind = kind
        self.leaves = kind in (Kind.ENTER, Kind.EXIT, Kind.NEXT_ITERATION)
        self.passes = self.leaves or kind in (Kind.MERGE, Kind.IDENTITY)
        self.frame = frame
        self.first = self.end = self.place = self.waits = self.data = self.port = 0
        self.function: Callable[..., Any] | None = None
        self.outputs = 0 if node is None else len(node.outputs)
        self.edges: tuple[tuple[Readers, Readers], ...] = ()
        self.controls: tuple[FrameNode, ...] = ()
        # Of the only edge to anybody, if that is no Merge.
        self.single: tuple[FrameNode, int, Any] | None = None
        # Of an Enter: the frame that it leads into, and whether all iterations get what it brings.
        self.child: FrameInfo | None = None
        self.constant = False
        # Of a Send and a Recv: what keys of the rendezvous have of their edge.
        self.key = ""
        # Seconds that its kernel takes, as far as that has been measured, and how often it runs
        # before it is measured again.
        self.cost = 0.0
        self.left = 0
        self.step: Step | None = None
        # Whether the function has graphs of its own, and takes the control of the run first.
        self.nested = False

    def __repr__(self) -> str:
        return f"Item({self.node!r})"


Readers: TypeAlias = tuple[tuple[FrameNode, int, Any], ...]


class FrameInfo:
    """A frame of the graph: that of loops of one ``name`` within one ``parent``.

    ``inputs`` and ``waits`` are what an iteration begins with, constants already in their places.
    ``enters``: how many tokens enter the frame, dead ones included.
    """

    __slots__ = ("enters", "inputs", "name", "parallel", "parent", "waits")

    def __init__(self, name: str, parent: FrameInfo | None) -> None:
        self.name = name
        self.parent = parent
        self.inputs: list[Any] = []
        self.waits: list[int] = []
        self.enters = 0
        self.parallel = 1

    def __repr__(self) -> str:
        return f"FrameInfo({self.name!r})"


class Slots:
    """The numbers by which observers know values: those of one graph, or of all parts of one."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._of: dict[Value, int] = {}

    def of(self, value: Value) -> int:
        """The number of a value."""
        found = self._of.get(value)
        if found is None:
            found = self._of[value] = len(self._values)
            self._values.append(value)
        return found

    def same(self, value: Value, other: Value) -> None:
        """Let ``value`` have the number of ``other``, whose copy it is."""
        self._of[value] = self.of(other)

    def plan(
        self, name: str, steps: Sequence[Step], inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> Plan:
        """What observers are told of a graph: all values known in runs, no order."""
        taken, given = (tuple(map(self.of, values)) for values in (inputs, outputs))
        kinds = {True: SlotKind.CONSTANT, False: SlotKind.DYNAMIC}
        slots = [
            Slot(v.name, v.type, kinds[v.const is not None], v.const, owned=v.const is None)
            for v in self._values
        ]
        return Plan(name, tuple(steps), tuple(slots), taken, given)


Caller: TypeAlias = (
    "Callable[..., Generator[tuple[Tokens, Sequence[Any]], Sequence[Any], Sequence[Any]]]"
)
"""Begins a call: takes what its node reads, yields what is to run and with which inputs, is sent
what that gives, and returns the outputs of the node."""


class Tokens:
    """The items of a graph: ``roots`` wait for nothing; ``fetches`` has one for each output, and
    ``feeds`` one for each input.

    ``frame_of`` gives the frame of each node, as names of frames from the outermost one inwards: of
    an Enter, that which it leaves. ``compile`` gives the function of a node that is none of the
    primitives, ``call`` that of one whose graphs, or function, are run by tokens as well. ``end``
    stands for the end of such a run. ``slots`` number the values, of this graph and of others that
    run with it.
    """

    def __init__(
        self,
        graph: Graph,
        frame_of: Mapping[Node, tuple[str, ...]],
        compile: Callable[[Node], Kernel],
        call: Callable[[Node], Caller],
        slots: Slots | None = None,
    ) -> None:
        self.graph = graph
        self.function = ""  # its name, if it is one
        self.root = FrameInfo("", None)
        self._slots = slots or Slots()
        self.asynchronous = False  # whether there are asynchronous kernels
        self._frames: dict[tuple[str, ...], FrameInfo] = {(): self.root}
        self.items: list[FrameNode] = []
        of: dict[Node, FrameNode] = {}
        for node in graph.nodes:
            of[node] = self._item(node, frame_of[node], compile, call)
        readers: _Readers = {}
        controls: dict[Node, list[FrameNode]] = {}
        for item in self.items:
            assert item.node is not None
            self._place(item, _inputs(item.node, compile), readers)
            for before in dict.fromkeys(item.node.control_inputs):
                controls.setdefault(before, []).append(item)
            count = len(dict.fromkeys(item.node.control_inputs))
            item.waits += 2 * count if item.kind is Kind.MERGE else item.data + count
        self.fetches = [
            self._fetch(i, value, frame_of, readers) for i, value in enumerate(graph.outputs)
        ]
        for item in self.items:
            item.place = len(item.frame.waits)
            item.frame.waits.append(item.waits)
            if item.kind is Kind.MERGE:
                item.frame.waits.append(0)
        for item in self.items:
            if item.node is not None:
                item.edges = tuple([_edges(readers, value) for value in item.node.outputs])
                item.controls = tuple(controls.get(item.node, ()))
                item.single = _single(item)
        self.roots = [item for item in self.items if not item.waits]
        self.end = FrameNode(-1, None, Kind.RETURN, self.root)
        self.feeds = []
        for value in graph.inputs:
            item = FrameNode(len(self.items), None, Kind.FEED, self.root)
            item.edges = (_edges(readers, value),)
            self.items.append(item)
            self.feeds.append(item)

    def _frame(self, path: tuple[str, ...]) -> FrameInfo:
        found = self._frames.get(path)
        if found is None:
            found = self._frames[path] = FrameInfo(path[-1], self._frame(path[:-1]))
        return found

    def _item(
        self,
        node: Node,
        path: tuple[str, ...],
        compile: Callable[[Node], Kernel],
        call: Callable[[Node], Caller],
    ) -> FrameNode:
        kind = kind_of(node)
        if any(is_framed(graph) for _, graph in node.graphs):
            kind = Kind.CALL
        if _is_identity(node):
            kind = Kind.IDENTITY
        kernel: Kernel | None = None
        item = FrameNode(len(self.items), node, kind, self._frame(path))
        self.items.append(item)
        if kind is Kind.ENTER:
            child = self._frame((*path, node.attrs["frame_name"]))
            child.enters += 1
            child.parallel = int(node.attrs.get("parallel_iterations", 10))
            item.child = child
            item.constant = bool(node.attrs.get("is_constant", False))
        elif kind is Kind.ORDINARY:
            kernel = compile(node)
            item.function = kernel.function
            item.nested = bool(node.graphs)
            if kernel.begin is not None:
                item.kind = Kind.ASYNCHRONOUS
                item.function = kernel.begin
                self.asynchronous = True
        elif kind is Kind.SEND or kind is Kind.RECV:
            attrs = node.attrs
            item.key = edge(attrs["send_device"], attrs["recv_device"], attrs["tensor_name"])
        elif kind is Kind.CALL:
            item.function = call(node)
        of = self._slots.of
        inputs = tuple([-1 if v is None else of(v) for v in node.inputs])
        outputs = tuple([-1 if v is None else of(v) for v in node.outputs])
        item.step = Step(node, kernel, inputs, outputs)
        return item

    @property
    def steps(self) -> list[Step]:
        """The steps that observers are told of."""
        return [item.step for item in self.items if item.step is not None]

    def plan(self) -> Plan:
        """What observers are told of the graph."""
        graph = self.graph
        return self._slots.plan(graph.name, self.steps, graph.inputs, graph.outputs)

    def _place(
        self,
        item: FrameNode,
        values: Sequence[Value | None],
        readers: _Readers,
    ) -> None:
        """Give the inputs of an item their places in its frame."""
        inputs = item.frame.inputs
        item.first = len(inputs)
        if item.kind is Kind.MERGE:
            self._place_merge(item, values, readers)
            return
        for value in values:
            if value is not None and value.const is None:
                readers.setdefault(value, []).append((item, len(inputs)))
                item.data += 1
            inputs.append(None if value is None else value.const)
        item.end = len(inputs)

    @staticmethod
    def _place_merge(item: FrameNode, values: Sequence[Value | None], readers: _Readers) -> None:
        """A constant lives from the start, so that no other input is waited for."""
        item.waits = 1
        taken: list[Any] = [None, None]
        for i, value in enumerate(values):
            index = np.array(i, np.int32)
            index.flags.writeable = False
            if value is None:
                continue
            if value.const is None:
                readers.setdefault(value, []).append((item, index))
                item.data += 1
            elif item.waits:
                item.waits, taken = 0, [value.const, index]
        item.frame.inputs += taken
        item.end = item.first + 2

    def _fetch(
        self,
        port: int,
        value: Value,
        frame_of: Mapping[Node, tuple[str, ...]],
        readers: _Readers,
    ) -> FrameNode:
        """An item that waits for an output, in the frame where that is made."""
        path: tuple[str, ...] = ()
        if value.producer is not None and value.producer in frame_of:
            path = self._inside(value.producer, frame_of)
        item = FrameNode(len(self.items), None, Kind.FETCH, self._frame(path))
        item.port = port
        self.items.append(item)
        self._place(item, [value], readers)
        item.waits = item.data
        return item

    @staticmethod
    def _inside(node: Node, frame_of: Mapping[Node, tuple[str, ...]]) -> tuple[str, ...]:
        """The frame that the outputs of a node are in."""
        kind = kind_of(node)
        path = frame_of[node]
        if kind is Kind.ENTER:
            return (*path, node.attrs["frame_name"])
        return path[:-1] if kind is Kind.EXIT else path


def _is_identity(node: Node) -> bool:
    """Whether a node makes what it reads; a constant reads itself."""
    alike = node.op.name == "Identity" and len(node.inputs) == len(node.outputs) == 1
    return alike or _is_constant(node)


def _is_constant(node: Node) -> bool:
    return node.op.name == "Const" and node.op.domain == TENSORFLOW


def _inputs(node: Node, compile: Callable[[Node], Kernel]) -> list[Value | None]:
    if _is_constant(node):
        return [Value(node.name, const=compile(node).function())]
    return read(node)


_Readers: TypeAlias = dict[Value, list[tuple[FrameNode, Any]]]


def _edges(readers: _Readers, value: Value | None) -> tuple[Readers, Readers]:
    """Who reads an output, and apart from these the Merges."""
    found = [] if value is None else readers.get(value, [])
    placed = [(reader, reader.place, where) for reader, where in found]
    return (
        tuple([each for each in placed if each[0].kind is not Kind.MERGE]),
        tuple([each for each in placed if each[0].kind is Kind.MERGE]),
    )


def _single(item: FrameNode) -> tuple[FrameNode, int, Any] | None:
    """The one who reads an item, if what it makes lives whenever the item does."""
    if item.controls or item.leaves or item.kind is Kind.SWITCH or not item.edges:
        return None
    (readers, merges), *others = item.edges
    if merges or len(readers) != 1 or any(a or b for a, b in others):
        return None
    return readers[0]


def read(node: Node) -> list[Value | None]:
    """All that a node reads, with what its graphs take from outside."""
    inner = [value for _, graph in node.graphs for value in captures(graph)]
    return [*node.inputs, *dict.fromkeys(inner)]


def alone(node: Node) -> tuple[Graph, list[int]]:
    """A graph of a copy of ``node`` alone, and which of the values that it reads are its inputs."""
    place: dict[Value, int] = {}
    for i, value in enumerate(read(node)):
        if value is not None and value.const is None:
            place.setdefault(value, i)
    made = [value for value in node.outputs if value is not None]
    return clone(Graph([], made, [node], node.name), list(place), made), list(place.values())
