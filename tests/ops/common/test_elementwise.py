"""What kernels do without knowing dtypes and shapes when they are compiled, and what they ask for."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import TensorType, type_of
from penstock.frontends.onnx.importer import load_onnx
from penstock.ir.kernel import Kernel
from penstock.ops import find
from penstock.ops.common import elementwise
from tests.ops.harness import node_model

X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
BIAS = X[0, 0]
HALF = np.array(0.5, np.float32)
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    *[(op, [X, BIAS], {}) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")],
    *[(op, [X, HALF, X], {}) for op in ("Max", "Sum", "Mean")],
    *[(op, [X], {}) for op in ("Neg", "Exp", "Erf", "Tanh", "Relu", "Sigmoid", "Gelu", "Mish")],
    *[(op, [X], {}) for op in ("Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ReduceMax")],
    ("Mod", [X, BIAS], {"fmod": 1}),
    ("Pow", [np.abs(X), HALF], {}),
    ("Pow", [np.abs(X), np.array(2)], {}),
    ("Clip", [X, -HALF, HALF], {}),
    ("Clip", [X, None, HALF], {}),
    ("Where", [X > 0, X, HALF], {}),
    ("Equal", [X, BIAS], {}),
    ("IsInf", [X], {"detect_negative": 0}),
    ("PRelu", [X, BIAS], {}),
    ("SwiGLU", [X, X], {}),
    ("Shrink", [X], {}),
    ("ReduceMean", [X, np.array([1])], {}),
    ("ReduceLogSumExp", [X, np.array([-1])], {"keepdims": 0}),
    ("CumSum", [X, np.array(1)], {"reverse": 1}),
]


def compiled(op: str, inputs: list[Any], attrs: dict[str, Any], types: list[Any]) -> Kernel:
    (node,) = load_onnx(node_model(op, inputs, attrs)).graph.nodes
    return node.op.compile(node, types)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
@pytest.mark.parametrize("dtype", ["f4", "f8", ml_dtypes.bfloat16])
def test_types_unknown_when_compiled(
    op: str, inputs: list[Any], attrs: dict[str, Any], dtype: Any
) -> None:
    inputs = [x.astype(dtype) if x is not None and x.dtype == np.float32 else x for x in inputs]
    exact = [None if x is None else type_of(x) for x in inputs]
    wanted = np.asarray(compiled(op, inputs, attrs, exact)(*inputs))
    nothing = [None if x is None else TensorType() for x in inputs]
    only_dtypes = [None if x is None else TensorType(x.dtype) for x in inputs]
    for types in (nothing, only_dtypes):
        kernel = compiled(op, inputs, attrs, types)
        result = np.asarray(kernel(*inputs))
        assert result.dtype == wanted.dtype
        wide = (a.astype(np.float64) for a in (result, wanted))
        np.testing.assert_allclose(*wide, rtol=1e-5 if dtype == "f4" else 1e-2)
        assert kernel.into is not None
        assert not kernel.workspace
        out = np.empty_like(wanted)
        kernel.into(*inputs, out)
        np.testing.assert_array_equal(out.astype(np.float64), result.astype(np.float64))


@pytest.mark.parametrize(("op", "arrays"), [("Gelu", 3), ("Mish", 2), ("Elu", 1), ("Sigmoid", 0)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_formula_workspace_is_bounded_by_blocks(op: str, arrays: int, dtype: str) -> None:
    itemsize = 8 if dtype == "f8" else 4
    for shape in ((1024, 1024, 1024), (3, 5), (0, 4)):
        kind = TensorType(np.dtype(dtype), shape)
        (node,) = load_onnx(node_model(op, [np.zeros(3, dtype)])).graph.nodes
        elements = min(math.prod(shape), elementwise.BLOCK)
        assert node.op.compile(node, [kind]).workspace == arrays * elements * itemsize


def test_one_ufunc_is_called_directly() -> None:
    kind = TensorType(np.dtype("f4"), (16,))
    for op, function in (("Add", np.add), ("Tanh", np.tanh), ("Equal", np.equal)):
        found = find(op)
        assert found is not None
        (node,) = load_onnx(node_model(op, [np.zeros(16, "f4")] * function.nin)).graph.nodes
        kernel = found.compile(node, [kind] * function.nin)
        out = np.empty(16, "f4")
        assert kernel.bind([out] * function.nin, [out], None)[0] is function
