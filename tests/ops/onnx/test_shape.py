"""Shape, Size, Reshape, Flatten, Squeeze, Unsqueeze, Transpose, Expand, Identity."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import INT64, ShapeError, TensorType
from penstock.ops import find
from tests.ops.cases import (
    F32,
    check_both,
    data_of,
    f32,
    fails,
    float_type,
    i64,
    infer,
    int_type,
    run,
    shape_of,
)
from tests.ops.harness import check_node

INT_MAX = 2**31 - 1


@pytest.mark.parametrize(
    "attrs",
    [{}, {"start": 1}, {"end": -1}, {"start": -2, "end": 9}, {"start": -9}, {"start": 2, "end": 1}],
)
def test_shape_and_size_matches_the_reference(attrs: dict[str, int]) -> None:
    for x in (f32(2, 3, 4), f32(0, 3), np.float32(1).reshape(())):
        check_node("Shape", [x], attrs)
        check_node("Size", [x])


def test_shape_data_keeps_names() -> None:
    x = float_type("N", 3, None, 8)
    assert data_of("Shape", [x]) == ("N", 3, None, 8)
    assert data_of("Shape", [x], {"start": -3, "end": -1}) == (3, None)
    assert data_of("Size", [x]) == (None,)
    assert data_of("Size", [float_type(2, 3)]) == (6,)
    assert data_of("Size", [float_type("N", 1)]) == ("N",)
    assert shape_of("Shape", [TensorType()]) == (None,)


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((2, 3, 4), (4, 6)),
        ((2, 3, 4), (-1,)),
        ((2, 3, 4), (0, -1)),
        ((2, 3, 4), (0, 0, 2, -1)),
        ((1,), ()),
        ((), (1, 1)),
        ((0, 3), (3, 0)),
    ],
)
def test_reshape_matches_the_reference(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    # A 0 in the target of an empty tensor must be meant if it copies no dim.
    attrs = {"allowzero": 1} if 0 in shape else {}
    check_both("Reshape", [f32(*shape), i64(*target)], attrs)


@pytest.mark.parametrize("op", ["Reshape", "Expand", "Unsqueeze", "Slice", "Split"])
def test_shape_operation_refuses_more_dims_than_memory_has_room_for(op: str) -> None:
    lengths = [TensorType(INT64, (INT_MAX,))] * (2 if op == "Slice" else 1)
    with pytest.raises(ShapeError, match="input 1 has 2147483647 elements"):
        infer(op, [float_type(2), *lengths])


def test_reshape_of_other_dtypes_and_strides() -> None:
    check_both("Reshape", [np.array(["a", "b"], object), i64(2, 1)])
    check_both("Reshape", [f32(4).astype(ml_dtypes.bfloat16), i64(2, 2)])
    check_both("Reshape", [f32(4, 6).T, i64(3, -1)])
    check_both("Reshape", [f32(4, 6)[:, ::2], i64(-1)])


def test_reshape_keeps_dims_of_an_empty_batch() -> None:
    (y,) = run("Reshape", [f32(0, 3, 4), i64(0, -1)])
    assert y.shape == (0, 12)
    assert shape_of("Reshape", [float_type(0, 3, 4), i64(0, -1)]) == (0, 12)


def test_reshape_that_copies_a_dim_of_0_takes_any_other_dims() -> None:
    # Exporters of attention reshape (batch * heads, ...) to (0, heads, ...), which an empty batch
    # turns into a copied dim.
    check_both("Reshape", [f32(0, 16, 24), i64(0, 4, 16, 24)])
    assert shape_of("Reshape", [float_type(0, 6), i64(0, 7)]) == (0, 7)
    fails("Reshape", [f32(2, 0, 6), i64(0, 5, 6)])


@pytest.mark.parametrize(
    ("shape", "target", "attrs"),
    [
        ((2, 3), (4, 2), {}),
        ((2, 3), (4, -1), {}),
        ((2, 3), (-1, -1), {}),
        ((2, 3), (-2, 3), {}),
        ((2, 3), (2, 3, 0), {}),
        ((0, 3), (0, -1), {"allowzero": 1}),
        ((2, 0), (3, 0, -1), {"allowzero": 1}),
        ((2, 3), (0, 3), {"allowzero": 1}),
    ],
)
def test_reshape_with_bad_inputs_is_refused(
    shape: tuple[int, ...], target: tuple[int, ...], attrs: dict[str, int]
) -> None:
    fails("Reshape", [f32(*shape), i64(*target)], attrs)
    with pytest.raises(ShapeError):
        infer("Reshape", [float_type(*shape), i64(*target)], attrs)


@pytest.mark.parametrize(
    ("dims", "target", "wanted"),
    [
        ((0, 3, 7), i64(0, -1), (0, 21)),
        ((0,), i64(0, -1), (0, 1)),
        ((2, 0, 6), i64(0, 3, -1), (0, 3, 4)),
        (("N", 3, 7), i64(0, -1), (0, None)),
        ((0, 3), int_type(0, None), (0, None)),
    ],
)
def test_reshape_that_skips_zeros_infers_a_dim_from_the_others(
    dims: tuple[int, ...], target: np.ndarray | TensorType, wanted: tuple[int, ...]
) -> None:
    attrs = {"allowzero": 1, "skip_zeros": 1}
    assert infer("Reshape", [float_type(*dims), target], attrs)[0].shape == wanted


@pytest.mark.parametrize(
    ("dims", "target", "wanted"),
    [
        (("N", 3, 8, 8), i64(0, -1), ("N", 192)),
        (("N", 3, None, 8), i64(0, -1), ("N", None)),
        (("N", 3, None, 8), i64(0, 3, 0, -1), ("N", 3, None, 8)),
        (("N", 12), int_type("N", -1), ("N", 12)),
        (("N", "T", 768), int_type("N", "T", 12, -1), ("N", "T", 12, 64)),
        (("N", "T", 12, 64), int_type("N", -1, 768), ("N", "T", 768)),
        (("N", "T", 12, 64), int_type(-1, "T", 768), ("N", "T", 768)),
        (("N", "T", 8), i64(-1, 8), (None, 8)),
        (("N", 6), i64(-1, 3), (None, 3)),
        (("N", "T"), int_type("T", "N"), ("T", "N")),
        ((4, 6), int_type(None, 8), (3, 8)),
        ((4, 6), int_type(None, -1), (None, None)),
        (("N", 6), int_type(None, 6), ("N", 6)),
        (("N", 6), int_type("M", -1), ("M", None)),
        ((None, 6), int_type(2, -1), (2, None)),
    ],
)
def test_reshape_infers_partly_known_dims(dims: Any, target: Any, wanted: Any) -> None:
    assert shape_of("Reshape", [float_type(*dims), target]) == wanted


def test_reshape_infers_without_much() -> None:
    assert shape_of("Reshape", [TensorType(F32), i64(2, 0, -1)]) == (2, None, None)
    assert shape_of("Reshape", [float_type(4), TensorType(INT64, (3,))]) == (None,) * 3
    assert shape_of("Reshape", [float_type(4), TensorType(INT64)]) is None
    assert data_of("Reshape", [int_type("N", 2), i64(-1)]) == ("N", 2)
    assert data_of("Reshape", [int_type("N"), i64()]) == ("N",)
    # N may be 0, and then any number of elements fits.
    assert shape_of("Reshape", [float_type("N", 3), int_type("N", 4)]) == ("N", 4)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -2, -3])
def test_flatten_matches_the_reference(axis: int) -> None:
    for x in (f32(2, 3, 4), f32(4, 3, 2).T):
        check_node("Flatten", [x], {"axis": axis})
    x = f32(2, 0, 4)
    rows = int(np.prod(x.shape[:axis]))
    columns = int(np.prod(x.shape[axis:]) if axis != 3 else 1)
    check_node("Flatten", [x], {"axis": axis}, expected=[x.reshape(rows, columns)])


def test_flatten_of_edge_cases_matches_the_definition() -> None:
    check_node("Flatten", [np.float32(3).reshape(())], {"axis": 0})
    check_node("Flatten", [f32(3)])
    fails("Flatten", [f32(2, 3)], {"axis": 3}, "axis 3 is out of range")
    fails("Flatten", [f32(2, 3)], {"axis": -3})
    assert shape_of("Flatten", [float_type("N", 3, 4)]) == ("N", 12)
    assert shape_of("Flatten", [float_type("N", "M", 4)], {"axis": 2}) == (None, 4)
    assert shape_of("Flatten", [TensorType(F32)]) == (None, None)


@pytest.mark.parametrize("axes", [(0,), (2,), (-2, 0), (-4,)])
def test_squeeze_matches_the_reference(axes: tuple[int, ...]) -> None:
    check_both("Squeeze", [f32(1, 3, 1, 2)[:, :, :, ::-1], i64(*axes)])


def test_squeeze_of_edge_cases_matches_the_definition() -> None:
    check_node("Squeeze", [f32(1, 3, 1)])
    check_node("Squeeze", [f32(1, 1)])
    check_node("Squeeze", [f32(2, 3), None])
    check_both("Squeeze", [f32(1), i64(0)])
    check_both("Squeeze", [f32(1, 2), i64()])
    fails("Squeeze", [f32(2, 3), i64(0)], match="not equal to one", error=ValueError)
    fails("Squeeze", [f32(1, 3), i64(2)], match="out of bounds", error=ValueError)
    fails("Squeeze", [f32(1, 1), i64(0, -2)], match="duplicate", error=ValueError)


def test_squeeze_infers_its_types() -> None:
    x = float_type("N", 1, None)
    assert shape_of("Squeeze", [x, i64(1)]) == ("N", None)
    assert shape_of("Squeeze", [x, i64(-1, 1)]) == ("N",)
    assert shape_of("Squeeze", [x]) is None
    assert shape_of("Squeeze", [x, TensorType(INT64, (1,))]) == (None, None)
    assert data_of("Squeeze", [int_type("N"), i64(0)]) == ("N",)
    with pytest.raises(ShapeError, match="to be removed"):
        infer("Squeeze", [float_type(2, 3), i64(0)])
    with pytest.raises(ShapeError, match="twice"):
        infer("Squeeze", [float_type(1, 3), i64(0, -2)])


@pytest.mark.parametrize("axes", [(0,), (2,), (-1,), (0, -1), (3, 1, 0), ()])
def test_unsqueeze_matches_the_reference(axes: tuple[int, ...]) -> None:
    check_both("Unsqueeze", [f32(3, 4)[:, ::2], i64(*axes)])


def test_unsqueeze_of_edge_cases_matches_the_definition() -> None:
    check_both("Unsqueeze", [np.float32(3).reshape(()), i64(0, 1)])
    check_both("Unsqueeze", [np.float32(3).reshape(()), i64()])
    fails("Unsqueeze", [f32(2), i64(3)])
    fails("Unsqueeze", [f32(2), i64(0, 0)])
    fails("Unsqueeze", [f32(2), i64(0, -3)])
    assert shape_of("Unsqueeze", [float_type("N", 4), i64(-1, 0)]) == (1, "N", 4, 1)
    assert shape_of("Unsqueeze", [float_type("N"), TensorType(INT64, (2,))]) == (None,) * 3
    assert shape_of("Unsqueeze", [TensorType(F32), i64(0)]) is None
    scalar = TensorType(INT64, (), ("N",))
    assert data_of("Unsqueeze", [scalar, i64(0)]) == ("N",)


@pytest.mark.parametrize("perm", [None, [0, 1, 2], [2, 0, 1], [1, 0, 2]])
def test_transpose_matches_the_reference(perm: list[int] | None) -> None:
    attrs = {} if perm is None else {"perm": perm}
    for x in (f32(2, 3, 4), f32(2, 0, 4), f32(2, 3, 4).astype(ml_dtypes.float8_e4m3fn)):
        check_node("Transpose", [x], attrs)


def test_transpose_of_edge_cases_matches_the_definition() -> None:
    check_node("Transpose", [np.float32(1).reshape(())])
    check_node("Transpose", [np.array([["a", "b"]], object)])
    fails("Transpose", [f32(2, 3)], {"perm": [0, 0]})
    fails("Transpose", [f32(2, 3)], {"perm": [0, 1, 2]})
    assert shape_of("Transpose", [float_type("N", 2, None)]) == (None, 2, "N")
    assert shape_of("Transpose", [float_type("N", 2)], {"perm": [1, 0]}) == (2, "N")
    assert shape_of("Transpose", [TensorType(F32)], {"perm": [1, 0]}) == (None, None)
    assert data_of("Transpose", [int_type("N", 2)]) == ("N", 2)
    with pytest.raises(ShapeError, match="is not a permutation of the"):
        infer("Transpose", [float_type(2, 3)], {"perm": [0, 0]})


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((3, 1), (2, 1, 6)),
        ((3, 1), (3, 4)),
        ((3, 2), (1, 1)),
        ((), (2, 3)),
        ((2, 3), ()),
        ((1, 3), (0, 3)),
        ((3, 4), (3, 4)),
    ],
)
def test_expand_matches_the_reference(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    check_both("Expand", [f32(*shape), i64(*target)])


def test_expand_of_edge_cases_matches_the_definition() -> None:
    check_both("Expand", [np.array(["a"], object), i64(3)])
    fails("Expand", [f32(2, 3), i64(2, 2)], match="broadcast", error=ValueError)
    fails("Expand", [f32(1, 3), i64(-1, 3)], error=ValueError)


def test_expand_infers_its_types() -> None:
    x = float_type("N", 1, 4)
    assert shape_of("Expand", [x, int_type("N", "T", 1)]) == ("N", "T", 4)
    assert shape_of("Expand", [x, int_type(None, 3, 1)]) == (None, 3, 4)
    assert shape_of("Expand", [x, TensorType(INT64, (4,))]) == (None, None, None, 4)
    assert shape_of("Expand", [x, TensorType(INT64)]) is None
    assert data_of("Expand", [TensorType(INT64, (), ("N",)), i64(3)]) == ("N",) * 3
    assert data_of("Expand", [TensorType(INT64, (), (1,)), i64(1000)]) is None
    with pytest.raises(ShapeError):
        infer("Expand", [x, i64(2, -1, 4)])


def test_identity_passes_every_value_on() -> None:
    check_node("Identity", [f32(2, 3)])
    check_node("Identity", [np.array("text", object)])
    check_node("Identity", [[f32(2), f32(3)]])
    assert infer("Identity", [int_type("N", 2)]) == [int_type("N", 2)]


@pytest.mark.parametrize(
    ("name", "inputs", "attrs"),
    [
        ("Reshape", [f32(4, 3).T, i64(2, 6)], {}),
        ("Flatten", [f32(4, 3, 2).T], {}),
        ("Transpose", [f32(2, 3)], {"perm": [1, 0]}),
        ("Expand", [f32(1, 3), i64(2, 3)], {}),
        ("Squeeze", [f32(1, 3), i64(0)], {}),
        ("Unsqueeze", [f32(3), i64(0)], {}),
        ("Identity", [f32(3)], {}),
        ("Slice", [f32(5), i64(1), i64(4)], {}),
        ("Split", [f32(5), i64(2, 3)], {}),
    ],
)
def test_views_can_also_be_copied(name: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    from penstock.frontends.onnx.importer import load_onnx
    from tests.ops.harness import node_model

    count = 2 if name == "Split" else 1
    (node,) = load_onnx(node_model(name, inputs, attrs, outputs=count)).graph.nodes
    kernel = node.op.compile(node, [TensorType(x.dtype, x.shape) for x in inputs])
    results = kernel(*inputs)
    results = results if count > 1 else (results,)
    assert kernel.view
    assert kernel.into is not None
    for step in (1, 2):  # contiguous outputs, and strided ones
        outs = [np.zeros((*r.shape[:-1], r.shape[-1] * step), F32)[..., ::step] for r in results]
        kernel.into(*inputs, *outs)
        for out, want in zip(outs, results, strict=True):
            np.testing.assert_array_equal(out, want)


def test_shape_operations_of_first_versions_match_the_current_ones() -> None:
    assert find("Squeeze", version=11) is None
    assert find("Reshape", version=5) is find("Reshape")
