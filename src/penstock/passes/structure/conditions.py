"""Deadness analysis: under which choices of Switches the nodes of one frame run.

A condition is a conjunction of choices; the empty one always holds. A node runs if all of its
inputs are live; an output of a Switch is live if the Switch runs and selects it. A Merge with one
input for each choice of a predicate runs under either. For any other Merge, it is only known that
its successors run if it does, which counts as a separate choice. So conditions are exact: nodes
with equal conditions run together or not at all. With ``s`` and ``t`` Switches by the predicates
``p`` and ``q``::

    x ──> s ──T──> a ──> t ──T──> b        x, s: {}        a, t: {p:1}      b: {p:1, q:1}
          └───F──> c ───────────────┐      c: {p:0}
                   a ──────────────> m     m = Merge(c, a): {}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from penstock.core.checkpoints import with_checkpoints
from penstock.ir.graph import Node, Value, all_reads
from penstock.ir.op import Role
from penstock.passes.structure.relax_control_edges import EffectOrder

Choice = tuple[Value | Node, int]
"""a predicate and the Switch output that it selects; or a node that may be dead and LIVES"""
Condition = frozenset[Choice]
LIVES = -1
ALWAYS: Condition = frozenset()

# A condition of more choices, deeper than sensible graphs nest, is represented by its node alone:
# sets of all choices would take quadratic space.
_MAX_CHOICES = 64


def is_switch(node: Node) -> bool:
    """Whether a node selects one of two outputs by a bool."""
    return node.op.role is Role.SWITCH and node.op.name == "Switch"


class Deadness:
    """Conditions of the nodes of one frame, in one iteration; ``nodes`` must be sorted. ``running``
    nodes always run. Values of nodes that are not among ``nodes`` are live, except exits of inner
    frames, and values of ``doubtful`` nodes. ``known`` predicates have one value whenever the frame
    runs, so that a Switch by one of them is no choice."""

    def __init__(
        self,
        nodes: Sequence[Node],
        running: Collection[Node] = (),
        doubtful: Collection[Node] = (),
        known: Mapping[Value, int] = MappingProxyType({}),
    ) -> None:
        self._doubtful = doubtful
        self._known = known
        self.conditions: dict[Node, Condition] = {}
        self.joined: dict[Node, tuple[Value, tuple[Value, Value]]] = {}
        """for Merges of both sides of a predicate: the predicate, and their inputs by choice"""
        self.reads: dict[Node, list[Value]] = {}
        """the non-constant inputs of each node, captures of its graphs included"""
        self.waits: dict[Node, list[Node]] = {}
        """the side-effecting nodes that each node waits for"""
        self._order = EffectOrder()
        self.has_side_effects = self._order.has_side_effects
        for node in with_checkpoints(nodes):
            reads = self.reads[node] = all_reads(node)
            self.conditions[node] = ALWAYS if node in running else self._condition(node)
            # A Switch is removed; its readers inherit its control inputs.
            producers = [p for v in reads if (p := v.producer) is not None]
            switches = [p for p in producers if is_switch(p)]
            inherited = [effect for switch in switches for effect in self.waits.get(switch, ())]
            self.waits[node] = self._order.add(node, producers, inherited)

    def of(self, value: Value) -> Condition:
        """Return the condition under which ``value`` is live."""
        node = value.producer
        if node is None:
            return ALWAYS
        if is_switch(node) and node in self.conditions:
            predicate, side = self.predicate(node), node.outputs.index(value)
            if self._known.get(predicate) == side:
                return self.conditions[node]
            return self.conditions[node] | {(predicate, side)}
        return self._of_node(node)

    def predicate(self, switch: Node) -> Value:
        """Return the predicate of a Switch, before LoopConds and Identities that forward it."""
        assert switch.inputs[1] is not None
        return self.origin(switch.inputs[1])

    def origin(self, value: Value) -> Value:
        """Return the value that LoopConds and Identities forward as ``value``."""
        source: Value | None = value
        while source is not None and (node := source.producer) in self.conditions:
            if not node or (node.op.role is not Role.LOOP_COND and node.op.full_name != "Identity"):
                break
            value, source = source, node.inputs[0]
        return value if source is None else source

    def choices_of(self, nodes: Iterable[Node]) -> dict[Value, int]:
        """Return the predicates whose value is implied where all of ``nodes`` run."""
        sides: dict[Value, int] = {}
        for node in nodes:
            for predicate, side in self.conditions.get(node, ALWAYS):
                if isinstance(predicate, Value) and sides.setdefault(predicate, side) != side:
                    return {}  # they never run together
        return sides

    def _of_node(self, node: Node) -> Condition:
        if node in self.conditions:
            return self.conditions[node]
        doubtful = node in self._doubtful or node.op.role is Role.EXIT
        return frozenset({(node, LIVES)}) if doubtful else ALWAYS

    def _condition(self, node: Node) -> Condition:
        if node.op.role is Role.MERGE:
            return self._merge(node)
        # In TensorFlow a ControlTrigger runs even if all of its control inputs are dead.
        if node.op.role is Role.CONTROL_TRIGGER:
            return ALWAYS
        choices = set[Choice]()
        for value in self.reads[node]:
            choices |= self.of(value)
        for source in node.control_inputs:
            choices |= self._of_node(source)
        return frozenset(choices if len(choices) <= _MAX_CHOICES else {(node, LIVES)})

    def _merge(self, node: Node) -> Condition:
        inputs = [value for value in node.inputs if value is not None]
        if len(inputs) == 2:
            first, second = (self.of(value) for value in inputs)
            apart = sorted(first ^ second, key=lambda choice: choice[1])
            # The two conditions differ only in the choice by one predicate, which is always made,
            # one way or the other.
            if [side for _, side in apart] == [0, 1] and apart[0][0] is apart[1][0]:
                predicate = apart[0][0]
                assert isinstance(predicate, Value)
                sides = (inputs[0], inputs[1]) if apart[0] in first else (inputs[1], inputs[0])
                self.joined[node] = (predicate, sides)
                return first & second
        return frozenset({(node, LIVES)})
