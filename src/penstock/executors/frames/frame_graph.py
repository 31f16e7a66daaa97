"""The compiled form of a graph with frames: its nodes with their counters, edges and functions.

Inputs and counts of pending inputs have indices within their frame, so a run allocates two lists
for each iteration, and nothing for each node. The graph ``y = Merge(Switch(x, p))``, with ``x`` and
``p`` fed, becomes

========= ============== ============ =================== ==========================
node      inputs         waits        edges of its outputs
========= ============== ============ ==============================================
Switch    [0:2] (x, p)   [0] = 2      0 -> Merge, index 0;  1 -> Merge, index 1
Merge     [2:4] (y, i)   [1:3] = 1, 0 0 -> fetch of y, input 4
fetch     [4:5] (y)      [3] = 1
========= ============== ============ ==============================================

where ``[a:b]`` are positions in an iteration's list of inputs or list of counts (``scheduler.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import PenstockError
from penstock.core.records import dataclass, field, replace
from penstock.core.types import RunValue, RunValues
from penstock.executors.frames.rendezvous import edge_key
from penstock.ir.contract import Guard
from penstock.ir.graph import FramePath, Graph, Node, Value, captures, clone, is_framed
from penstock.ir.kernel import Kernel
from penstock.ir.op import Role
from penstock.ops.internal.segment import is_frame, is_segment
from penstock.ops.registry import TENSORFLOW
from penstock.plan.plan import Block, Slot, SlotKind, Step, StepTable

# Above any number of inputs: a count equal to DEATH means that no input is pending and that an
# input was dead. Below 2**30: CPython's arithmetic has a fast path for such single-digit integers.
DEATH = 1 << 29
"""Added to the count of an ordinary node when its first dead input arrives."""
MERGE_DATA = 1
"""The part of a Merge's count that is removed by its first live data input."""
MERGE_CONTROL = 2
"""The part of a Merge's count for each of its control inputs."""


class TokenRule(IntEnum):
    """The rule by which a node consumes and produces tokens."""

    ORDINARY = 0
    SWITCH = 1
    MERGE = 2
    ENTER = 3
    EXIT = 4
    NEXT_ITERATION = 5
    IDENTITY = 6
    # A LoopCond matters only where a graph is partitioned. It passes its input on.
    LOOP_COND = IDENTITY
    CONTROL_TRIGGER = 7
    FETCH = 8
    FEED = 9
    CALL = 10
    RETURN = 11
    ASYNCHRONOUS = 20
    SEND = 21
    RECV = 22


def _rule_of(node: Node) -> TokenRule:
    role = node.op.role
    if role is not None and role.name in TokenRule.__members__:
        return TokenRule[role.name]
    if any(is_framed(graph) for _, graph in node.graphs):
        return TokenRule.CALL
    return TokenRule.IDENTITY if is_identity(node) else TokenRule.ORDINARY


# One class with a rule, instead of a class for each rule: the loop that moves tokens reads the
# fields and branches on the rule inline, since a method call per token would take a third longer
# (``scheduler``). For the same reason, properties derived from the rule are fields.
#
# Nodes are shared by all runs of the graph, on any thread. Runs write ``cost``, ``latest`` and
# ``unmeasured`` without a lock: a lost update only changes when a kernel is measured next. If two
# runs decrement from 1 at the same time, the count becomes -1, and the next run measures.


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class FrameNode:
    """A node, a feed or a fetch of a ``FrameGraph``.

    ``first`` to ``end``: the indices of its inputs in its frame; a Merge has two, the value that
    it takes and that value's input index. ``counter``: the index of its count; ``waits``: the
    initial count. ``data_inputs``: the number of inputs that are not constant.

    ``edges``: for each output, its readers other than Merges, and its Merges. ``controls``: the
    nodes with a control edge from this one. ``only_edge``: the single reader, if only one output is
    read, by one node other than a Merge, and if the output is live whenever the node is.

    ``forwards``: whether its outputs are its inputs. ``leaves``: whether its outputs go to another
    iteration or frame. ``port``: the output index of a fetch. ``child``: the frame of an Enter;
    ``constant``: whether the Enter's value is for all iterations. ``key``: identifies the edge
    of a Send and a Recv in the rendezvous.

    ``cost``: the estimated seconds of its kernel, ``latest``: the last measurement; ``unmeasured``:
    the number of runs until it is measured again. ``nested``: whether the function runs a plan or a
    frame: its first argument is the control of the run, and it returns all outputs. ``varies``:
    whether that plan may have loops. ``explain``: explains its errors, unless None.
    """

    node: Node | None
    rule: TokenRule
    frame: StaticFrame
    first: int = 0
    end: int = 0
    counter: int = 0
    waits: int = 0
    data_inputs: int = 0
    edges: tuple[tuple[Readers, Readers], ...] = ()
    controls: tuple[FrameNode, ...] = ()
    only_edge: tuple[FrameNode, int, Any] | None = None
    port: int = 0
    child: StaticFrame | None = None
    constant: bool = False
    key: str = ""
    function: Callable[..., RunValue] | None = None
    nested: bool = False
    varies: bool = False
    explain: Explain | None = None
    cost: float = 0.0
    latest: float = 0.0
    unmeasured: int = 0
    step: Step | None = None
    outputs: int = field(init=False)
    leaves: bool = field(init=False)
    forwards: bool = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = 0 if self.node is None else len(self.node.outputs)
        self.leaves = self.rule in (TokenRule.ENTER, TokenRule.EXIT, TokenRule.NEXT_ITERATION)
        self.forwards = self.leaves or self.rule in (TokenRule.MERGE, TokenRule.IDENTITY)


Readers: TypeAlias = "tuple[tuple[FrameNode, int, Any], ...]"
"""For each reader of an output: the node, its ``counter``, and the position of its input. For a
Merge, the third element is the index that it returns as its second output."""


@dataclass(slots=True, eq=False, repr=False)
class StaticFrame:
    """The static part of a frame: all loops of the same ``name`` in the same parent frame.

    ``inputs`` and ``waits`` are the initial lists of an iteration, with constants already stored.
    ``enters``: the number of tokens that enter the frame, dead ones included. ``parallel``: the
    maximum number of concurrent iterations.
    """

    name: str
    inputs: list[RunValue] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    enters: int = 0
    parallel: int = 1


Explain: TypeAlias = Callable[[Exception], PenstockError]
"""Returns the run's error for an exception, with the name of the node that raised it."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeKernel:
    """The kernel of a node, and the name of its backend. ``table``: the steps of the plan that the
    kernel runs, if any; ``explain``: explains its errors, unless None; ``source``: the source code
    of the function of a frame."""

    kernel: Kernel
    backend: str
    table: StepTable | None = None
    explain: Explain | None = None
    source: str = ""


class ValueNumbers:
    """Assigns slots, which observers see, to the values of a graph and of nested plans."""

    def __init__(self) -> None:
        self._values: list[Value | Slot] = []
        self._slots: dict[Value, int] = {}

    def slot(self, value: Value | None) -> int:
        """Return the slot of a value; -1 for an omitted optional value."""
        if value is None:
            return -1
        # Assigned on demand: slots of nested plans lie between those of the graph.
        if value not in self._slots:
            self._slots[value] = len(self._values)
            self._values.append(value)
        return self._slots[value]

    def share(self, value: Value, other: Value) -> None:
        """Give ``value``, a copy of ``other``, the same slot."""
        self._slots[value] = self.slot(other)

    def step(self, node: Node, compiled: NodeKernel | None) -> Step:
        """Return the step of a node. A segment or a frame has one block."""
        inputs, outputs = tuple(map(self.slot, node.inputs)), tuple(map(self.slot, node.outputs))
        if compiled is None:
            return Step(node, None, inputs, outputs)
        whole = is_segment(node) or is_frame(node)
        blocks = (self.block(compiled.table),) if whole and compiled.table is not None else ()
        kernel, backend = compiled.kernel, compiled.backend
        return Step(node, kernel, inputs, outputs, blocks=blocks, backend=backend)

    def block(self, table: StepTable) -> Block:
        """Return the steps of a nested plan, with slots of this table."""
        first = len(self._values)
        for slot in with_checkpoints(table.slots):
            kind = SlotKind.DYNAMIC if slot.constant is None else SlotKind.CONSTANT
            self._values.append(Slot(slot.name, slot.type, kind, slot.constant))

        def moved(slots: Sequence[int]) -> tuple[int, ...]:
            return tuple([i + first if i >= 0 else i for i in slots])

        def step(old: Step) -> Step:
            inputs, outputs = moved(old.inputs), moved(old.outputs)
            blocks = tuple(map(block, old.blocks))
            # Observers see no workspaces.
            return replace(old, inputs=inputs, outputs=outputs, blocks=blocks, workspace=-1)

        def block(old: Block | StepTable) -> Block:
            return Block(
                moved(old.inputs), moved(old.outputs), tuple(map(step, with_checkpoints(old.steps)))
            )

        return block(table)

    def table(
        self,
        name: str,
        steps: Sequence[Step],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        constants: Sequence[Value | np.ndarray],
    ) -> StepTable:
        """Return the table of ``steps``, whose slots were assigned here."""
        begin, end = (tuple(map(self.slot, values)) for values in (inputs, outputs))
        kinds = {True: SlotKind.CONSTANT, False: SlotKind.DYNAMIC}
        slots = [
            Slot(v.name, v.type, kinds[v.is_constant], v if v.is_constant else None)
            if isinstance(v, Value)
            else v
            for v in self._values
        ]
        return StepTable(name, tuple(steps), tuple(slots), begin, end, tuple(constants))


CallSteps: TypeAlias = "Generator[tuple[FrameGraph, RunValues], RunValues, RunValues]"
"""A call in progress: yields the next graph to run and its inputs, receives the graph's outputs,
and returns the outputs of the node."""
StartCall: TypeAlias = Callable[..., CallSteps]
"""Begins the call of a node for the values of its inputs."""


def _replace(node: ref[FrameNode], guard: Guard) -> None:
    """Replace the guard of a node by its kernel, once the first result was valid."""
    if (frame_node := node()) is not None:
        frame_node.function = guard.function


# The executor runs the graph without a plan. A plan would fix order and memory before the run, but
# tokens decide during the run which nodes run, and how often (decision 28). All static facts are
# computed here, once: a run adds two lists for each iteration, as copies of the frame's lists.


class FrameGraph:
    """A graph compiled for the frames executor.

    ``roots`` are the nodes without pending inputs; ``fetches`` has one node for each output, and
    ``feeds`` one for each input. ``end`` is the node that ends a call of the graph. ``function``:
    the name of the graph's function, or "". ``asynchronous``: whether the graph has asynchronous
    kernels.

    ``paths`` maps each node to its frame. ``kernel`` compiles an ordinary node, ``call`` a node
    that calls a function or runs its graphs as frame graphs. ``numbers`` assigns the slots of this
    graph and of graphs that run with it. Up to ``workers`` kernels run at the same time.
    """

    def __init__(
        self,
        graph: Graph,
        paths: Mapping[Node, FramePath],
        kernel: Callable[[Node], NodeKernel],
        call: Callable[[Node], StartCall],
        numbers: ValueNumbers,
        workers: int,
    ) -> None:
        self.workers = workers
        self.graph = graph
        self.function = ""
        self.root = StaticFrame("")
        self.asynchronous = False
        self._numbers = numbers
        self._frames: dict[FramePath, StaticFrame] = {(): self.root}
        self.nodes = [
            self._node(node, paths[node], kernel, call) for node in with_checkpoints(graph.nodes)
        ]
        readers: _ReadersByValue = {}
        controls: dict[Node, list[FrameNode]] = {}
        for node, original in with_checkpoints(zip(self.nodes, graph.nodes, strict=True)):
            self._place(node, _inputs(original, kernel), readers)
            # A predecessor that is named twice sends one token.
            predecessors = dict.fromkeys(original.control_inputs)
            for predecessor in predecessors:
                controls.setdefault(predecessor, []).append(node)
            if node.rule is TokenRule.MERGE:
                node.waits += MERGE_CONTROL * len(predecessors)
            else:
                node.waits = node.data_inputs + len(predecessors)
        self.fetches = []
        for port, value in enumerate(graph.outputs):
            frame = self._frame(_output_path(value.producer, paths))
            fetch = FrameNode(None, TokenRule.FETCH, frame, port=port)
            self._place(fetch, [value], readers)
            fetch.waits = fetch.data_inputs  # 0 for a constant, whose fetch is a root
            self.fetches.append(fetch)
        self.nodes += self.fetches
        # All counters before the edges: an edge has the counter of its reader, and readers may
        # precede the node in a loop.
        for node in self.nodes:
            node.counter = len(node.frame.waits)
            # The count of a Merge is followed by the number of its dead inputs.
            node.frame.waits += [node.waits, 0] if node.rule is TokenRule.MERGE else [node.waits]
        # Not strict, since ``nodes`` ends with the fetches, which have no outputs.
        for node, original in with_checkpoints(zip(self.nodes, graph.nodes, strict=False)):
            node.edges = tuple([_edges(readers, value) for value in original.outputs])
            node.controls = tuple(controls.get(original, ()))
            node.only_edge = _only_edge(node)
        self.roots = [node for node in self.nodes if not node.waits]
        self.end = FrameNode(None, TokenRule.RETURN, self.root)
        self.feeds = [
            FrameNode(None, TokenRule.FEED, self.root, edges=(_edges(readers, value),))
            for value in graph.inputs
        ]

    def __del__(self) -> None:
        # Loops are reference cycles of nodes, which would stay until the next garbage collection.
        for node in getattr(self, "nodes", ()):
            node.edges, node.controls, node.only_edge = (), (), None

    def _frame(self, path: FramePath) -> StaticFrame:
        if path not in self._frames:
            self._frames[path] = StaticFrame(path[-1])
        return self._frames[path]

    def _node(
        self,
        node: Node,
        path: FramePath,
        compile: Callable[[Node], NodeKernel],
        call: Callable[[Node], StartCall],
    ) -> FrameNode:
        """Return the frame node of a node, with its function but without its inputs and edges."""
        frame_node, attrs = FrameNode(node, _rule_of(node), self._frame(path)), node.attrs
        compiled: NodeKernel | None = None
        match frame_node.rule:
            case TokenRule.ENTER:
                child = frame_node.child = self._frame((*path, attrs["frame_name"]))
                # The first iteration stays open until a token of each Enter has arrived, live or
                # dead.
                child.enters += 1
                # TensorFlow's default, for graphs that leave the attribute out.
                child.parallel = int(attrs.get("parallel_iterations", 10))
                frame_node.constant = bool(attrs.get("is_constant", False))
            case TokenRule.ORDINARY:
                compiled = compile(node)
                kernel = compiled.kernel
                frame_node.function = kernel.function
                frame_node.nested = compiled.table is not None
                # The time of a loop or a branch depends on data, so a single sample is not enough.
                frame_node.varies = any(inner.graphs for _, g in node.graphs for inner in g.nodes)
                frame_node.varies |= bool(node.graphs) and not is_segment(node)
                frame_node.explain = compiled.explain
                if kernel.begin is not None:
                    frame_node.rule = TokenRule.ASYNCHRONOUS
                    frame_node.function = kernel.begin
                    self.asynchronous = True
                # A weak reference, since the node refers to the guard.
                if isinstance(frame_node.function, Guard):
                    frame_node.function.replace = partial(_replace, ref(frame_node))
            case TokenRule.SEND | TokenRule.RECV:
                frame_node.key = edge_key(
                    attrs["send_device"], attrs["recv_device"], attrs["tensor_name"]
                )
            case TokenRule.CALL if is_frame(node):
                compiled = compile(node)
                frame_node.function, frame_node.nested = compiled.kernel.function, True
                frame_node.explain = compiled.explain
            case TokenRule.CALL:
                frame_node.function = call(node)
        frame_node.step = self._numbers.step(node, compiled)
        return frame_node

    @property
    def steps(self) -> list[Step]:
        """The steps that observers see."""
        return [node.step for node in self.nodes if node.step is not None]

    def _place(
        self, node: FrameNode, values: Sequence[Value | None], readers: _ReadersByValue
    ) -> None:
        """Assign the inputs of a node their positions in its frame."""
        inputs = node.frame.inputs
        node.first = len(inputs)
        if node.rule is TokenRule.MERGE:
            self._place_merge(node, values, readers)
            return
        for value in values:
            if value is not None and not value.is_constant:
                # Other parts wait for a Send, so it is the first reader.
                own = readers.setdefault(value, [])
                first = 0 if node.rule is TokenRule.SEND else len(own)
                own.insert(first, (node, len(inputs)))
                node.data_inputs += 1
            # Constants are in the list that each iteration copies, and need no tokens.
            inputs.append(None if value is None else value.const)
        node.end = len(inputs)

    @staticmethod
    def _place_merge(
        node: FrameNode, values: Sequence[Value | None], readers: _ReadersByValue
    ) -> None:
        """Assign the inputs of a Merge their positions. A constant input is live from the start, so
        a Merge with one waits for no other data."""
        node.waits = MERGE_DATA
        merged: list[Any] = [None, None]
        for i, value in enumerate(values):
            index = np.array(i, np.int32)
            index.flags.writeable = False  # all runs share it
            if value is None:
                continue
            if not value.is_constant:
                readers.setdefault(value, []).append((node, index))
                node.data_inputs += 1
            elif node.waits:  # the first constant is taken, as the first live token would be
                node.waits, merged = 0, [value.const, index]
        node.frame.inputs += merged
        node.end = node.first + 2


def _output_path(node: Node | None, paths: Mapping[Node, FramePath]) -> FramePath:
    """Return the frame of a node's outputs."""
    if node is None or node not in paths:
        return ()
    if node.op.role is Role.ENTER:
        return (*paths[node], node.attrs["frame_name"])
    # An Exit runs in the frame that it leaves.
    return paths[node][:-1] if node.op.role is Role.EXIT else paths[node]


def is_identity(node: Node) -> bool:
    """Whether a node outputs its input. A constant counts as its own input (``_inputs``)."""
    alike = node.op.name == "Identity" and len(node.inputs) == len(node.outputs) == 1
    return alike or is_constant(node)


def is_constant(node: Node) -> bool:
    return node.op.name == "Const" and node.op.domain == TENSORFLOW


def _inputs(node: Node, compile: Callable[[Node], NodeKernel]) -> list[Value | None]:
    if is_constant(node):
        return [Value(node.name, const=compile(node).kernel.function())]
    return all_inputs(node)


_ReadersByValue: TypeAlias = dict[Value, list[tuple[FrameNode, Any]]]


def _edges(readers: _ReadersByValue, value: Value | None) -> tuple[Readers, Readers]:
    """Return the readers of an output other than Merges, and its Merges."""
    pairs = [] if value is None else readers.get(value, [])
    edges = [(reader, reader.counter, position) for reader, position in pairs]
    # Merges are separate: they count differently, and most outputs have none, so this saves a test
    # of the rule for each reader.
    return (
        tuple([edge for edge in edges if edge[0].rule is not TokenRule.MERGE]),
        tuple([edge for edge in edges if edge[0].rule is TokenRule.MERGE]),
    )


def _only_edge(node: FrameNode) -> tuple[FrameNode, int, Any] | None:
    # Most values have one reader. A fast path for this case, with inlined methods, halved the time
    # per token (decision 28). It does not apply to a Switch, whose outputs may be dead, nor to
    # values that leave an iteration, which are delivered in another one.
    if node.controls or node.leaves or node.rule is TokenRule.SWITCH or not node.edges:
        return None
    (readers, merges), *others = node.edges
    if merges or len(readers) != 1 or any(a or b for a, b in others):
        return None
    return readers[0]


def all_inputs(node: Node) -> list[Value | None]:
    """Return the inputs of a node, followed by the captures of its graphs."""
    inner = [value for _, graph in node.graphs for value in captures(graph)]
    return [*node.inputs, *dict.fromkeys(inner)]


def isolate(node: Node) -> tuple[Graph, list[int]]:
    """Return a graph with only a copy of ``node``, and the indices of its inputs in
    ``all_inputs(node)``. Omitted outputs are replaced by a constant, to keep their number."""
    indices: dict[Value, int] = {}
    for i, value in enumerate(all_inputs(node)):
        if value is not None and not value.is_constant:
            indices.setdefault(value, i)
    none = Value("", const=np.empty(0))
    outputs = [none if value is None else value for value in node.outputs]
    graph = clone(Graph([], outputs, [node], node.name, [node]), list(indices))
    return graph, list(indices.values())
