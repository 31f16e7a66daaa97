"""Raise Switches and Merges of one frame to Ifs.

The nodes of a frame are visited in topological order, each in the block of its condition
(``conditions``). Merges are held back until no other node is ready. Then all reached Merges of one
predicate become one If, whose branches are the nodes that lead to these Merges under either
choice::

                 ┌─F─> neg ──┐                               else: y0 = neg(x), 0
    x ──> switch ┤           ├─> merge ──> y         y, i = If(p)
          p ─┘   └─T─> abs ──┘      └──> i                   then: y1 = abs(x), 1

A Switch is removed: its readers in a branch read its input. The graph is changed only once all
nodes are known to fit; otherwise an ``UnraisedError`` is raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from penstock.core.records import dataclass, field
from penstock.core.types import BOOL, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import FRAMED, Role
from penstock.ops.registry import standard
from penstock.passes.context import Unraised
from penstock.passes.rewrite import Substitution
from penstock.passes.structure.conditions import Condition, Deadness, is_switch


class UnraisedError(Exception):
    """The reason why a node, and so its frame, cannot be raised."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.label}: {reason}")
        self.unraised = Unraised(node, reason)


@dataclass(slots=True)
class RaisedBlock:
    """Nodes that run together, in order, and their outputs; ``effects`` must run even if unread,
    ``waits`` are nodes outside of the block that they have control edges from."""

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    effects: list[Node] = field(default_factory=list)
    waits: dict[Node, None] = field(default_factory=dict)

    def graph(self, name: str) -> Graph:
        return Graph([], self.outputs, self.nodes, name, self.effects)


@dataclass(eq=False)
class Branches:
    """Raises the nodes of ``deadness`` to blocks. ``values`` maps values to their replacements in
    the blocks. ``forced`` nodes must run, like those with side effects. ``edits`` are the changes
    that ``apply`` will make to nodes."""

    deadness: Deadness
    values: dict[Value, Value] = field(default_factory=dict)
    forced: Collection[Node] = ()
    edits: list[tuple[Node, dict[Value, Value], list[Node]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.position = {node: i for i, node in enumerate(self.deadness.conditions)}

    def block(
        self,
        condition: Condition,
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        around: Collection[Condition] = (),
    ) -> RaisedBlock:
        """Return the block of ``nodes``, whose conditions are or imply ``condition``. It may
        capture values of enclosing blocks, whose conditions are ``around``."""
        return _BlockBuilder(self, condition, nodes, {*around, condition}).build(outputs)

    def check(self, edge: Collection[Node]) -> None:
        """Raise ``UnraisedError`` for primitives without a structured form, except those of
        ``edge``."""
        for node in self.deadness.conditions:
            if node.op.role not in FRAMED or _is_removed(node):
                continue
            if node not in edge and node not in self.deadness.joined:
                reasons: dict[Role | None, str] = {
                    Role.MERGE: "its inputs are not the two sides of one condition",
                    Role.ENTER: f"frame {node.attrs.get('frame_name')!r} stays",
                    Role.CALL: "it calls a recursive function",
                }
                other = "this operation belongs to no condition or loop"
                raise UnraisedError(node, reasons.get(node.op.role, other))

    def source(self, value: Value) -> Value:
        """Return the value that Switches and LoopConds forward as ``value``."""
        while (node := value.producer) in self.deadness.conditions:
            data = node.inputs[0] if is_switch(node) or node.op.role is Role.LOOP_COND else None
            if data is None:
                break
            value = data
        return value

    def must_run(self, node: Node) -> bool:
        return node in self.forced or self.deadness.has_side_effects(node)

    def predecessors(self, node: Node) -> list[Node]:
        """Return the nodes that ``node`` depends on, or that decide whether it runs."""
        deadness = self.deadness
        sources = [value.producer for value in deadness.reads[node]]
        if node in deadness.joined:
            sources.append(deadness.joined[node][0].producer)
        elif self.must_run(node):
            # Predicates may be reached only through control edges, which were dropped.
            choices = deadness.conditions[node]
            sources += [source.producer for source, _ in choices if isinstance(source, Value)]
        return [source for source in (*sources, *deadness.waits[node]) if source is not None]

    def apply(self) -> None:
        """Apply the recorded changes of inputs and control inputs to the nodes of all blocks."""
        for node, values, waits in self.edits:
            substitute([node], values)
            node.control_inputs = waits


class _BlockBuilder:
    """Builder of the block of one condition; ``readable`` are its condition and enclosing ones.

    ``place`` maps each visited node to the node of the block that replaces or contains it.
    ``reached``: the Merges held back, by predicate; ``unreached`` counts the others. ``forced``:
    nodes in branches that must run, and are not in an If yet.
    """

    def __init__(
        self,
        branches: Branches,
        condition: Condition,
        nodes: Sequence[Node],
        readable: set[Condition],
    ) -> None:
        self.branches = branches
        self.deadness = branches.deadness
        self.condition = condition
        self.readable = readable
        self.block = RaisedBlock()
        self.place: dict[Node, Node] = {}
        self.followers: dict[Node, list[Node]] = {node: [] for node in nodes}
        self.pending: dict[Node, int] = {}
        for node in nodes:
            # A node may read several values of another node: count it once.
            sources = [s for s in dict.fromkeys(branches.predecessors(node)) if s in self.followers]
            self.pending[node] = len(sources)
            for source in sources:
                self.followers[source].append(node)
        # Ready nodes are visited in graph order, which is preserved.
        at = branches.position
        self.ready = [at[node] for node in nodes if not self.pending[node]]
        heapify(self.ready)
        self.by_position = {at[node]: node for node in nodes}
        self.reached: dict[Value, list[Node]] = {}
        self.forced: dict[Node, None] = {}
        conditions, joined = self.deadness.conditions, self.deadness.joined
        self.unreached = Counter(
            joined[n][0] for n in nodes if n in joined and conditions[n] == condition
        )

    def build(self, outputs: Sequence[Value]) -> RaisedBlock:
        while True:
            while self.ready:
                self.visit(self.by_position[heappop(self.ready)])
            # A newly added If may contain some of them.
            self.forced = {node: None for node in self.forced if node not in self.place}
            if not self.reached and not self.forced:
                break
            predicate = self.next_predicate()
            merges = self.reached.pop(predicate, [])
            self.unreached[predicate] -= len(merges)
            # A forced node that leads to no Merge goes into the last If of its predicate.
            self.add_if(predicate, merges, () if self.unreached[predicate] else self.forced)
            for merge in merges:
                self.leave(merge)
        self.block.outputs = [self.output(value) for value in outputs]
        return self.block

    def visit(self, node: Node) -> None:
        """Visit a node whose predecessors have all been visited, or are in an If."""
        if self.deadness.conditions[node] != self.condition:
            if self.branches.must_run(node) and not _is_removed(node):
                self.forced[node] = None
        elif node in self.deadness.joined:
            self.reached.setdefault(self.deadness.joined[node][0], []).append(node)
            return
        elif not _is_removed(node):
            self.keep(node)
        self.leave(node)

    def leave(self, node: Node) -> None:
        for follower in self.followers[node]:
            self.pending[follower] -= 1
            if not self.pending[follower]:
                heappush(self.ready, self.branches.position[follower])

    def next_predicate(self) -> Value:
        """Return the predicate of the next If, preferably one whose Merges are all reached."""
        if not self.reached:
            return self.outermost_predicate(next(iter(self.forced)))
        complete = (p for p in self.reached if len(self.reached[p]) == self.unreached[p])
        return next(complete, next(iter(self.reached)))

    def keep(self, node: Node) -> None:
        """Add a node to the block itself."""
        values = {value: self.read(value, node) for value in self.deadness.reads[node]}
        changed = {old: new for old, new in values.items() if old is not new}
        self.branches.edits.append((node, changed, self.waited(self.deadness.waits[node])))
        self.place[node] = node
        self.block.nodes.append(node)
        if self.branches.must_run(node):
            self.block.effects.append(node)

    def read(self, value: Value, reader: Node) -> Value:
        """Return the replacement of ``value`` in this block; it must be produced here or in an
        enclosing block."""
        source = self.branches.source(value)
        producer = source.producer
        # A graph input is live everywhere.
        condition = self.condition if producer is None else self.deadness.conditions.get(producer)
        if condition is not None and condition not in self.readable:
            raise UnraisedError(reader, f"it reads {source.name!r}, which is in another branch")
        return self.branches.values.get(source, source)

    def output(self, value: Value) -> Value:
        """Return the replacement of an output of the block."""
        if value.producer is None:
            return value
        if not self.deadness.of(value) <= self.condition:
            reason = f"{value.name!r} is needed, but has no value if its branch is not taken"
            raise UnraisedError(value.producer, reason)
        return self.read(value, value.producer)

    def waited(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the replacements of control inputs in the block; others are left outside."""
        places: dict[Node, None] = {}
        for node in nodes:
            if node in self.place:
                places[self.place[node]] = None
            elif node in self.followers:
                raise UnraisedError(
                    node, "it has a side effect in a branch, and nodes outside wait for it"
                )
            else:
                self.block.waits[node] = None
        return list(places)

    def outermost_predicate(self, node: Node) -> Value:
        """Return the predicate, known here, that decides whether a node outside of all Ifs runs."""
        for predicate, _ in self.deadness.conditions[node] - self.condition:
            if isinstance(predicate, Value) and self.deadness.of(predicate) <= self.condition:
                return predicate
        raise UnraisedError(node, "it must run in a branch that no condition decides")

    # Ifs.

    def add_if(self, predicate: Value, merges: Sequence[Node], forced: Iterable[Node]) -> None:
        """Add an If for ``merges`` of one predicate, and the ``forced`` nodes in its branches."""
        regions = [self.condition | {(predicate, choice)} for choice in (0, 1)]
        conditions = self.deadness.conditions
        within = [n for n in forced if any(region <= conditions[n] for region in regions)]
        first = [*merges, *within][0]
        if not isinstance(predicate.type, TensorType) or predicate.type.dtype != BOOL:
            reason = f"its predicate {predicate.name!r} is not known to be a truth value"
            raise UnraisedError(first, reason)
        condition = self.read(predicate, first)
        inside: dict[Node, None] = {}
        sides: list[RaisedBlock] = []
        for choice, region in enumerate(regions):
            nodes = self.leading_to(merges, choice, region, within)
            inside.update(dict.fromkeys(nodes))
            sides.append(self.side(merges, choice, region, nodes))
        waits = {w: None for merge in merges for w in self.deadness.waits[merge] if w not in inside}
        waits.update({w: None for side in sides for w in side.waits})
        outputs = self.if_outputs(merges)
        if not merges:  # a node without outputs needs a side effect
            outputs.append(Value(f"{first.name}#done"))
            for side in sides:
                side.outputs.append(Value(f"{first.name}#nothing", const=np.array(0, np.int32)))
        name = first.name if merges else f"{first.name}#branch"
        keys = ("else_branch", "then_branch")
        graphs = {k: side.graph(f"{first.name}/{k}") for k, side in zip(keys, sides, strict=True)}
        before, op = self.waited(waits), standard("If")
        node = first.derived([condition], outputs, graphs, op=op, name=name, control_inputs=before)
        self.place.update(dict.fromkeys((*inside, *merges), node))
        self.block.nodes.append(node)
        if any(side.effects for side in sides):
            self.block.effects.append(node)

    def if_outputs(self, merges: Sequence[Node]) -> list[Value]:
        """Return new values for the values of ``merges``, then for their indices."""
        outputs: list[Value] = []
        for i in (0, 1):
            for merge in merges:
                old = merge.outputs[i] if i < len(merge.outputs) else None
                outputs.append(Value(old.name, old.type) if old else Value(f"{merge.name}#{i}"))
                if old is not None:
                    self.branches.values[old] = outputs[-1]
        return outputs

    def side(
        self, merges: Iterable[Node], choice: int, region: Condition, nodes: Sequence[Node]
    ) -> RaisedBlock:
        """Return one branch; its outputs are the inputs of ``merges``, then their indices."""
        inputs = [(merge, self.deadness.joined[merge][1][choice]) for merge in merges]
        # A branch may capture values of enclosing blocks, as in ONNX.
        block = self.branches.block(region, nodes, [value for _, value in inputs], self.readable)
        for merge, value in inputs:
            # The second output of a Merge is the index of its live input.
            index = np.array(merge.inputs.index(value), np.int32)
            block.outputs.append(Value(f"{merge.name}#{index}", const=index))
        return block

    def leading_to(
        self, merges: Iterable[Node], choice: int, region: Condition, forced: Iterable[Node]
    ) -> list[Node]:
        """Return the nodes of a region that lead to ``forced`` nodes, or to ``merges`` under one
        choice."""
        deadness = self.deadness
        nodes: set[Node] = set()
        stack: list[Node | None] = [*forced]
        for merge in merges:
            stack.append(deadness.joined[merge][1][choice].producer)
            stack += deadness.waits[merge]
        while stack:
            node = stack.pop()
            # Nodes of enclosing blocks are captured, and run before the If.
            if node not in self.followers or node in nodes or node is None:
                continue
            if not region <= deadness.conditions[node]:
                continue
            if node in self.place:
                raise UnraisedError(node, "two conditions that run in sequence share it")
            nodes.add(node)
            stack += self.branches.predecessors(node)
        # The search runs backwards: restore graph order, in which side effects must happen.
        return sorted(nodes, key=self.branches.position.__getitem__)


def _is_removed(node: Node) -> bool:
    """Whether a node only routes control, which structured control flow makes redundant."""
    return is_switch(node) or node.op.role in (Role.LOOP_COND, Role.CONTROL_TRIGGER)


def substitute(nodes: Iterable[Node], values: Mapping[Value, Value]) -> None:
    """Replace the values that nodes, and the graphs in them, read."""
    substitution = Substitution()
    substitution.replace(list(values), list(values.values()))
    for node in nodes if values else ():
        substitution.apply(node)
        for _, graph in node.graphs:
            substitution.apply_throughout(graph)
