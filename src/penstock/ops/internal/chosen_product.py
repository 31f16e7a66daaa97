"""ChosenMatMul: products with matrices selected by indices, without copying the matrices.

It is not in the table of operations: the pass ``recompose_experts`` creates it for a MatMul with
the result of a Gather along axis 0, as in exported mixtures of experts. For x [..., rows, K],
matrices [count, K, N] and indices [...] or [..., 1], to which the leading dims of x broadcast:

    y[i] = x[i] @ matrices[indices[i]]        [..., rows, N]

``transposed``: matrices are [count, N, K]. ``columns``: x is [..., K, 1] and y [..., N, 1]. Raises
``ShapeError`` for an index that is out of range; negative ones count from the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Dims, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.onnx.index import check_range
from penstock.ops.registry import array_kernel


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = rules.same_dtype(types, range(2))
    x, matrices, indices = (rules.tensor(types, i).shape for i in range(3))
    if x is None or matrices is None or indices is None:
        return (TensorType(dtype),)
    if len(x) < 2 or len(matrices) != 3:
        raise ShapeError(f"x {x} must have rank 2 or more, and the matrices {matrices} rank 3")
    inner, width = matrices[1:][::-1] if attrs["transposed"] else matrices[1:]
    rules.check_shape("x", x[-2:], (inner, 1) if attrs["columns"] else (x[-2], inner))
    lead = indices[: len(x) - 2]
    rules.check_shape("indices", indices, lead, (*lead, 1))
    rules.check_broadcasts("x", x[:-2], lead)
    end = (width, 1) if attrs["columns"] else (x[-2], width)
    return (TensorType(dtype, (*lead, *end)),)


def _work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    matrices = inputs[1]
    return 2 * math.prod(output) * matrices[2 if attrs["transposed"] else 1] if matrices else 0


def _chosen_product(
    x: np.ndarray, matrices: np.ndarray, indices: np.ndarray, *, transposed: bool, columns: bool
) -> np.ndarray:
    count, places = len(matrices), indices.reshape(-1)
    if places.size:
        check_range(int(places.min()), int(places.max()), 0, count)
    rows = x.swapaxes(-1, -2) if columns else x
    width, lead = matrices.shape[1 if transposed else 2], indices.shape[: x.ndim - 2]
    y = np.empty((*lead, rows.shape[-2], width), x.dtype)
    each = np.broadcast_to(rows, (*lead, *rows.shape[-2:])).reshape(-1, *rows.shape[-2:])
    for to, row, place in zip(y.reshape(-1, *y.shape[-2:]), each, places, strict=True):
        checkpoint()
        matrix = matrices[place]
        np.matmul(row, matrix.T if transposed else matrix, out=to)
    return y.swapaxes(-1, -2) if columns else y


CHOSEN_MATMUL = Op(
    "ChosenMatMul", "penstock", 1, 1, _infer, array_kernel(_chosen_product), work=_work
)
