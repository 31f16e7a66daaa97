"""Split the merged samples-and-heads axis of attention into an axis of samples and one of heads.

Some exporters merge samples and heads into one axis, so that matrix products have rank 3.
``lift_heads`` splits the axis again; here for one sample::

    q3 = Reshape(q, [heads, rows, size])
    s3 = MatMul(q3, Transpose(Reshape(k, ...))) + b     s = MatMul(q, Transpose(k)) + Unsqueeze(b)
    s  = Reshape(s3, [1, heads, rows, positions])    ->
    w  = Softmax(s + mask)                              w = Softmax(s + mask)

Others have the axis of rows first, and merge samples and heads behind it::

    q3 = Transpose(Reshape(q, [rows, heads, size]), [1, 0, 2])
    y  = Reshape(Transpose(y3, [1, 0, 2]), [rows, heads * size])
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from penstock.core.types import TensorType, is_static
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Attrs
from penstock.ops.onnx.softmax import SINGLE_AXIS
from penstock.ops.registry import standard
from penstock.passes.dead_code import prune

LIFTED = "/lifted"
"""the suffix of the names of rank-4 values"""


def lift_heads(graph: Graph, samples: int = 1) -> None:
    """Rewrite attention on merged axes [samples * heads, rows, size] for separate axes
    [samples, heads, rows, size]."""
    lifting = _Lifting(samples)
    graph.nodes = [written for node in graph.nodes for written in lifting.written(node)]
    graph.outputs = [lifting.replaced.get(v, v) for v in graph.outputs]
    prune(graph)


class _Lifting:
    """``lifted`` maps rank-3 values to rank-4 forms, ``replaced`` rank-4 values to equal ones.
    ``turned`` maps values [rows, samples * heads, size] to lifted ones whose axes they exchange."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.lifted: dict[Value, Value] = {}
        self.replaced: dict[Value, Value] = {}
        self.turned: dict[Value, Value] = {}

    def written(self, node: Node) -> Sequence[Node]:
        """Return the node, which now reads replaced values, and the nodes that compute its rank-4
        result, if it has one."""
        node.inputs = [None if v is None else self.replaced.get(v, v) for v in node.inputs]
        y, x = node.outputs[0], node.inputs[0] if node.inputs else None
        if y is None or x is None or node.control_inputs or len(node.outputs) > 1:
            return [node]
        before, dims = _dims(x), _dims(y)
        if node.op.view and self._joins(before, dims):
            self.lifted[y] = x
            return [node]
        if node.op.view and x in self.lifted and dims == _dims(self.lifted[x]):
            self.replaced[y] = self.lifted[x]
            return [node]
        perm = [*node.attrs.get("perm", ())] if node.op.full_name == "Transpose" else []
        if perm[:1] == [1] and len(dims) == 3:
            return self._turn(node, x, y, perm)
        if node.op.full_name in ("Flatten", "Reshape") and x in self.turned:
            return self._reshape_turned(node, x, y)
        if len(dims) != 3 or self.lifted.keys().isdisjoint(node.inputs):
            return [node]
        attrs, lead = _attrs_of_four(node), self._lead(node, dims)
        if attrs is None or lead is None:
            return [node]
        # Keep both forms: other nodes may read the rank-3 one. Unread nodes are pruned later.
        others: list[Node] = []
        inputs = [self._of_four(v, node, lead, others) for v in node.inputs if v is not None]
        whole = TensorType(y.dtype, (*lead, *dims[1:]))
        self.lifted[y] = result = Value(f"{y.name}{LIFTED}", whole)
        return [node, *others, node.derived(inputs, [result], attrs)]

    def _reshape_turned(self, node: Node, x: Value, y: Value) -> Sequence[Node]:
        """Return the nodes that reshape a turned value, from the rank-4 value that it came from."""
        four = self.turned[x]
        samples, heads, rows, size = _dims(four)
        whole = Value(f"{x.name}{LIFTED}", TensorType(x.dtype, (rows, samples, heads, size)))
        turn = node.derived([four], [whole], {"perm": [2, 0, 1, 3]}, op=standard("Transpose"))
        target = Value("dims", const=np.array(_dims(y)))
        return [turn, node.derived([whole, target], [y], {}, op=standard("Reshape"))]

    def _turn(self, node: Node, x: Value, y: Value, perm: list[int]) -> Sequence[Node]:
        """Return a Transpose that moves the merged axis to the front or, for lifted values, from
        there, with the nodes that compute its rank-4 result."""
        before, source = _dims(x), x.producer
        if x in self.lifted:
            if perm == [1, 0, 2]:
                self.turned[y] = self.lifted[x]
            return [node]
        is_reshaped = source is not None and source.op.full_name == "Reshape"
        heads, rest = divmod(before[1], self._samples)
        if not is_reshaped or rest or not heads:
            return [node]
        four = before[0], self._samples, heads, before[2]
        whole = Value(f"{x.name}{LIFTED}", TensorType(x.dtype, four))
        target = Value("dims", const=np.array(four))
        split = node.derived([x, target], [whole], {}, op=standard("Reshape"))
        order = [1, 2, *[(0, 0, 3)[axis] for axis in perm[1:]]]
        result = Value(f"{y.name}{LIFTED}", TensorType(y.dtype, tuple([four[i] for i in order])))
        self.lifted[y] = result
        return [node, split, node.derived([whole], [result], {"perm": order})]

    def _lead(self, node: Node, dims: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return a result's dims of samples and heads; None if its operands disagree."""
        leads = {_dims(self.lifted[v])[:2] for v in node.inputs if v in self.lifted}
        if len(leads) > 1 or any(v is None for v in node.inputs):
            return None
        (lead,) = leads
        # An operand with another first dim has other heads, unless that dim is 1 (broadcast).
        of_three = {_dims(v)[0] for v in node.inputs if v is not None and len(_dims(v)) == 3}
        return lead if dims[0] == prod(lead) and of_three <= {1, dims[0]} else None

    def _joins(self, before: tuple[int, ...], dims: tuple[int, ...]) -> bool:
        """Whether a Reshape merges samples and heads into one axis."""
        is_four = len(dims) == 3 and len(before) == 4 and before[0] == self._samples
        return is_four and dims == (prod(before[:2]), *before[2:])

    def _of_four(
        self, value: Value, beside: Node, lead: tuple[int, ...], nodes: list[Node]
    ) -> Value:
        """Return an operand that broadcasts with lifted ones; if it has rank 3, an Unsqueeze is
        appended to ``nodes``."""
        dims = _dims(value)
        if value not in self.lifted and len(dims) == 3:
            own = (1, *dims) if dims[0] == 1 or lead[0] == 1 else (*lead, *dims[1:])
            result = Value(f"{value.name}{LIFTED}", TensorType(value.dtype, own))
            name, spelled = ("Unsqueeze", [0]) if own[1:] == dims else ("Reshape", own)
            other = Value("axes", const=np.array(spelled))
            nodes.append(beside.derived([value, other], [result], {}, op=standard(name)))
            self.lifted[value] = result
        return self.lifted.get(value, value)


def _dims(value: Value) -> tuple[int, ...]:
    return value.dims if is_static(value.type) else ()


def _attrs_of_four(node: Node) -> Attrs | None:
    """Return an operation's attributes for operands of rank 4 instead of 3; None if unknown."""
    name, attrs = node.op.full_name, node.attrs
    if name == "MatMul":
        return attrs if all(v is not None and len(_dims(v)) == 3 for v in node.inputs) else None
    if name == "Transpose":
        perm = attrs.get("perm") or (2, 1, 0)
        return attrs | {"perm": [0, *[axis + 1 for axis in perm]]}
    if name == "Softmax":
        # Up to opset 12, Softmax flattens all axes from ``axis`` on, which is 1 by default.
        axis = attrs.get("axis", -1 if node.op.since >= SINGLE_AXIS else 1)
        return attrs | {"axis": -1} if axis in (-1, 2) else None
    return attrs if node.op.elementwise else None
