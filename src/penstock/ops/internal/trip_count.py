"""TripCount: how often a loop runs that counts up to a limit.

It is not in the table of operations: a pass creates it. Inputs are pairs of integers, where a
counter starts and its limit; the loop ends with the first counter that reaches its limit, after
``least`` iterations at the earliest.
"""

from __future__ import annotations

import numpy as np

from penstock.core.types import INT64, TensorType
from penstock.ir.op import Op
from penstock.ops.common.shape_rules import always
from penstock.ops.registry import array_kernel


def _trip_count(*bounds: np.ndarray, least: int) -> np.ndarray:
    numbers = [bound.item() for bound in bounds]
    trips = min([end - start for start, end in zip(numbers[::2], numbers[1::2], strict=True)])
    return np.array(max(trips, least), np.int64)


_COUNT = always(TensorType(INT64, ()))
TRIP_COUNT = Op("TripCount", "penstock", 1, 1, _COUNT, array_kernel(_trip_count))
