"""Attend: attention of few queries, as products and a softmax spell it out.

It is not in the table of operations: the pass ``recompose_attention`` creates it. Inputs are
queries [batch, heads, rows, size], keys [batch, groups, positions, size] and values [batch, groups,
positions, value_size], each group of which serves ``heads / groups`` heads in a row, and a bias
that broadcasts to the scores [batch, heads, rows, positions], or None. The result is
softmax(queries keys^T ``scale`` + bias) values; a row that sees no key is NaN, or 0 if ``guarded``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.work import attention_work


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    q, v = rules.tensor(types, 0), rules.tensor(types, 2)
    shape = None if q.shape is None or v.shape is None else (*q.shape[:3], v.shape[3])
    return (TensorType(q.dtype, shape),)


def _compile(node: Node, types: Types) -> Kernel:
    scale, guarded = node.attrs["scale"], node.attrs["guarded"]

    def function(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: Any) -> np.ndarray:
        (batch, heads, rows, _), groups, positions = q.shape, k.shape[1], k.shape[2]
        by_group = batch, groups, heads // groups * rows
        scores = q.reshape(*by_group, q.shape[3]) @ k.swapaxes(2, 3)
        scores = scores.reshape(batch, heads, rows, positions) * q.dtype.type(scale)
        if bias is not None:
            scores = scores + bias
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        if guarded:
            np.copyto(scores, 0, where=np.isnan(scores))
        y = scores.reshape(*by_group, positions) @ v
        return y.reshape(batch, heads, rows, v.shape[3])

    return Kernel(function)


ATTEND = Op("Attend", "penstock", 1, 1, _infer, _compile, work=attention_work)
