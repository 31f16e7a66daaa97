"""Sequences and optionals."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from penstock.core.types import (
    ANY,
    BOOL,
    FLOAT32,
    INT64,
    OptionalType,
    SequenceType,
    ShapeError,
    TensorType,
)
from penstock.ir.graph import Node, Value
from penstock.ops import find
from tests.ops.cases import F32, check_both, f32, fails, float_type, i64, infer, run
from tests.ops.harness import check_node

FLOATS = SequenceType(float_type("N", 3))


def three() -> list[np.ndarray]:
    return [f32(2), f32(3), f32(1)]


def test_sequence_construct_matches_the_reference() -> None:
    check_node("SequenceConstruct", [f32(2), f32(3, 2)])
    check_node("SequenceConstruct", [np.array(["a"], object)])
    assert infer("SequenceConstruct", [float_type("N", 3), float_type(2, 3)]) == [
        SequenceType(float_type(None, 3))
    ]
    with pytest.raises(ShapeError, match="different dtypes"):
        infer("SequenceConstruct", [float_type(1), TensorType(INT64)])


def test_sequence_empty_gives_an_empty_sequence() -> None:
    assert run("SequenceEmpty", []) == ([],)
    assert infer("SequenceEmpty", [], {"dtype": int(TensorProto.INT64)}) == [
        SequenceType(TensorType(INT64))
    ]
    assert infer("SequenceEmpty", []) == [SequenceType(TensorType(F32))]


@pytest.mark.parametrize("position", [None, 0, 1, 3, -1, -3])
def test_sequence_insert_matches_the_reference(position: int | None) -> None:
    inputs: list[Any] = [three(), f32(5)]
    if position is not None:
        inputs.append(np.array(position))
    want = three()
    want.insert(3 if position is None else position, f32(5))
    check_node("SequenceInsert", inputs, expected=[want])


def test_sequence_insert_with_bad_inputs_is_refused() -> None:
    fails("SequenceInsert", [three(), f32(1), np.array(4)], match="out of range")
    fails("SequenceInsert", [three(), f32(1), np.array(-4)], match="out of range")
    empty = SequenceType(TensorType(F32))
    assert infer("SequenceInsert", [empty, float_type(2)]) == [empty]
    assert infer("SequenceInsert", [FLOATS, float_type("N", 3)]) == [FLOATS]
    with pytest.raises(ShapeError):
        infer("SequenceInsert", [FLOATS, TensorType(INT64)])
    with pytest.raises(ShapeError, match="must be a sequence"):
        infer("SequenceInsert", [float_type(2), float_type(2)])


@pytest.mark.parametrize("position", [None, 0, 2, -1, -3])
def test_sequence_erase_matches_the_reference(position: int | None) -> None:
    inputs: list[Any] = [three()]
    if position is not None:
        inputs.append(np.array(position, np.int32))
    want = three()
    del want[-1 if position is None else position]
    check_node("SequenceErase", inputs, expected=[want])
    assert infer("SequenceErase", [FLOATS, None]) == [FLOATS]


@pytest.mark.parametrize("position", [0, 2, -1, -3])
def test_sequence_at_matches_the_reference(position: int) -> None:
    check_node("SequenceAt", [three(), np.array(position)])
    check_node("SequenceLength", [three()])


def test_sequence_at_with_bad_inputs_is_refused() -> None:
    for position in (3, -4):
        fails("SequenceAt", [three(), np.array(position)], match="out of range")
        fails("SequenceErase", [three(), np.array(position)], match="out of range")
    fails("SequenceAt", [three(), i64(0, 1)], match="scalar")
    assert infer("SequenceAt", [FLOATS, TensorType(INT64, ())]) == [FLOATS.element]
    assert infer("SequenceAt", [ANY, TensorType(INT64, ())]) == [ANY]
    assert infer("SequenceLength", [FLOATS]) == [TensorType(INT64, ())]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_split_to_sequence_matches_the_reference(axis: int) -> None:
    x = f32(4, 4)
    check_node("SplitToSequence", [x], {"axis": axis})
    check_both("SplitToSequence", [x, np.array(3)], {"axis": axis})
    check_both("SplitToSequence", [x, np.array(2, np.int32)], {"axis": axis, "keepdims": 0})
    check_both("SplitToSequence", [x, i64(1, 0, 3)], {"axis": axis})
    parts = [part.squeeze(axis) for part in np.split(x, 4, axis)]
    check_node("SplitToSequence", [x], {"axis": axis, "keepdims": 0}, expected=[parts])
    # Exporters write unbind with a scalar of 1, of which ONNX Runtime drops the axis.
    unbind = [x, np.array(1)]
    check_node("SplitToSequence", unbind, {"axis": axis, "keepdims": 0}, expected=[parts])
    check_both("SplitToSequence", [x, i64(1, 1, 1, 1)], {"axis": axis, "keepdims": 0})


def test_split_to_sequence_of_edge_cases_matches_the_definition() -> None:
    fails("SplitToSequence", [f32(4), np.array(0)], match="the size of the parts must")
    fails("SplitToSequence", [f32(4), i64(1, 2)], match="add up")
    fails("SplitToSequence", [f32(4), i64(5, -1)], match="add up")
    x = float_type("N", 6)
    cases: list[tuple[list[Any], dict[str, int], tuple[Any, ...]]] = [
        ([x], {}, (1, 6)),
        ([x], {"keepdims": 0, "axis": 1}, ("N",)),
        ([x, np.array(2)], {"axis": 1}, ("N", 2)),
        ([x, np.array(4)], {"axis": 1}, ("N", None)),
        ([x, np.array(2)], {}, (None, 6)),
        ([x, np.array(2)], {"keepdims": 0, "axis": 1}, ("N", 2)),
        ([x, np.array(1)], {"keepdims": 0, "axis": 1}, ("N",)),
        ([x, i64(1, 5)], {"keepdims": 0, "axis": 1}, ("N", None)),
        ([x, i64(3, 3)], {"axis": -1}, ("N", 3)),
        ([x, i64(1, 5)], {"axis": -1}, ("N", None)),
        ([x, TensorType(INT64)], {"axis": -1}, ("N", None)),
    ]
    for inputs, attrs, wanted in cases:
        assert infer("SplitToSequence", inputs, attrs) == [SequenceType(float_type(*wanted))]
    unknown = infer("SplitToSequence", [x, TensorType(INT64, ())], {"keepdims": 0})
    assert unknown == [SequenceType(TensorType(FLOAT32))]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("new_axis", [0, 1])
def test_concat_from_sequence_matches_the_reference(axis: int, new_axis: int) -> None:
    attrs = {"axis": axis, "new_axis": new_axis}
    check_node("ConcatFromSequence", [[f32(2, 3), f32(2, 3)]], attrs)
    wanted: tuple[Any, ...] = {
        (0, 0): (None, 3),
        (1, 0): ("N", None),
        (-1, 0): ("N", None),
        (0, 1): (None, "N", 3),
        (1, 1): ("N", None, 3),
        (-1, 1): ("N", 3, None),
    }[axis, new_axis]
    assert infer("ConcatFromSequence", [FLOATS], attrs) == [float_type(*wanted)]


def test_concat_from_sequence_of_edge_cases_matches_the_definition() -> None:
    check_node("ConcatFromSequence", [[f32(2), f32(3)]], {"axis": 0})
    fails("ConcatFromSequence", [[f32(2), f32(3)]], {"axis": 0, "new_axis": 1}, "shape", ValueError)
    fails("ConcatFromSequence", [[f32(2), f32(3)]], {"axis": 1}, "out of bounds", ValueError)
    op = find("ConcatFromSequence")
    assert op is not None
    kernel = op.compile(Node(op, [Value("s")], [Value("y")], {"axis": 0}), [FLOATS])
    with pytest.raises(ValueError, match="at least one array"):
        kernel([])
    assert infer("ConcatFromSequence", [ANY], {"axis": 0}) == [TensorType()]


def test_optional_holds_its_element() -> None:
    x = f32(2)
    (some,) = run("Optional", [x])
    np.testing.assert_array_equal(some, x)
    (sequence,) = run("Optional", [[x]])
    assert isinstance(sequence, list)
    declared = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    assert run("Optional", [], {"type": declared}) == (None,)
    assert infer("Optional", [float_type("N")]) == [OptionalType(float_type("N"))]
    assert infer("Optional", [None], {"type": FLOATS}) == [OptionalType(FLOATS)]


def test_optional_elements_matches_the_reference() -> None:
    x = f32(2)
    check_node("OptionalGetElement", [x])
    check_node("OptionalHasElement", [x])
    check_node("OptionalHasElement", [[x]])
    assert not run("OptionalHasElement", [])[0]
    op = find("OptionalHasElement")
    assert op is not None
    node = Node(op, [Value("x", OptionalType(FLOATS))], [Value("y")])
    has = op.compile(node, [OptionalType(FLOATS)])(None)
    assert has.shape == ()
    assert has.dtype == BOOL
    assert not has
    get = find("OptionalGetElement")
    assert get is not None
    with pytest.raises(ShapeError, match="no element"):
        get.compile(node, [OptionalType(FLOATS)])(None)
    assert infer("OptionalGetElement", [OptionalType(FLOATS)]) == [FLOATS]
    assert infer("OptionalGetElement", [float_type(2)]) == [float_type(2)]
    assert infer("OptionalHasElement", []) == [TensorType(BOOL, ())]
