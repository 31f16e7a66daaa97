"""What is found to be one operation, taken into weights, pulled behind products, and fused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.backends.onednn.library import library
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.fused import is_fused, parts
from penstock.passes.context import PassContext
from penstock.passes.lowering.fuse import Fuse
from penstock.passes.lowering.hoist_scales import HoistScales
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import graph_from_text, model_from_text
from tests.support.passes import AcceptingPolicy, fusing_context

there = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")
rng = np.random.default_rng(3)


def optimized(text: str, opset: int = 20) -> Graph:
    graph = graph_from_text(text, opset=opset)
    optimize(graph)
    return graph


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op.name for node in graph.walk())


def run(model, backends, **feeds):
    return list(ps.compile(model, backends=backends).run(feeds).values())


# Operations that are written out.


WRITTEN_OUT = {
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
    "rms norm": (
        """<int64[1] last = {-1}, float e = {0.00001}, float[4] scale = {1, 2, 3, 4}>
        { s = Mul(x, x) v = ReduceMean(s, last) a = Add(v, e) r = Sqrt(a) n = Div(x, r)
          y = Mul(n, scale) }""",
        {"RMSNormalization": 1},
    ),
    "where nan": (
        "<float zero = {0}> { n = IsNaN(x) y = Where(n, zero, x) }",
        {"ZeroNaN": 1},
    ),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_what_is_written_out_is_found(name):
    body, expected = WRITTEN_OUT[name]
    text = f"g (float[3, 4] x) => (float[3, 4] y) {body}"
    assert ops(optimized(text)) == expected
    x = 3 * rng.standard_normal((3, 4)).astype(np.float32)
    if name == "where nan":
        x[1, 2] = np.nan
    (found,) = run(model_from_text(text), ["numpy"], x=x)
    from onnx.reference import ReferenceEvaluator

    (reference,) = ReferenceEvaluator(model_from_text(text)).run(None, {"x": x})
    np.testing.assert_allclose(found, reference, rtol=1e-4, atol=1e-5)


NOT_QUITE = {
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
    "not zero": "<float one = {1}> { n = IsNaN(x) y = Where(n, one, x) }",
}


@pytest.mark.parametrize("name", NOT_QUITE)
def test_what_only_looks_like_it_stays(name):
    graph = optimized(f"g (float[3, 4] x) => (float[3, 4] y) {NOT_QUITE[name]}")
    composed = {"Gelu", "Swish", "LayerNormalization", "ZeroNaN"}
    assert composed.isdisjoint(ops(graph))


def test_a_value_in_between_can_be_fetched():
    body, _ = WRITTEN_OUT["gelu"]
    model = model_from_text(f"g (float[3, 4] x) => (float[3, 4] y) {body}")
    x = rng.standard_normal((3, 4)).astype(np.float32)
    found = ps.compile(model).run({"x": x}, ["c", "y"])
    np.testing.assert_allclose(found["y"], x * found["c"] / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"])
def test_a_reduction_over_dims_of_one_is_a_reshape(op):
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


# Constants that convolutions take in.


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_what_scales_channels_goes_into_the_weights(op, group):
    text = f"""g (float[2, 4, 5, 5] x, float[4, {4 // group},
            1, 1] w) => (float[2, 4, 5, 5] y)
        <float[4] s = {{1, -2, 3, 0.5}}, float[4] b = {{1, 2, 3, 4}}, float[4] m = {{0, 1, 0, 2}},
         float[4] v = {{1, 2, 3, 4}}, float[1, 4, 1, 1] t = {{2, 3, 4, 5}}, float k = {{3}}>
        {{ a = {op} <group = {group}> (x, w) n = BatchNormalization(a, s, b, m, v)
           p = Add(n, t) q = Mul(p, k) y = Sub(t, q) }}"""
    model = model_from_text(text)
    w = rng.standard_normal((4, 4 // group, 1, 1)).astype(np.float32)
    x = rng.standard_normal((2, 4, 5, 5)).astype(np.float32)
    (expected,) = run(
        model, ["numpy"], x=x, w=w
    )  # the weights are no constant: nothing is taken in
    del model.graph.input[1]
    from onnx import numpy_helper

    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    graph = ps.load(model).graph
    optimize(graph)
    assert ops(graph) == {op: 1}
    (found,) = run(model, ["numpy"], x=x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_others_read_is_not_taken_in():
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
def test_what_is_not_one_for_each_channel_is_not_taken_in(const):
    n = 2 if "[2, 1" in const else 1
    graph = optimized(
        f"""g (float[1, 2, 3, 3] x) => (float[{n}, 1, 3, 3] y)
        <float[1, 2, 1, 1] w = {{2, 3}}, {const}> {{ a = Conv(x, w) y = Mul(a, k) }}"""
    )
    assert ops(graph) == {"Conv": 1, "Mul": 1}


# Numbers behind products.


def test_numbers_go_behind_products_through_views():
    graph = graph_from_text(
        """g (float[2, 3, 4] q, float[2, 5, 4] k) => (float[2, 3, 5] y)
        <float a = {0.5}, float b = {4}> {
            qs = Mul(q, a)
            kt = Transpose <perm = [0, 2, 1]> (ks)
            ks = Div(k, b)
            y = MatMul(qs, kt)
        }"""
    )
    infer_types(graph)
    assert HoistScales().run(graph, fusing_context())
    assert [node.op.name for node in graph.nodes] == ["Transpose", "MatMul", "Mul"]
    (scale,) = [v.const for v in graph.nodes[-1].inputs if v.const is not None]
    assert scale == 0.125
    assert graph.outputs[0].name == "y"
    assert not HoistScales().run(graph, fusing_context())


def test_numbers_that_others_read_stay():
    graph = graph_from_text(
        """g (float[3, 4] q, float[4, 5] k) => (float[3, 5] y, float[3, 4] qs)
        <float a = {0.5}> { qs = Mul(q, a) y = MatMul(qs, k) }"""
    )
    assert not HoistScales().run(graph, fusing_context())


# Chains.


def fuse(graph: Graph, policy: AcceptingPolicy | None = None) -> None:
    Fuse().run(graph, PassContext(fusion=policy or AcceptingPolicy()))


def fused_chains(graph: Graph, policy: AcceptingPolicy | None = None) -> list[list[str]]:
    fuse(graph, policy)
    return [[part.op.name for part in parts(node)] for node in graph.nodes]


def test_chains_end_where_others_read():
    #  x -> Conv -> Relu -> Exp -> y
    #                 '---> Neg -> z
    graph = graph_from_text(
        """g (float[1, 2, 3, 3] x) => (float[1, 1, 3, 3] y, float[1, 1, 3, 3] z)
        <float[1, 2, 1, 1] w = {2, 3}> { a = Conv(x, w) b = Relu(a) y = Exp(b) z = Neg(b) }"""
    )
    assert fused_chains(graph) == [["Conv", "Relu"], ["Exp"], ["Neg"]]


def test_of_two_convolutions_the_first_takes_the_sum():
    #  x -> Conv -> Add -> Relu -> y
    #    -> Conv ----'
    graph = graph_from_text(
        """g (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] y)
        <float[2, 2, 1, 1] w = {2, 3, 4, 5}> {
            a = Conv(x, w) b = Conv(x, w) c = Add(a, b) y = Relu(c) }"""
    )
    assert fused_chains(graph) == [["Conv"], ["Conv", "Add", "Relu"]]
    fused = graph.nodes[1]
    assert fused.inputs[-1] is graph.nodes[0].outputs[0]
    assert graph.outputs[0] is fused.outputs[0]


def shorter_than(n: int) -> AcceptingPolicy:
    return AcceptingPolicy(lambda node: len(parts(node)) < n)


def test_fuse_takes_the_longest_chain_with_a_kernel():
    graph = graph_from_text(
        """g (float[1, 2, 3, 3] x) => (float[1, 1, 3, 3] y)
        <float[1, 2, 1, 1] w = {2, 3}> { a = Conv(x, w) b = Relu(a) c = Exp(b) y = Neg(c) }"""
    )
    assert fused_chains(graph, shorter_than(3)) == [["Conv", "Relu"], ["Exp", "Neg"]]


@pytest.mark.parametrize("policy", [shorter_than(0), AcceptingPolicy(faster=False)])
def test_fuse_leaves_chains_without_a_kernel_or_a_gain(policy):
    graph = graph_from_text("g (float[3] x) => (float[3] y) { a = Exp(x) y = Neg(a) }")
    assert fused_chains(graph, policy) == [["Exp"], ["Neg"]]


def chain_of(n: int) -> Graph:
    """n elementwise nodes in a row."""
    graph = graph_from_text("g (float[3] x) => (float[3] y) { y = Neg(x) }")
    (node,) = graph.nodes
    value, nodes = graph.inputs[0], []
    for i in range(n):
        output = Value(f"v{i}", value.type)
        nodes.append(Node(node.op, [value], [output], name=f"n{i}"))
        value = output
    return Graph(graph.inputs, [value], nodes)


@pytest.mark.parametrize("most", range(18))
def test_fuse_asks_for_at_most_three_kernels_per_elementwise_node(most):
    graph, policy = chain_of(4000), shorter_than(most + 1)
    chains = fused_chains(graph, policy)
    length = min(max(most, 1), 16)
    assert {len(chain) for chain in chains[:-1]} == {length}
    assert len(policy.asked) <= 3 * 4000
    if most < 2:
        assert len(policy.asked) <= 4000


def test_fuse_asks_for_no_kernel_of_a_chain_that_is_slower():
    policy = AcceptingPolicy(faster=False)
    assert len(fused_chains(chain_of(4000), policy)) == 4000
    assert not policy.asked


def test_chains_are_found_in_branches_and_not_across():
    graph = graph_from_text(
        """g (float[3] x, bool c) => (float[3] y) {
            a = Exp(x)
            y = If (c) <
                then_branch = t () => (float[3] p) { q = Neg(a) p = Abs(q) },
                else_branch = e () => (float[3] r) { r = Identity(a) }
            >
        }"""
    )
    fuse(graph)
    assert [node.op.name for node in graph.nodes] == ["Exp", "If"]
    then = graph.nodes[1].attrs["then_branch"]
    assert [is_fused(node) for node in then.nodes] == [True]


def test_a_fused_node_means_its_parts():
    model = model_from_text(
        """g (float[2, 3] x, float[3] z) => (float[2, 3] y)
        { a = Exp(x) b = Sub(z, a) c = Mul(b, x) y = Relu(c) }"""
    )
    graph = ps.load(model).graph
    fuse(graph)
    (node,) = graph.nodes
    assert node.name == "+".join(part.name or part.op.name for part in parts(node))
    kernel = node.op.compile(node, [value.type for value in node.inputs])
    x, z = rng.standard_normal((2, 3)).astype(np.float32), np.float32([1, 2, 3])
    by_name = {"x": x, "z": z}
    arrays = [by_name[value.name] for value in node.inputs]
    expected = np.maximum((z - np.exp(x)) * x, 0)
    np.testing.assert_allclose(kernel.function(*arrays), expected, rtol=1e-6)
    out = np.empty_like(x)
    kernel.into(*arrays, out)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


# In plans.


def steps(model, **feeds) -> list[str]:
    session = ps.compile(model, backends=["onednn", "numpy"], executor="linear")
    session.run(feeds)
    return [
        " ".join(part.op.name for part in parts(step.node)) + f" on {step.backend}"
        for step in session.plan.walk()
    ]


@there
def test_a_residual_block_is_three_steps():
    model = model_from_text(
        """g (float[1, 16, 20, 20] x, float[1, 16, 20, 20] z) => (float[1, 16, 20, 20] y)
        <float[16] s, float[16] b> {
            w = ConstantOfShape <value = float[1] {0.01}> (shape)
            shape = Constant <value_ints = [16, 16, 3, 3]> ()
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            c = BatchNormalization(a, s1, s1, s1, s1)
            s1 = Constant <value = float[16] {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}> ()
            d = Relu(c)
            e = Conv <pads = [1, 1, 1, 1]> (d, w)
            f = Add(e, d)
            y = Relu(f)
        }""".replace("<float[16] s, float[16] b> ", "").replace(", float[1, 16, 20, 20] z", "")
    )
    x = rng.standard_normal((1, 16, 20, 20)).astype(np.float32)
    found = steps(model, x=x)
    assert found[1:] == ["Conv Relu on onednn", "Conv Add Relu on onednn"]
    assert found[0].startswith("Reorder")
    (ours,) = run(model, ["onednn", "numpy"], x=x)
    (expected,) = run(model, ["numpy"], x=x)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@there
def test_attention_is_three_products_and_a_softmax():
    model = model_from_text(
        """g (float[1, 32, 64] x, float[1, 1, 32, 32] mask) => (float[1, 32, 64] y)
        <float k = {0.25}, float zero = {0}, int64[4] heads = {1, 32, 4, 16}, int64[3] whole = {1, 32, 64}> {
            h = Reshape(x, heads)
            q = Transpose <perm = [0, 2, 1, 3]> (h)
            t = Transpose <perm = [0, 2, 3, 1]> (h)
            s = Mul(q, k)
            a = MatMul(s, t)
            b = Add(a, mask)
            p = Softmax <axis = -1> (b)
            n = IsNaN(p)
            g = Where(n, zero, p)
            c = MatMul(g, q)
            d = Transpose <perm = [0, 2, 1, 3]> (c)
            e = Reshape(d, whole)
            y = Neg(e)
        }"""
    )
    x = rng.standard_normal((1, 32, 64)).astype(np.float32)
    mask = np.where(rng.random((1, 1, 32, 32)) < 0.3, -np.inf, 0).astype(np.float32)
    mask[..., 5, :] = -np.inf  # a row of which nothing is left
    found = [each for each in steps(model, x=x, mask=mask) if not each.startswith("Reorder")]
    kernels = [each for each in found if each.split()[0] not in ("Reshape", "Transpose")]
    assert kernels[:3] == [
        "MatMul Mul Add on onednn",
        "Softmax ZeroNaN on onednn",
        "MatMul on onednn",
    ]
    assert len(kernels) == 4
    (ours,) = run(model, ["onednn", "numpy"], x=x, mask=mask)
    (expected,) = run(model, ["numpy"], x=x, mask=mask)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    assert not ours[0, 5].any()
