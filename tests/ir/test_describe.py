"""Nodes and bytes in messages."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ir.describe import compile_error, describe_node, format_bytes
from penstock.ir.graph import Node, Value
from penstock.ir.op import Op
from penstock.ops.registry import find


def node_of(op: Op | None = None) -> Node:
    op = op or find("Add")
    assert op is not None
    x = Value("x", TensorType(FLOAT32, (2, 3)))
    return Node(op, [x, None], [Value("y")], name="sum", origin="sum in model.onnx")


def foreign(node, types):
    raise NotImplementedError


def test_node_is_described_by_operation_place_and_inputs():
    text = describe_node(node_of())
    assert text.startswith("Add (sum")
    assert text.endswith("with inputs (x: float32[2, 3], none)")
    assert describe_node(node_of(), ["x: int64[]"]).endswith("with inputs (x: int64[])")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ShapeError("no fit"), ps.InvalidModel, "no fit"),
        (MemoryError("128 GiB"), ps.LimitExceeded, "not enough memory"),
        (ZeroDivisionError("by 0"), ps.InternalError, "Please report it"),
        (KeyError("axis"), ps.InternalError, "Please report it"),  # its schema has told of axis
    ],
)
def test_errors_of_operations_become_those_of_penstock(error, kind, text):
    raised = compile_error(node_of(), error)
    assert type(raised) is kind
    assert text in str(raised) and "Add (sum" in str(raised)


def test_errors_of_penstock_stay_as_they_are():
    error = ps.Unsupported("no")
    assert compile_error(node_of(), error) is error


def test_operations_of_users_are_to_be_corrected_by_them():
    op = Op("Mine", "users", 1, 1, foreign, foreign)
    assert "Correct the function" in str(compile_error(node_of(op), ZeroDivisionError()))
    missing = compile_error(node_of(op), KeyError("axis"))
    assert type(missing) is ps.InvalidModel and "needs the attribute 'axis'" in str(missing)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (3 << 41, "6144.00 GiB"),
    ],
)
def test_bytes_have_the_largest_unit_that_keeps_them_above_1(count, text):
    assert format_bytes(count) == text
