"""Lowering of ONNX's Attention to Penstock's own fused node, or to matrix products and a softmax::

    y = Attention(q, k, v, mask)     becomes     y = penstock.Attention(q, k, v, mask, hidden)

where a backend has a kernel for the fused node, otherwise::

    s = MatMul(q, Transpose(k)) * scale + (mask + hidden)
    y = MatMul(Softmax(s), v)

Causal and sliding-window masks become a constant that is added to the scores, here ``hidden``; a
boolean mask becomes minus infinity where it is false. A query whose keys are all masked gets zeros,
as ONNX defines: in the decomposed form, such queries are found from the masks alone, which are
smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import BOOL, FLOAT32, ShapeError, TensorType, Type
from penstock.ir.graph import Node, Value
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.shape_rules import dtype_attribute
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.onnx.attention import Heads, attention_dims, check_mask, unseen
from penstock.passes.context import FusionPolicy
from penstock.passes.rewrite import Expansion

# Largest causal or window mask, in bytes, that is materialized as a constant.
_MOST_MASK = 1 << 24

Biases = dict[tuple[object, ...], Value]
"""values computed from masks, by operation and inputs"""


def attention_nodes(
    node: Node, policy: FusionPolicy | None, biases: Biases
) -> Sequence[Node] | None:
    """Return the replacement of a float32 Attention of static shapes without a past, else None."""
    if policy is None or not _is_simple(node):
        return None
    types: Any = [None if value is None else value.type for value in node.inputs]
    types += [None] * (7 - len(types))
    heads = Heads(*attention_dims(types, node.attrs))  # type: ignore[arg-type]
    if not _is_short(node, heads) or not _mask_fits(types[3], heads):
        return None
    return _AttentionNodes(node, heads, policy, biases).nodes


def _is_simple(node: Node) -> bool:
    # Inputs after the mask are the past; the output after keys and values is the scores.
    if any(value is not None for value in (*node.inputs[4:], *node.outputs[3:])):
        return False
    types = [None if value is None else value.type for value in node.inputs]
    precision = dtype_attribute(node.attrs, "softmax_precision")
    if precision is not None and precision == FLOAT64:  # to NumPy, None equals float64
        return False
    return all(_fits(type_, i) for i, type_ in enumerate(types) if node.inputs[i] is not None)


def _fits(type_: Type | None, i: int) -> bool:
    """Whether a tensor has static non-empty dims and a float dtype (or bool, as a mask)."""
    if not isinstance(type_, TensorType):
        return False
    dtypes = (FLOAT32,) if i < 3 else (BOOL, FLOAT32)
    return type_.static and 0 not in type_.dims and type_.dtype in dtypes


def _is_short(node: Node, heads: Heads) -> bool:
    """Whether the causal or window mask is small enough for a constant."""
    windows = (node.attrs.get(f"{side}_window_size", -1) for side in ("left", "right"))
    ordered = bool(node.attrs.get("is_causal")) or max(windows) >= 0
    return not ordered or FLOAT32.itemsize * heads.queries * heads.keys <= _MOST_MASK


def _mask_fits(mask: TensorType | None, heads: Heads) -> bool:
    """Whether a mask has an element for each key; kernels report invalid masks."""
    if mask is None:
        return True
    try:
        check_mask(mask.dims, heads)
    except ShapeError:
        return False
    return mask.dims[-1] == heads.keys


class _AttentionNodes(Expansion):
    """Builder of the ``nodes`` that replace an Attention."""

    def __init__(self, node: Node, heads: Heads, policy: FusionPolicy, biases: Biases) -> None:
        super().__init__(node)
        self.heads = heads
        self._biases = biases
        self._write(policy)

    def _write(self, policy: FusionPolicy) -> None:
        node, heads = self.node, self.heads
        hidden = unseen(heads, 0, node.attrs)
        q, k, v = self._split(0, heads.heads), *(self._split(i, heads.kv_heads) for i in (1, 2))
        k, v = self._kept(k, 1), self._kept(v, 2)
        mask = self._as_numbers(node.input(3))
        whole = self._whole([q, k, v, mask, None if hidden is None else self._infinite(hidden)])
        if policy.has_kernel(whole):
            (y,) = whole.outputs
            assert y is not None
            self.nodes.append(whole)
        else:
            y = self._steps(q, k, v, hidden, mask)
        output, first = node.outputs[0], node.inputs[0]
        assert output is not None and first is not None
        # Rank-3 inputs, and then the result, have their heads concatenated on the last axis.
        if first.rank == 3:
            y = self.transposed(y, (0, 2, 1, 3))
            y = self.reshaped(y, (heads.batch, heads.queries, heads.heads * heads.value_size))
        self._written(y, output)

    def _whole(self, inputs: Sequence[Value | None]) -> Node:
        """Return the attention as a single fused node."""
        heads, attrs = self.heads, self.node.attrs
        dims = (heads.batch, heads.heads, heads.queries, heads.value_size)
        assert self.node.outputs[0] is not None
        y = Value(f"{self.node.outputs[0].name}/heads", TensorType(FLOAT32, dims))
        own = {"scale": self._scale(), "softcap": attrs.get("softcap", 0.0), "zeros": "unseen"}
        given = [value for value in inputs if value is not None]
        return self.node.derived(given, [y], own, op=ATTENTION)

    def _scale(self) -> float:
        scale = self.node.attrs.get("scale")
        # ONNX's default; a size of 0 would divide by zero.
        return float(1 / math.sqrt(max(self.heads.size, 1)) if scale is None else scale)

    def _split(self, index: int, heads: int) -> Value:
        """Return an input reshaped to [batch, heads, positions, size]."""
        value = self.node.inputs[index]
        assert value is not None
        if value.rank == 4:
            return value
        batch, positions, features = value.dims
        value = self.reshaped(value, (batch, positions, heads, features // heads))
        return self.transposed(value, (0, 2, 1, 3))

    def _kept(self, value: Value, index: int) -> Value:
        """Return the keys or the values, written to the node's present output if it has one."""
        present = self.node.outputs[index] if index < len(self.node.outputs) else None
        return value if present is None else self._written(value, present)

    def _written(self, value: Value, output: Value) -> Value:
        """Write ``value`` to an output, directly if its producer is one of ``nodes``."""
        node = value.producer
        if node not in self.nodes:
            self.finish("Identity", [value], output)
            return value
        assert node is not None
        node.outputs, output.producer = [output], node
        return output

    # Masks.

    def _as_numbers(self, mask: Value | None) -> Value | None:
        """Return a mask as an additive bias of the scores."""
        if mask is None or not isinstance(mask.type, TensorType) or mask.type.dtype != BOOL:
            return mask
        key = "numbers", mask
        if key not in self._biases:
            if mask.const is not None:
                infinite = np.where(mask.const, np.float32(0), np.float32(-np.inf))
                # -inf rather than a low number: Softmax must give masked keys a weight of exactly
                # 0, also where all scores of a row are low.
                self._biases[key] = self.constant(infinite)
            else:
                numbers = [self.constant(np.float32(x)) for x in (0, -np.inf)]
                self._biases[key] = self.add("Where", [mask, *numbers])
        return self._biases[key]

    def _infinite(self, hidden: np.ndarray) -> Value:
        """Return the causal or window mask as an additive bias of the scores."""
        key = "hidden", hidden.shape, hidden.tobytes()
        if key not in self._biases:
            self._biases[key] = self.constant(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        return self._biases[key]

    def _blind(self, bias: Value) -> Value | None:
        """Return flags of the queries whose keys are all masked; None if there are none."""
        if bias.const is not None:
            # A constant bias shows at compile time which queries see no key; without any, the Where
            # that gives them zeros is not needed.
            flags = np.isneginf(bias.const).all(-1, keepdims=True)
            return self.constant(flags) if flags.any() else None
        key = "blind", bias
        if key not in self._biases:
            axes = self.constant(np.array([-1], np.int64))
            most = self.add("ReduceMax", [bias, axes], keepdims=1)
            self._biases[key] = self.add("Equal", [most, self.constant(np.float32(-np.inf))])
        return self._biases[key]

    # The decomposed form.

    def _steps(
        self, q: Value, k: Value, v: Value, hidden: np.ndarray | None, mask: Value | None
    ) -> Value:
        heads = self.heads
        q, k, v = self._share_keys(q, k, v, mask)
        scores = self._capped(self.add("MatMul", [q, self._as_columns(k)]))
        # Queries of heads that share keys are rows of one product: the mask is the same.
        rows = q.dims[2] // heads.queries
        bias = None if hidden is None else self._infinite(np.tile(hidden, (rows, 1)))
        if bias is not None and mask is not None:
            key = "sum", mask, bias
            if key not in self._biases:
                self._biases[key] = self.add("Add", [mask, bias])
            bias = self._biases[key]
        bias = mask if bias is None else bias
        if bias is not None:
            scores = self.add("Add", [scores, bias])
        weights = self.add("Softmax", [scores], axis=-1)
        y = self.add("MatMul", [weights, v])
        # Softmax of a row of minus infinities is NaN.
        blind = None if bias is None else self._blind(bias)
        if blind is not None:
            y = self.add("Where", [blind, self.constant(np.float32(0)), y])
        return self.reshaped(y, (heads.batch, heads.heads, heads.queries, heads.value_size))

    def _as_columns(self, k: Value) -> Value:
        """Return the keys with their last two dims swapped, merged with a preceding Transpose."""
        axes, before = [0, 1, 3, 2], k.producer
        if before is not None and before.op.full_name == "Transpose":
            source, perm = before.inputs[0], before.attrs.get("perm", (3, 2, 1, 0))
            if source is not None:
                return self.transposed(source, [perm[axis] for axis in axes])
        return self.transposed(k, axes)

    def _share_keys(
        self, q: Value, k: Value, v: Value, mask: Value | None
    ) -> tuple[Value, Value, Value]:
        """Return operands with equal numbers of heads: the queries of a group become rows of one
        product; under a mask, which may differ by head, keys and values are repeated instead."""
        heads = self.heads
        if heads.group == 1:
            return q, k, v
        if mask is None:
            dims = (heads.batch, heads.kv_heads, heads.group * heads.queries, heads.size)
            return self.reshaped(q, dims), k, v
        return q, self._repeated(k), self._repeated(v)

    def _repeated(self, value: Value) -> Value:
        batch, kv_heads, positions, size = value.dims
        group = self.heads.group
        value = self.reshaped(value, (batch, kv_heads, 1, positions, size))
        dims = (batch, kv_heads, group, positions, size)
        value = self.add("Expand", [value, self.constant(np.array(dims, np.int64))])
        return self.reshaped(value, (batch, kv_heads * group, positions, size))

    def _capped(self, scores: Value) -> Value:
        """Return the scaled scores, limited by ``softcap``."""
        factor, cap = self._scale(), self.node.attrs.get("softcap", 0.0)
        # ONNX: cap * tanh(scores / cap), with the scale folded into the first factor.
        if cap:
            scores = self.add("Mul", [scores, self.constant(np.float32(factor / cap))])
            scores, factor = self.add("Tanh", [scores]), cap
        return self.add("Mul", [scores, self.constant(np.float32(factor))])
