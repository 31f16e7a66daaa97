"""Append joins as Concat does."""

from __future__ import annotations

import numpy as np

from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.append import APPEND


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
