"""Rows that are sent to parts, and put together again, as embeddings in several shards are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.text import array_operator


def _row_dims(
    x: tuple[int, ...], places: tuple[int, ...], name: str = "partitions"
) -> tuple[int, ...]:
    """The dims of one row. Raises ``ShapeError`` unless there is a place for each row."""
    if x[: len(places)] != places:
        raise ShapeError(f"{name} of shape {places} do not begin the shape of the data, {x}")
    return x[len(places) :]


def _infer_parts(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, places = rules.tensor(types, 0), rules.tensor(types, 1).shape
    tail = None if x.shape is None or places is None else x.shape[len(places) :]
    part = TensorType(x.dtype, None if tail is None else (None, *tail))
    return [part] * common.count(np.array(attrs["num_partitions"]), "num_partitions")


@array_operator("DynamicPartition", infer=_infer_parts)
def dynamic_partition(
    x: np.ndarray, partitions: np.ndarray, *, num_partitions: int
) -> common.Outputs:
    """For each part the rows whose number it is, in their order."""
    dims, places = _row_dims(x.shape, partitions.shape), partitions.reshape(-1)
    outside = (places < 0) | (places >= num_partitions)
    if outside.any():
        row = int(outside.argmax())
        raise ShapeError(f"row {row} goes to part {places[row]} of {num_partitions}")
    rows = x.reshape(places.size, *dims)
    return common.outputs([rows[places == i] for i in range(num_partitions)])


@array_operator("DynamicStitch", infer=lambda types, attrs, consts: (_stitched(types),))
def dynamic_stitch(*inputs: np.ndarray) -> np.ndarray:
    """The rows of all data at their indices; of several for one index, the last."""
    half = len(inputs) // 2
    pairs = list(zip(inputs[:half], inputs[half:], strict=True))
    tails = {_row_dims(data.shape, indices.shape, "indices") for indices, data in pairs}
    if len(tails) != 1:
        raise ShapeError(f"the data have rows of several shapes, {sorted(tails)}")
    (dims,) = tails
    if min(int(indices.min(initial=0)) for indices, _ in pairs) < 0:
        raise ShapeError("indices must not be negative")
    size = max(int(indices.max(initial=-1)) for indices, _ in pairs) + 1
    dtype = pairs[0][1].dtype
    # The size comes from the indices, which the file or a feed may choose freely.
    reserve(size * int(np.prod(dims)) * dtype.itemsize)
    out = np.zeros((size, *dims), dtype)
    for indices, data in pairs:
        out[indices.reshape(-1)] = data.reshape(indices.size, *dims)
    return out


def _stitched(types: Types) -> TensorType:
    half = len(types) // 2
    indices, data = rules.tensor(types, 0).shape, rules.tensor(types, half)
    if indices is None or data.shape is None:
        return TensorType(data.dtype)
    return TensorType(data.dtype, (None, *data.shape[len(indices) :]))
