"""Lower If and Loop to TensorFlow's primitives.

A structured node runs with its graphs as one node, on one device. In frames, each node runs on its
own device, as soon as it is ready. TensorFlow lowers its functional If and While in the same way::

    y = If(p, then: Neg(x), else: Abs(x))          x ─> switch ─T─> neg ─> merge ─> y
                                                   p ─────┘ └───F─> abs ────┘

A Loop becomes a frame: an Enter, a Merge, a Switch, a NextIteration and an Exit for its condition
and each carried value, and a constant Enter and a Switch for each captured value. Scan outputs are
carried as a TensorList, which is stacked to a tensor after its Exit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count, zip_longest
from typing import Any

import numpy as np

from penstock.core.types import ANY, STRING, TensorType
from penstock.ir.graph import Graph, Node, Value, all_reads, captures, embed, sort
from penstock.ir.op import Op, Role
from penstock.ops.onnx.control_flow import collects_rows
from penstock.ops.registry import TENSORFLOW, standard
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.structure.branches import substitute
from penstock.passes.structure.order_effects import keeps_order


class LowerControlFlow(Pass):
    """Lower the If and Loop nodes whose nodes ``FramePolicy.runs_apart`` schedules individually
    (see ``lower_control_flow``)."""

    invalidates = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        return lower_control_flow(graph, context.frames.runs_apart)


def lower_control_flow(graph: Graph, apart: Callable[[Node], bool]) -> bool:
    """Lower the structured nodes of ``graph`` that are to run ``apart``, and those nested in them,
    except loops with scan outputs of unknown dtype. Return whether there were any."""
    awaited = {before for node in graph.nodes for before in node.control_inputs}
    frames = {node.attrs["frame_name"] for node in graph.nodes if node.op.role is Role.ENTER}
    lowered: list[Node] = []
    stack = graph.nodes[::-1]
    while stack:
        node = stack.pop()
        # A control edge needs a single node that completes last, which a frame does not have.
        if node not in awaited and _has_primitives(node) and apart(node):
            stack += _Lowering(node, frames).nodes[::-1]
        else:
            lowered.append(node)
    if changed := len(lowered) != len(graph.nodes):
        graph.nodes = lowered
        sort(graph)
    return changed


def spans_devices(node: Node) -> bool:
    """Whether nodes in the graphs of ``node`` name other devices."""
    return any(n.device and n.device != node.device for n in node.inner)


def _has_primitives(node: Node) -> bool:
    """Whether a structured node has a form in primitives."""
    if node.op.role is not Role.LOOP:
        return node.op.role is Role.IF
    rows = [value.type for value in node.attrs["body"].outputs[len(node.inputs) - 1 :]]
    return all(isinstance(t, TensorType) and t.dtype is not None for t in rows)


class _Lowering:
    """Builder of the ``nodes`` that replace one structured node. ``taken``: names of other frames
    and of nodes lowered before; nodes in different graphs may share a name."""

    def __init__(self, node: Node, taken: set[str]) -> None:
        self.node = node
        self.name = name = node.name or node.label
        if name in taken:
            self.name = next(f"{name}_{i}" for i in count(1) if f"{name}_{i}" not in taken)
        taken.add(self.name)
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
        op: str | Op,
        inputs: Sequence[Value | None],
        outputs: int | Sequence[Value | None] = 1,
        before: Collection[Node] = (),
        **attrs: Any,
    ) -> list[Value]:
        """Add a node of an operation, by default one of TensorFlow's; return its outputs."""
        op = standard(op, TENSORFLOW) if isinstance(op, str) else op
        type_ = next((v.type for v in inputs if v is not None), None)
        if isinstance(type_, TensorType) and type_.dtype is not None:
            attrs["T"] = type_.dtype.name
        name = f"{self.name}/{op.name}_{len(self.nodes)}"
        if isinstance(outputs, int):
            outputs = [Value(f"{name}:{i}") for i in range(outputs)]
        made = self.node.derived(inputs, outputs, attrs, op=op, name=name)
        made.control_inputs = list(before)
        self.nodes.append(made)
        return [value for value in made.outputs if value is not None]

    def inline(
        self, graph: Graph, inputs: Sequence[Value], outer: Mapping[Value, Value], pivot: Value
    ) -> list[Value]:
        """Add the nodes of a graph, which run if ``pivot`` is live; return the outputs of the
        graph. They read ``outer`` values instead of captured ones."""
        nodes, outputs = embed(graph, inputs, f"@{self.name}/{graph.name}")
        substitute(nodes, outer)
        self.add(standard("Identity"), [pivot])
        alive = self.nodes[-1]
        for node in nodes:
            node.device = node.device or self.node.device
            if not all_reads(node) and not node.control_inputs:
                node.control_inputs = [alive]
        self.nodes += nodes
        values = [outer.get(value, value) for value in outputs]
        return [
            value
            if value.const is None
            else self.add(standard("Identity"), [value], before=[alive])[0]
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
        limit, condition, *start = node.inputs
        # A Loop that the frame may be raised to has outputs of other names than this one.
        # Side effects of an iteration precede those of the next one.
        parallel = 1 if keeps_order(node) else 10
        frame = {"frame_name": f"{self.name}/frame", "parallel_iterations": parallel}
        read = {value for inner in body.walk() for value in inner.inputs} | {*body.outputs}
        counted = limit is not None or body.inputs[0] in read
        if condition is None:
            condition = Value(f"{node.name}#going", const=np.array(True))
        number = Value(f"{node.name}#iteration", const=np.array(0, np.int64))
        rows = body.outputs[1 + len(start) :]
        start += [self.empty_list(row) for row in rows]
        start = [condition, *([number] if counted else []), *start]
        merged: list[Value] = []
        again: list[Value] = []
        for value, carried in zip_longest(start, [None] * (1 + counted) + body.inputs[2:]):
            (entered,) = self.add("Enter", [value], 1, self.before, is_constant=False, **frame)
            # Otherwise the dtype of a value that is carried unchanged could not be inferred.
            entered.type = ANY if carried is None else carried.type
            # The next iteration's value may have another shape.
            again.append(Value(f"{entered.name}#again"))
            merged.append(self.add("Merge", [entered, again[-1]], 2, N=2)[0])

        def constant(value: Value) -> Value:
            return self.add("Enter", [value], 1, self.before, is_constant=True, **frame)[0]

        proceed = merged[:1]
        if limit is not None:
            proceed += self.add(standard("Less"), [merged[1], constant(limit)])
            proceed = self.add(standard("And"), proceed)
        (going,) = self.add("LoopCond", proceed)
        switched = [self.add("Switch", [value, going], 2) for value in merged]
        outer = {v: self.add("Switch", [constant(v), going], 2)[1] for v in captures(body)}
        inside = [both[1] for both in switched]
        if not counted:
            inside.insert(1, number)
        inside[:2] = inside[1::-1]  # the body's first input is the iteration number
        lists = inside[len(body.inputs) :]
        updated = self.inline(body, self.with_dims(inside, body), outer, inside[1])
        first = len(updated) - len(rows)
        for i, rows_so_far in enumerate(lists, first):
            (updated[i],) = self.add("TensorListPushBack", [rows_so_far, updated[i]])
        if counted:
            one = Value(f"{node.name}#one", const=np.array(1, np.int64))
            updated[1:1] = self.add(standard("Add"), [inside[0], one])
        for value, target in zip(updated, again, strict=True):
            self.add("NextIteration", [value], [target])
        left = [both[0] for both in switched[1 + counted :]]
        own = len(left) - len(rows)
        for value, output in zip(left[:own], node.outputs[:own], strict=True):
            if output is not None:
                self.add("Exit", [value], [output])
        for value, output, row in zip(left[own:], node.outputs[own:], rows, strict=True):
            if output is not None:
                (left_rows,) = self.add("Exit", [value])
                shape, dtype = _row(row)
                attrs: dict[str, Any] = {"element_dtype": dtype, "none_is_empty": True}
                self.add("TensorListStack", [left_rows, shape], [output], **attrs)

    def with_dims(self, values: Sequence[Value], body: Graph) -> list[Value]:
        """Return the first of ``values`` as inputs of a loop's body, with their loop-invariant dims
        if it has nested loops, which need them for scan outputs of zero iterations."""
        values = list(values[: len(body.inputs)])
        if any(map(collects_rows, body.walk())):
            for i, value in enumerate(body.inputs[2:], 2):
                if value.shape is not None:
                    dims = [dim if isinstance(dim, int) else -1 for dim in value.shape]
                    (values[i],) = self.add("EnsureShape", [values[i]], shape=dims)
        return values

    def empty_list(self, row: Value) -> Value:
        """Return an empty TensorList for rows of this type."""
        shape, dtype = _row(row)
        # In TensorFlow, a max_num_elements of -1 means no limit.
        endless = Value("#endless", const=np.array(-1, np.int32))
        return self.add("EmptyTensorList", [shape, endless], 1, self.before, element_dtype=dtype)[0]


def _row(row: Value) -> tuple[Value, str]:
    """Return the partially known shape of a row, as a constant, and its dtype."""
    type_ = row.type
    assert isinstance(type_, TensorType) and type_.dtype is not None
    dtype = "string" if type_.dtype == STRING else type_.dtype.name
    # TensorFlow writes an unknown rank as a scalar of -1, an unknown dim as -1.
    dims = -1 if type_.shape is None else [d if isinstance(d, int) else -1 for d in type_.shape]
    return Value("#shape", const=np.array(dims, np.int32)), dtype
