"""Which chains Fuse replaces by fused nodes, and what plans make of them."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.host.native import library
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.fused import is_fused, parts
from penstock.passes.context import PassContext
from penstock.passes.lowering.fuse import Fuse
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import graph_from_text, model_from_text
from tests.support.passes import AcceptingPolicy
from tests.support.tflite_models import TYPES, subgraph
from tests.support.tflite_models import model as tflite_model

there = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
rng = np.random.default_rng(3)


def run(model, backends, **feeds):
    return list(ps.compile(model, backends=backends).run(feeds).values())


def fuse(graph: Graph, policy: AcceptingPolicy | None = None) -> None:
    Fuse().run(graph, PassContext(fusion=policy or AcceptingPolicy()))


def fused_chains(graph: Graph, policy: AcceptingPolicy | None = None) -> list[list[str]]:
    fuse(graph, policy)
    return [[part.op.name for part in parts(node)] for node in graph.nodes]


def test_fuse_value_with_other_readers_ends_a_chain():
    #  x -> Conv -> Relu -> Exp -> y
    #                 '---> Neg -> z
    graph = graph_from_text(
        """g (float[1, 2, 3, 3] x) => (float[1, 1, 3, 3] y, float[1, 1, 3, 3] z)
        <float[1, 2, 1, 1] w = {2, 3}> { a = Conv(x, w) b = Relu(a) y = Exp(b) z = Neg(b) }"""
    )
    assert fused_chains(graph) == [["Conv", "Relu"], ["Exp"], ["Neg"]]


def test_fuse_sum_of_two_convolutions_is_fused_with_the_first():
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
    graph, policy = chain_of(1000), shorter_than(most + 1)
    chains = fused_chains(graph, policy)
    length = min(max(most, 1), 16)
    assert {len(chain) for chain in chains[:-1]} == {length}
    assert len(policy.asked) <= 3 * 1000
    if most < 2:
        assert len(policy.asked) <= 1000


def test_fuse_asks_for_no_kernel_of_a_chain_that_is_slower():
    policy = AcceptingPolicy(faster=False)
    assert len(fused_chains(chain_of(4000), policy)) == 4000
    assert not policy.asked


def test_fuse_chains_in_branches_do_not_cross_their_borders():
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


def test_fused_node_computes_its_parts():
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
    session = ps.compile(model, backends=["native", "numpy"], executor="linear")
    session.run(feeds)
    return [
        " ".join(part.op.name for part in parts(step.node)) + f" on {step.backend}"
        for step in session.inspect.plan.walk()
    ]


@there
def test_compile_residual_block_is_two_fused_steps():
    model = model_from_text(
        """g (float[1, 24, 20, 20] x, float[1, 24, 20, 20] z) => (float[1, 24, 20, 20] y)
        <float[24] s, float[24] b> {
            w = ConstantOfShape <value = float[1] {0.01}> (shape)
            shape = Constant <value_ints = [24, 24, 3, 3]> ()
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            c = BatchNormalization(a, s1, s1, s1, s1)
            s1 = Constant <value = float[24] {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}> ()
            d = Relu(c)
            e = Conv <pads = [1, 1, 1, 1]> (d, w)
            f = Add(e, d)
            y = Relu(f)
        }""".replace("<float[24] s, float[24] b> ", "").replace(", float[1, 24, 20, 20] z", "")
    )
    x = rng.standard_normal((1, 24, 20, 20)).astype(np.float32)
    # The first kernel copies lines of the input itself.
    assert steps(model, x=x) == ["Conv Relu on native", "Conv Add Relu on native"]
    (ours,) = run(model, ["native", "numpy"], x=x)
    (expected,) = run(model, ["numpy"], x=x)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


QUANTIZED = """g (uint8[2, 3] x, uint8[3] v) => (uint8[2, 3] y, float[2, 3] z)
    <float s = {0.5}, float t = {0.25}, uint8 zero = {3}> {
        a = DequantizeLinear(x, s, zero) b = DequantizeLinear(v, t, zero)
        c = Add(a, b) d = Relu(c) y = QuantizeLinear(d, s, zero)
        e = Neg(a) f = QuantizeLinear(e, s) g = DequantizeLinear(f, s) z = Exp(g) }"""


def test_fuse_dequantized_values_are_read_as_codes_by_each_chain():
    graph = graph_from_text(QUANTIZED)
    dequantize = "DequantizeLinear"
    assert fused_chains(graph) == [
        [dequantize, dequantize, "Add", "Relu", "QuantizeLinear"],
        [dequantize, "Neg", "QuantizeLinear", dequantize, "Exp"],
    ]
    assert graph.nodes[0].inputs[0] is graph.nodes[1].inputs[0] is graph.inputs[0]


def test_fuse_value_that_is_dequantized_for_others_too_stays():
    graph = graph_from_text(
        """g (uint8[2, 3] x) => (float[2, 3] y, float[2, 3] z)
        <float s = {0.5}> { y = DequantizeLinear(x, s) z = Neg(y) }"""
    )
    assert fused_chains(graph) == [["DequantizeLinear"], ["DequantizeLinear", "Neg"]]


def test_fuse_conversions_do_not_end_a_convolution():
    graph = graph_from_text(
        """g (float[1, 2, 3, 3] x) => (uint8[1, 1, 3, 3] y)
        <float[1, 2, 1, 1] w = {2, 3}, float s = {0.5}> {
            a = Conv(x, w) b = Relu(a) y = QuantizeLinear(b, s) }"""
    )
    assert fused_chains(graph) == [["Conv", "Relu"], ["QuantizeLinear"]]


@pytest.mark.parametrize(("rows", "fused_first"), [(10, True), (1000, False)])
def test_fuse_chain_ends_before_it_is_computed_again_for_many_elements(rows, fused_first):
    graph = graph_from_text(
        f"""g (float[8] x, float[{rows}, 8] z) => (float[{rows}, 8] y)
        {{ a = Exp(x) b = Neg(a) c = Add(b, z) y = Abs(c) }}"""
    )
    optimize(graph)  # infers shapes
    chains = [["Exp", "Neg", "Add", "Abs"]] if fused_first else [["Exp", "Neg"], ["Add", "Abs"]]
    assert fused_chains(graph) == chains


@pytest.mark.parametrize(("rows", "codes"), [(10, False), (1000, True)])
def test_fuse_large_codes_are_what_elementwise_readers_read(rows, codes):
    graph = graph_from_text(
        f"""g (float[{rows}, 8] x) => (float[{rows}, 8] y, float[{rows}, 8] z)
        <float s = {{0.5}}> {{
            a = Exp(x) b = QuantizeLinear(a, s) z = DequantizeLinear(b, s) y = Neg(z) }}"""
    )
    optimize(graph)
    of_codes = [["Exp", "QuantizeLinear"], ["DequantizeLinear"], ["DequantizeLinear", "Neg"]]
    of_numbers = [["Exp", "QuantizeLinear", "DequantizeLinear"], ["Neg"]]
    assert fused_chains(graph) == (of_codes if codes else of_numbers)


def swish(other: str) -> bytes:
    """y = other * sigmoid(x), in codes of TFLite."""
    of = [{"scale": [s], "zero_point": [z]} for s, z in ((0.05, 3), (1 / 256, -128), (0.04, -7))]
    int8 = [{"type": TYPES.index("int8"), "shape": [40, 50], "quantization": q} for q in of]
    operators = [("LOGISTIC", ["x"], ["s"], None), ("MUL", [other, "s"], ["y"], ("MulOptions", {}))]
    inputs = {name: ("int8", [40, 50]) for name in ("x", "z")}
    tensors = dict(zip("xzsy", [int8[0], *int8], strict=True))
    return tflite_model([subgraph(inputs, operators, ["y"], **tensors)])


@there
@pytest.mark.parametrize(("other", "steps"), [("x", 1), ("z", 2)])
def test_fuse_product_of_codes_and_a_function_of_them_is_one_step(other, steps):
    model = swish(other)
    x, z = rng.integers(-128, 128, (2, 40, 50)).astype(np.int8)
    session = ps.compile(model)
    (y,) = session.run({"x": x, "z": z}).values()
    (want,) = run(model, ["numpy"], x=x, z=z)
    np.testing.assert_array_equal(y, want)
    real = np.multiply([x, z][other == "z"] - 3.0, 0.05) / (1 + np.exp(-0.05 * (x - 3.0)))
    assert np.abs(np.clip(np.rint(real / 0.04) - 7, -128, 127) - y).max() <= 1
    assert session.explain().startswith(f"plan 'main': {steps} step")
