"""The graph with layers of chosen types, beside ONNX Runtime, which runs it as written."""

from collections import Counter

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.core.records import replace
from penstock.frontends.onnx.writer import onnx_bytes
from penstock.quantizing.layers import codes_of, layers_of
from penstock.quantizing.rewriting import ValueRange, rewritten
from penstock.quantizing.source import float_model
from tests.support.quantizable import convolutional, feed_forward, images, rows, with_weights

MODELS = {"convolutional": (convolutional, images), "feed_forward": (feed_forward, rows)}


def written(name: str, type_: str):
    """The model with one type wherever it can be, its float outputs and an input."""
    make, data = MODELS[name]
    model = float_model(ps.load(make()))
    graph, x = model.graph, data()[0]
    layers = layers_of(graph)
    choice = {layer.name: type_ for layer in layers if type_ in layer.types}
    names = [value.name for value in codes_of(graph, layers, choice).values]
    values = ps.compile(model).run({"x": x}, fetches=names) if names else {}
    ranges = {n: ValueRange.of(float(v.min()), float(v.max())) for n, v in values.items()}
    form = rewritten(graph, choice, ranges)
    return replace(model, graphs={model.entry: form.graph}), ps.compile(make())(x), x


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("type_", "most"),
    [("static", 0.02), ("dynamic", 0.02), ("weights8", 0.01), ("blocks8", 0.01), ("blocks4", 0.1)],
)
def test_types_are_near_the_float_model_and_onnxruntime(name, type_, most):
    model, wanted, x = written(name, type_)
    ours = ps.compile(model)(x)
    session = onnxruntime.InferenceSession(onnx_bytes(model))
    (theirs,) = session.run(None, {"x": x})
    spread = np.ptp(wanted)
    assert 0 < np.abs(ours - wanted).max() < most * spread
    # Roundings to codes may fall to either side.
    np.testing.assert_allclose(ours, theirs, atol=most * spread / 2)


def test_static_layers_run_on_codes():
    model, _, x = written("convolutional", "static")
    session = ps.compile(model)
    session.run({"x": x})
    steps = session.explain()
    assert "DequantizeLinear+DequantizeLinear+DequantizeLinear+Conv+Relu+QuantizeLinear" in steps
    assert "= Conv(" not in steps


def test_layers_of_one_input_share_its_codes():
    model, _, _ = written("feed_forward", "dynamic")
    counts = Counter(node.op.name for node in model.graph.nodes)
    assert counts["DynamicQuantizeLinear"] == counts["MatMulInteger"] == 2


def test_range_holds_zero():
    range_ = ValueRange.of(2.0, 6.0)
    assert (range_.low, range_.zero) == (0.0, 0)
    assert ValueRange.of(-1.0, 1.0).zero in (127, 128)
    assert ValueRange(0.0, 0.0).scale > 0


def test_biases_are_corrected():
    model = float_model(ps.load(feed_forward()))
    x = rows()[0]
    plain = rewritten(model.graph, {"up": "dynamic"}, {})
    more = rewritten(model.graph, {"up": "dynamic"}, {}, {"up": np.ones(128, np.float32)})
    counts = [sum(n.op.name == "Add" for n in form.graph.nodes) for form in (plain, more)]
    assert counts == [2, 2]  # a MatMul without a bias gets none
    conv = float_model(ps.load(convolutional()))
    forms = [
        rewritten(conv.graph, {"dense": "weights8"}, {}, biases)
        for biases in ({}, {"dense": np.full(10, 2, np.float32)})
    ]
    x = images()[0]
    one, other = [ps.compile(replace(conv, graphs={conv.entry: f.graph}))(x) for f in forms]
    np.testing.assert_allclose(other - one, 2, atol=1e-5)


def test_embedding_reads_rows_of_codes():
    table = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    proto = with_weights(
        "g (int64[2] i, float[30,40] w) => (float[2,40] y) { y = Gather(w, i) }", w=table
    )
    model = float_model(ps.load(proto))
    name = model.graph.nodes[0].name
    form = rewritten(model.graph, {name: "weights8"}, {})
    model = replace(model, graphs={model.entry: form.graph})
    data, i = onnx_bytes(model), np.array([3, 29])
    assert len(data) < table.nbytes / 2
    (theirs,) = onnxruntime.InferenceSession(data).run(None, {"i": i})
    np.testing.assert_allclose(ps.compile(model)(i), theirs, atol=1e-6)
    np.testing.assert_allclose(theirs, table[i], atol=0.02)
