"""Models as ONNX files, read again by ONNX Runtime, by the checker of onnx, and by ourselves."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.analysis.schemas import find_schema
from penstock.build import GraphBuilder
from penstock.frontends.onnx.messages import TensorProto
from penstock.frontends.onnx.writer import LEAST_OPSET, onnx_bytes, onnx_message, tensor_message
from tests.support.onnx_text import model_from_text
from tests.support.quantizable import convolutional, images


def again(proto) -> onnx.ModelProto:
    return onnx.load_from_string(onnx_bytes(ps.load(proto)))


def test_written_model_gives_the_same_answers():
    data = onnx_bytes(ps.load(convolutional()))
    x = images()[0]
    wanted = ps.compile(convolutional())(x)
    np.testing.assert_allclose(ps.compile(data)(x), wanted, atol=1e-6)
    (theirs,) = onnxruntime.InferenceSession(data).run(None, {"x": x})
    np.testing.assert_allclose(theirs, wanted, atol=1e-5)


def test_written_model_passes_the_checker_and_keeps_names():
    proto = again(convolutional())
    assert proto.opset_import[0].version == LEAST_OPSET
    assert [value.name for value in proto.graph.input] == ["x"]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    assert {tensor.name for tensor in proto.graph.initializer} >= {"w0", "b4"}


def test_message_without_weights_has_their_types():
    model = ps.load(convolutional())
    whole, form = onnx_message(model), onnx_message(model, weights=False)
    assert [t.name for t in form.graph.initializer] == [t.name for t in whole.graph.initializer]
    assert [t.data_type for t in form.graph.initializer] == [
        t.data_type for t in whole.graph.initializer
    ]
    assert not any(t.raw_data for t in form.graph.initializer)
    assert [str(node) for node in form.graph.node] == [str(node) for node in whole.graph.node]


def test_opset_is_as_high_as_the_operations_need():
    text = "g (float[2,4] x) => (float[2,4] y) { y = Swish(x) }"
    proto = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["": 24]> {text}')
    schema = find_schema("Swish", "", 28)
    assert schema is not None
    assert again(proto).opset_import[0].version == schema.version


def test_nested_graphs_see_constants_and_values_around_them():
    text = """g (bool c, float[2] x) => (float[2] y) <float[2] k = {5, 6}> {
        a = Neg(x)
        y = If (c) <then_branch = t () => (float[2] o) { o = Add(a, k) },
                    else_branch = e () => (float[2] o) { o = Sub(a, k) }>
    }"""
    data = onnx_bytes(ps.load(model_from_text(text)))
    x = np.float32([1, 2])
    for c in (True, False):
        feeds = {"c": np.array(c), "x": x}
        (theirs,) = onnxruntime.InferenceSession(data).run(None, feeds)
        np.testing.assert_array_equal(theirs, ps.compile(data).run(feeds)["y"])
        np.testing.assert_array_equal(theirs, -x + (1 if c else -1) * np.float32([5, 6]))


def test_other_runtimes_read_loops_with_quantized_weights():
    """They need the types of the inputs of bodies, and weights beside their readers."""
    proto = model_from_text("""g (int64 k, float[n,64] x) => (float[n,64] y) {
        y = Loop (k, , x) <body = body (int64 i, bool c, float[n,64] s) => (bool d, float[n,64] t) {
            d = Identity (c)
            w = DequantizeLinear <axis=1> (codes, scales, zeros)
            p = MatMul (s, w)
            t = Tanh (p)
        }>
    }""")
    rng = np.random.default_rng(0)
    for name, array in {
        "codes": rng.integers(-100, 100, (64, 64)).astype(np.int8),
        "scales": np.full(64, 0.003, np.float32),
        "zeros": np.zeros(64, np.int8),
    }.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    data = onnx_bytes(ps.load(proto))
    feeds = {"k": np.array(3), "x": rng.standard_normal((2, 64)).astype(np.float32)}
    (theirs,) = onnxruntime.InferenceSession(data).run(None, feeds)
    np.testing.assert_allclose(theirs, ps.compile(data).run(feeds)["y"], atol=0.02)


def test_branch_that_only_passes_a_value_on():
    text = """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = t () => (float[2] o) { o = Identity(x) },
                    else_branch = e () => (float[2] o) { o = Neg(x) }>
    }"""
    data = onnx_bytes(ps.load(model_from_text(text)))
    feeds = {"c": np.array(True), "x": np.float32([1, 2])}
    assert onnxruntime.InferenceSession(data).run(None, feeds)[0].tolist() == [1.0, 2.0]


def test_attributes_of_every_kind():
    b = GraphBuilder()
    x = b.input("x", np.float32, [1, 1, 4, 4])
    y = b.op("AveragePool", x, kernel_shape=[2, 2], auto_pad="SAME_UPPER", count_include_pad=1)
    y = b.op("LeakyRelu", y, alpha=0.5)
    shape = b.op("ConstantOfShape", b.constant([1]), value=np.array([3], np.float32))
    b.output("y", b.op("Cast", y * shape, to=11))
    data = onnx_bytes(b.model())
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 4)).astype(np.float32)
    (theirs,) = onnxruntime.InferenceSession(data).run(None, {"x": x})
    np.testing.assert_allclose(theirs, ps.compile(data)(x), rtol=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "int64", "uint8", "bool", "float16"),
        "bfloat16",
        "int4",
        "uint4",
        "float8_e4m3fn",
    ],
)
def test_tensors_are_read_back(dtype):
    from penstock.core.limits import Limits
    from penstock.frontends.onnx.tensors import TensorReader

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.arange(7).astype(np.float32).astype(kind).reshape(7, 1)
    proto = TensorProto()
    tensor_message(array, proto)
    read = TensorReader(Limits(), None).read(proto)
    assert read.dtype == kind
    np.testing.assert_array_equal(read.astype(np.float32), array.astype(np.float32))


def test_texts_are_read_back():
    text = 'g () => (string[2] y) { y = Constant<value_strings: strings = ["a", "é"]>() }'
    data = onnx_bytes(ps.load(model_from_text(text)))
    assert ps.compile(data).run({})["y"].tolist() == ["a", "é"]


def test_operations_that_onnx_lacks_are_refused_all_at_once():
    b = GraphBuilder()
    x = b.input("x", np.float32, [4, 3])
    b.output(
        "y",
        b.op(
            "Cross",
            b.op("Fill", b.constant([4, 3]), x[0, 0], domain="tensorflow"),
            x,
            domain="tensorflow",
        ),
    )
    with pytest.raises(ps.Unsupported, match=r"(?s)2 unsupported.*cannot express"):
        onnx_bytes(b.model())


def test_old_meaning_of_an_operation_is_refused():
    text = '<ir_version: 6, opset_import: ["": 11]>'
    text += "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=1>(x) }"
    with pytest.raises(ps.Unsupported, match=r"Softmax.*cannot express"):
        onnx_bytes(ps.load(onnx.parser.parse_model(text)))
