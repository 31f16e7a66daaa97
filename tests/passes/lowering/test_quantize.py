"""Operations between DequantizeLinear and QuantizeLinear: what becomes one node, and what stays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.quantized_weights import has_quantized_weights
from penstock.backends.numpy import NumpyBackend
from penstock.ir.graph import Graph, Node
from penstock.ir.kernel import Kernel
from penstock.passes.context import PassContext
from penstock.passes.lowering.quantize import Quantize
from penstock.passes.pipeline import optimize
from tests.support.graphs import interpret
from tests.support.onnx_text import model_from_text
from tests.support.passes import fusing_context

CONSTANTS = """
    float s = {0.5}, float t = {0.25}, uint8 z = {3}, uint8 other = {4}, int8 n = {0},
    float tiny = {1e-40}, float[2] two = {0.5, 0.25}, uint8[2] zeros = {3, 3}, int16 wide = {3},
    int8[2, 2, 1, 1] w = {1, -2, 3, 4}, int8[2, 2] m = {1, -2, 3, 4}, int32[2] b = {5, 6},
    float zero = {0}, float six = {6}, int64[3] shape = {1, 2, 4}, int64 one = {1}
"""

KEEP_WEIGHTS = PassContext(fold_quantized_weights=False)


def proto(body: str, inputs: str = "uint8[1, 2, 2, 2] x", outputs: str = "uint8[?] y"):
    outputs = outputs.replace("?", "a, b, c, d")
    return model_from_text(f"g ({inputs}) => ({outputs}) <{CONSTANTS}> {{ {body} }}", opset=21)


def quantized(model, accepts=lambda node: True) -> Graph:
    """The graph of a model with all that is done with codes, as a backend that ``accepts`` gets it.
    It computes what the model does."""
    graph = ps.load(model).graph
    before = ps.load(model).graph
    for each in (graph, before):
        optimize(each, KEEP_WEIGHTS)
    Quantize().run(graph, fusing_context(accepts))
    rng = np.random.default_rng(0)
    feeds = [rng.integers(0, 50, v.type.dims).astype(v.type.dtype) for v in graph.inputs]
    for got, want in zip(interpret(graph, feeds), interpret(before, feeds), strict=True):
        np.testing.assert_array_equal(got, want, strict=True)
    return graph


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.attrs.get("ops", node.op.name) for node in graph.walk())


X = "dx = DequantizeLinear(x, s, z) "
W = "dw = DequantizeLinear(w, t, n) "

ONE_NODE = {
    "a convolution": (
        X + W + "c = Conv(dx, dw) y = QuantizeLinear(c, s, z)",
        "DequantizeLinear DequantizeLinear Conv QuantizeLinear",
    ),
    "a convolution and its bias": (
        X
        + W
        + """db = DequantizeLinear(b, t) c = Conv(dx, dw, db) r = Relu(c)
        y = QuantizeLinear(r, s, z)""",
        "DequantizeLinear DequantizeLinear DequantizeLinear Conv Relu QuantizeLinear",
    ),
    "bounds": (
        X + W + "c = Conv(dx, dw) r = Clip(c, zero, six) y = QuantizeLinear(r, s, z)",
        "DequantizeLinear DequantizeLinear Conv Clip QuantizeLinear",
    ),
    "a product": (
        X + "dm = DequantizeLinear(m, t, n) c = MatMul(dx, dm) y = QuantizeLinear(c, s, z)",
        "DequantizeLinear DequantizeLinear MatMul QuantizeLinear",
    ),
}


@pytest.mark.parametrize("name", ONE_NODE)
def test_quantize_operation_between_conversions_becomes_one_fused_node(name):
    body, expected = ONE_NODE[name]
    assert ops(quantized(proto(body))) == {expected: 1}


@pytest.mark.parametrize("name", ONE_NODE)
def test_quantize_operation_without_a_kernel_stays(name):
    body, _ = ONE_NODE[name]
    graph = ps.load(proto(body)).graph
    optimize(graph, KEEP_WEIGHTS)
    before = ops(graph)
    assert not Quantize().run(graph, fusing_context(lambda node: False))
    assert ops(graph) == before


def test_quantize_float_result_ends_the_fused_node_with_the_operation():
    graph = quantized(proto(X + W + "y = Conv(dx, dw)", outputs="float[?] y"))
    assert ops(graph) == {"DequantizeLinear DequantizeLinear Conv": 1}


def test_quantize_value_with_other_readers_is_not_fused():
    """The result of the convolution is needed as it is:

    x - DQ - Conv - Q - y
                 `- c
    """
    body = X + W + "c = Conv(dx, dw) y = QuantizeLinear(c, s, z)"
    graph = quantized(proto(body, outputs="uint8[?] y, float[?] c"))
    assert ops(graph) == {"DequantizeLinear DequantizeLinear Conv": 1, "QuantizeLinear": 1}


def test_quantize_conversion_with_two_readers_is_fused_with_both():
    body = (
        X
        + W
        + """c = Conv(dx, dw) y = QuantizeLinear(c, s, z)
        r = Relu(dx) v = QuantizeLinear(r, s, z)"""
    )
    graph = quantized(proto(body, outputs="uint8[?] y, uint8[?] v"))
    assert ops(graph) == {
        "DequantizeLinear DequantizeLinear Conv QuantizeLinear": 1,
        "DequantizeLinear": 1,
        "Relu": 1,
        "QuantizeLinear": 1,
    }


def test_quantize_codes_that_are_also_an_output_are_kept():
    """y - DQ - Conv - Q - v, and y is an output"""
    body = (
        X
        + W
        + """c = Conv(dx, dw) y = QuantizeLinear(c, s, z)
        dy = DequantizeLinear(y, s, z) e = Conv(dy, dw) v = QuantizeLinear(e, s, z)"""
    )
    graph = quantized(proto(body, outputs="uint8[?] y, uint8[?] v"))
    assert ops(graph) == {"DequantizeLinear DequantizeLinear Conv QuantizeLinear": 2}


IF = """y = If(p) <
    then_branch = then_graph () => (uint8[a, b, c, d] u) {{ {then} }},
    else_branch = else_graph () => (uint8[a, b, c, d] v) {{ v = Identity(x) }}
>"""


def test_quantize_operations_in_branches_are_fused():
    """The conversion of what both read stands outside."""
    inside = X + W + IF.format(then="c = Conv(dx, dw) u = QuantizeLinear(c, s, z)")
    graph = quantized(proto(inside, "uint8[1, 2, 2, 2] x, bool p"))
    assert ops(graph)["DequantizeLinear DequantizeLinear Conv QuantizeLinear"] == 1
    assert ops(graph)["DequantizeLinear"] == 0


def test_quantize_captured_values_are_not_fused_into_a_branch():
    outside = X + W + "c = Conv(dx, dw) " + IF.format(then="u = QuantizeLinear(c, s, z)")
    graph = quantized(proto(outside, "uint8[1, 2, 2, 2] x, bool p"))
    assert ops(graph)["DequantizeLinear DequantizeLinear Conv"] == 1
    assert ops(graph)["QuantizeLinear"] == 1


# What only moves codes.


MOVED = {
    "MaxPool": "m = MaxPool <kernel_shape = [2, 2]> (dx)",
    "Transpose": "m = Transpose <perm = [0, 2, 1, 3]> (dx)",
    "Reshape": "m = Reshape(dx, shape)",
    "Concat": "dv = DequantizeLinear(x, s, z) m = Concat <axis = 1> (dx, dv)",
    "Gather": "m = Gather <axis = 1> (dx, one)",
    "Flatten": "m = Flatten(dx)",
}


def moved(name: str, scale: str = "s", zero: str = "z"):
    return proto(X + MOVED[name] + f"y = QuantizeLinear(m, {scale}, {zero})", outputs="uint8[] y")


@pytest.mark.parametrize("name", MOVED)
def test_quantize_moving_operations_move_codes(name):
    assert ops(quantized(moved(name), accepts=lambda node: False)) == {name: 1}


@pytest.mark.parametrize(("scale", "zero"), [("t", "z"), ("s", "other")])
@pytest.mark.parametrize("name", ["MaxPool", "Concat"])
def test_quantize_moves_between_different_scales_stay(name, scale, zero):
    graph = quantized(moved(name, scale, zero))
    assert ops(graph)["QuantizeLinear"] == 1


def test_quantize_chain_of_moves_moves_codes():
    body = (
        X
        + """a = MaxPool <kernel_shape = [2, 2]> (dx) qa = QuantizeLinear(a, s, z)
        da = DequantizeLinear(qa, s, z) b1 = Transpose <perm = [0, 2, 3, 1]> (da)
        y = QuantizeLinear(b1, s, z)"""
    )
    assert ops(quantized(proto(body))) == {"MaxPool": 1, "Transpose": 1}


def test_quantize_concat_with_one_input_of_another_scale_stays():
    body = (
        X
        + """dv = DequantizeLinear(x, t, z) m = Concat <axis = 1> (dx, dv)
        y = QuantizeLinear(m, s, z)"""
    )
    assert ops(quantized(proto(body)))["DequantizeLinear"] == 2


def test_quantize_moves_with_extreme_scales_stay():
    """Products with those are rounded: codes would not come back."""
    body = """dx = DequantizeLinear(x, tiny, z) m = MaxPool <kernel_shape = [2, 2]> (dx)
        y = QuantizeLinear(m, tiny, z)"""
    assert ops(quantized(proto(body)))["DequantizeLinear"] == 1


def test_quantize_moves_with_scales_along_an_axis_stay():
    body = """dx = DequantizeLinear <axis = 1> (x, two, zeros)
        m = Transpose <perm = [0, 2, 1, 3]> (dx)
        y = QuantizeLinear <axis = 2> (m, two, zeros)"""
    assert ops(quantized(proto(body)))["DequantizeLinear"] == 1


def test_quantize_moves_of_16_bit_codes_stay():
    body = """dx = DequantizeLinear(x, s, wide) m = MaxPool <kernel_shape = [2, 2]> (dx)
        y = QuantizeLinear(m, s, wide)"""
    graph = quantized(proto(body, "int16[1, 2, 2, 2] x", "int16[?] y"))
    assert ops(graph)["DequantizeLinear"] == 1


# Constants.


def test_fold_constants_keeps_weights_that_integer_kernels_may_use():
    body = (
        X
        + W
        + """c = Conv(dx, dw) dm = DequantizeLinear(m, t, n) e = Mul(c, dm)
        y = QuantizeLinear(e, s, z)"""
    )
    graph = ps.load(proto(body)).graph
    optimize(graph, KEEP_WEIGHTS)
    assert ops(graph)["DequantizeLinear"] == 2  # of x and w
    assert has_quantized_weights(graph)
    optimize(graph)
    assert ops(graph)["DequantizeLinear"] == 1
    assert not has_quantized_weights(graph)


def test_fold_constants_keeps_weights_that_the_model_quantizes_itself():
    body = (
        X
        + """r = Constant <value = float[2, 2, 1, 1] {0.25, -0.5, 0.75, 1.0}> ()
        cw = QuantizeLinear(r, t, n) dw = DequantizeLinear(cw, t, n) c = Conv(dx, dw)
        y = QuantizeLinear(c, s, z)"""
    )
    graph = ps.load(proto(body)).graph
    optimize(graph, KEEP_WEIGHTS)
    assert ops(graph) == {"DequantizeLinear": 2, "Conv": 1, "QuantizeLinear": 1}


def test_fold_constants_dequantizes_weights_of_float_operations():
    graph = ps.load(proto(W + "y = Conv(x, dw)", "float[1, 2, 2, 2] x", "float[?] y")).graph
    optimize(graph, KEEP_WEIGHTS)
    assert ops(graph) == {"Conv": 1}


class Refusing(NumpyBackend):
    """NumPy, asked for fused nodes, of which it takes none."""

    fuses = True

    def kernel(self, node: Node, types) -> Kernel | None:
        return None if "ops" in node.attrs else super().kernel(node, types)


@pytest.mark.parametrize("backend", ["numpy", "refusing"])
def test_compile_leaves_no_dequantized_weights_to_the_run(backend):
    body = X + W + "c = Conv(dx, dw) y = QuantizeLinear(c, s, z)"
    chosen = [Refusing() if backend == "refusing" else backend]
    session = ps.compile(proto(body), backends=chosen, shapes={"x": (1, 2, 2, 2)})
    assert [s.node.op.name for s in session.inspect.plan.walk()].count("DequantizeLinear") == 1
