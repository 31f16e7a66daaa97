"""Attention as the operations that it consists of, which fuse into kernels of a backend::

    y = Attention(q, k, v, mask)     becomes     s = MatMul(q, Transpose(k)) * scale + mask
                                                 y = MatMul(Softmax(s), v)

Causality and windows are a constant that is added to the scores; a mask of flags, minus infinity
where it is false. A query that sees no key gets zeros, as in the definition: which queries these
are is looked for in the masks alone, which are smaller than the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import BOOL, FLOAT32, TensorType, Type
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.shape_rules import dtype_attribute
from penstock.ops.onnx.attention import Heads, attention_dims, check_mask, unseen
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.rewrite import Expansion, replace_nodes

# Bytes of a mask for causality or a window up to which it is worth to have it as a constant.
_MOST_MASK = 1 << 24


class DecomposeAttention(Pass):
    """Replace each Attention of known shapes in float32 without a past."""

    name = "decompose_attention"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        return context.placing.fuses and replace_nodes(graph, _nodes)


def _nodes(node: Node) -> Sequence[Node] | None:
    if node.op.full_name != "Attention" or node.control_inputs or node.outputs[0] is None:
        return None
    if any(value is not None for value in (*node.inputs[4:], *node.outputs[3:])):
        return None
    types = [None if value is None else value.type for value in node.inputs]
    if not all(value is None or _fits(value.type) for value in node.inputs):
        return None
    padded: Any = [*types, *[None] * (7 - len(types))]
    q, k, v, mask, *_ = padded
    heads = Heads(*attention_dims(padded, node.attrs))  # type: ignore[arg-type]
    if {q.dtype, k.dtype, v.dtype} != {FLOAT32} or not _is_simple(node, heads):
        return None
    if mask is not None:
        check_mask(mask.dims, heads)
        if mask.dims[-1] != heads.keys:
            return None
    return _AttentionNodes(node, heads).nodes


def _fits(type_: Type | None) -> bool:
    """Whether a tensor is known, not empty, and of numbers or flags as masks may be."""
    if not isinstance(type_, TensorType):
        return False
    return type_.static and 0 not in type_.dims and type_.dtype in (BOOL, FLOAT32)


def _is_simple(node: Node, heads: Heads) -> bool:
    """Whether the softmax is one of float32, and what order hides is worth a constant."""
    precision = dtype_attribute(node.attrs, "softmax_precision")
    if precision is not None and precision == FLOAT64:  # to NumPy, None equals float64
        return False
    windows = (node.attrs.get(f"{side}_window_size", -1) for side in ("left", "right"))
    ordered = bool(node.attrs.get("is_causal")) or max(windows) >= 0
    return not ordered or FLOAT32.itemsize * heads.queries * heads.keys <= _MOST_MASK


class _AttentionNodes(Expansion):
    """The ``nodes`` that an Attention becomes."""

    def __init__(self, node: Node, heads: Heads) -> None:
        super().__init__(node)
        self.heads = heads
        self._write()

    def _write(self) -> None:
        node, heads = self.node, self.heads
        attrs, mask = node.attrs, node.input(3)
        hidden = unseen(heads, 0, attrs)
        q, k, v = self._split(0, heads.heads), *(self._split(i, heads.kv_heads) for i in (1, 2))
        self._keep(k, 1)
        self._keep(v, 2)
        q, k, v = self._share_keys(q, k, v, mask)
        product = self._float(
            "MatMul", [q, self.transposed(k, (0, 1, 3, 2))], (*_dims(q)[:3], heads.keys)
        )
        scores = self._capped(product)
        rows = _dims(q)[2] // heads.queries
        bias, blind = self._bias(None if hidden is None else np.tile(hidden, (rows, 1)), mask)
        if bias is not None:
            scores = self._float("Add", [scores, bias], _dims(scores))
        weights = self._float("Softmax", [scores], _dims(scores), axis=-1)
        y = self._float("MatMul", [weights, v], (*_dims(q)[:3], heads.value_size))
        if blind is not None:
            y = self._float("Where", [blind, self.constant(np.float32(0)), y], _dims(y))
        y = self.reshaped(y, (heads.batch, heads.heads, heads.queries, heads.value_size))
        output = node.outputs[0]
        assert output is not None
        first = node.inputs[0]
        assert first is not None
        if first.rank == 3:
            y = self.transposed(y, (0, 2, 1, 3))
        dims = (heads.batch, heads.queries, heads.heads * heads.value_size)
        shape = dims if first.rank == 3 else _dims(y)
        inputs = [y, self.constant(np.array(shape, np.int64))]
        self.finish("Reshape", inputs, output, allowzero=1)

    def _split(self, index: int, heads: int) -> Value:
        """An input as [batch, heads, positions, size]."""
        value = self.node.inputs[index]
        assert value is not None
        if value.rank == 4:
            return value
        batch, positions, features = _dims(value)
        value = self.reshaped(value, (batch, positions, heads, features // heads))
        return self.transposed(value, (0, 2, 1, 3))

    def _keep(self, value: Value, index: int) -> None:
        """The keys or the values as an output of the node, if it has that."""
        present = self.node.outputs[index] if index < len(self.node.outputs) else None
        if present is not None:
            self.finish("Identity", [value], present)

    def _share_keys(
        self, q: Value, k: Value, v: Value, mask: Value | None
    ) -> tuple[Value, Value, Value]:
        """Operands of products with as many heads: the queries of the heads that share one of keys
        are rows of one product; under a mask, which may tell them apart, each has a copy."""
        heads = self.heads
        if heads.group == 1:
            return q, k, v
        if mask is None:
            dims = (heads.batch, heads.kv_heads, heads.group * heads.queries, heads.size)
            return self.reshaped(q, dims), k, v
        return q, self._repeated(k), self._repeated(v)

    def _repeated(self, value: Value) -> Value:
        batch, kv_heads, positions, size = _dims(value)
        group = self.heads.group
        value = self.reshaped(value, (batch, kv_heads, 1, positions, size))
        dims = (batch, kv_heads, group, positions, size)
        value = self._float("Expand", [value, self.constant(np.array(dims, np.int64))], dims)
        return self.reshaped(value, (batch, kv_heads * group, positions, size))

    def _capped(self, scores: Value) -> Value:
        """The scores times the scale, within the bounds of ``softcap``."""
        attrs = self.node.attrs
        scale, cap = attrs.get("scale"), attrs.get("softcap", 0.0)
        factor = 1 / math.sqrt(max(self.heads.size, 1)) if scale is None else scale
        dims = _dims(scores)
        if cap:
            scores = self._float("Mul", [scores, self.constant(np.float32(factor / cap))], dims)
            scores, factor = self._float("Tanh", [scores], dims), cap
        return self._float("Mul", [scores, self.constant(np.float32(factor))], dims)

    def _bias(
        self, hidden: np.ndarray | None, mask: Value | None
    ) -> tuple[Value | None, Value | None]:
        """What is added to scores, and which queries see no key."""
        bias = blind = None
        if hidden is not None:
            infinite = np.where(hidden, np.float32(-np.inf), np.float32(0))
            bias = self.constant(infinite)
            if hidden.all(-1).any():
                blind = self.constant(hidden.all(-1, keepdims=True))
        if mask is None:
            return bias, blind
        assert isinstance(mask.type, TensorType)
        if mask.type.dtype == BOOL:
            numbers = [self.constant(np.float32(x)) for x in (0, -np.inf)]
            mask = self._float("Where", [mask, *numbers], _dims(mask))
        if bias is not None:
            dims = np.broadcast_shapes(_dims(mask), _dims(bias))
            mask = self._float("Add", [mask, bias], dims)
        dims = (*_dims(mask)[:-1], 1)
        axes = self.constant(np.array([-1], np.int64))
        most = self._float("ReduceMax", [mask, axes], dims, keepdims=1)
        lowest = self.constant(np.float32(-np.inf))
        return mask, self.emit("Equal", [most, lowest], dims, BOOL)

    def _float(
        self, name: str, inputs: Sequence[Value], dims: Sequence[int], **attrs: Any
    ) -> Value:
        return self.emit(name, inputs, dims, FLOAT32, **attrs)


def _dims(value: Value) -> tuple[int, ...]:
    assert isinstance(value.type, TensorType)
    return value.type.dims
