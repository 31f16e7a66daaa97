"""Operations on arrays that only passes create: ``APPEND``, ``TRIP_COUNT`` and ``ZERO_NAN``."""

from __future__ import annotations

import numpy as np

from penstock.core.types import INT64, TensorType
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Op, Types
from penstock.ops.common.shape_rules import always, same_type
from penstock.ops.registry import array_kernel, standard

APPEND = Op(
    *("Append", "penstock", 1, 1),
    lambda *arguments: standard("Concat").infer(*arguments),
    array_kernel(lambda *parts, axis: np.concatenate(parts, axis)),
    moves=True,
)
"""Append rows to a tensor, like Concat, for caches that grow with each run. Input 0 is the tensor,
input 1 the rows to append along ``axis``. The NumPy kernel copies both. A kernel of another backend
may append in place if nothing was appended to the same memory yet, and return a read-only view."""


def _trip_count(start: np.ndarray, limit: np.ndarray, *more: np.ndarray, least: int) -> np.ndarray:
    trips = limit.item() - start.item()
    for i in range(0, len(more), 2):
        trips = min(trips, more[i + 1].item() - more[i].item())
    return np.array(max(trips, least), np.int64)


_COUNT = always(TensorType(INT64, ()))
TRIP_COUNT = Op("TripCount", "penstock", 1, 1, _COUNT, array_kernel(_trip_count))
"""The trip count of a counting loop. Inputs are pairs of integers, the start and the limit of a
counter; the loop ends when the first counter reaches its limit, but not before ``least``
iterations."""


def _zero_nan(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x), x.dtype.type(0), x)

    def into(x: np.ndarray, out: np.ndarray) -> None:
        if out is not x:
            np.copyto(out, x)
        np.copyto(out, 0, where=np.isnan(x))

    return Kernel(function, into, inplace=(0,))


ZERO_NAN = Op("ZeroNaN", "penstock", 1, 1, same_type, _zero_nan, elementwise=True)
"""Replace NaN by 0: ``Where(IsNaN(x), 0, x)``, with which exporters guard a Softmax against rows
that are entirely masked."""
