"""Attention of one sample whose heads are its first axis, with an axis of samples before them.

Some exporters write the heads of all samples along one axis, for products of three axes. Of a graph
for one sample, an axis of one element goes before the heads::

    q3 = Reshape(q, [heads, rows, size])
    s3 = MatMul(q3, Transpose(Reshape(k, ...))) + b     s = MatMul(q, Transpose(k)) + Unsqueeze(b)
    s  = Reshape(s3, [1, heads, rows, positions])    ->
    w  = Softmax(s + mask)                              w = Softmax(s + mask)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Attrs
from penstock.ops.onnx.softmax import SINGLE_AXIS
from penstock.ops.registry import standard
from penstock.passes.dead_code import prune

LIFTED = "/lifted"
"""ends the names of values with an axis more"""


def lift_heads(graph: Graph) -> None:
    """Write attention whose operands drop an axis of one sample with that axis."""
    lifting = _Lifting()
    graph.nodes = [written for node in graph.nodes for written in lifting.written(node)]
    graph.outputs = [lifting.replaced.get(v, v) for v in graph.outputs]
    prune(graph)


class _Lifting:
    """Values of three axes with one of one element before them, ``lifted``, and those of four axes
    that are these, ``replaced``."""

    def __init__(self) -> None:
        self.lifted: dict[Value, Value] = {}
        self.replaced: dict[Value, Value] = {}

    def written(self, node: Node) -> Sequence[Node]:
        """A node, which reads what was lifted, and those that compute its result with an axis more,
        if that can be."""
        node.inputs = [None if v is None else self.replaced.get(v, v) for v in node.inputs]
        y, x = node.outputs[0], node.inputs[0] if node.inputs else None
        if y is None or x is None or node.control_inputs or len(node.outputs) > 1:
            return [node]
        before, dims = _dims(x), _dims(y)
        if node.op.view and len(dims) == 3 and before == (1, *dims):
            self.lifted[y] = x
            return [node]
        if node.op.view and x in self.lifted and dims == (1, *before):
            self.replaced[y] = self.lifted[x]
            return [node]
        if len(dims) != 3 or self.lifted.keys().isdisjoint(node.inputs):
            return [node]
        attrs = _attrs_of_four(node)
        if attrs is None or any(v is None for v in node.inputs):
            return [node]
        # Both forms stay: other nodes may read the one of three axes. Unread nodes are pruned.
        others: list[Node] = []
        inputs = [self._of_four(v, node, others) for v in node.inputs if v is not None]
        assert isinstance(y.type, TensorType)
        self.lifted[y] = result = Value(f"{y.name}{LIFTED}", TensorType(y.type.dtype, (1, *dims)))
        return [node, *others, node.derived(inputs, [result], attrs)]

    def _of_four(self, value: Value, beside: Node, nodes: list[Node]) -> Value:
        """An operand beside lifted ones, by a node that is added to ``nodes`` if it has an axis
        less."""
        dims = _dims(value)
        if value not in self.lifted and len(dims) == 3:
            assert isinstance(value.type, TensorType)
            result = Value(f"{value.name}{LIFTED}", TensorType(value.type.dtype, (1, *dims)))
            axes = Value("axes", const=np.array([0]))
            nodes.append(beside.derived([value, axes], [result], {}, op=standard("Unsqueeze")))
            self.lifted[value] = result
        return self.lifted.get(value, value)


def _dims(value: Value) -> tuple[int, ...]:
    type_ = value.type
    return type_.dims if isinstance(type_, TensorType) and type_.static else ()


def _attrs_of_four(node: Node) -> Attrs | None:
    """The attributes of an operation for operands of four axes in place of three; None for one that
    needs others."""
    name, attrs = node.op.full_name, node.attrs
    if name == "MatMul":
        return attrs if all(v is not None and len(_dims(v)) == 3 for v in node.inputs) else None
    if name == "Transpose":
        perm = attrs.get("perm") or (2, 1, 0)
        return attrs | {"perm": [0, *[axis + 1 for axis in perm]]}
    if name == "Softmax":
        # Up to opset 12, Softmax takes all axes from its one on as one, by default those from 1 on.
        axis = attrs.get("axis", -1 if node.op.since >= SINGLE_AXIS else 1)
        return attrs | {"axis": -1} if axis in (-1, 2) else None
    return attrs if node.op.elementwise else None
