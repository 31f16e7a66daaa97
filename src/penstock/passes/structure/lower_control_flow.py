"""Lower If and Loop to TensorFlow's primitives where nodes inside of them name other devices.

A structured node runs on one device, with its graphs. In frames each node runs where it says, as in
TensorFlow, which lowers its functional If and While in the same way::

    y = If(p, then: Neg(x), else: Abs(x))          x ─> switch ─T─> neg ─> merge ─> y
                                                   p ─────┘ └───F─> abs ────┘

A Loop becomes a frame: an Enter, a Merge, a Switch, a NextIteration and an Exit for its condition
and each carried value, a constant Enter and a Switch for each value that its body captures.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Graph, Node, Value, all_reads, captures, embed, sort
from penstock.ir.op import Role
from penstock.ops.registry import TENSORFLOW, standard
from penstock.passes.structure.branches import substitute
from penstock.types import TensorType


def lower_control_flow(graph: Graph) -> None:
    """Lower the structured nodes of ``graph`` that span devices, and those inside of them that do.
    A Loop with a trip count, or with outputs that collect rows, stays."""
    awaited = {before for node in graph.nodes for before in node.control_inputs}
    lowered: list[Node] = []
    stack = graph.nodes[::-1]
    while stack:
        node = stack.pop()
        if node not in awaited and _spans_devices(node) and _has_primitives(node):
            stack += _Lowering(node).nodes[::-1]
        else:
            lowered.append(node)
    graph.nodes = lowered
    sort(graph)


def _spans_devices(node: Node) -> bool:
    inner = (inner for _, graph in node.graphs for inner in graph.walk())
    return any(n.device and n.device != node.device for n in inner)


def _has_primitives(node: Node) -> bool:
    """Whether TensorFlow has primitives for what a node does: it is an If, or a plain while."""
    if node.op.role is Role.IF:
        return True
    if node.op.role is not Role.LOOP or node.inputs[0] is not None or node.inputs[1] is None:
        return False
    body: Graph = node.attrs["body"]
    read = {value for inner in body.walk() for value in inner.inputs} | {*body.outputs}
    return len(body.outputs) == len(node.inputs) - 1 and body.inputs[0] not in read


class _Lowering:
    """The ``nodes`` that replace one structured node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []
        # A node of constants alone would be in the root frame.
        reads = [v.producer for v in all_reads(node) if v.producer is not None]
        self.before = [*node.control_inputs, *reads[:1]]
        if node.op.role is Role.IF:
            self.branches()
        else:
            self.loop()

    def add(
        self,
        op: str,
        inputs: Sequence[Value | None],
        outputs: int | Sequence[Value | None] = 1,
        before: Collection[Node] = (),
        **attrs: Any,
    ) -> list[Value]:
        """Add a primitive or an Identity; returns its outputs."""
        type_ = next((v.type for v in inputs if v is not None), None)
        if isinstance(type_, TensorType) and type_.dtype is not None:
            attrs["T"] = type_.dtype.name
        name = f"{self.node.name}/{op}_{len(self.nodes)}"
        if isinstance(outputs, int):
            outputs = [Value(f"{name}:{i}") for i in range(outputs)]
        domain = "" if op == "Identity" else TENSORFLOW
        made = self.node.derived(inputs, outputs, attrs, op=standard(op, domain), name=name)
        made.control_inputs = list(before)
        self.nodes.append(made)
        return [value for value in made.outputs if value is not None]

    def inline(
        self, graph: Graph, inputs: Sequence[Value], outer: Mapping[Value, Value], pivot: Value
    ) -> list[Value]:
        """Add the nodes of a graph, which run if ``pivot`` lives; returns the outputs of the graph.
        They read ``outer`` values instead of those that they capture."""
        nodes, outputs = embed(graph, inputs, f"@{self.node.name}/{graph.name}")
        substitute(nodes, outer)
        self.add("Identity", [pivot])
        alive = self.nodes[-1]
        for node in nodes:
            node.device = node.device or self.node.device
            if not all_reads(node) and not node.control_inputs:
                node.control_inputs = [alive]
        self.nodes += nodes
        values = [outer.get(value, value) for value in outputs]
        return [
            value if value.const is None else self.add("Identity", [value], before=[alive])[0]
            for value in values
        ]

    def branches(self) -> None:
        node, (predicate,) = self.node, self.node.inputs
        assert predicate is not None
        graphs: list[Graph] = [node.attrs["else_branch"], node.attrs["then_branch"]]
        pivots = self.add("Switch", [predicate, predicate], 2, self.before)
        captured = dict.fromkeys(value for graph in graphs for value in captures(graph))
        switched = {value: self.add("Switch", [value, predicate], 2) for value in captured}
        for made in self.nodes:
            made.control_inputs = list(node.control_inputs) or made.control_inputs
        sides = [
            self.inline(graph, (), {v: both[i] for v, both in switched.items()}, pivots[i])
            for i, graph in enumerate(graphs)
        ]
        for i, value in enumerate(node.outputs):
            if value is not None:
                index = Value(f"{value.name}#side")
                self.add("Merge", [side[i] for side in sides], [value, index], N=2)

    def loop(self) -> None:
        node, body = self.node, self.node.attrs["body"]
        _, *start = node.inputs
        frame = {"frame_name": node.name or node.label, "parallel_iterations": 10}
        merged: list[Value] = []
        again: list[Value] = []
        for value in start:
            (entered,) = self.add("Enter", [value], 1, self.before, is_constant=False, **frame)
            again.append(Value(f"{entered.name}#again", value.type if value else entered.type))
            merged.append(self.add("Merge", [entered, again[-1]], 2, N=2)[0])
        (going,) = self.add("LoopCond", merged[:1])
        switched = [self.add("Switch", [value, going], 2) for value in merged]
        outer = {}
        for value in captures(body):
            (entered,) = self.add("Enter", [value], 1, self.before, is_constant=True, **frame)
            outer[value] = self.add("Switch", [entered, going], 2)[1]
        number = Value(f"{node.name}#iteration", const=np.array(0, np.int64))
        inside = [number, *[both[1] for both in switched]]
        updated = self.inline(body, inside, outer, inside[1])
        for value, target in zip(updated, again, strict=True):
            self.add("NextIteration", [value], [target])
        for (left, _), output in zip(switched[1:], node.outputs, strict=True):
            if output is not None:
                self.add("Exit", [left], [output])
