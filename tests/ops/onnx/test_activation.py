"""Activation functions against their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from penstock.core.types import ShapeError, TensorType
from penstock.frontends.onnx.importer import load_onnx
from penstock.ops import find
from tests.ops.harness import check_node, node_model, run_ort

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64, F16 = np.dtype("f4"), np.dtype("f8"), np.dtype("f2")
LARGE = (3, 41, 700)  # several blocks, and part of one


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.asarray(3 * np.random.default_rng(seed).standard_normal(shape), dtype)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(
        x < 0,
        np.exp(np.minimum(x, 0)) / (1 + np.exp(np.minimum(x, 0))),
        1 / (1 + np.exp(-np.maximum(x, 0))),
    )


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(v) for v in np.ravel(x)]).reshape(np.shape(x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def selu(x: np.ndarray, alpha: float, gamma: float) -> np.ndarray:
    return gamma * np.where(x > 0, x, alpha * np.expm1(x))


def shrink(x: np.ndarray, bias: float, lambd: float) -> np.ndarray:
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0))


CASES: list[tuple[str, dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = [
    ("Relu", {}, lambda x: np.maximum(x, 0)),
    ("LeakyRelu", {}, lambda x: np.where(x < 0, 0.01 * x, x)),
    ("LeakyRelu", {"alpha": 0.3}, lambda x: np.where(x < 0, 0.3 * x, x)),
    ("LeakyRelu", {"alpha": 2.0}, lambda x: np.where(x < 0, 2.0 * x, x)),
    ("LeakyRelu", {"alpha": -0.5}, lambda x: np.where(x < 0, -0.5 * x, x)),
    ("LeakyRelu", {"alpha": 0.0}, lambda x: np.where(x < 0, 0, x)),
    ("ThresholdedRelu", {}, lambda x: np.where(x > 1, x, 0)),
    ("ThresholdedRelu", {"alpha": -0.5}, lambda x: np.where(x > -0.5, x, 0)),
    ("Elu", {}, lambda x: np.where(x < 0, np.expm1(x), x)),
    ("Elu", {"alpha": 2.5}, lambda x: np.where(x < 0, 2.5 * np.expm1(x), x)),
    ("Selu", {}, lambda x: selu(x, 1.6732631923, 1.0507010221)),
    ("Selu", {"alpha": 2.0, "gamma": 3.0}, lambda x: selu(x, 2.0, 3.0)),
    ("Celu", {}, lambda x: np.maximum(x, 0) + np.minimum(0, np.expm1(x))),
    ("Celu", {"alpha": 2.0}, lambda x: np.maximum(x, 0) + np.minimum(0, 2 * np.expm1(x / 2))),
    ("Celu", {"alpha": -2.0}, lambda x: np.maximum(x, 0) + np.minimum(0, -2 * np.expm1(x / -2))),
    ("Sigmoid", {}, sigmoid),
    ("HardSigmoid", {}, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    ("HardSigmoid", {"alpha": 0.5, "beta": 0.6}, lambda x: np.clip(0.5 * x + 0.6, 0, 1)),
    ("HardSwish", {}, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    ("Softplus", {}, softplus),
    ("Softsign", {}, lambda x: x / (1 + np.abs(x))),
    ("Mish", {}, lambda x: x * np.tanh(softplus(x))),
    ("Swish", {}, lambda x: x * sigmoid(x)),
    ("Swish", {"alpha": 0.5}, lambda x: x * sigmoid(0.5 * x)),
    ("Gelu", {}, gelu),
    ("Gelu", {"approximate": "tanh"}, gelu_tanh),
    ("Shrink", {}, lambda x: shrink(x, 0, 0.5)),
    ("Shrink", {"bias": 1.5, "lambd": 1.5}, lambda x: shrink(x, 1.5, 1.5)),
]
TOLERANCE = {F32: (1e-6, 1e-6), F64: (1e-12, 1e-13), F16: (1e-3, 1e-3), BF16: (8e-3, 8e-3)}


def case_id(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
@pytest.mark.parametrize(("op", "attrs", "exact"), CASES, ids=case_id)
def test_activation_equals_its_formula(
    op: str, attrs: dict[str, Any], exact: Any, dtype: Any
) -> None:
    rtol, atol = TOLERANCE[dtype]
    if attrs and dtype == F64:
        rtol = atol = 1e-6  # attributes are float32
    for x in (
        normal(3, 40, dtype=dtype),
        normal(dtype=dtype),
        np.zeros((0, 4), dtype),
        np.array([0.0, -0.0, 60, -60, 0.5, -0.5, 1, -1, 1000, -1000], dtype),
        normal(*LARGE, dtype=dtype)[:, ::2].swapaxes(0, 2),
    ):
        wanted = np.asarray(exact(x.astype(np.float64))).astype(dtype)
        default = {"Elu": 1e-6, "LeakyRelu": 1e-6, "HardSigmoid": 1e-6, "Selu": 1e-6}
        slack = max(atol, default.get(op, 0) if dtype == F64 else 0)
        check_node(op, [x], attrs, expected=[wanted], rtol=max(rtol, slack), atol=slack)


@pytest.mark.parametrize(("op", "attrs", "exact"), CASES, ids=case_id)
def test_activation_keeps_nan(op: str, attrs: dict[str, Any], exact: Any) -> None:
    x = np.array([math.nan, 1.0], np.float32)
    (got,) = check_node(op, [x], attrs, expected=[exact(x.astype(np.float64)).astype(np.float32)])
    # The definitions of these two compare first, and no comparison with NaN holds.
    assert np.isnan(got[0]) == (op not in ("ThresholdedRelu", "Shrink"))


def test_activation_of_infinities_is_the_limit() -> None:
    x = np.array([math.inf, -math.inf], np.float32)
    for op, wanted in (
        ("Relu", [math.inf, 0]),
        ("LeakyRelu", [math.inf, -math.inf]),
        ("Elu", [math.inf, -1]),
        ("Celu", [math.inf, -1]),
        ("Sigmoid", [1, 0]),
        ("HardSigmoid", [1, 0]),
        ("Softplus", [math.inf, 0]),
        ("ThresholdedRelu", [math.inf, 0]),
        ("Shrink", [math.inf, -math.inf]),
    ):
        check_node(op, [x], expected=[np.array(wanted, np.float32)])


@pytest.mark.parametrize("dtype", [F32, F64])
def test_sigmoid_keeps_relative_accuracy_far_below_zero(dtype: Any) -> None:
    x = np.linspace(-80, 40, 5001).astype(dtype)
    rtol = 5e-7 if dtype == F32 else 1e-14
    wanted = sigmoid(x.astype(np.float64)).astype(dtype)
    check_node("Sigmoid", [x], expected=[wanted], rtol=rtol, atol=0)


@pytest.mark.parametrize("op", ["Relu", "Shrink"])
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8"])
def test_activation_of_integers_matches_the_reference(op: str, dtype: str) -> None:
    x = np.arange(-6, 6).astype(dtype).reshape(3, 4)
    if op == "Relu":
        check_node(op, [x], expected=[np.maximum(x, 0)])
    else:
        attrs = {"bias": 1.0, "lambd": 2.5}
        check_node(op, [x], attrs, expected=[shrink(x, 1, 2.5).astype(dtype)])


def test_relu_of_a_dtype_unknown_when_compiled() -> None:
    for dtype in (F32, BF16, np.dtype("i4")):
        x = np.array([-1, 2], dtype)
        (node,) = load_onnx(node_model("Relu", [x])).graph.nodes
        result = node.op.compile(node, [TensorType()])(x)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, np.array([0, 2], dtype))


# PRelu


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16, "i4", "i8", "u4"])
@pytest.mark.parametrize("slope", [(), (1,), (4,), (3, 1), (2, 3, 4)])
def test_prelu_matches_the_reference(dtype: Any, slope: tuple[int, ...]) -> None:
    dtype = np.dtype(dtype)
    x, s = normal(2, 3, 4), normal(*slope, seed=1)
    if dtype.kind == "u":
        x, s = np.abs(x), np.abs(s)
    x, s = x.astype(dtype), s.astype(dtype)
    if dtype.kind in "iu":
        wanted = np.where(x < 0, x * s, x)
    else:
        wanted = np.where(x < 0, x.astype(F64) * s.astype(F64), x.astype(F64)).astype(dtype)
    rtol, atol = TOLERANCE.get(dtype, (0, 0))
    check_node("PRelu", [x, s], expected=[wanted], rtol=rtol, atol=atol)


@pytest.mark.parametrize("options", [{}, {"backends": ["numpy"]}])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_prelu_with_slopes_that_are_not_finite_leaves_what_is_not_negative(dtype, options) -> None:
    x = np.array([0.5, 0.5, -0.5, 0.0, -0.0, np.inf, np.nan, -1], dtype)
    slope = np.array([np.inf, np.nan, np.inf, np.inf, np.inf, np.nan, 1, np.nan], dtype)
    model = node_model("PRelu", [x, slope], opset=16)
    (wanted,) = run_ort(model, [x, slope])
    got = ps.compile(model, **options).run({"x0": x, "x1": slope})["y0"]
    np.testing.assert_array_equal(got, wanted)


def test_prelu_over_many_blocks() -> None:
    x, s = normal(2, 64, 30, 31), normal(64, 1, 1, seed=1)
    check_node("PRelu", [x, s], expected=[np.where(x < 0, x * s, x)])


# Two inputs


def test_swiglu_matches_the_reference() -> None:
    for shape in ((3, 5), (), LARGE):
        a, b = normal(*shape), normal(*shape, seed=1)
        for alpha in (1.0, 1.7):
            wide = a.astype(F64)
            wanted = np.asarray(wide * sigmoid(alpha * wide) * b).astype(F32)
            check_node("SwiGLU", [a, b], {"alpha": alpha}, expected=[wanted])


# What cannot be


def infer(op: str, *types: Any, domain: str = "") -> Any:
    found = find(op, domain)
    assert found is not None
    return found.infer(types, {}, [None] * len(types))[0]


def test_activation_infers_the_input_type() -> None:
    x = TensorType(F32, ("n", None, 4))
    assert infer("Gelu", x) == x
    assert infer("PRelu", x, TensorType(F32, (4,))) == x
    assert infer("SwiGLU", x, TensorType(F32, (2, 3, None))) == TensorType(F32, ("n", 3, 4))
    assert infer("SwiGLU", TensorType(F32), x) == x


@pytest.mark.parametrize(("x", "slope"), [((2, 3), (4,)), ((3,), (2, 3)), ((1, 3), (2, 3))])
def test_prelu_slope_that_does_not_broadcast_raises(
    x: tuple[int, ...], slope: tuple[int, ...]
) -> None:
    with pytest.raises(ShapeError, match="broadcast"):
        infer("PRelu", TensorType(F32, x), TensorType(F32, slope))
    with pytest.raises(ShapeError, match="broadcast"):
        check_node("PRelu", [normal(*x), normal(*slope)], expected=[])


def test_swiglu_of_two_shapes_raises() -> None:
    with pytest.raises(ShapeError, match="input 1 has shape"):
        infer("SwiGLU", TensorType(F32, (2, 3)), TensorType(F32, (3,)))


def test_gelu_of_unknown_approximation_raises() -> None:
    with pytest.raises(InvalidModel, match="approximate"):
        check_node("Gelu", [normal(3)], {"approximate": "cubic"}, expected=[])


def test_prelu_slope_that_would_broadcast_in_the_run_raises() -> None:
    """Where shapes are known in the run only."""
    x, other = normal(3), normal(2, 3)
    (node,) = load_onnx(node_model("PRelu", [x, other], opset=16)).graph.nodes
    kernel = node.op.compile(node, [TensorType(), TensorType()])
    kernel(other, x)
    with pytest.raises(ShapeError, match="does not broadcast"):
        kernel(x, other)
