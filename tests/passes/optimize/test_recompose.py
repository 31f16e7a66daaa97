"""Which groups of nodes Recompose replaces by one operation."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import penstock as ps
from tests.support.onnx_text import model_from_text
from tests.support.passes import count_operations as ops
from tests.support.passes import optimized_text as optimized

rng = np.random.default_rng(3)


EXPANDED = {
    "gelu": (
        """<float half = {0.5}, float one = {1}, float root = {1.4142135}>
        { a = Div(x, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half) }""",
        {"Gelu": 1},
    ),
    "gelu, the half first": (
        """<float half = {0.5}, float one = {1}, float root = {0.70710677}>
        { a = Mul(x, root) b = Erf(a) c = Add(one, b) d = Mul(half, c) y = Mul(x, d) }""",
        {"Gelu": 1},
    ),
    "gelu with tanh": (
        """<float half = {0.5}, float one = {1}, float three = {3}, float k = {0.044715},
            float r = {0.7978846}>
        { a = Pow(x, three) b = Mul(a, k) c = Add(x, b) d = Mul(c, r) e = Tanh(d) f = Add(e, one)
          g = Mul(x, half) y = Mul(g, f) }""",
        {"Gelu": 1},
    ),
    "gelu with tanh, the cube as products": (
        """<float half = {0.5}, float one = {1}, float k = {0.044715}, float r = {0.7978846}>
        { s = Mul(x, x) a = Mul(s, x) b = Mul(k, a) c = Add(x, b) d = Mul(r, c) e = Tanh(d)
          f = Add(one, e) g = Mul(half, x) y = Mul(g, f) }""",
        {"Gelu": 1},
    ),
    "silu": ("{ s = Sigmoid(x) y = Mul(x, s) }", {"Swish": 1}),
    "quick gelu": (
        "<float k = {1.702}> { a = Mul(x, k) s = Sigmoid(a) y = Mul(s, x) }",
        {"Swish": 1},
    ),
    "hard swish": (
        "{ s = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x) y = Mul(x, s) }",
        {"HardSwish": 1},
    ),
    "hard swish of a clip": (
        """<float three = {3}, float zero = {0}, float six = {6}>
        { a = Add(x, three) b = Clip(a, zero, six) c = Mul(x, b) y = Div(c, six) }""",
        {"HardSwish": 1},
    ),
    "hard sigmoid": (
        """<float three = {3}, float zero = {0}, float six = {6}>
        { a = Add(x, three) b = Clip(a, zero, six) y = Div(b, six) }""",
        {"HardSigmoid": 1},
    ),
    "mish": ("{ s = Softplus(x) t = Tanh(s) y = Mul(x, t) }", {"Mish": 1}),
    "layer norm": (
        """<int64[1] last = {-1}, float two = {2}, float e = {0.00001},
            float[4] scale = {1, 2, 3, 4}, float[4] bias = {4, 3, 2, 1}>
        { m = ReduceMean(x, last) c = Sub(x, m) s = Pow(c, two) v = ReduceMean(s, last)
          a = Add(v, e) r = Sqrt(a) n = Div(c, r) t = Mul(n, scale) y = Add(t, bias) }""",
        {"LayerNormalization": 1},
    ),
    "layer norm with the reciprocal of a root": (
        """<int64[1] last = {-1}, float e = {0.00001},
            float[4] scale = {1, 2, 3, 4}, float[4] bias = {4, 3, 2, 1}>
        { m = ReduceMean(x, last) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, last)
          a = Add(v, e) r = Sqrt(a) i = Reciprocal(r) n = Mul(c, i) t = Mul(n, scale)
          y = Add(t, bias) }""",
        {"LayerNormalization": 1},
    ),
    "layer norm as Keras exports it": (
        """<int64[1] last = {-1}, float e = {0.00001},
            float[1, 4] scale = {1, 2, 3, 4}, float[1, 4] bias = {4, 3, 2, 1}>
        { m = ReduceMean(x, last) o = Neg(m) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, last)
          a = Add(v, e) r = Sqrt(a) i = Reciprocal(r) f = Mul(i, scale) p = Mul(o, f)
          b = Add(p, bias) t = Mul(x, f) y = Add(t, b) }""",
        {"LayerNormalization": 1},
    ),
    "layer norm as a product and a difference": (
        """<int64[1] last = {-1}, float e = {0.00001}, float[4] bias = {4, 3, 2, 1}>
        { m = ReduceMean(x, last) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, last)
          a = Add(v, e) r = Sqrt(a) f = Reciprocal(r) p = Mul(f, m) b = Sub(bias, p) t = Mul(f, x)
          y = Add(b, t) }""",
        {"LayerNormalization": 1},
    ),
    "layer norm without a bias": (
        """<int64[1] last = {-1}, float e = {0.00001}, float[4] scale = {1, 2, 3, 4}>
        { m = ReduceMean(x, last) o = Neg(m) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, last)
          a = Add(v, e) r = Sqrt(a) i = Reciprocal(r) f = Mul(scale, i) p = Mul(f, o)
          t = Mul(f, x) y = Add(t, p) }""",
        {"LayerNormalization": 1},
    ),
    "rms norm": (
        """<int64[1] last = {-1}, float e = {0.00001}, float[4] scale = {1, 2, 3, 4}>
        { s = Mul(x, x) v = ReduceMean(s, last) a = Add(v, e) r = Sqrt(a) n = Div(x, r)
          y = Mul(n, scale) }""",
        {"RMSNormalization": 1},
    ),
    "where nan": ("<float zero = {0}> { n = IsNaN(x) y = Where(n, zero, x) }", {"ZeroNaN": 1}),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_recompose_expanded_operation_becomes_one_node(name):
    body, expected = EXPANDED[name]
    text = f"g (float[3, 4] x) => (float[3, 4] y) {body}"
    assert ops(optimized(text)) == expected
    x = 3 * rng.standard_normal((3, 4)).astype(np.float32)
    if name == "where nan":
        x[1, 2] = np.nan
    (result,) = ps.compile(model_from_text(text), backends=["numpy"]).run({"x": x}).values()
    (reference,) = ReferenceEvaluator(model_from_text(text)).run(None, {"x": x})
    np.testing.assert_allclose(result, reference, rtol=1e-4, atol=1e-5)


SIMILAR = {
    "another number": """<float half = {0.5}, float one = {1}, float root = {1.5}>
        { a = Div(x, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half) }""",
    "another input": """<float half = {0.5}, float one = {1}, float root = {1.4142135}>
        { n = Neg(x) a = Div(n, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half) }""",
    "a gate of another": "{ n = Neg(x) s = Sigmoid(n) y = Mul(x, s) }",
    "an axis in front": """<int64[1] first = {0}, float two = {2}, float e = {0.00001}>
        { m = ReduceMean(x, first) c = Sub(x, m) s = Pow(c, two) v = ReduceMean(s, first)
          a = Add(v, e) r = Sqrt(a) y = Div(c, r) }""",
    "another mean": """<int64[1] last = {-1}, float two = {2}, float e = {0.00001}>
        { n = Neg(x) m = ReduceMean(n, last) c = Sub(x, m) s = Pow(c, two) v = ReduceMean(s, last)
          a = Add(v, e) r = Sqrt(a) y = Div(c, r) }""",
    "the reciprocal of another root": """<int64[1] last = {-1}, float e = {0.00001}>
        { m = ReduceMean(x, last) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, last) a = Add(v, e)
          r = Sqrt(a) i = Reciprocal(r) y = Mul(x, i) }""",
    "the mean of another": """<int64[1] last = {-1}, float e = {0.00001}>
        { n = Exp(x) m = ReduceMean(x, last) q = ReduceMean(n, last) c = Sub(x, m) s = Mul(c, c)
          v = ReduceMean(s, last) a = Add(v, e) r = Sqrt(a) f = Reciprocal(r) o = Neg(q)
          p = Mul(o, f) t = Mul(x, f) y = Add(t, p) }""",
    "a shift by another factor": """<int64[1] last = {-1}, float e = {0.00001}, float k = {2}>
        { m = ReduceMean(x, last) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, last)
          a = Add(v, e) r = Sqrt(a) f = Reciprocal(r) g = Mul(f, k) o = Neg(m) p = Mul(o, f)
          t = Mul(x, g) y = Add(t, p) }""",
    "not zero": "<float one = {1}> { n = IsNaN(x) y = Where(n, one, x) }",
}


@pytest.mark.parametrize("name", SIMILAR)
def test_recompose_similar_group_of_nodes_stays(name):
    graph = optimized(f"g (float[3, 4] x) => (float[3, 4] y) {SIMILAR[name]}")
    composed = {"Gelu", "Swish", "LayerNormalization", "ZeroNaN"}
    assert composed.isdisjoint(ops(graph))


def test_recompose_inner_value_can_still_be_fetched():
    body, _ = EXPANDED["gelu"]
    model = model_from_text(f"g (float[3, 4] x) => (float[3, 4] y) {body}")
    x = rng.standard_normal((3, 4)).astype(np.float32)
    results = ps.compile(model).run({"x": x}, ["c", "y"])
    np.testing.assert_allclose(results["y"], x * results["c"] / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"])
def test_optimize_reduction_over_dims_of_one_becomes_a_reshape(op):
    for keepdims, dims in ((0, "[3, 4]"), (1, "[3, 1, 4]")):
        graph = optimized(
            f"""g (float[3, 1, 4] x) => (float{dims} y) <int64[1] a = {{1}}>
            {{ e = Exp(x) y = {op} <keepdims = {keepdims}> (e, a) }}""",
            18,
        )
        assert op not in ops(graph)
        assert str(graph.outputs[0].type) == f"float32{dims}"
    other = optimized(
        f"""g (float[3, 2, 4] x) => (float[3, 4] y) <int64[1] a = {{1}}>
        {{ y = {op} <keepdims = 0> (x, a) }}""",
        18,
    )
    assert ops(other) == {op: 1}
