"""How TensorFlow's operations are registered, and what they read of attributes and inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.registry import TENSORFLOW, find
from penstock.ops.tensorflow import common


def compiled(op: str, attrs: dict[str, Any], inputs: int = 1, outputs: int = 1) -> Kernel:
    operation = find(op, TENSORFLOW)
    assert operation is not None
    values = [Value(f"x{i}") for i in range(inputs)]
    node = Node(operation, values, [Value(f"y{i}") for i in range(outputs)], attrs)
    return operation.compile(node, [TensorType()] * inputs)


def test_array_operator_gives_each_node_its_own_attributes():
    x = np.arange(6).reshape(2, 3)
    rows = compiled("Unpack", {"num": 2}, outputs=2)
    columns = compiled("Unpack", {"num": 3, "axis": 1}, outputs=3)
    assert [part.tolist() for part in rows(x)] == [[0, 1, 2], [3, 4, 5]]
    assert [part.tolist() for part in columns(x)] == [[0, 3], [1, 4], [2, 5]]


def test_array_operator_without_mandatory_attribute_raises_shape_error():
    with pytest.raises(ShapeError, match="'num'"):
        compiled("Unpack", {})


@pytest.mark.parametrize(
    ("op", "inputs"),
    [("StackPushV2", 2), ("TensorArrayWriteV3", 4), ("TensorListLength", 1), ("Assign", 2)],
)
def test_operation_on_a_tensor_instead_of_a_handle_raises_shape_error(op, inputs):
    with pytest.raises(ShapeError, match="the input must be a"):
        compiled(op, {}, inputs)(*[np.zeros(())] * inputs)


@pytest.mark.parametrize("x", [np.zeros(2, np.int32), np.zeros(()), np.zeros(0, np.int64)])
def test_integer_of_anything_else_raises_shape_error(x):
    with pytest.raises(ShapeError, match="the axis must be one integer"):
        common.integer(x, "the axis")


def test_integer_takes_one_element_of_any_rank():
    assert common.integer(np.array([[7]], np.int64), "the axis") == 7


def test_lengths_refuses_negative_dims_and_keeps_unknown_ones():
    assert common.lengths((2, None, "n")) == (2, None, "n")
    with pytest.raises(ShapeError, match="must not be negative"):
        common.lengths((2, -1))


def test_named_dtype_of_another_kind_raises_shape_error():
    assert common.named_dtype({}, "dtype", "float32") == FLOAT32
    with pytest.raises(ShapeError, match="out_type is 'float32'"):
        common.named_dtype({"out_type": "float32"}, "out_type", "int32", "iu")
