"""Operations on arrays that passes create, and that no table of operations has: ``APPEND``,
``TRIP_COUNT`` and ``ZERO_NAN``."""

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
"""Rows added behind those of a tensor, as Concat does, for caches that grow run by run. Input 0 is
the tensor so far, input 1 what is added along ``axis``. NumPy's kernel copies both; one of another
backend may add the new rows behind the old ones where these lie, if nothing else was added there
yet, and gives a view that is not to be written."""


def _trip_count(*bounds: np.ndarray, least: int) -> np.ndarray:
    numbers = [bound.item() for bound in bounds]
    trips = min([end - start for start, end in zip(numbers[::2], numbers[1::2], strict=True)])
    return np.array(max(trips, least), np.int64)


_COUNT = always(TensorType(INT64, ()))
TRIP_COUNT = Op("TripCount", "penstock", 1, 1, _COUNT, array_kernel(_trip_count))
"""Trip count of a loop that counts up to a limit. Inputs are pairs of integers, the start of a
counter and its limit; the loop ends with the first counter that reaches its limit, after ``least``
iterations at the earliest."""


def _zero_nan(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x), x.dtype.type(0), x)

    def into(x: np.ndarray, out: np.ndarray) -> None:
        if out is not x:
            np.copyto(out, x)
        np.copyto(out, 0, where=np.isnan(x))

    return Kernel(function, into, inplace=(0,))


ZERO_NAN = Op("ZeroNaN", "penstock", 1, 1, same_type, _zero_nan, elementwise=True)
"""0 where an element is not a number: ``Where(IsNaN(x), 0, x)``, by which exporters guard a Softmax
against rows that are masked entirely."""
