"""Gradients of convolution and pooling, and gradients of another shape than the result's."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Type
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.windows"
)


@pytest.mark.parametrize(
    ("op", "first", "fault"),
    [
        ("AvgPoolGrad", [np.array([1, 6, 6, 2], np.int32)], "does not match images of shape"),
        ("MaxPoolGrad", [np.zeros((1, 6, 6, 2), "f")] * 2, "the gradient has shape"),
        (
            "Conv2DBackpropFilter",
            [np.zeros((1, 6, 6, 2), "f"), np.array([2, 2, 2, 2], np.int32)],
            "does not match images of shape",
        ),
        (
            "Conv2DBackpropFilter",
            [np.zeros((1, 6, 6, 3), "f"), np.array([2, 2, 2, 2], np.int32)],
            "a filter of shape",
        ),
    ],
)
def test_gradient_of_another_shape_is_refused(op: str, first: list[np.ndarray], fault: str) -> None:
    g = Builder()
    kinds = {"strides": [1, 2, 2, 1], "padding": "VALID", "T": Type("float32")}
    if "Pool" in op:
        kinds["ksize"] = [1, 2, 2, 1]
    inputs = [g.const(x) for x in first]
    g.node(op, *inputs, g.placeholder("dy", "float32", -1, -1, -1, 2), name="y", **kinds)
    with pytest.raises(ps.RunError, match=fault):
        ps.compile(g.bytes()).run({"dy": np.ones((1, 2, 3, 2), np.float32)})
