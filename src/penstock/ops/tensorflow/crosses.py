"""SparseCross: each combination of one feature per column, as a hash or a string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import INT64, STRING, RunValues, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.hashes import fingerprints, joined_fingerprints, text_hashes
from penstock.ops.onnx.text import strings
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.text import operator, sparse_layout

_BETWEEN = "_X_"


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = common.named_dtype(attrs, "out_type", "int64")
    return TensorType(INT64, (None, 2)), TensorType(dtype, (None,)), TensorType(INT64, (2,))


def _sparse_rows(indices: np.ndarray, values: np.ndarray, shape: np.ndarray) -> list[np.ndarray]:
    """The values of each row of a sparse matrix."""
    if indices.ndim != 2 or indices.shape != (len(values), 2) or shape.shape != (2,):
        raise ShapeError(
            f"a sparse matrix has indices {indices.shape} and values {values.shape}: they must "
            "be [n, 2] and [n]"
        )
    rows, count = indices[:, 0], int(shape[0])
    if rows.size and (rows[0] < 0 or rows.max() >= count or (np.diff(rows) < 0).any()):
        raise ShapeError(f"the rows of a sparse matrix must be ascending and in [0, {count})")
    return np.split(values, np.searchsorted(rows, np.arange(1, count))) if count else []


def _columns(node: Node, inputs: RunValues) -> list[list[np.ndarray]]:
    """The features of each column by row, from sparse matrices and then dense ones."""
    count = node.attrs["N"]
    parts = [inputs[count * i : count * (i + 1)] for i in range(3)]
    columns = [_sparse_rows(*matrix) for matrix in zip(*parts, strict=True)]
    for matrix in inputs[3 * count :]:
        if matrix.ndim != 2:
            raise ShapeError(f"dense features must have rank 2, but have shape {matrix.shape}")
        columns.append(list(matrix))
    if not columns or any(len(column) != len(columns[0]) for column in columns):
        raise ShapeError(
            "the columns must have the same number of rows, not "
            f"{[len(column) for column in columns]}"
        )
    return columns


def _hashed(column: list[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """The fingerprints of strings; integers are their own fingerprints."""
    ends = np.cumsum([len(row) for row in column])[:-1]
    features = np.concatenate(column) if column else np.empty(0, dtype)
    if features.dtype == STRING:
        numbers = text_hashes(features.tolist(), fingerprints)
    else:
        numbers = features.astype(np.int64).view(np.uint64)
    return np.split(numbers, ends) if column else []


@operator("SparseCross", infer=_infer)
def sparse_cross(node: Node, types: Types) -> Kernel:
    """Return indices, values and shape of a sparse matrix with the crosses of each row; the
    features of the last column vary fastest. Hashes have 63 bits, or are below ``num_buckets``.
    """
    attrs = node.attrs
    hashed, buckets, key = attrs["hashed_output"], attrs["num_buckets"], attrs["hash_key"]
    inner = common.named_dtype(attrs, "internal_type", "string")
    out = common.named_dtype(attrs, "out_type", "int64")
    if out != (INT64 if hashed else STRING) or (inner != STRING and not hashed):
        raise ShapeError(
            f"SparseCross with internal_type {inner} and out_type {out} is not supported"
        )
    most = np.uint64(buckets if buckets > 0 else 2**63 - 1)

    def hashes(row: Sequence[np.ndarray]) -> np.ndarray:
        result = np.full(1, key % 2**64, np.uint64)
        for features in row:
            result = joined_fingerprints(result[:, np.newaxis], features).reshape(-1)
        return (result % most).astype(np.int64)

    def joined(row: Sequence[np.ndarray]) -> np.ndarray:
        result = [str(feature) for feature in row[0].tolist()]
        for features in row[1:]:
            result = [f"{one}{_BETWEEN}{other}" for one in result for other in features.tolist()]
        return strings(result, (len(result),))

    def run(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        columns = _columns(node, inputs)
        if hashed:
            columns = [_hashed(column, inner) for column in columns]
        rows = []
        for row in zip(*columns, strict=True):
            checkpoint()
            # A product of int64 could overflow.
            reserve(8 * int(np.prod([len(features) for features in row], dtype=np.float64)))
            rows.append(hashes(row) if hashed else joined(row))
        indices, shape = sparse_layout(rows)
        return indices, np.concatenate(rows) if rows else np.empty(0, out), shape

    return Kernel(run)
