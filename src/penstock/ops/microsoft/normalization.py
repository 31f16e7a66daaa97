"""Normalisations of com.microsoft, fused with the additions or lookups before them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import check_broadcasts, check_shape, same_dtype, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.onnx.normalization import Statistics
from penstock.ops.registry import MICROSOFT, operator
from penstock.types import FLOAT32, Dim, ShapeError, TensorType, Type

# SkipLayerNormalization


def _infer_skip(types: Types, **parameters: int) -> Sequence[Type]:
    x, skip = tensor(types, 0), tensor(types, 1)
    dtype = same_dtype(types, range(len(types)))
    if x.shape is None:
        return (TensorType(dtype, None),)
    if len(x.shape) < 2:
        raise ShapeError(f"input of shape {x.shape} must have rank 2 or 3")
    check_broadcasts("skip", skip.shape, x.shape)
    for name, index in parameters.items():
        check_shape(name, tensor(types, index).shape, (x.shape[-1],))
    statistics = TensorType(FLOAT32, (*x.shape[:-1], 1))
    return TensorType(dtype, x.shape), statistics, statistics, TensorType(dtype, x.shape)


@operator(
    "SkipLayerNormalization",
    domain=MICROSOFT,
    infer=lambda types, attrs, consts: _infer_skip(types, gamma=2, beta=3, bias=4),
)
@operator(
    "SkipSimplifiedLayerNormalization",
    domain=MICROSOFT,
    infer=lambda types, attrs, consts: _infer_skip(types, gamma=2, bias=3),
)
@by_shape(arity=(5, 4), inplace=(0, 1), contiguous=True)
def skip_layer_norm(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    centred = node.op.name == "SkipLayerNormalization"
    dims, dtype = static_type(inputs, 0)
    rows, columns = prod(dims[:-1]), dims[-1]
    layout, epsilon = Scratch(), node.attrs.get("epsilon", 1e-12)
    statistics = Statistics(layout, rows, columns, dtype, epsilon, centred)

    def into(*arguments: Any) -> None:
        x, skip, gamma, beta, bias, out, mean, inverse, total, workspace = arguments
        if not centred:
            beta, bias = None, beta
        np.add(x, skip, out)
        if bias is not None:
            np.add(out, bias, out)
        if total is not None:
            np.copyto(total, out)
        matrix = out.reshape(rows, columns)
        moments = statistics(matrix, matrix, workspace)
        np.multiply(out, gamma, out)
        if beta is not None:
            np.add(out, beta, out)
        for result, column in zip((mean, inverse), moments, strict=True):
            if result is not None:
                np.copyto(result, column.reshape(result.shape))

    return Routine(into, layout.size)


# EmbedLayerNormalization


def _infer_embed(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    tables = [tensor(types, i) for i in (2, 3, 4)]
    dtype = same_dtype(types, (2, 3, 4, 5, 6))
    hidden: Dim = None
    for table in tables:
        check_shape("an embedding", table.shape, (None, hidden))
        if table.shape is not None and hidden is None:
            hidden = table.shape[1]
    for name, index in (("gamma", 5), ("beta", 6)):
        check_shape(name, tensor(types, index).shape, (hidden,))
    ids = tensor(types, 0)
    check_shape("input_ids", ids.shape, (None, None))
    batch, length = ids.shape or (None, None)
    for name, index in (("segment_ids", 1), ("mask", 7), ("position_ids", 8)):
        check_broadcasts(name, tensor(types, index).shape, (batch, length))
    full = TensorType(dtype, (batch, length, hidden))
    return full, TensorType(np.dtype(np.int32), (batch,)), full


def _lookup(table: np.ndarray, indices: np.ndarray, name: str) -> np.ndarray:
    if indices.size and (indices.min() < 0 or indices.max() >= len(table)):
        raise ShapeError(f"an index of {name} is out of range for {len(table)} rows")
    return table[indices]


@operator("EmbedLayerNormalization", domain=MICROSOFT, infer=_infer_embed)
@by_shape(arity=(9, 3), contiguous=True)
def embed_layer_norm(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    (batch, length, hidden), dtype = static_type(outputs, 0)
    layout, epsilon = Scratch(), node.attrs.get("epsilon", 1e-12)
    statistics = Statistics(layout, batch * length, hidden, dtype, epsilon)

    def into(*arguments: Any) -> None:
        ids, segments, words, positions, segment_table, gamma, beta, mask = arguments[:8]
        places, out, index, total, workspace = arguments[8:]
        np.copyto(out, _lookup(words, ids, "input_ids"))
        if places is None:
            if length > len(positions):
                raise ShapeError(f"{length} positions, but {len(positions)} embeddings")
            np.add(out, positions[:length], out)
        else:
            np.add(out, _lookup(positions, places, "position_ids"), out)
        if segment_table is not None and segments is not None:
            np.add(out, _lookup(segment_table, segments, "segment_ids"), out)
        if total is not None:
            np.copyto(total, out)
        if index is not None:
            # How many elements of the mask are set, before the padding at the end.
            index[...] = 0 if mask is None else np.count_nonzero(mask == 1, axis=1)
        matrix = out.reshape(batch * length, hidden)
        statistics(matrix, matrix, workspace)
        np.multiply(out, gamma, out)
        np.add(out, beta, out)

    return Routine(into, layout.size)
