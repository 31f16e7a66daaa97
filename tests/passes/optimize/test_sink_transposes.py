"""Transposes between convolutions: what is moved before them, and that all means what it did."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import penstock as ps
from penstock.ir.graph import Graph, Model
from penstock.passes.context import PassContext
from penstock.passes.optimize.sink_transposes import SinkTransposes
from penstock.passes.pipeline import optimize
from penstock.textual.parser import parse_graph
from tests.support.onnx_text import model_from_text
from tests.support.passes import count_operations as ops
from tests.support.sweeps import examples

FIRST, LAST = [0, 3, 1, 2], [0, 2, 3, 1]
RNG = np.random.default_rng(0)


class Net:
    """A model that is written node by node, on images with channels last."""

    def __init__(self, *shape: int) -> None:
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.channels = shape[-1]

    def constant(self, value: object, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(self, op: str, *inputs: str, **attrs: object) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attrs))
        return name

    def conv(self, value: str, out: int = 4, size: int = 3, pad: int | None = None) -> str:
        """A convolution between its Transposes; if nothing is said, as large as what it reads."""
        shape = (out, self.channels, size, size)
        weights = self.constant(RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:])))
        self.channels = out
        moved = self.add("Transpose", value, perm=FIRST)
        made = self.add("Conv", moved, weights, pads=[size // 2 if pad is None else pad] * 4)
        return self.add("Transpose", made, perm=LAST)

    def model(self, *outputs: str) -> onnx.ModelProto:
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, made, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def check(model: onnx.ModelProto, x: np.ndarray) -> Graph:
    """That a session gives what the reference does; returns the optimized graph."""
    with np.errstate(over="ignore", invalid="ignore"):  # in the reference's Sigmoid
        want = ReferenceEvaluator(model).run(None, {"x": x})
    for executor in ("linear", "dataflow"):
        got = ps.compile(model, executor=executor).run({"x": x})
        for a, b in zip(got.values(), want, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    graph = ps.load(model).graph
    optimize(graph)
    return graph


def image(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_between_two_convolutions_none_is_left_and_biases_are_taken_in():
    net = Net(1, 6, 5, 3)
    y = net.conv("x")
    y = net.add("Add", y, net.constant([1, 2, 3, 4]))
    y = net.add("Mul", y, net.constant([[[[2, 3, 4, 5]]]]))
    y = net.add("Relu", y)
    y = net.conv(y)
    graph = check(net.model(y), image(1, 6, 5, 3))
    assert ops(graph) == {"Transpose": 2, "Conv": 2, "Relu": 1}


def test_sink_transposes_leaves_none_inside_a_residual_block():
    net = Net(1, 6, 5, 3)
    y = net.conv("x")
    z = net.add("Relu", net.conv(y))
    z = net.add("Add", z, y)
    y = net.conv(net.add("Clip", z, net.constant(0), net.constant(6)))
    assert ops(check(net.model(y), image(1, 6, 5, 3)))["Transpose"] == 2


def test_sink_transposes_passes_a_pad_before_a_convolution():
    net = Net(1, 6, 5, 3)
    amounts = net.constant([0, 1, 2, 0, 0, 3, 1, 0], np.int64)
    y = net.conv(net.add("Pad", "x", amounts))
    y = net.conv(net.add("Pad", y, amounts))
    graph = check(net.model(y), image(1, 6, 5, 3))
    assert ops(graph) == {"Transpose": 2, "Conv": 2}


def test_a_pad_that_others_read_stays_where_it_is():
    net = Net(1, 6, 5, 3)
    padded = net.add("Pad", "x", net.constant([0, 1, 2, 0, 0, 3, 1, 0], np.int64))
    y = net.conv(padded)
    graph = check(net.model(y, padded), image(1, 6, 5, 3))
    assert ops(graph)["Pad"] == 1


def test_branches_are_joined_before():
    net = Net(2, 6, 5, 3)
    a = net.conv("x")
    b = net.conv(a)
    known = net.constant(RNG.standard_normal((2, 6, 5, 2)))
    y = net.add("Concat", a, b, known, axis=-1)
    net.channels = 10
    y = net.conv(y)
    graph = check(net.model(y), image(2, 6, 5, 3))
    assert ops(graph)["Transpose"] == 2


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axes", [[1, 2], [-1], [0, 3], [2], [0, 1, 2, 3]])
def test_reductions_name_other_axes(axes, keep):
    net = Net(2, 6, 5, 3)
    y = net.add("ReduceMean", net.conv("x"), net.constant(axes, np.int64), keepdims=keep)
    check(net.model(y), image(2, 6, 5, 3))


def test_sink_transposes_keeps_channels_together_where_they_are_reduced():
    net = Net(2, 6, 5, 3)
    y = net.add("ReduceMean", net.conv("x"), net.constant([3], np.int64))
    graph = check(net.model(y), image(2, 6, 5, 3))
    assert [node.op.name for node in graph.nodes][-2:] == ["Transpose", "ReduceMean"]


@pytest.mark.parametrize(("slopes", "left"), [((4,), 2), ((1,), 2), ((5, 1), 4)])
def test_slopes_for_channels_and_no_others_are_moved(slopes, left):
    net = Net(2, 6, 5, 3)
    y = net.conv(net.add("PRelu", net.conv("x"), net.constant(RNG.standard_normal(slopes))))
    assert ops(check(net.model(y), image(2, 6, 5, 3)))["Transpose"] == left


def test_sink_transposes_removes_the_transpose_before_a_mean_of_an_image():
    net = Net(2, 6, 5, 3)
    y = net.add("ReduceMean", net.conv("x"), net.constant([1, 2], np.int64), keepdims=0)
    assert ops(check(net.model(y), image(2, 6, 5, 3)))["Transpose"] == 1


def test_squeeze_and_excite_is_not_split():
    net = Net(2, 6, 5, 3)
    y = net.conv("x")
    s = net.add("ReduceMean", y, net.constant([1, 2], np.int64), keepdims=1)
    s = net.add("Sigmoid", net.conv(s, size=1))
    y = net.conv(net.add("Mul", y, s))
    assert ops(check(net.model(y), image(2, 6, 5, 3)))["Transpose"] == 2


def test_one_element_for_each_channel_may_come_from_elsewhere():
    net = Net(2, 6, 5, 4)
    y = net.conv("x")
    s = net.add("ReduceMax", "x", net.constant([1, 2], np.int64), keepdims=1)
    y = net.conv(net.add("Mul", y, s))
    graph = check(net.model(y), image(2, 6, 5, 4))
    assert [n.op.name for n in graph.nodes if n.op.name == "Mul"] == ["Mul"]
    conv = next(n for n in graph.nodes if n.op.name == "Mul").inputs[0].producer
    assert conv.op.name == "Conv"


def test_sink_transposes_keeps_transposes_of_other_layouts():
    """An image with channels last from outside is as large as that which is transposed."""
    net = Net(2, 6, 5, 4)
    y = net.add("Add", net.conv("x"), "x")
    graph = check(net.model(y), image(2, 6, 5, 4))
    assert [node.op.name for node in graph.nodes] == ["Transpose", "Conv", "Transpose", "Add"]


def test_sequences_keep_their_order():
    """Of three axes the last is that of vectors more often than that of channels."""
    net = Net(2, 6, 4)
    y = net.add("Transpose", "x", perm=[0, 2, 1])
    y = net.add("Relu", y)
    graph = check(net.model(y), image(2, 6, 4))
    assert [node.op.name for node in graph.nodes] == ["Transpose", "Relu"]


def test_inputs_of_other_ranks_stay():
    """[N, H, W, C] and one axis more in front."""
    net = Net(2, 6, 5, 3)
    more = net.constant(RNG.standard_normal((2, 1, 1, 1, 4)))
    y = net.add("Add", net.conv("x"), more)
    check(net.model(y), image(2, 6, 5, 3))


def test_in_a_branch_what_comes_from_outside_is_followed():
    net = Net(1, 6, 5, 3)
    y = net.conv("x")
    branches = []
    for op in ("Relu", "Neg"):
        node = helper.make_node(op, [y], [f"made_{op}"])
        made = helper.make_tensor_value_info(f"made_{op}", TensorProto.FLOAT, None)
        branches.append(helper.make_graph([node], op, [], [made]))
    truth = net.add("Greater", net.add("ReduceSum", "x", keepdims=0), net.constant(0.0))
    z = net.add("If", truth, then_branch=branches[0], else_branch=branches[1])
    check(net.model(z), image(1, 6, 5, 3))


CONSTANTS = [(), (4,), (1,), (5, 4), (6, 1, 1), (1, 1, 1, 4), (2, 6, 5, 4), (1, 6, 1, 4)]


@examples(1)
@given(data=st.data())
def test_random_nets_with_channels_last_mean_what_they_did(data):
    net = Net(2, 6, 5, 3)
    known = [net.conv("x")]
    for _ in range(data.draw(st.integers(1, 8))):
        value = data.draw(st.sampled_from(known[-3:]))
        kind = data.draw(
            st.sampled_from(["unary", "constant", "two", "pad", "mean", "conv", "cat"])
        )
        if kind == "unary":
            made = net.add(data.draw(st.sampled_from(["Relu", "Neg", "Sigmoid", "Tanh"])), value)
        elif kind == "constant":
            shape = data.draw(st.sampled_from(CONSTANTS))
            inputs = [value, net.constant(RNG.standard_normal(shape))]
            if data.draw(st.booleans()):
                inputs.reverse()
            made = net.add(data.draw(st.sampled_from(["Add", "Mul", "Sub", "Max"])), *inputs)
        elif kind == "two":
            made = net.add("Add", value, data.draw(st.sampled_from(known)))
        elif kind == "pad":
            axes = data.draw(st.sampled_from([[1, 2], [-2, 1]]))
            mode = data.draw(st.sampled_from(["constant", "edge", "reflect"]))
            one = net.constant([1] * 4, np.int64)
            made = net.add("Pad", value, one, "", net.constant(axes, np.int64), mode=mode)
            net.channels = 4
            made = net.conv(made, pad=0)
        elif kind == "mean":
            axes = data.draw(st.sampled_from([[1, 2], [1], [0]]))
            mean = net.add("ReduceMean", value, net.constant(axes, np.int64), keepdims=1)
            made = net.add("Mul", value, mean)
        elif kind == "cat":
            both = net.add("Concat", value, data.draw(st.sampled_from(known)), axis=3)
            net.channels = 8
            made = net.conv(both, size=1)
        else:
            net.channels = 4
            made = net.conv(value)
        known.append(made)
    check(net.model(*{known[-1], known[len(known) // 2]}), image(2, 6, 5, 3))


def test_nodes_that_make_nothing_are_passed_by():
    graph = parse_graph(
        """graph g(x: float32[1, 2, 2, 3], c: bool[]) -> (y) targets (check) {
            tensorflow.Assert(c, x) as check
            y = Transpose{perm=[0, 3, 1, 2]}(x)
        }"""
    )
    assert not SinkTransposes().run(graph, PassContext())
    assert len(graph.nodes) == 2


def test_identities_around_a_function_with_a_gradient_of_its_own_are_gone():
    """TensorFlow's swish is one: IdentityN of the product and what it was made of."""
    graph = parse_graph(
        """graph g(x: float32[2, 3]) -> (y) {
            s = Sigmoid(x)
            p = Mul(x, s)
            y, z = tensorflow.IdentityN(p, x)
        }"""
    )
    model = Model({"g": graph}, "g")
    x = image(2, 3)
    session = ps.compile(model)
    np.testing.assert_allclose(session.run({"x": x})["y"], x / (1 + np.exp(-x)), rtol=1e-5)
    assert [step.node.op.name for step in session.inspect.plan.steps] == ["Swish"]


QUANTIZED = """
    a = Transpose <perm = [0, 3, 1, 2]> (dx) c = Conv <pads = [1, 1, 1, 1]> (a, fw, db)
    r = Relu(c) l = Transpose <perm = [0, 2, 3, 1]> (r) q = QuantizeLinear(l, s, z)
    d = DequantizeLinear(q, s, z) f = Transpose <perm = [0, 3, 1, 2]> (d)
    e = Conv <pads = [1, 1, 1, 1]> (f, fw, db) g = Transpose <perm = [0, 2, 3, 1]> (e)
    p = QuantizeLinear(g, s, z) dp = DequantizeLinear(p, s, z) u = Add(dp, d)
    y = QuantizeLinear(u, s, z)
"""


def test_transposes_move_codes_until_convolutions_stand_between_conversions():
    """As TFLite's networks are written: the weights with their filters first, each with a scale."""
    rng = np.random.default_rng(0)
    weights = rng.integers(-9, 9, 2 * 3 * 3 * 2).tolist()
    model = model_from_text(
        f"""g (int8[1, 5, 4, 2] x) => (int8[1, 5, 4, 2] y)
        <float s = {{0.5}}, int8 z = {{3}}, int8 n = {{0}}, int32[2] b = {{5, 6}},
         float[2] t = {{0.25, 0.125}}, int8[2, 3, 3, 2] w = {{{str(weights)[1:-1]}}},
         int8[2] zeros = {{0, 0}}>
        {{ dx = DequantizeLinear(x, s, z) dw = DequantizeLinear <axis = 0> (w, t, zeros)
        fw = Transpose <perm = [0, 3, 1, 2]> (dw) db = DequantizeLinear <axis = 0> (b, t)
        {QUANTIZED} }}""",
        opset=21,
    )
    x = rng.integers(-20, 20, (1, 5, 4, 2)).astype(np.int8)
    want = ReferenceEvaluator(model).run(None, {"x": x})[0]
    session = ps.compile(model)
    np.testing.assert_allclose(session.run({"x": x})["y"], want, atol=1)
    graph = ps.load(model).graph
    optimize(graph, PassContext(fold_quantized_weights=False))
    assert ops(graph)["Transpose"] == 2  # of the input and the output
    convolutions = [node for node in graph.walk() if node.op.name == "Conv"]
    for node in convolutions:
        before = [value.producer for value in node.inputs]
        assert [source.op.name for source in before] == ["DequantizeLinear"] * 3
    assert [node.op.name for node in graph.walk()].count("QuantizeLinear") == 3
    fused = [step.node.attrs.get("ops", "") for step in session.inspect.plan.steps]
    assert sum("Conv" in names and "QuantizeLinear" in names for names in fused) == 2


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("perm", [[2, 0, 1], [0, 2, 1], [1, 2, 0]])
@pytest.mark.parametrize("name", ["ReduceSum", "ReduceMax", "ArgMax"])
@pytest.mark.parametrize("axes", [[-1], [0], [1], [0, 2]])
def test_reduction_of_a_transpose_is_done_before_it(axes, name, perm, keepdims):
    attrs = f"axis = {axes[0]}" if name == "ArgMax" else ""
    spelled = "" if attrs else ", axes"
    model = model_from_text(f"""g (float[4, 5, 6] x) => (y)
        <int64[{len(axes)}] axes = {{{", ".join(map(str, axes))}}}> {{
          t = Transpose<perm = {perm}>(x)
          y = {name}<keepdims = {keepdims}{", " * bool(attrs)}{attrs}>(t{spelled})
        }}""")
    session = ps.compile(model)
    assert session.inspect.plan.steps[0].node.op.name == name
    x = RNG.integers(0, 9, (4, 5, 6)).astype(np.float32)
    want = ps.compile(model, executor="interpret").run({"x": x})["y"]
    np.testing.assert_array_equal(session.run({"x": x})["y"], want, strict=True)


def test_transpose_that_others_read_stays_before_a_reduction():
    session = ps.compile(
        model_from_text("""g (float[4, 5, 6] x) => (y, z) <int64[1] axes = {1}> {
          t = Transpose<perm = [2, 0, 1]>(x)
          y = ReduceSum(t, axes)
          z = Exp(t)
        }""")
    )
    assert session.inspect.plan.steps[0].node.op.name == "Transpose"
