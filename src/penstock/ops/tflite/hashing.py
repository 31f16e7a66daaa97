"""Hashes of locality-sensitive hashing: the signs of projections of fingerprints."""

from __future__ import annotations

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import FLOAT32, ShapeError, TensorType, Type, dtype_name
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.hashes import fingerprints
from penstock.ops.registry import TFLITE, array_operator

_MOST_BITS = 32
_TOGETHER = 1 << 14  # keys that are hashed at once


def _infer(types: Types, attrs: Attrs, consts: Consts) -> tuple[Type]:
    shape = rules.tensor(types, 0).shape
    if shape is None or len(shape) != 2:
        return (TensorType(INT32),)
    rows, bits = shape
    if not attrs.get("dense"):
        return (TensorType(INT32, (rows,)),)
    elements = rows * bits if isinstance(rows, int) and isinstance(bits, int) else None
    return (TensorType(INT32, (elements,)),)


@array_operator("LshProjection", domain=TFLITE, infer=_infer)
def lsh_projection(
    hashes: np.ndarray, x: np.ndarray, weights: np.ndarray | None = None, *, dense: bool = False
) -> np.ndarray:
    """For each of ``hashes`` [rows, bits] (float32) whether the weighted sum of fingerprints of the
    items of ``x`` is positive, 0 or 1 (int32); unless ``dense``, the bits of each row as a number,
    with a range of its own."""
    if hashes.ndim != 2 or hashes.shape[1] > _MOST_BITS or not x.ndim or not len(x):
        raise ShapeError(f"hashes of shape {hashes.shape} for items of shape {x.shape}")
    if hashes.dtype != FLOAT32:
        raise ShapeError(f"hashes of {dtype_name(hashes.dtype)} instead of float32")
    if weights is not None and weights.shape != x.shape[:1]:
        raise ShapeError(f"weights of shape {weights.shape} for {len(x)} items")
    items = np.ascontiguousarray(x).reshape(len(x), x.size // len(x)).view(np.uint8)
    seeds = np.ascontiguousarray(hashes).reshape(-1, 1).view(np.uint8)
    bits = np.empty(hashes.shape, np.int32)
    some = max(_TOGETHER // len(x), 1)
    for first in range(0, len(seeds), some):
        checkpoint()
        own = seeds[first : first + some]
        keys = np.empty((len(own), len(x), 4 + items.shape[1]), np.uint8)
        keys[..., :4], keys[..., 4:] = own[:, None], items
        prints = fingerprints(keys.reshape(-1, keys.shape[2])).view(np.int64)
        scores = prints.reshape(len(own), len(x)).astype(np.float64)
        # In order, as LiteRT adds them: the last bits may decide.
        totals = np.cumsum(scores if weights is None else weights * scores, 1)[:, -1]
        bits.reshape(-1)[first : first + some] = totals > 0
    if dense:
        return bits.ravel()
    rows, count = hashes.shape
    numbers = bits @ (1 << np.arange(count, dtype=np.int64)[::-1])
    return (numbers + np.arange(rows) * (1 << count)).astype(np.int32)
