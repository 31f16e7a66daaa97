"""Arithmetic against ``onnx.reference``, or exact values where that errs."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType, constant_type
from penstock.ops import find
from tests.ops.harness import check_node, node_model

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
I64 = np.dtype(np.int64)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, math.inf, -math.inf, math.nan, 1e30, 100.0, -100.0]
LARGE = (3, 41, 700)  # several blocks, and part of one


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def integers(*shape: int, dtype: Any = np.int64, low: int = -9, high: int = 9) -> np.ndarray:
    low = max(low, 0) if np.dtype(dtype).kind == "u" else low
    return np.random.default_rng(1).integers(low, high, shape).astype(dtype)


def tolerance(dtype: Any) -> dict[str, float]:
    rtol = {F16: 2e-3, BF16: 1.6e-2, F64: 1e-12}.get(np.dtype(dtype), 1e-6)
    return {"rtol": rtol, "atol": rtol}


# Two inputs

SHAPES = [
    ((), ()),
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((3, 1), (1, 4)),
    ((2, 3, 4), ()),
    ((1,), (2, 3)),
    ((0, 3), (1, 3)),
]


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_binary_operation_broadcasts(op: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check_node(op, [normal(*a), normal(*b, seed=1)])


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", F16, BF16, F64])
def test_binary_keeps_the_dtype(op: str, dtype: Any) -> None:
    dtype = np.dtype(dtype)
    make = integers if dtype.kind in "iu" else normal
    a, b = make(4, 5, dtype=dtype), make(4, 5, dtype=dtype)[::-1].copy()
    b[b == 0] = 3
    expected: Any = "reference"
    if op == "Div" and dtype.kind in "iu":
        expected = [np.trunc(a.astype(np.float64) / b).astype(dtype)]
    check_node(op, [a, b], expected=expected, **tolerance(dtype))


@pytest.mark.parametrize("op", ["Add", "Div"])
def test_large_bfloat16_is_computed_in_blocks(op: str) -> None:
    a, b = normal(*LARGE, dtype=BF16), normal(700, dtype=BF16, seed=2)
    exact = np.add if op == "Add" else np.divide
    wanted = exact(a.astype(np.float32), b.astype(np.float32)).astype(BF16)
    check_node(op, [a, b], expected=[wanted], rtol=0, atol=0)


def test_integer_division_truncates_and_survives_zero() -> None:
    low = np.iinfo(np.int32).min
    a = np.array([7, -7, 7, -7, 5, -5, 0, low, low], np.int32)
    b = np.array([2, 2, -2, -2, 0, 0, 0, 1, -1], np.int32)
    wanted = np.array([3, -3, -3, 3, 0, 0, 0, low, low], np.int32)
    check_node("Div", [a, b], expected=[wanted])
    u = np.array([7, 5, 255], np.uint8)
    v, quotient = np.array([2, 0, 255], np.uint8), np.array([3, 0, 1], np.uint8)
    check_node("Div", [u, v], expected=[quotient])


def test_division_without_known_dtype() -> None:
    for dtype, dividends, wanted in (
        ("i4", [-7, 7], [-3, 3]),
        ("u2", [7, 8], [3, 4]),
        ("f4", [-7, 7], [-3.5, 3.5]),
    ):
        a, b, want = (np.array(v, dtype) for v in (dividends, [2, 2], wanted))
        (node,) = _load("Div", [a, b])
        kernel = node.op.compile(node, [TensorType(), TensorType()])
        result = kernel(a, b)
        assert result.dtype == want.dtype
        np.testing.assert_array_equal(result, want)


def _load(op: str, inputs: list[Any], **attrs: Any) -> list[Any]:
    from penstock.frontends.onnx.importer import load_onnx

    return load_onnx(node_model(op, inputs, attrs)).graph.nodes


@pytest.mark.parametrize("fmod", [0, 1])
@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u1", "u8"])
def test_mod_of_integers_matches_the_reference(fmod: int, dtype: str) -> None:
    a, b = integers(6, 5, dtype=dtype), integers(6, 5, dtype=dtype)[::-1].copy()
    b[b == 0] = 4
    wanted = (np.fmod if fmod else np.mod)(a, b)
    check_node("Mod", [a, b], {"fmod": fmod}, expected=[wanted])
    zero = np.zeros(5, dtype)
    check_node("Mod", [a, zero], {"fmod": fmod}, expected=[np.zeros_like(a)])


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
def test_mod_of_floats_has_the_special_cases_of_the_definition(dtype: Any) -> None:
    inf, nan = math.inf, math.nan
    #        zero: sign of y; inf: nan; by zero: nan; by inf: x or y; nan
    a = np.array([0.0, -0.0, 0.0, inf, 1.0, 2.0, -2.0, 2.0, -2.0, nan, 5.5, -5.5], dtype)
    b = np.array([3.0, 3.0, -3.0, 1.0, 0.0, inf, inf, -inf, -inf, 1.0, 2.0, 2.0], dtype)
    floor = np.array([0.0, 0.0, -0.0, nan, nan, 2.0, inf, -inf, -2.0, nan, 1.5, 0.5], dtype)
    trunc = np.array([0.0, -0.0, 0.0, nan, nan, 2.0, -2.0, 2.0, -2.0, nan, 1.5, -1.5], dtype)
    for fmod, wanted in ((0, floor), (1, trunc)):
        (got,) = check_node("Mod", [a, b], {"fmod": fmod}, expected=[wanted], rtol=0, atol=0)
        if not fmod:
            np.testing.assert_array_equal(np.signbit(got[:3]), [False, False, True])


# Pow


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 1.7])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
def test_pow_with_constant_exponent(exponent: float, dtype: Any) -> None:
    x = np.abs(normal(3, 70, dtype=dtype)) + np.array(0.25, dtype)
    wanted = np.power(x.astype(np.float64), exponent).astype(dtype)
    close = {"rtol": 4 * tolerance(dtype)["rtol"], "atol": 0.0}
    for shape in ((), (1,), (1, 1)):
        y = np.full(shape, exponent, dtype)
        check_node("Pow", [x, y], expected=[wanted], constants=[1], **close)
    check_node("Pow", [x, np.full((70,), exponent, dtype)], expected=[wanted], **close)


def test_pow_of_a_scalar_by_a_constant_of_higher_rank() -> None:
    check_node("Pow", [normal(), np.full((1, 1), 2, np.float32)], constants=[1])


def test_pow_of_many_blocks() -> None:
    x = normal(*LARGE)
    check_node("Pow", [x, np.array(3.0, np.float32)], expected=[x * x * x], constants=[1])


@pytest.mark.parametrize("base", ["f4", "f8", "f2", BF16, "i4", "i8"])
@pytest.mark.parametrize("exponent", ["f4", "f8", "f2", BF16, "i4", "i8", "u1", "u8", "i1"])
@pytest.mark.parametrize("constants", [[], [1]])
def test_pow_of_mixed_of_every_dtype_matches_the_definition(
    base: Any, exponent: Any, constants: list[int]
) -> None:
    x = np.array([1, 2, 3, 2, 3], base)
    y = np.array([0, 1, 2, 3, 4], exponent)
    wanted = np.array([1, 2, 9, 8, 81], base)
    check_node("Pow", [x, y], expected=[wanted], constants=constants)


def test_pow_of_integers_matches_the_reference() -> None:
    x = np.array([2, -2, 3, 0, 1, -1, -1, 2, 0, 7], np.int64)
    y = np.array([10, 3, 0, 0, -5, -5, -4, -1, -1, 22], np.int64)
    wanted = np.array([1024, -8, 1, 1, 1, -1, 1, 0, 0, 7**22], np.int64)
    check_node("Pow", [x, y], expected=[wanted])
    half = np.array([2.5, 0.5], np.float32)
    check_node("Pow", [np.array([4, 9], np.int32), half], expected=[np.array([32, 3], np.int32)])


# One input

UNARY = {
    "Abs": np.abs,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Reciprocal": lambda x: 1 / x,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.round,
    "Sign": np.sign,
    "Sin": np.sin,
    "Cos": np.cos,
    "Tan": np.tan,
    "Asin": np.arcsin,
    "Acos": np.arccos,
    "Atan": np.arctan,
    "Sinh": np.sinh,
    "Cosh": np.cosh,
    "Tanh": np.tanh,
    "Asinh": np.arcsinh,
    "Acosh": np.arccosh,
    "Atanh": np.arctanh,
}


@pytest.mark.parametrize("op", list(UNARY))
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
def test_unary_equals_numpy(op: str, dtype: Any) -> None:
    for x in (np.array(SPECIAL[:-3], dtype), normal(dtype=dtype), np.zeros((2, 0), dtype)):
        wanted = np.asarray(UNARY[op](x.astype(np.float64))).astype(dtype)
        check_node(op, [x], expected=[wanted], **tolerance(dtype))


def test_large_bfloat16_functions_are_computed_in_blocks() -> None:
    x = normal(*LARGE, dtype=BF16)
    check_node("Exp", [x], expected=[np.exp(x)], rtol=0, atol=0)


@pytest.mark.parametrize("op", ["Abs", "Sign"])
@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u1", "u8"])
def test_unary_of_integers_matches_the_reference(op: str, dtype: str) -> None:
    check_node(op, [integers(3, 5, dtype=dtype)])


def test_round_takes_halves_to_even() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.9], np.float32)
    check_node("Round", [x], expected=[np.array([0, 2, 2, -0.0, -2, 1], np.float32)])


# Erf


@pytest.mark.parametrize(("dtype", "rtol"), [(F32, 3e-7), (F64, 2e-15), (F16, 1e-3), (BF16, 8e-3)])
def test_erf_equals_math_erf(dtype: Any, rtol: float) -> None:
    grid = np.concatenate([np.linspace(-7, 7, 40001), np.geomspace(1e-30, 7, 2000)]).astype(dtype)
    exact = np.array([math.erf(float(x)) for x in grid])
    small = np.finfo(np.float16).smallest_subnormal if dtype == F16 else 0
    check_node("Erf", [grid], expected=[exact.astype(dtype)], rtol=rtol, atol=float(small))


def test_erf_of_large_arguments_saturates() -> None:
    x = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 5, -5], np.float32)
    wanted = np.array([0, -0.0, 1, -1, math.nan, 1, -1, 1, -1], np.float32)
    (got,) = check_node("Erf", [x], expected=[wanted], rtol=0, atol=0)
    assert np.signbit(got[1])
    check_node("Erf", [np.array(0.5, np.float32)])
    check_node("Erf", [np.zeros((0, 3), np.float32)])


def test_erf_of_transposed_memory_and_many_blocks() -> None:
    x = normal(300, 200).T
    wanted = np.array([math.erf(float(v)) for v in x.reshape(-1)], np.float32).reshape(x.shape)
    check_node("Erf", [x], expected=[wanted])


# Any number of inputs


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
@pytest.mark.parametrize(
    "shapes",
    [[(3, 4)], [(3, 4), (3, 4)], [(3, 4), (4,), (3, 1)], [(1,), (2, 1), (3, 1, 1)], [(), ()]],
)
def test_sum_mean_and_extrema_take_any_number_of_inputs(
    op: str, dtype: Any, shapes: list[tuple[int, ...]]
) -> None:
    values = [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    wide = np.stack(np.broadcast_arrays(*[v.astype(np.float64) for v in values]))
    function = {"Sum": np.sum, "Mean": np.mean, "Max": np.max, "Min": np.min}[op]
    wanted = np.asarray(function(wide, axis=0)).astype(dtype)
    check_node(op, values, expected=[wanted], **tolerance(dtype))


def test_sum_of_more_inputs_than_numpy_broadcasts_at_once() -> None:
    values = [normal(2, 3, seed=i) for i in range(100)]
    check_node("Sum", values)
    check_node("Max", values)


def test_mean_of_float16_does_not_overflow() -> None:
    x = np.full(3, 60000, np.float16)
    check_node("Mean", [x, x, x], expected=[x])


@pytest.mark.parametrize("op", ["Max", "Min"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i4", "i8", "u8", F32, F16, BF16])
def test_extrema_equal_numpy(op: str, dtype: Any) -> None:
    function = np.maximum if op == "Max" else np.minimum
    make = integers if np.dtype(dtype).kind in "iu" else normal
    a, b = make(4, 5, dtype=dtype), np.array([2], dtype)
    for pair in ([a, b], [b, a], [a, b.reshape(())]):
        check_node(op, pair, expected=[function(pair[0], pair[1])])


@pytest.mark.parametrize("op", ["Max", "Min"])
def test_extrema_keep_nan(op: str) -> None:
    x = np.array([1, math.nan, -1], np.float32)
    wanted = np.array([1, math.nan, 0] if op == "Max" else [0, math.nan, -1], np.float32)
    check_node(op, [x, np.zeros((), np.float32)], expected=[wanted])
    nan = np.full((), math.nan, np.float32)
    check_node(op, [x, nan], expected=[np.full(3, math.nan, np.float32)])


# Clip


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16, "i1", "i4", "i8", "u1", "u8"])
@pytest.mark.parametrize("given", ["both", "low", "high", "none", "omitted"])
@pytest.mark.parametrize("constant", [True, False])
def test_clip_matches_the_reference(dtype: Any, given: str, constant: bool) -> None:
    dtype = np.dtype(dtype)
    x = (integers if dtype.kind in "iu" else normal)(4, 50, dtype=dtype)
    low = np.array(1 if dtype.kind == "u" else -1, dtype)
    high = np.array(3 if dtype.kind == "u" else 1, dtype)
    inputs: list[Any] = {
        "both": [x, low, high],
        "low": [x, low],
        "high": [x, None, high],
        "none": [x],
        "omitted": [x, None, None],
    }[given]
    wanted = x
    if len(inputs) > 1 and inputs[1] is not None:
        wanted = np.maximum(wanted, low)
    if len(inputs) > 2 and inputs[2] is not None:
        wanted = np.minimum(wanted, high)
    constants = [i for i in (1, 2) if i < len(inputs) and inputs[i] is not None and constant]
    check_node("Clip", inputs, expected=[wanted], constants=constants)


def test_clip_at_the_ends() -> None:
    x = np.array([-math.inf, -1, math.nan, 2, math.inf], np.float32)
    low, high = np.array(3, np.float32), np.array(1, np.float32)
    above = np.array([1, 1, math.nan, 1, 1], np.float32)
    check_node("Clip", [x, low, high], expected=[above])  # the upper bound wins
    check_node("Clip", [x], expected=[x])
    check_node("Clip", [x, None, high], expected=[np.minimum(x, high)])
    one = [np.array([v], np.float32) for v in (0.0, 1.0)]
    check_node("Clip", [np.array(3, np.float32), *one], expected=[np.array(1, np.float32)])


# Inference


def infer(op: str, *types: Any, attrs: Any = None, **more: Any) -> Any:
    found = find(op)
    assert found is not None
    consts = more.get("consts", [None] * len(types))
    return found.infer(types, attrs or {}, consts)[0]


def known(*data: Any) -> TensorType:
    return TensorType(I64, (len(data),), data)


@pytest.mark.parametrize(
    ("op", "a", "b", "wanted"),
    [
        ("Add", (2, "n", "n", None), (3, 0, 1, 0), (5, "n", None, None)),
        ("Add", (0, "n"), ("n", 0), ("n", "n")),
        ("Sub", (2, "n", "n", "n"), (3, 0, "n", "m"), (-1, "n", 0, None)),
        ("Mul", (2, "n", "n", "n"), (3, 1, 0, 2), (6, "n", 0, None)),
        ("Mul", (1,), ("n",), ("n",)),
        ("Div", (7, -7, 7, "n", 4), (2, 2, 0, 1, "n"), (3, -3, None, "n", None)),
        ("Mod", (7, -7, 5), (4, 4, 0), (3, 1, None)),
        ("Pow", (2, "n", 3), (3, 1, "n"), (8, "n", None)),
        ("Max", (2, "n", "n", "n"), (3, 0, 1, "n"), (3, "n", None, "n")),
        ("Min", (2, "n", "n", "n"), (3, 0, 1, "n"), (2, 0, None, "n")),
    ],
)
def test_contents_of_integers_are_inferred(op: str, a: Any, b: Any, wanted: Any) -> None:
    kind = infer(op, known(*a), known(*b))
    assert kind.data == wanted
    assert kind.shape == (len(a),)


def test_contents_of_one_element_broadcast() -> None:
    scalar = TensorType(I64, (), (2,))
    assert infer("Mul", known(3, "n", 5), scalar).data == (6, None, 10)
    assert infer("Mul", known(), scalar).data == ()
    assert infer("Add", scalar, known(1, 2)).data == (3, 4)


def test_contents_of_floats_and_overflow_are_dropped() -> None:
    x = np.array([1.5], np.float32)
    kind = infer("Add", constant_type(x), constant_type(x), consts=[x, x])
    assert kind == TensorType(F32, (1,))
    big = TensorType(np.dtype(np.int32), (1,), (2**30,))
    assert infer("Mul", big, big).data == (None,)


def test_contents_of_one_input() -> None:
    x = known(-2, 3, "n")
    assert infer("Neg", x).data == (2, -3, None)
    assert infer("Abs", x).data == (2, 3, None)
    assert infer("Sign", x).data == (-1, 1, None)


def test_arithmetic_with_symbolic_dims_infers_shapes() -> None:
    a, b = TensorType(F32, ("n", 1, None)), TensorType(F32, (4, 5))
    assert infer("Add", a, b) == TensorType(F32, ("n", 4, 5))
    assert infer("Sum", a, b, TensorType()) == TensorType(F32, None)
    assert infer("Pow", a, TensorType(I64, ())) == a
    assert infer("Erf", a) == a


@pytest.mark.parametrize("op", ["Add", "Pow", "Max", "Mod", "Sum"])
def test_shapes_that_do_not_broadcast_raise(op: str) -> None:
    with pytest.raises(ShapeError, match="do not broadcast"):
        infer(op, TensorType(F32, (2, 3)), TensorType(F32, (2, 4)))


@pytest.mark.parametrize("op", ["Add", "Max", "Clip", "Div"])
def test_dtypes_that_differ_raise(op: str) -> None:
    with pytest.raises(ShapeError, match="different dtypes"):
        infer(op, TensorType(F32, ()), TensorType(I64, ()))


def test_clip_bounds_must_be_scalars() -> None:
    with pytest.raises(ShapeError, match="scalars"):
        infer("Clip", TensorType(F32, (2, 3)), TensorType(F32, (3,)))
