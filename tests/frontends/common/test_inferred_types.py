"""Types of values that rules have emitted."""

from __future__ import annotations

import pytest

from penstock.core.types import ANY, FLOAT32, TensorType
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.common.inferred_types import InferredTypes
from penstock.ir.graph import Value
from tests.frontends.common.test_builder import builder


def test_input_queries_infer_types_through_producers() -> None:
    types = InferredTypes()
    x = Value("x", TensorType(FLOAT32, ("N", 4)))
    before = builder(x, types=types)
    before.emit_final("Transpose", [before.emit("Relu", [x])], {"perm": [1, 0]})
    after = builder(before.outputs[0], types=types)
    assert after.shape(0) == (4, "N")
    assert after.dtype(0) == FLOAT32
    with pytest.raises(InexpressibleError, match="the shape of the filter is not known"):
        after.static_shape(0, "the filter")


def test_elements_of_a_shape_are_inferred() -> None:
    types = InferredTypes()
    x = Value("x", TensorType(FLOAT32, ("N", 4)))
    before = builder(x, types=types)  # owns the node
    shape = before.emit("Shape", [x], start=0)
    assert builder(shape, types=types).elements(0) == ("N", 4)


def test_inferred_types_of_a_value_without_a_producer_are_asked_again() -> None:
    types = InferredTypes()
    y = Value("y")
    assert types.of(y) is ANY
    b = builder(Value("x", TensorType(FLOAT32, (2,))), types=types)
    b.emit_final("Neg", outputs=[y])
    assert types.tensor(y) == TensorType(FLOAT32, (2,))


def test_inferred_types_in_a_circle_end() -> None:
    a, b = Value("a"), Value("b")
    builder().append("Neg", "", [b], [a], None, "one")
    builder().append("Neg", "", [a], [b], None, "two")
    assert InferredTypes().tensor(a).shape is None
