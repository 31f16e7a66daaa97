"""TripCount counts as range does."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import INT64, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.trip_count import TRIP_COUNT

NUMBER = TensorType(INT64, ())


def trips(least, *bounds):
    inputs = [Value(f"x{i}", NUMBER) for i in range(len(bounds))]
    node = Node(TRIP_COUNT, inputs, [Value("n", NUMBER)], {"least": least})
    kernel = TRIP_COUNT.compile(node, [NUMBER] * len(bounds))
    return kernel.function(*(np.array(bound) for bound in bounds))


@pytest.mark.parametrize("start", [-3, 0, 5])
@pytest.mark.parametrize("end", [-4, 0, 6])
def test_trips_of_one_counter_are_those_of_a_range(start, end):
    count = trips(0, start, end)
    assert (count, count.dtype, count.shape) == (len(range(start, end)), INT64, ())
    assert trips(1, start, end) == max(1, len(range(start, end)))


def test_first_counter_at_its_limit_ends_the_loop():
    assert trips(0, 0, 9, 2, 6, -1, 8) == 4
    assert trips(0, 0, 9, 5, 2) == 0
    assert trips(1, 0, 9, 5, 2) == 1


def test_type_is_an_integer():
    assert list(TRIP_COUNT.infer([NUMBER] * 2, {"least": 0}, [None] * 2)) == [NUMBER]
