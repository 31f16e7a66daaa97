"""Gather, GatherElements, GatherND, Slice, Compress, NonZero, Unique, ReverseSequence."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import INT64, ShapeError, TensorType, constant_type
from penstock.frontends.onnx.importer import load_onnx
from penstock.ir.kernel import Kernel
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
from tests.ops.harness import check_node, node_model

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def scalar(value: int) -> np.ndarray:
    return np.array(value, np.int64)


# Gather


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize(
    "indices",
    [
        scalar(1),
        scalar(-1),
        i64(1),
        i64(-1),
        i64(0, 1),
        i64(1, 0, 1),
        i64(-2, -1),
        i64(-1, 0),
        np.array([[0, 1], [-1, -2]]),
        np.array([[0]], np.int32),
        np.empty((2, 0), np.int64),
    ],
)
def test_gather_matches_the_reference(axis: int, indices: np.ndarray) -> None:
    for x in (f32(2, 3, 4), f32(4, 3, 2).T, f32(2, 3, 8)[..., ::2]):
        check_both("Gather", [x, indices], {"axis": axis})


def test_gather_large_outputs_and_of_every_dtype_matches_the_definition() -> None:
    table = f32(100, 256)
    indices = np.array([[0, 99, -1], [-100, 5, 5]])
    check_both("Gather", [table, indices])
    check_both("Gather", [table, indices.astype(np.int32)])
    check_both("Gather", [f32(256, 100).T, np.tile(indices, (1, 8))])
    check_both("Gather", [np.array(["a", "b"], object), i64(1, 0, 1)])
    check_both("Gather", [np.array(["a", "b"], object), scalar(1)])
    for dtype in (ml_dtypes.bfloat16, np.bool_, np.float16, np.uint8):
        check_both("Gather", [f32(5).astype(dtype), i64(3, 0, 2)])


@pytest.mark.parametrize("indices", [scalar(3), scalar(-4), i64(0, 3), i64(-4), i64(2, 1, 3)])
def test_gather_refuses_what_is_out_of_range(indices: np.ndarray) -> None:
    x = f32(3, 2)
    fails("Gather", [x, indices], match="out of bounds", error=IndexError)
    for given in (TensorType(), float_type(None, None), float_type(3, 2)):
        with pytest.raises((ShapeError, IndexError), match="out of"):
            compiled("Gather", [x, indices], constants=(1,), types=[given, None])(x, indices)
    with pytest.raises(ShapeError, match="out of range"):
        infer("Gather", [float_type(3, 2), indices])


def test_gather_refuses_when_writing_large_outputs() -> None:
    x, indices = f32(4, 10_000), i64(0, 4)
    kernel = compiled("Gather", [x, indices])
    assert kernel.into is not None
    for bad in (i64(0, 4), i64(-5, 0)):
        with pytest.raises(ShapeError):
            kernel.into(x, bad, np.empty((2, 10_000), np.float32))


def compiled(
    name: str,
    inputs: list[Any],
    attrs: dict[str, Any] | None = None,
    *,
    constants: tuple[int, ...] = (),
    types: list[Any] | None = None,
) -> Kernel:
    """The kernel of a node; a type of ``None`` is that of the input."""
    (node,) = load_onnx(node_model(name, inputs, attrs)).graph.nodes
    for i in constants:
        value = node.inputs[i]
        assert value is not None
        value.set_constant(inputs[i])
    given = [TensorType(x.dtype, x.shape) for x in inputs]
    if types is not None:
        given = [b if a is None else a for a, b in zip(types, given, strict=True)]
    return node.op.compile(node, given)


@pytest.mark.parametrize("indices", [scalar(-1), i64(1, 2), i64(0, 2), i64(-3, -2, -1), i64(2)])
@pytest.mark.parametrize("shape", [(4, 4), (None, None), None])
@pytest.mark.parametrize("axis", [0, -1])
def test_gather_of_a_constant_run_is_a_view(indices: np.ndarray, shape: Any, axis: int) -> None:
    x = f32(4, 4)
    kernel = compiled(
        "Gather", [x, indices], {"axis": axis}, constants=(1,), types=[TensorType(F32, shape), None]
    )
    assert kernel.view
    result = kernel(x, indices)
    np.testing.assert_array_equal(result, np.take(x, indices, axis))
    assert np.shares_memory(result, x)


def test_gather_in_shape_arithmetic() -> None:
    shape = int_type("N", 3, None, 8)
    assert data_of("Gather", [shape, scalar(1)]) == (3,)
    assert data_of("Gather", [shape, scalar(-4)]) == ("N",)
    assert data_of("Gather", [shape, i64(0, 2)]) == ("N", None)
    assert infer("Gather", [shape, scalar(0)]) == [TensorType(INT64, (), ("N",))]
    assert data_of("Gather", [shape, int_type(1, None)]) == (3, None)
    with pytest.raises(ShapeError):
        infer("Gather", [shape, int_type(4)])


def test_gather_infers_its_types() -> None:
    x = float_type("N", 3, 4)
    assert shape_of("Gather", [x, int_type("M", 2)], {"axis": 1}) == ("N", 2, 4)
    assert shape_of("Gather", [x, TensorType(INT64, ())], {"axis": -1}) == ("N", 3)
    assert shape_of("Gather", [x, TensorType(INT64)]) is None
    assert shape_of("Gather", [TensorType(F32), i64(0)]) is None
    with pytest.raises(ShapeError):
        infer("Gather", [x, i64(0)], {"axis": 3})
    with pytest.raises(ShapeError):
        infer("Gather", [float_type(), i64(0)])


# GatherElements, GatherND


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements_matches_the_reference(axis: int) -> None:
    indices = np.array([[0, 1], [-1, 0], [2, -3]])
    for x, given in ((f32(3, 3), indices), (f32(3, 3).T, indices.astype(np.int32))):
        check_node("GatherElements", [x, given], {"axis": axis}, expected="ort", opset=13)


def test_gather_elements_of_edge_cases_matches_the_definition() -> None:
    check_node("GatherElements", [f32(4), i64(3, -4, 0)])
    check_node("GatherElements", [f32(2, 3), np.empty((0, 3), np.int64)])
    check_node("GatherElements", [np.array(["a", "b"], object), i64(1, 1)])
    fails("GatherElements", [f32(2, 3), np.array([[2, 0, 0]])], None, "of bounds", IndexError)
    fails("GatherElements", [f32(2, 3), np.array([[0, 0, 0, 0]])], error=IndexError)
    fails("GatherElements", [f32(2, 3), i64(0)], match="but indices rank")
    assert shape_of("GatherElements", [float_type(3, 3), TensorType(INT64, ("N", 2))]) == ("N", 2)
    with pytest.raises(ShapeError, match="rank"):
        infer("GatherElements", [float_type(3, 3), i64(1)])


@pytest.mark.parametrize(
    ("shape", "indices", "batch"),
    [
        ((2, 3, 4), [[0, 1, 2], [1, -1, -4]], 0),
        ((2, 3, 4), [[0, 1], [1, -1]], 0),
        ((2, 3, 4), [[1], [-2]], 0),
        ((2, 3, 4), [[[0], [1]], [[1], [0]]], 0),
        ((2, 3, 4), [[1], [-1]], 1),
        ((2, 3, 4), [[[1, 0], [2, 1]], [[0, 3], [0, -4]]], 1),
        ((2, 3, 4), [[[0], [1], [2]], [[3], [0], [1]]], 2),
        ((2, 3, 4), [0], 0),
    ],
)
def test_gather_nd_matches_the_reference(shape: tuple[int, ...], indices: Any, batch: int) -> None:
    x, picked = f32(*shape), np.array(indices)
    want = nd_by_loops(x, picked, batch)
    check_node("GatherND", [x, picked], {"batch_dims": batch}, expected=[want])
    check_node("GatherND", [x.T.copy().T, picked], {"batch_dims": batch}, expected=[want])
    assert shape_of("GatherND", [x_type(x), constant_type(picked)], {"batch_dims": batch}) == (
        want.shape
    )


def x_type(x: np.ndarray) -> TensorType:
    return TensorType(x.dtype, x.shape)


def nd_by_loops(x: np.ndarray, indices: np.ndarray, batch: int) -> np.ndarray:
    leading = indices.shape[:-1]
    rows = [x[(*at[:batch], *indices[at])] for at in np.ndindex(leading)]
    return np.array(rows).reshape(*leading, *x.shape[batch + indices.shape[-1] :])


def test_gather_nd_of_edge_cases_matches_the_definition() -> None:
    check_node("GatherND", [f32(2, 3), np.empty((0, 2), np.int64)], expected=[f32(0)])
    fails("GatherND", [f32(2, 3), np.array([[2, 0]])], match="out of bounds", error=IndexError)
    fails("GatherND", [f32(2, 3), np.array([[0, 0, 0]])], match="the last dim of indices is")
    fails("GatherND", [f32(2, 3), np.array([[0], [0], [0]])], {"batch_dims": 1}, "differ")
    fails("GatherND", [f32(2, 3), np.array([[0], [0]])], {"batch_dims": 2}, "batch_dims")
    indices = TensorType(INT64, ("N", "M", 2))
    assert shape_of("GatherND", [float_type(2, 3, 4), indices]) == ("N", "M", 4)
    assert shape_of("GatherND", [float_type(2, 3, 4), TensorType(INT64, (2, None))]) is None
    with pytest.raises(ShapeError):
        infer("GatherND", [float_type(2), TensorType(INT64, (1, 2))])


# Slice


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ((1,), (3,), None, None),
        ((0, 1), (-1, 1000), None, None),
        ((1, 0), (2, 3), (0, 1), (1, 2)),
        ((-1,), (INT_MIN,), (1,), (-1,)),
        ((INT_MAX,), (INT_MIN,), (0,), (-2,)),
        ((3, -1), (0, -5), (-1, 0), (-1, -2)),
        ((1,), (1,), (0,), None),
        ((-100,), (100,), (-2,), (3,)),
        ((20,), (30,), (0,), None),
        ((0,), (2**63 - 1,), (1,), None),
        ((), (), (), None),
    ],
)
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_slice_matches_the_reference(
    starts: Any, ends: Any, axes: Any, steps: Any, dtype: Any
) -> None:
    bounds = [
        None if v is None else np.array(v, np.int64).clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
        for v in (starts, ends, axes, steps)
    ]
    given = [None if v is None else v.astype(dtype) for v in bounds]
    while given and given[-1] is None:
        given.pop()
    known = [i + 1 for i, v in enumerate(given) if v is not None]
    for x in (f32(5, 4), f32(4, 5).T):
        check_both("Slice", [x, *given], constants=known)


def test_slice_starts_before_the_first_element_going_backward() -> None:
    inputs = [f32(5), i64(-9), i64(-99), i64(0), i64(-1)]
    check_both("Slice", inputs, constants=(1, 2, 3, 4), expected="ort", opset=13)
    kernel = compiled(
        "Slice", inputs, constants=(1, 2, 3, 4), types=[float_type(None), *[None] * 4]
    )
    np.testing.assert_array_equal(kernel(*inputs), f32(5)[:1])


def test_slice_with_bad_inputs_is_refused() -> None:
    fails("Slice", [f32(5), i64(0), i64(1), i64(1)])
    fails("Slice", [f32(5), i64(0), i64(1), i64(0), i64(0)], match="step")
    fails("Slice", [f32(5, 5), i64(0), i64(1, 2)], match="length")


def test_slice_infers_its_types() -> None:
    x = float_type("N", 8, None)
    cases: list[tuple[list[Any], Any]] = [
        ([i64(2), i64(6), i64(1)], ("N", 4, None)),
        ([i64(0), i64(INT_MAX), i64(0)], ("N", 8, None)),
        ([i64(0), int_type("N"), i64(0)], ("N", 8, None)),
        ([i64(1), i64(INT_MAX), i64(0)], (None, 8, None)),
        ([TensorType(INT64, (1,)), i64(3), i64(1)], ("N", None, None)),
        ([TensorType(INT64, (1,)), TensorType(INT64, (1,)), i64(2)], ("N", 8, None)),
        ([i64(0, 0), i64(1, 1)], (None, 1, None)),
        ([i64(0), i64(1), TensorType(INT64, (1,))], (None, None, None)),
        ([i64(-1), i64(INT_MIN), i64(1), i64(-3)], ("N", 3, None)),
        ([i64(0), i64(4), i64(1), TensorType(INT64, (1,))], ("N", None, None)),
    ]
    for bounds, wanted in cases:
        assert shape_of("Slice", [x, *bounds]) == wanted
    shape = int_type("N", 3, None, 8)
    assert data_of("Slice", [shape, i64(0), i64(2)]) == ("N", 3)
    assert data_of("Slice", [shape, i64(-1), i64(INT_MIN), i64(0), i64(-2)]) == (8, 3)
    assert data_of("Slice", [shape, i64(2), TensorType(INT64, (1,))]) is None
    assert shape_of("Slice", [TensorType(F32), i64(0), i64(1)]) is None


# Compress, NonZero, Unique, ReverseSequence


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_compress_matches_the_reference(axis: int | None) -> None:
    attrs = {} if axis is None else {"axis": axis}
    for condition in ([True, False, True], [False, True], [False], []):
        given = np.array(condition, np.bool_)
        want = np.compress(given, f32(3, 3), axis)
        check_node("Compress", [f32(3, 3), given], attrs, expected=[want])


def test_compress_of_edge_cases_matches_the_definition() -> None:
    fails("Compress", [f32(2), np.array([False, False, True])], error=IndexError)
    fails("Compress", [f32(2), np.array([True])], {"axis": 1}, "out of bounds", ValueError)
    assert shape_of("Compress", [float_type("N", 4)], {"axis": 0}) == (None, 4)
    assert shape_of("Compress", [float_type("N", 4)]) == (None,)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.int8, ml_dtypes.bfloat16])
def test_nonzero_matches_the_reference(dtype: Any) -> None:
    check_node("NonZero", [np.array([[1, 0], [1, 1]], dtype)])
    check_node("NonZero", [np.zeros((2, 3), dtype)])
    check_node("NonZero", [np.zeros((0, 3), dtype)])
    for dims in ((2000,), (7, 11, 31)):
        check_node("NonZero", [np.random.default_rng(0).integers(0, 2, dims).astype(dtype)])


def test_nonzero_of_edge_cases_matches_the_definition() -> None:
    for value, count in ((3.0, 1), (0.0, 0)):
        x = np.array(value, np.float32)
        check_node("NonZero", [x], expected=[np.empty((0, count), np.int64)])
    check_node("NonZero", [np.array([np.nan, 0, -0.0], np.float32)])
    check_node("NonZero", [np.array(["a", ""], object)])
    assert shape_of("NonZero", [float_type(None, 3)]) == (2, None)
    assert shape_of("NonZero", [TensorType(F32)]) == (None, None)


@pytest.mark.parametrize("ascending", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, object])
def test_unique_matches_the_reference(ascending: int, axis: int | None, dtype: Any) -> None:
    x = np.array([[2, 1, 1], [2, 1, 1], [0, 3, 3]])
    given = x.astype(str).astype(object) if dtype is object else x.astype(dtype)
    attrs = {"sorted": ascending} | ({} if axis is None else {"axis": axis})
    if dtype is not object and ascending:
        check_node("Unique", [given], attrs, outputs=4)
    results = run("Unique", [given], attrs, outputs=4)
    values, first, inverse, counts = results
    along = 0 if axis is None else axis
    source = given.reshape(-1) if axis is None else given
    np.testing.assert_array_equal(values.take(inverse, along), source)
    np.testing.assert_array_equal(source.take(first, along), values)
    np.testing.assert_array_equal(np.bincount(inverse), counts)
    assert (np.diff(first) > 0).all() or ascending
    (only,) = run("Unique", [given], attrs)
    np.testing.assert_array_equal(only, values)


def test_unique_of_edge_cases_matches_the_definition() -> None:
    check_node("Unique", [f32(0)], outputs=4)
    check_node("Unique", [np.float32(3).reshape(())], outputs=4)
    x = np.array([3, 1, 3], np.float32).astype(ml_dtypes.bfloat16)
    (y, counts) = run("Unique", [x], outputs=[True, False, False, True])[::3]
    assert y.tolist() == [1, 3]
    assert counts.tolist() == [1, 2]
    fails("Unique", [f32(2)], {"axis": 1})
    kinds = infer("Unique", [float_type("N", 3)], {"axis": 1})
    assert kinds[0] == float_type("N", None)
    assert kinds[2] == TensorType(INT64, (3,))


@pytest.mark.parametrize("ascending", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint32])
def test_unique_of_many_elements_equals_numpys(dtype: Any, ascending: int) -> None:
    x = np.random.default_rng(5).integers(0, 300, 3000).astype(dtype)
    if dtype in (np.float32, np.float16):
        x[::7], x[1::5], x[2::9], x[3::11], x[4::13] = np.nan, -0.0, np.inf, -np.inf, 0.0
    x[x == 200] = np.iinfo(dtype).max if x.dtype.kind in "iu" else -7
    results = run("Unique", [x.reshape(3, -1)], {"sorted": ascending}, outputs=4)
    wanted = np.unique(x, True, True, True)
    if not ascending:
        order = np.argsort(wanted[1])
        wanted = [
            wanted[0][order],
            wanted[1][order],
            np.argsort(order)[wanted[2]],
            wanted[3][order],
        ]
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_, np.float32])
@pytest.mark.parametrize("shape", [(200, 3), (50, 2, 2), (60, 17), (9, 1), (1, 4)])
def test_unique_slices_equal_numpys(shape: tuple[int, ...], dtype: Any) -> None:
    x = np.random.default_rng(4).integers(-1, 2, shape).astype(dtype)
    for axis in range(x.ndim):
        results = run("Unique", [x], {"axis": axis}, outputs=4)
        for found, wanted in zip(results, np.unique(x, True, True, True, axis=axis), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("time", "batch"), [(0, 1), (1, 0)])
def test_reverse_sequence_matches_the_reference(time: int, batch: int) -> None:
    attrs = {"time_axis": time, "batch_axis": batch}
    for lengths in (i64(1, 2, 3, 4), i64(4, 1, 0, 3)):
        check_node("ReverseSequence", [f32(4, 4), lengths], attrs)
        check_node("ReverseSequence", [f32(4, 4, 3), lengths], attrs)


def test_reverse_sequence_of_edge_cases_matches_the_definition() -> None:
    fails("ReverseSequence", [f32(2, 2), i64(1, 3)], match="sequence_lens must be in")
    fails("ReverseSequence", [f32(2, 2), i64(1, -1)], match="sequence_lens must be in")
    fails("ReverseSequence", [f32(2, 2), i64(1)], match="must have one entry per sample")
    fails("ReverseSequence", [f32(2, 2), i64(1, 1)], {"time_axis": 1}, "must be 0 and 1")
    assert find("ReverseSequence", version=10) is not None
