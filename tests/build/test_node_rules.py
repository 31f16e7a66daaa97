"""Nodes that their schemas allow, and their names, outputs and versions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder, SymbolicValue
from tests.build.test_graph_builder import TF, node_of, run


def test_error_names_the_line_that_added_the_node() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, ["n", 4])
    line = sys._getframe().f_lineno + 2
    with pytest.raises(ps.InvalidModel, match=rf"test_node_rules.py:{line}\b.*4 and 5"):
        x @ np.ones((5, 2), np.float32)


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (lambda b, x: b.op("Convv", x), "did you mean Conv"),
        (lambda b, x: b.op("Softmax", x, axes=1), "has an attribute 'axes'"),
        (lambda b, x: b.op("Softmax", x, axis=0.5), "'axis' that is of kind FLOAT, not INT"),
        (lambda b, x: b.op("Softmax", x, x), "has 2 inputs"),
        (lambda b, x: b.op("Softmax", None), "leaves out input 0"),
        (lambda b, x: b.op("Concat", x, x), "lacks attribute 'axis'"),
        (lambda b, x: b.op("Add", x, np.ones(2)), "must be of one type"),
        (lambda b, x: b.op("Softmax", x.astype(np.int32)), "takes tensor"),
        (lambda b, x: b.op("ReduceSum", x, keepdims=5), "must be one of 0, 1"),
        (lambda b, x: b.op("Switch", x, True, domain=TF, data=1), "its attributes are T"),
        (lambda b, x: b.op("Gelu", GraphBuilder().input("y", "f4")), "another GraphBuilder"),
    ],
)
def test_node_that_its_schema_does_not_allow_is_refused(
    add: Callable[[GraphBuilder, SymbolicValue], Any], reason: str
) -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2, 3])
    nodes = len(b.graph(lambda: None).nodes)
    with pytest.raises(ps.InvalidModel, match=reason):
        add(b, x)
    assert nodes == 0
    b.output("y", x + 1)  # the builder goes on
    assert run(b, np.zeros((2, 3), np.float32)).shape == (2, 3)


def test_operation_may_have_several_outputs_left_out_inputs_and_lists() -> None:
    x = np.array([[3, 1, 2]], np.float32)
    b = GraphBuilder()
    value = b.input("x", np.float32, [1, 3])
    values, indices = b.op("TopK", value, [2], axis=-1)
    first, second = b.op("Split", value, np.array([1, 2]), axis=1, outputs=2)
    padded = b.op("Clip", value, None, np.float32(2))
    for i, result in enumerate([values, indices, first, second, padded]):
        b.output(f"y{i}", result)
    wants = [[[3, 2]], [[0, 2]], [[3]], [[1, 2]], [[2, 1, 2]]]
    for got, want in zip(run(b, x), wants, strict=True):
        np.testing.assert_array_equal(got, want)


def test_operation_of_a_version_is_that_version() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2, 3])
    assert node_of(b.op("Softmax", x, version=11)).op.version == 12
    assert node_of(b.op("Softmax", x)).op.since == 13


def test_names_are_unique_and_begin_with_their_scope() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])
    with b.scope("layer"):
        first, second = b.op("Relu", x), b.op("Relu", x, name="act")
    third = b.op("Relu", x, name="layer/relu")
    assert [v.name for v in (first, second, third)] == ["layer/relu", "layer/act", "layer/relu_1"]
    b.output("layer/act", third)
    assert second.name == "layer/act_2"
    with pytest.raises(ps.InvalidModel, match="choose another name"):
        b.input("x", np.float32)
    with pytest.raises(ps.InvalidModel, match="choose another name"):
        b.output("layer/act", x)
    b.output("layer/relu", first)
    with pytest.raises(ps.InvalidModel, match="choose another name"):
        b.output("layer/relu", first)


def test_lists_of_numbers_take_the_dtype_of_the_value_beside_them() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])
    b.output("y", [1, 2] * x + (0.5, 1))
    assert b.model().graph.outputs[0].type.dtype == np.float32
    np.testing.assert_array_equal(run(b, np.ones(2, np.float32)), [1.5, 3])
    with pytest.raises(TypeError, match="use astype first"):
        b.input("i", np.int32, [2]) * [0.5, 1]
