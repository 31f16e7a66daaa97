"""Switches and Merges of one frame as Ifs.

The nodes of a frame are run symbolically: each goes where its condition (``deadness.py``) says, as
soon as all is there that it comes after. Only a Merge is held back until nothing else can go on.
Then those that have come this far by one predicate become one If, whose branches are what leads to
these Merges under one choice or the other. A Switch goes: who reads it in a branch reads what it
was given.

Nothing is changed before all is known to fit. What does not is told by a ``UnraisedError``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Role
from penstock.ops.registry import find
from penstock.ops.tensorflow.control_flow import is_primitive
from penstock.passes.structure.conditions import SWITCHES, Condition, Deadness, is_tensorflow
from penstock.types import BOOL, TensorType

# What only says where and when others run, and is not needed where that shows.
_GONE = frozenset({*SWITCHES, "LoopCond", "ControlTrigger"})
_HANDS_ON = frozenset({*SWITCHES, "LoopCond"})


class UnraisedError(Exception):
    """Why a node, and all around it, stays as it is."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.label}: {reason}")
        self.node = node
        self.reason = reason


@dataclass(slots=True)
class Block:
    """Nodes that run together, in order; what they give; those that must run although nobody may
    read what they make; and which nodes outside of the block they wait for."""

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    effects: list[Node] = field(default_factory=list)
    waits: dict[Node, None] = field(default_factory=dict)

    def graph(self, name: str) -> Graph:
        return Graph([], self.outputs, self.nodes, name, self.effects)


class Branches:
    """Blocks of the nodes that ``deadness`` knows.

    ``values``: what stands for which value in them. ``forced``: nodes that must run, as those with
    effects must. ``edits`` is what ``apply`` will do to the nodes of blocks.
    """

    def __init__(
        self,
        deadness: Deadness,
        values: Mapping[Value, Value] | None = None,
        forced: Collection[Node] = (),
    ) -> None:
        self.deadness = deadness
        self.values = dict(values or {})
        self.forced = forced
        self.position = {node: i for i, node in enumerate(deadness.conditions)}
        self.edits: list[tuple[Node, dict[Value, Value], list[Node]]] = []

    def block(
        self,
        condition: Condition,
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        around: Collection[Condition] = (),
    ) -> Block:
        """What runs under ``condition`` of ``nodes``, all of which run under it, or under one that
        says more. ``around``: the conditions of the blocks around it, whose values it may read."""
        return _Builder(self, condition, nodes, {*around, condition}).build(outputs)

    def check(self, edge: Collection[Node]) -> None:
        """Raise for primitives that become nothing else; those of ``edge`` are known to."""
        for node in self.deadness.conditions:
            if (
                not is_primitive(node)
                or node in edge
                or node in self.deadness.joined
                or is_tensorflow(node, _GONE)
            ):
                continue
            if node.op.role is Role.MERGE:
                raise UnraisedError(node, "what it reads are not the two sides of one condition")
            if node.op.role is Role.ENTER:
                raise UnraisedError(node, f"frame {node.attrs['frame_name']!r} stays")
            if is_tensorflow(node, ("Call",)):
                raise UnraisedError(node, "it calls a function that calls itself")
            raise UnraisedError(node, "this operation is part of no condition or loop")

    def source(self, value: Value) -> Value:
        """What a value is before Switches hand it on."""
        while (node := value.producer) in self.deadness.conditions:
            given = node.inputs[0] if is_tensorflow(node, _HANDS_ON) else None
            if given is None:
                break
            value = given
        return value

    def must_run(self, node: Node) -> bool:
        return node in self.forced or self.deadness.effective(node)

    def before(self, node: Node) -> list[Node]:
        """The nodes that must have run before ``node`` can, or that decide whether it does."""
        deadness = self.deadness
        found = [value.producer for value in deadness.read[node]]
        if node in deadness.joined:
            found.append(deadness.joined[node][0].producer)
        elif self.must_run(node):
            # Perhaps only pivots lead there, for which nobody waits any more.
            choices = deadness.conditions[node]
            found += [each.producer for each, _ in choices if isinstance(each, Value)]
        return [each for each in (*found, *deadness.waits[node]) if each is not None]

    def apply(self) -> None:
        """Let the nodes of all blocks read and wait for what they do there."""
        for node, values, waits in self.edits:
            substitute([node], values)
            node.control_inputs = waits


class _Builder:
    def __init__(
        self,
        branches: Branches,
        condition: Condition,
        nodes: Sequence[Node],
        known: set[Condition],
    ) -> None:
        self.branches = branches
        self.deadness = branches.deadness
        self.condition = condition
        self.nodes = nodes
        self.known = known
        self.made = Block()
        # Which node of the block each node has become, or is inside of.
        self.place: dict[Node, Node] = {}
        self.followers: dict[Node, list[Node]] = {node: [] for node in nodes}
        self.left: dict[Node, int] = {}
        for node in nodes:
            before = dict.fromkeys(branches.before(node))
            needed = [each for each in before if each in self.followers]
            self.left[node] = len(needed)
            for each in needed:
                self.followers[each].append(node)
        at = branches.position
        self.ready = [at[node] for node in nodes if not self.left[node]]
        heapify(self.ready)
        self.by_position = {at[node]: node for node in nodes}

    def build(self, outputs: Sequence[Value]) -> Block:
        conditions, joined = self.deadness.conditions, self.deadness.joined
        unmade = Counter(
            joined[n][0] for n in self.nodes if n in joined and conditions[n] == self.condition
        )
        arrived: dict[Value, list[Node]] = {}
        forced: dict[Node, None] = {}  # in branches
        while True:
            while self.ready:
                node = self.by_position[heappop(self.ready)]
                if conditions[node] == self.condition:
                    if node in joined:
                        arrived.setdefault(joined[node][0], []).append(node)
                        continue
                    if not is_tensorflow(node, _GONE):
                        self.keep(node)
                elif self.branches.must_run(node) and not is_tensorflow(node, _GONE):
                    forced[node] = None
                self.done(node)
            forced = {node: None for node in forced if node not in self.place}
            if not arrived and not forced:
                break
            if arrived:
                whole = (each for each in arrived if len(arrived[each]) == unmade[each])
                predicate = next(whole, next(iter(arrived)))
            else:
                predicate = self.outermost(next(iter(forced)))
            merges = arrived.pop(predicate, [])
            unmade[predicate] -= len(merges)
            # What nobody behind the branch asks for runs in the last If there is.
            self.join(predicate, merges, forced if not unmade[predicate] else ())
            for merge in merges:
                self.done(merge)
        self.made.outputs = [self.given(value) for value in outputs]
        return self.made

    def done(self, node: Node) -> None:
        for each in self.followers[node]:
            self.left[each] -= 1
            if not self.left[each]:
                heappush(self.ready, self.branches.position[each])

    def keep(self, node: Node) -> None:
        """A node of the block itself."""
        found = {value: self.read(value, node) for value in self.deadness.read[node]}
        changed = {old: new for old, new in found.items() if old is not new}
        waits = self.waited(self.deadness.waits[node])
        self.branches.edits.append((node, changed, waits))
        self.place[node] = node
        self.made.nodes.append(node)
        if self.branches.must_run(node):
            self.made.effects.append(node)

    def read(self, value: Value, reader: Node) -> Value:
        """What stands for a value that is read here, which must be made here or around here."""
        source = self.branches.source(value)
        made = source.producer
        condition = self.condition if made is None else self.deadness.conditions.get(made)
        if condition is not None and condition not in self.known:
            raise UnraisedError(reader, f"it reads {source.name!r}, which is in another branch")
        return self.branches.values.get(source, source)

    def given(self, value: Value) -> Value:
        """What stands for a value that the block gives."""
        made = value.producer
        if made is None:
            return value
        if not self.deadness.of(value) <= self.condition:
            reason = f"{value.name!r} is asked for, and has no value if its branch is not taken"
            raise UnraisedError(made, reason)
        return self.read(value, made)

    def waited(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes of the block that stand for ``nodes``; others are for those around it."""
        found: dict[Node, None] = {}
        for node in nodes:
            if node in self.place:
                found[self.place[node]] = None
            elif node in self.followers:
                raise UnraisedError(node, "it has an effect in a branch, and others wait for it")
            else:
                self.made.waits[node] = None
        return list(found)

    def outermost(self, node: Node) -> Value:
        """The predicate that decides, here, about a node in a branch that is in no If."""
        for predicate, _ in self.deadness.conditions[node] - self.condition:
            if isinstance(predicate, Value) and self.deadness.of(predicate) <= self.condition:
                return predicate
        raise UnraisedError(node, "it has to run in a branch of no condition")

    def join(self, predicate: Value, merges: Sequence[Node], forced: Iterable[Node]) -> None:
        """One If for Merges of the two sides of one predicate, and for those of the nodes that must
        run which are in one of its branches."""
        regions = [self.condition | {(predicate, choice)} for choice in (0, 1)]
        conditions = self.deadness.conditions
        within = [n for n in forced if any(each <= conditions[n] for each in regions)]
        first = [*merges, *within][0]
        if not isinstance(predicate.type, TensorType) or predicate.type.dtype != BOOL:
            raise UnraisedError(
                first, f"its predicate {predicate.name!r} is not known to be a truth"
            )
        truth = self.read(predicate, first)
        inside: dict[Node, None] = {}
        sides: list[Block] = []
        for choice, region in enumerate(regions):
            nodes = self.leading_to(merges, choice, region, within)
            inside.update(dict.fromkeys(nodes))
            sides.append(self.side(merges, choice, region, nodes))
        waits = {w: None for merge in merges for w in self.deadness.waits[merge] if w not in inside}
        waits.update({w: None for side in sides for w in side.waits})
        old = [_made(merge, i) for i in (0, 1) for merge in merges]
        values = [
            Value(f"{first.name}#{i}") if v is None else Value(v.name, v.type)
            for i, v in enumerate(old)
        ]
        if not merges:  # a node without outputs must have an effect of its own
            values.append(Value(f"{first.name}#done"))
            for side in sides:
                side.outputs.append(Value(f"{first.name}#nothing", const=np.array(0, np.int32)))
        op = find("If")
        assert op is not None
        node = Node(
            op,
            [truth],
            values,
            {
                "then_branch": sides[1].graph(f"{first.name}/then_branch"),
                "else_branch": sides[0].graph(f"{first.name}/else_branch"),
            },
            name=first.name if merges else f"{first.name}#branch",
            control_inputs=self.waited(waits),
            device=first.device,
            origin=first.origin,
        )
        for was, value in zip(old, values, strict=False):
            if was is not None:
                self.branches.values[was] = value
        self.place.update(dict.fromkeys((*inside, *merges), node))
        self.made.nodes.append(node)
        if any(side.effects for side in sides):
            self.made.effects.append(node)

    def side(
        self, merges: Iterable[Node], choice: int, region: Condition, nodes: Sequence[Node]
    ) -> Block:
        """One branch: what the Merges read in it, and which of their inputs that is."""
        read = [(merge, self.deadness.joined[merge][1][choice]) for merge in merges]
        made = self.branches.block(region, nodes, [value for _, value in read], self.known)
        for merge, value in read:
            index = np.array(merge.inputs.index(value), np.int32)
            made.outputs.append(Value(f"{merge.name}#{index}", const=index))
        return made

    def leading_to(
        self, merges: Iterable[Node], choice: int, region: Condition, forced: Iterable[Node]
    ) -> list[Node]:
        """The nodes of a region that are ``forced``, or lead to those that are, or to what
        ``merges`` read for one choice."""
        deadness = self.deadness
        found: set[Node] = set()
        left: list[Node | None] = [*forced]
        for merge in merges:
            left.append(deadness.joined[merge][1][choice].producer)
            left += deadness.waits[merge]
        while left:
            node = left.pop()
            if node not in self.followers or node in found or node is None:
                continue
            if not region <= deadness.conditions[node]:
                continue
            if node in self.place:
                raise UnraisedError(node, "two conditions, one behind the other, have it in common")
            found.add(node)
            left += self.branches.before(node)
        return sorted(found, key=self.branches.position.__getitem__)


def _made(merge: Node, i: int) -> Value | None:
    return merge.outputs[i] if i < len(merge.outputs) else None


def substitute(nodes: Iterable[Node], values: Mapping[Value, Value]) -> None:
    """Let nodes, and the graphs in them, read other values instead."""
    if not values:
        return
    for node in nodes:
        node.inputs = [None if v is None else values.get(v, v) for v in node.inputs]
        for _, graph in node.graphs:
            for inner in graph.walk():
                inner.inputs = [None if v is None else values.get(v, v) for v in inner.inputs]
            for each in graph.graphs():
                each.outputs = [values.get(v, v) for v in each.outputs]
