"""Rules for TensorFlow's operations, by the operation's name."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.support.tf_graphs import Builder, Type
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "frontends.tensorflow.rules"
)


def test_rounding_integers_changes_neither_values_nor_type() -> None:
    g = Builder()
    g.node("Placeholder", name="x", dtype=Type("int64"))
    g.node("Round", "x", name="y", T=Type("int64"))
    x = np.array([2**62 + 1, -3])
    (y,) = ps.compile(g.bytes()).run({"x": x}).values()
    assert y.dtype == np.int64
    np.testing.assert_array_equal(y, x)
