"""Which scales and terms FoldAffine takes into the weights of convolutions."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import penstock as ps
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import model_from_text
from tests.support.passes import count_operations as ops
from tests.support.passes import optimized_text as optimized

rng = np.random.default_rng(3)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_fold_affine_scales_and_terms_of_channels_are_folded_into_the_weights(op, group):
    text = f"""g (float[2, 4, 5, 5] x, float[4, {4 // group},
            1, 1] w) => (float[2, 4, 5, 5] y)
        <float[4] s = {{1, -2, 3, 0.5}}, float[4] b = {{1, 2, 3, 4}}, float[4] m = {{0, 1, 0, 2}},
         float[4] v = {{1, 2, 3, 4}}, float[1, 4, 1, 1] t = {{2, 3, 4, 5}}, float k = {{3}}>
        {{ a = {op} <group = {group}> (x, w) n = BatchNormalization(a, s, b, m, v)
           p = Add(n, t) q = Mul(p, k) y = Sub(t, q) }}"""
    model = model_from_text(text)
    w = rng.standard_normal((4, 4 // group, 1, 1)).astype(np.float32)
    x = rng.standard_normal((2, 4, 5, 5)).astype(np.float32)
    # Computed weights are left as they are.
    (expected,) = ps.compile(model, backends=["numpy"]).run({"x": x, "w": w}).values()
    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    graph = ps.load(model).graph
    optimize(graph)
    assert ops(graph) == {op: 1}
    (result,) = ps.compile(model, backends=["numpy"]).run({"x": x}).values()
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("third", ["", ", c", ", d"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
def test_fold_affine_factor_of_what_a_gemm_adds_is_not_that_of_a_term(op, beta, third):
    model = model_from_text(
        f"""g (float[2, 3] x) => (float[2, 2] y)
        <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}, float[2] c = {{7, 8}}, float d = {{9}}, float[2] k = {{2, 3}}>
        {{ a = Gemm <alpha = 2.0, beta = {beta}> (x, w{third}) y = {op}(a, k) }}"""
    )
    x = rng.standard_normal((2, 3)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(ps.compile(model).run({"x": x})["y"], wanted, rtol=1e-5)


def test_fold_affine_value_with_other_readers_stays():
    body = """<float[1, 2, 1, 1] w = {2, 3}, float k = {3}>
        { a = Conv(x, w) b = Mul(a, k) c = Neg(a) y = Add(b, c) }"""
    graph = optimized(f"g (float[1, 2, 3, 3] x) => (float[1, 1, 3, 3] y) {body}")
    assert ops(graph)["Mul"] == 1
    graph = optimized(
        """g (float[1, 2, 3, 3] x) => (float[1, 1, 3, 3] a, float[1, 1, 3, 3] y)
        <float[1, 2, 1, 1] w = {2, 3}, float k = {3}> { a = Conv(x, w) y = Mul(a, k) }"""
    )
    assert ops(graph) == {"Conv": 1, "Mul": 1}


@pytest.mark.parametrize(
    "const",
    ["float[3] k = {1, 2, 3}", "float[1, 1, 3, 1] k = {1, 2, 3}", "float[2, 1, 1, 1] k = {1, 2}"],
)
def test_fold_affine_factor_not_along_channels_stays(const):
    n = 2 if "[2, 1" in const else 1
    graph = optimized(
        f"""g (float[1, 2, 3, 3] x) => (float[{n}, 1, 3, 3] y)
        <float[1, 2, 1, 1] w = {{2, 3}}, {const}> {{ a = Conv(x, w) y = Mul(a, k) }}"""
    )
    assert ops(graph) == {"Conv": 1, "Mul": 1}


BATCH_NORMALIZATION = """float[4] s = {1, -2, 3, 0.5}, float[4] b = {1, 2, 3, 4},
    float[4] m = {0, 1, 0, 2}, float[4] v = {1, 2, 3, 4}"""


@pytest.mark.parametrize(
    "shape, body, left",
    [
        ("6, 3", "a = MatMul(x, w) y = BatchNormalization(a, s, b, m, v)", {"MatMul": 1, "Add": 1}),
        ("6, 3", "a = Gemm(x, w) y = BatchNormalization(a, s, b, m, v)", {"Gemm": 1}),
        ("6, 3", "a = Gemm(x, w, c) y = BatchNormalization(a, s, b, m, v)", {"Gemm": 1}),
        (
            "6, 3",
            "a = Gemm <transB = 1> (x, t, c) y = BatchNormalization(a, s, b, m, v)",
            {"Gemm": 1},
        ),
        (
            "2, 3, 3",
            "a = MatMul(x, w) f = Reshape(a, two) y = BatchNormalization(f, s, b, m, v)",
            {"MatMul": 1, "Add": 1, "Reshape": 1},
        ),
        (
            "2, 3, 3",
            "a = MatMul(x, w) f = Flatten <axis = 2> (a) y = BatchNormalization(f, s, b, m, v)",
            {"MatMul": 1, "Add": 1, "Flatten": 1},
        ),
        # A beta of its own, or a Reshape that moves channels.
        (
            "6, 3",
            "a = Gemm <beta = 2.0> (x, w, c) y = BatchNormalization(a, s, b, m, v)",
            {"Gemm": 1, "BatchNormalization": 1},
        ),
        (
            "2, 6, 3",
            "a = MatMul(x, u) f = Reshape(a, two) y = BatchNormalization(f, s, b, m, v)",
            {"MatMul": 1, "Reshape": 1, "BatchNormalization": 1},
        ),
    ],
)
def test_fold_affine_normalization_is_folded_into_products(shape, body, left):
    weights = rng.standard_normal((3, 4)).astype(np.float32)
    constants = {"w": weights, "t": weights.T.copy(), "u": weights[:, :2].copy()}
    text = f"""g (float[{shape}] x) => (float[6, 4] y)
        <float[4] c = {{1, 0, 2, 5}}, int64[2] two = {{6, 4}}, {BATCH_NORMALIZATION}> {{ {body} }}"""
    model = model_from_text(text)
    arrays = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    model.graph.initializer.extend(arrays)
    graph = ps.load(model).graph
    optimize(graph)
    assert ops(graph) == left
    x = rng.standard_normal([int(n) for n in shape.split(",")]).astype(np.float32)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(ps.compile(model).run({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
