"""The graph that is quantized."""

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.core.errors import Unsupported
from penstock.ir.graph import Graph, Model
from penstock.quantizing.source import constant_bytes, float_model
from tests.support.onnx_text import model_from_text
from tests.support.quantizable import convolutional, images


def test_normalization_goes_into_the_weights_before_it():
    text = """g (float[1,2,4,4] x) => (float[1,3,4,4] y)
        <float[3,2,1,1] w = {1,2,3,4,5,6}, float[3] s = {2,2,2}, float[3] b = {1,0,1},
         float[3] m = {0,1,0}, float[3] v = {1,1,4}>
        { c = Conv(x, w) y = BatchNormalization(c, s, b, m, v) }"""
    model = ps.load(model_from_text(text))
    folded = float_model(model)
    assert [node.op.name for node in folded.graph.nodes] == ["Conv"]
    assert [value.name for value in folded.graph.outputs] == ["y"]
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)
    np.testing.assert_allclose(ps.compile(folded)(x), ps.compile(model)(x), rtol=1e-5, atol=1e-5)


def test_model_that_is_given_stays_as_it_was():
    model = ps.load(convolutional())
    before = [repr(node) for node in model.graph.nodes]
    float_model(model)
    assert [repr(node) for node in model.graph.nodes] == before


def test_output_that_is_an_input_keeps_its_name():
    model = float_model(
        ps.load(model_from_text("g (float[2] x) => (float[2] y) { y = Identity(x) }"))
    )
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert ps.compile(model).run({"x": [1, 2]})["y"].tolist() == [1, 2]


def test_names_of_nodes_are_unique():
    model = float_model(ps.load(convolutional()))
    names = [node.name for node in model.graph.walk()]
    assert len(names) == len({*names})
    x = images()[0]
    np.testing.assert_allclose(ps.compile(model)(x), ps.compile(convolutional())(x), atol=1e-5)


def test_softmax_of_old_opsets_becomes_one_of_an_axis():
    text = """<ir_version: 6, opset_import: ["": 11]>
        g (float[2,3] x) => (float[2,3] y) { y = Softmax<axis=1>(x) }"""
    import onnx

    node = float_model(ps.load(onnx.parser.parse_model(text))).graph.nodes[0]
    assert (node.op.name, node.attrs) == ("Softmax", {"axis": 1})
    assert node.op.version > 12


def test_guard_against_nan_is_of_standard_operations():
    text = """g (float[3] x) => (float[3] y) <float z = {0}>
        { n = IsNaN(x) w = Where(n, z, x) y = Abs(w) }"""
    model = float_model(ps.load(model_from_text(text)))
    assert [node.op.full_name for node in model.graph.nodes] == ["IsNaN", "Where", "Abs"]
    assert ps.compile(model)(np.float32([1, np.nan, -2])).tolist() == [1, 0, 2]


def test_functions_that_nodes_call_are_refused():
    model = Model({"main": Graph([], [], [])}, "main", functions={"f": Graph([], [], [])})
    with pytest.raises(Unsupported, match="functions"):
        float_model(model)


def test_constants_that_are_computed_of_a_few_numbers_are_not_in_the_file():
    text = """g (float[n,300] x) => (float[n,300] y)
        <int64[2] s = {300,300}, float c = {0.01}>
        { e = Expand(c, s) w = Sin(e) h = MatMul(x, w) y = Relu(h) }"""
    model = ps.load(model_from_text(text))
    before, folded = constant_bytes(model.graph), float_model(model)
    assert constant_bytes(folded.graph) <= before + 2**14
    x = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)
    np.testing.assert_allclose(ps.compile(folded)(x), ps.compile(model)(x), rtol=1e-5, atol=1e-5)


def test_equal_constants_are_one():
    text = """g (float[n,40] x) => (float[n,40] y) {
        a = Transpose(w) b = MatMul(x, a) c = Transpose(w) y = MatMul(b, c)
    }"""
    proto = model_from_text(text)
    w = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    folded = float_model(ps.load(proto)).graph
    first, second = (node.inputs[1] for node in folded.nodes)
    assert first is second and first.is_constant
    assert constant_bytes(folded) == w.nbytes
