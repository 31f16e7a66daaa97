"""Append joins as Concat does, TripCount counts as range does, ZeroNaN is Where(IsNaN(x), 0, x)."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.arrays import APPEND, TRIP_COUNT, ZERO_NAN


def test_append_joins_both_along_an_axis():
    types = [TensorType(FLOAT32, (2, None, 3)), TensorType(FLOAT32, (2, 1, 3))]
    (joined,) = APPEND.infer(types, {"axis": 1}, [None, None])
    assert joined == TensorType(FLOAT32, (2, None, 3))
    values = [Value("x", types[0]), Value("new", types[1])]
    node = Node(APPEND, values, [Value("y", joined)], {"axis": 1})
    x, new = np.ones((2, 4, 3), np.float32), np.zeros((2, 1, 3), np.float32)
    y = APPEND.compile(node, types).function(x, new)
    np.testing.assert_array_equal(y, np.concatenate([x, new], 1))
    assert not np.shares_memory(x, y)


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


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_no_number_becomes_0_and_all_else_stays(dtype):
    type_ = TensorType(np.dtype(dtype), (5,))
    node = Node(ZERO_NAN, [Value("x", type_)], [Value("y", type_)])
    kernel = ZERO_NAN.compile(node, [type_])
    x = np.array([np.nan, -0.0, np.inf, -np.inf, 3], dtype)
    wanted = np.array([0, -0.0, np.inf, -np.inf, 3], dtype)
    y, out = kernel.function(x), np.ones(5, dtype)
    kernel.into(x, out)
    for result in (y, out):
        assert (result.dtype, result.tobytes()) == (wanted.dtype, wanted.tobytes())
    assert np.isnan(x[0])
    kernel.into(x, x)
    assert x.tobytes() == wanted.tobytes()
