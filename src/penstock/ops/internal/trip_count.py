"""TripCount: how often a loop runs that counts up to a limit.

It is not in the table of operations: a pass creates it. Inputs are pairs of integers, where a
counter starts and its limit; the loop ends with the first counter that reaches its limit, after
``least`` iterations at the earliest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import INT64, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Op, Types


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(INT64, ()),)


def _compile(node: Node, types: Types) -> Kernel:
    least = node.attrs["least"]

    def of_one(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.array(max(end.item() - start.item(), least), np.int64)

    def function(*bounds: np.ndarray) -> np.ndarray:
        numbers = [bound.item() for bound in bounds]
        trips = min([end - start for start, end in zip(numbers[::2], numbers[1::2], strict=True)])
        return np.array(max(trips, least), np.int64)

    return Kernel(of_one if len(types) == 2 else function)


TRIP_COUNT = Op("TripCount", "penstock", 1, 1, _infer, _compile)
