"""Attention: ``softmax(softcap(q keys^T scale) + biases) values``, as one node.

It is not in the table of operations: the pass ``recognize_attention`` creates it from ONNX's
Attention and from equivalent subgraphs. Inputs are queries [..., heads, rows, size], keys
[..., groups, positions, size], values [..., groups, positions, value_size], and any number of
biases, which broadcast to the scores [..., heads, rows, positions] and may be None. Each group of
keys and values is shared by ``heads / groups`` consecutive heads.

Attributes: ``scale``; ``softcap``, 0 for none; ``keys_last``: keys are [..., groups, size,
positions]; and ``zeros``: which rows of the result become 0. "unseen": rows without a score above
negative infinity, which would be NaN; "nan": rows whose weights are NaN.

StackedAttention, which a front end creates, is ONNX's Attention with a past of keys and values in
one tensor [2, batch, heads, positions, size], the input after queries, keys, values and a mask or
None. Its outputs are the result and the present: the past followed by the new keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import FLOAT32, RunValues, ShapeError, TensorType, Type
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Dims, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.products import attention_work
from penstock.ops.registry import array_kernel, standard


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    q, k, v = [rules.tensor(types, i) for i in range(3)]
    if q.shape is None or k.shape is None or v.shape is None:
        return (TensorType(q.dtype),)
    # Kernels rely on these dims, and saved plans may contain any.
    if not len(q.shape) == len(k.shape) == len(v.shape) >= 3:
        raise ShapeError(
            f"queries {q.shape}, keys {k.shape} and values {v.shape} must have the same rank, at "
            "least 3"
        )
    *lead, heads, rows, size = q.shape
    *_, groups, positions, value_size = v.shape
    keys = (size, positions) if attrs.get("keys_last", 0) else (positions, size)
    rules.check_shape("keys", k.shape, (*lead, groups, *keys))
    rules.check_shape("values", v.shape, (*lead, groups, positions, value_size))
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        raise ShapeError(f"{heads} query heads must be a multiple of {groups} key/value heads")
    for i in range(3, len(types)):
        rules.check_broadcasts(
            "bias", rules.tensor(types, i).shape, (*lead, heads, rows, positions)
        )
    return (TensorType(q.dtype, (*q.shape[:-1], value_size)),)


def attend(
    attrs: Attrs, q: np.ndarray, k: np.ndarray, v: np.ndarray, biases: RunValues
) -> np.ndarray:
    """The result of an Attention with these attributes."""
    scale, cap, zeros = attrs["scale"], attrs.get("softcap", 0.0), attrs.get("zeros", "")
    *lead, heads, rows, size = q.shape
    groups = k.shape[-3]
    # Heads that share keys are rows of one matrix product.
    by_group = q.reshape(*lead, groups, heads // groups * rows, size)
    scores = by_group @ (k if attrs.get("keys_last", 0) else k.swapaxes(-1, -2))
    scores = scores.reshape(*lead, heads, rows, v.shape[-2]) * q.dtype.type(scale)
    if cap:
        scores = np.tanh(scores / q.dtype.type(cap)) * q.dtype.type(cap)
    for bias in biases:
        if bias is not None:
            scores = scores + bias
    # The number of positions may be 0.
    highest = scores.max(-1, keepdims=True, initial=-np.inf)
    if zeros == "unseen":
        unseen = np.isneginf(highest)
        # -inf - (-inf) would be NaN.
        highest[unseen] = 0
    scores = np.exp(scores - highest)
    total = scores.sum(-1, keepdims=True)
    if zeros == "unseen":
        total[unseen] = 1
    scores /= total
    if zeros == "nan":
        np.copyto(scores, 0, where=np.isnan(scores))
    y = scores.reshape(*by_group.shape[:-1], v.shape[-2]) @ v
    return y.reshape(*q.shape[:-1], v.shape[-1])


def _compile(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    return Kernel(lambda q, k, v, *biases: attend(attrs, q, k, v, biases))


def _work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    """Return the work of attention with keys laid out as values: [..., positions, size]."""
    return attention_work(attrs, [inputs[0], inputs[2]], output)


ATTENTION = Op("Attention", "penstock", 1, 1, _infer, _compile, work=_work)


# With a past.


def _parted(types: Types) -> list[Type | None]:
    """The types of the inputs of ONNX's Attention."""
    past = rules.tensor(types, 4)
    rules.check_shape("past", past.shape, (2, None, None, None, None))
    half = TensorType(past.dtype, None if past.shape is None else past.shape[1:])
    return [*types[:4], half, half]


def _infer_stacked(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    y, *present = standard("Attention").infer(_parted(types), attrs, consts)[:3]
    k, v = rules.tensor(present, 0), rules.tensor(present, 1)
    rules.check_shape("values in heads", v.shape, k.shape or v.shape)
    return y, TensorType(k.dtype, None if k.shape is None else (2, *k.shape))


def _compile_stacked(node: Node, types: Types) -> Kernel:
    parts, (y, _) = _parted(types), node.outputs
    k, v, old_k, old_v = (Value(name) for name in ("k", "v", "old_k", "old_v"))
    inputs = [*node.inputs[:4], old_k, old_v]
    inner = node.derived(inputs, [y, k, v], op=standard("Attention"))
    attend = inner.op.compile(inner, parts).function

    def function(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y, k, v = attend(*inputs[:4], *inputs[4])
        return y, np.stack((k, v))

    return Kernel(function)


STACKED_ATTENTION = Op(
    "StackedAttention", "penstock", 1, 1, _infer_stacked, _compile_stacked, work=attention_work
)


def _infer_behind(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims = rules.tensor(types, 0).shape
    return [TensorType(FLOAT32, None if dims is None else (dims[0], 1, attrs["positions"]))]


def _behind(lengths: np.ndarray, *, positions: int) -> np.ndarray:
    """The bias of scores [batch, .., positions] that masks positions from ``lengths`` on."""
    rules.check_lengths("the memory", lengths, positions)
    is_behind = np.arange(positions) >= lengths[:, None, None]
    return np.where(is_behind, FLOAT32.type(-np.inf), FLOAT32.type(0))


POSITIONS_BEHIND = Op("PositionsBehind", "penstock", 1, 1, _infer_behind, array_kernel(_behind))
