"""Reductions, and running sums and products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64, F16 = np.dtype("f4"), np.dtype("f8"), np.dtype("f2")
I64 = np.dtype(np.int64)
FLOATS = [F32, F64, F16, BF16]
INTEGERS = ["i4", "i8", "u4", "u8"]
TOLERANCE = {F32: 2e-6, F64: 1e-13, F16: 1e-3, BF16: 8e-3}

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceSum": lambda x, **k: np.sum(x, **k),
    "ReduceMean": lambda x, **k: np.mean(x, **k),
    "ReduceMax": lambda x, **k: np.max(x, initial=-math.inf, **k),
    "ReduceMin": lambda x, **k: np.min(x, initial=math.inf, **k),
    "ReduceProd": lambda x, **k: np.prod(x, **k),
    "ReduceL1": lambda x, **k: np.sum(np.abs(x), **k),
    "ReduceL2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    "ReduceLogSum": lambda x, **k: np.log(np.sum(x, **k)),
    "ReduceLogSumExp": lambda x, **k: np.log(np.sum(np.exp(x), **k)),
    "ReduceSumSquare": lambda x, **k: np.sum(x * x, **k),
}


def positive(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(0).uniform(0.5, 1.5, shape), dtype)


def exact(op: str, x: np.ndarray, axes: Any, keepdims: int = 1) -> np.ndarray:
    axes = None if axes is None else tuple(axes)
    result = REDUCTIONS[op](x.astype(np.float64), axis=axes, keepdims=bool(keepdims))
    return np.asarray(result).astype(x.dtype)


def axes_of(*axes: int) -> np.ndarray:
    return np.array(axes, np.int64)


LAYOUTS = [
    ((3, 4, 5), (2,)),
    ((3, 4, 5), (0,)),
    ((3, 4, 5), (1,)),
    ((3, 4, 5), (1, 2)),
    ((3, 4, 5), (-1, 0)),
    ((3, 4, 5), (0, 1, 2)),
    ((20, 3, 7), (2,)),
    ((2, 40, 50), (1,)),
    ((40, 50), (0,)),
    ((6, 1, 7), (1,)),
]


@pytest.mark.parametrize("op", list(REDUCTIONS))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("constant", [True, False])
def test_reductions_match_the_reference(op: str, dtype: Any, constant: bool) -> None:
    close = TOLERANCE[dtype]
    for shape, axes in LAYOUTS:
        x = positive(*shape, dtype=dtype)
        if op == "ReduceProd" and x.size > 500:
            continue
        for keepdims in (0, 1):
            check_node(
                op,
                [x, axes_of(*axes)],
                {"keepdims": keepdims},
                expected=[exact(op, x, axes, keepdims)],
                constants=[1] if constant else [],
                rtol=4 * close,
                atol=close,
            )


@pytest.mark.parametrize("op", list(REDUCTIONS))
def test_reduction_of_all_axes(op: str) -> None:
    for x in (positive(3, 4), positive(), positive(1)):
        for inputs in ([x], [x, None], [x, axes_of()]):
            for keepdims in (0, 1):
                wanted = exact(op, x, None, keepdims)
                check_node(op, inputs, {"keepdims": keepdims}, expected=[wanted])
        check_node(op, [x, axes_of()], expected=[exact(op, x, None)], constants=[1])


@pytest.mark.parametrize("op", list(REDUCTIONS))
def test_reduction_of_no_axes_applies_elementwise_part(op: str) -> None:
    x = positive(3, 4)
    for inputs in ([x], [x, axes_of()], [positive()]):
        wanted = exact(op, inputs[0], ())
        check_node(op, inputs, {"noop_with_empty_axes": 1}, expected=[wanted])


@pytest.mark.parametrize("op", [k for k in REDUCTIONS if k != "ReduceLogSumExp"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_reduction_of_integers_matches_the_reference(op: str, dtype: str) -> None:
    x = np.random.default_rng(0).integers(1, 5, (3, 4, 3)).astype(dtype)
    if dtype[0] == "i" and op != "ReduceLogSum":
        x = -x
    for axes in ((1,), (0, 2)):
        check_node(op, [x, axes_of(*axes)], expected=[exact(op, x, axes)])


def test_mean_of_integers_does_not_overflow() -> None:
    x = np.full((4,), 2**31 - 1, np.int32)
    check_node("ReduceMean", [x], expected=[x[:1]])
    check_node("ReduceMean", [np.array([-7, 0], np.int32)], expected=[np.array([-3], np.int32)])


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "?", "i8", F16, F32])
def test_reductions_to_extrema_match_numpy(op: str, dtype: Any) -> None:
    x = np.random.default_rng(0).integers(0, 2, (30, 4)).astype(dtype)
    function = np.max if op == "ReduceMax" else np.min
    for axis in (0, 1):
        check_node(op, [x, axes_of(axis)], expected=[function(x, axis, keepdims=True)])


@pytest.mark.parametrize("shape", [(20, 4), (2, 4)])
def test_extrema_keep_nan(shape: tuple[int, int]) -> None:
    x = positive(*shape)
    x[1, 2] = math.nan
    x[0, 1] = -math.inf
    for op, function in (("ReduceMax", np.max), ("ReduceMin", np.min)):
        check_node(op, [x, axes_of(1)], expected=[function(x, 1, keepdims=True)])


def test_reduction_of_empty_tensors_is_identity() -> None:
    x = np.zeros((2, 0, 4), np.float32)
    values = {
        "ReduceSum": 0,
        "ReduceProd": 1,
        "ReduceL1": 0,
        "ReduceL2": 0,
        "ReduceSumSquare": 0,
        "ReduceMax": -math.inf,
        "ReduceMin": math.inf,
        "ReduceLogSum": -math.inf,
        "ReduceLogSumExp": -math.inf,
        "ReduceMean": math.nan,
    }
    for op, value in values.items():
        wanted = np.full((2, 1, 4), value, np.float32)
        check_node(op, [x, axes_of(1)], expected=[wanted])
        kept = np.full((1, 0, 4), value, np.float32)
        check_node(op, [x, axes_of(0)], expected=[kept])
    low, high = np.iinfo(np.int8).min, np.iinfo(np.int8).max
    empty = np.zeros((0, 2), np.int8)
    check_node("ReduceMax", [empty, axes_of(0)], expected=[np.full((1, 2), low, np.int8)])
    check_node("ReduceMin", [empty, axes_of(0)], expected=[np.full((1, 2), high, np.int8)])
    truth = np.zeros((0, 2), bool)
    check_node("ReduceMax", [truth, axes_of(0)], expected=[np.zeros((1, 2), bool)])
    check_node("ReduceMin", [truth, axes_of(0)], expected=[np.ones((1, 2), bool)])
    integers = np.zeros((0, 2), np.int64)
    check_node("ReduceMean", [integers, axes_of(0)], expected=[np.zeros((1, 2), np.int64)])


def test_log_sum_exp_of_extreme_values() -> None:
    inf, nan = math.inf, math.nan
    x = np.array([[1000, 1000], [-1000, -1000], [inf, 0], [-inf, -inf], [nan, 0]], np.float32)
    wanted = np.array([1000 + math.log(2), -1000 + math.log(2), inf, -inf, nan], np.float32)
    attrs = {"keepdims": 0}
    check_node("ReduceLogSumExp", [x, axes_of(1)], attrs, expected=[wanted])


def test_reduction_of_strided_memory() -> None:
    x = positive(30, 40, 2)[..., 0].T
    for op in ("ReduceSum", "ReduceMax", "ReduceL2", "ReduceMean"):
        check_node(op, [x, axes_of(1)], expected=[exact(op, x, (1,))])


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceSumSquare", "ReduceMean"])
def test_long_sums_stay_accurate(op: str) -> None:
    x = positive(1_000_003)
    check_node(op, [x], expected=[exact(op, x, None)], rtol=1e-6)


def test_float16_sums_are_float32() -> None:
    x = np.ones((5000, 2), np.float16)
    check_node("ReduceSum", [x, axes_of(0)], expected=[np.full((1, 2), 5000, np.float16)])
    big = np.full((1, 100), 3e4, np.float16)
    check_node("ReduceMean", [big], expected=[np.full((1, 1), 3e4, np.float16)])
    check_node("ReduceL2", [np.full((1,), 300, np.float16)], expected=[np.full(1, 300, np.float16)])


# Running sums and products


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_cumulative_operations_match_the_definition(
    op: str, exclusive: int, reverse: int, dtype: Any
) -> None:
    dtype = np.dtype(dtype)
    x = positive(3, 4, 5, dtype=F64)
    x = (x * 4 if dtype.kind in "iu" else x).astype(dtype)
    accumulate = np.cumsum if op == "CumSum" else np.cumprod
    neutral = 0 if op == "CumSum" else 1
    for axis in (0, 1, -1):
        wide = x.astype(np.float64)
        wide = np.flip(wide, axis) if reverse else wide
        wanted = accumulate(wide, axis)
        if exclusive:
            wanted = np.roll(wanted, 1, axis)
            np.moveaxis(wanted, axis, 0)[0] = neutral
        wanted = (np.flip(wanted, axis) if reverse else wanted).astype(dtype)
        rtol = TOLERANCE.get(dtype, 0)
        for place in (np.array(axis), np.array([axis], np.int32)):
            attrs = {"exclusive": exclusive, "reverse": reverse}
            check_node(op, [x, place], attrs, expected=[wanted], rtol=rtol, atol=rtol)


def test_cumulative_of_empty_tensors_is_empty() -> None:
    x = np.zeros((0, 3), np.float32)
    for axis in (0, 1):
        for exclusive in (0, 1):
            check_node("CumSum", [x, np.array(axis)], {"exclusive": exclusive}, expected=[x])


def test_float16_running_sums_are_float32() -> None:
    x = np.ones(4000, np.float16)
    wanted = np.arange(1, 4001, dtype=np.float32).astype(np.float16)
    check_node("CumSum", [x, np.array(0)], expected=[wanted], rtol=0, atol=0)


# Inference


def infer(op: str, *types: Any, consts: Any = None, **attrs: Any) -> TensorType:
    found = find(op)
    assert found is not None
    kind = found.infer(types, attrs, consts or [None] * len(types))[0]
    assert isinstance(kind, TensorType)
    return kind


def known(*data: Any) -> TensorType:
    return TensorType(I64, (len(data),), data)


X = TensorType(F32, ("n", 3, None))


def test_reduction_infers_shapes() -> None:
    assert infer("ReduceSum", X, known(1)).shape == ("n", 1, None)
    assert infer("ReduceSum", X, known(-1, 0), keepdims=0).shape == (3,)
    assert infer("ReduceSum", X).shape == (1, 1, 1)
    assert infer("ReduceSum", X, keepdims=0).shape == ()
    assert infer("ReduceSum", X, noop_with_empty_axes=1) == X
    assert infer("ReduceSum", X, known(), noop_with_empty_axes=1, keepdims=0) == X
    assert infer("ReduceSum", TensorType(F32), keepdims=0).shape == ()
    assert infer("ReduceSum", TensorType(F32), known(0)).shape is None


def test_reduction_infers_shapes_of_unknown_axes() -> None:
    axes = TensorType(I64, (2,))
    assert infer("ReduceMax", X, axes).shape == (None, None, None)
    assert infer("ReduceMax", X, axes, keepdims=0).shape == (None,)
    assert infer("ReduceMax", X, TensorType(I64, (None,)), keepdims=0).shape is None
    ones = TensorType(F32, (1, "n"))
    assert infer("ReduceMax", ones, TensorType(I64)).shape == (1, None)


def test_reduction_infers_contents() -> None:
    assert infer("ReduceProd", known(2, "n", 1), keepdims=0).data is not None
    assert infer("ReduceProd", known("n", 1), keepdims=0) == TensorType(I64, (), ("n",))
    assert infer("ReduceProd", known(2, 3)) == TensorType(I64, (1,), (6,))
    assert infer("ReduceSum", known(2, 3), known(0), keepdims=0).data == (5,)
    assert infer("ReduceMax", known(2, 3), keepdims=0).data == (3,)
    assert infer("ReduceMin", known(2, "n"), keepdims=0).data == (None,)
    assert infer("ReduceProd", known(2**40, 2**40)).data == (None,)


@pytest.mark.parametrize("axes", [(3,), (-4,), (1, -2)])
def test_reduction_axes_out_of_range_are_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        infer("ReduceSum", X, known(*axes))
    for constants in ([1], []):
        with pytest.raises(ShapeError):
            check_node(
                "ReduceSum", [positive(2, 3, 4), axes_of(*axes)], expected=[], constants=constants
            )


def test_cumulative_axis_out_of_range_is_refused() -> None:
    with pytest.raises(ShapeError, match="out of range"):
        infer("CumSum", X, TensorType(I64, (), (3,)))
    with pytest.raises(ShapeError, match="out of range"):
        check_node("CumSum", [positive(2), np.array(1)], expected=[])
    with pytest.raises(ShapeError, match="axis must have exactly one element"):
        check_node("CumSum", [positive(2, 3), np.array([0, 1])], expected=[])
    assert infer("CumSum", X, TensorType(I64, ())) == X
