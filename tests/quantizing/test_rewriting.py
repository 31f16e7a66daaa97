"""The graph with layers of chosen types, beside ONNX Runtime, which runs it as written."""

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.core.records import replace
from penstock.frontends.onnx.writer import onnx_bytes
from penstock.quantizing.layers import codes_of, layers_of
from penstock.quantizing.rewriting import ValueRange, rewritten
from penstock.quantizing.source import constant_bytes, float_model
from tests.support.exact_runtime import exact_session
from tests.support.quantizable import convolutional, feed_forward, images, rows, with_weights

MODELS = {"convolutional": (convolutional, images), "feed_forward": (feed_forward, rows)}


def written(name: str, type_: str):
    """The model with one type wherever it can be, its float outputs and an input."""
    make, data = MODELS[name]
    x = data()[0]
    layers = layers_of(float_model(ps.load(make())).graph)
    choice = {layer.name: type_ for layer in layers if type_ in layer.types}
    return with_types(make, choice, x), ps.compile(make())(x), x


def with_types(make, choice, x):
    """The model with the types of a choice and ranges of one input."""
    model = float_model(ps.load(make()))
    names = [value.name for value in codes_of(model.graph, layers_of(model.graph), choice).values]
    values = ps.compile(model).run({"x": x}, fetches=names) if names else {}
    ranges = {n: ValueRange.of(float(v.min()), float(v.max())) for n, v in values.items()}
    form = rewritten(model.graph, choice, ranges)
    return replace(model, graphs={model.entry: form.graph})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("type_", "most"),
    [
        *(("static", 0.02), ("dynamic", 0.02), ("weights8", 0.01), ("weights16", 0.001)),
        *(("blocks8", 0.01), ("blocks4", 0.1), ("bfloat16", 0.01), ("bfloat16x8", 0.01)),
    ],
)
def test_types_are_near_the_float_model_and_onnxruntime(name, type_, most):
    model, wanted, x = written(name, type_)
    ours = ps.compile(model)(x)
    session = exact_session(onnx_bytes(model))
    (theirs,) = session.run(None, {"x": x})
    spread = np.ptp(wanted)
    assert 0 < np.abs(ours - wanted).max() < most * spread
    # Roundings to codes may fall to either side.
    np.testing.assert_allclose(ours, theirs, atol=most * spread / 2)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_types_equal_those_of_onnxruntime(seed):
    # Such as stored codes with zero points beside an input that is codes.
    rng = np.random.default_rng(seed)
    wanted = ("float32", "static", "weights8", "bfloat16x8")
    kinds = {own.name: own.types for own in layers_of(float_model(ps.load(convolutional())).graph)}
    types = {
        name: str(rng.choice([type_ for type_ in own if type_ in wanted]))
        for name, own in kinds.items()
    }
    x = images()[0]
    model = with_types(convolutional, types, x)
    (theirs,) = exact_session(onnx_bytes(model)).run(None, {"x": x})
    np.testing.assert_allclose(ps.compile(model)(x), theirs, atol=0.005 * np.ptp(theirs))


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


def test_layers_of_bfloat16_are_the_same_steps_if_their_weights_are_stored_as_codes():
    sizes, steps = [], []
    for type_ in ("bfloat16", "bfloat16x8"):
        model, _, x = written("convolutional", type_)
        sizes.append(constant_bytes(model.graph))
        session = ps.compile(model)
        session.run({"x": x})
        steps.append([(step.backend, str(step.node.op)) for step in session.inspect.plan.walk()])
    assert sizes[1] < 0.65 * sizes[0]
    assert steps[0] == steps[1]


def test_layers_of_one_input_share_its_rounding_to_bfloat16():
    text = """g (float[4,32] x, float[32,32] v, float[32,32] w) => (float[4,32] y)
        { a = MatMul(x, v) b = MatMul(x, w) y = Mul(a, b) }"""
    rng = np.random.default_rng(0)
    v, w, x = (
        rng.standard_normal(shape).astype(np.float32) for shape in [(32, 32)] * 2 + [(4, 32)]
    )
    model = float_model(ps.load(with_weights(text, v=v, w=w)))
    choice = {layer.name: "bfloat16" for layer in layers_of(model.graph)}
    form = rewritten(model.graph, choice, {})
    assert Counter(n.op.name for n in form.graph.nodes) == {"Cast": 4, "MatMul": 2, "Mul": 1}
    data = onnx_bytes(replace(model, graphs={model.entry: form.graph}))
    assert len(data) < 0.51 * (v.nbytes + w.nbytes) + 1000
    (theirs,) = exact_session(data).run(None, {"x": x})
    a, b, c = (own.astype(ml_dtypes.bfloat16).astype(np.float64) for own in (x, v, w))
    wanted = (a @ b) * (a @ c)
    most = np.abs(wanted).max()
    np.testing.assert_allclose(theirs, wanted, atol=1e-5 * most)
    np.testing.assert_allclose(ps.compile(data)(x), wanted, atol=1e-5 * most)


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
        rewritten(conv.graph, {"dense": "dynamic"}, {}, biases)
        for biases in ({}, {"dense": np.full(10, 2, np.float32)})
    ]
    x = images()[0]
    one, other = [ps.compile(replace(conv, graphs={conv.entry: f.graph}))(x) for f in forms]
    np.testing.assert_allclose(other - one, 2, atol=1e-5)


STORED = [("weights8", 0.27, 0.02), ("weights16", 0.51, 0.001)]


@pytest.mark.parametrize(("type_", "size", "most"), STORED)
def test_embedding_is_stored_in_fewer_bits(type_, size, most):
    table = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    proto = with_weights(
        "g (int64[2] i, float[30,40] w) => (float[2,40] y) { y = Gather(w, i) }", w=table
    )
    model = float_model(ps.load(proto))
    name = model.graph.nodes[0].name
    form = rewritten(model.graph, {name: type_}, {})
    model = replace(model, graphs={model.entry: form.graph})
    data, i = onnx_bytes(model), np.array([3, 29])
    assert len(data) < size * table.nbytes + 1000
    (theirs,) = exact_session(data).run(None, {"i": i})
    np.testing.assert_allclose(ps.compile(model)(i), theirs, atol=1e-6)
    np.testing.assert_allclose(theirs, table[i], atol=most * np.abs(table).max())


@pytest.mark.parametrize(("type_", "size", "most"), STORED)
def test_recurrent_weights_are_stored_and_folded_when_the_model_is_compiled(type_, size, most):
    rng = np.random.default_rng(0)
    w, r = (rng.standard_normal((1, 128, n)).astype(np.float32) / 6 for n in (24, 32))
    proto = with_weights(
        "g (float[5,2,24] x, float[1,128,24] w, float[1,128,32] r) => (float[5,1,2,32] y)"
        "{ y = LSTM<hidden_size=32>(x, w, r) }",
        w=w,
        r=r,
    )
    model = float_model(ps.load(proto))
    form = rewritten(model.graph, {model.graph.nodes[0].name: type_}, {})
    model = replace(model, graphs={model.entry: form.graph})
    data, x = onnx_bytes(model), rng.standard_normal((5, 2, 24)).astype(np.float32)
    assert len(data) < size * (w.nbytes + r.nbytes) + 2000
    (wanted,), (theirs,) = [
        exact_session(own).run(None, {"x": x}) for own in (proto.SerializeToString(), data)
    ]
    session = ps.compile(data)
    np.testing.assert_allclose(session(x), theirs, atol=1e-5)
    assert 0 < np.abs(theirs - wanted).max() < most * np.ptp(wanted)
    assert [step.node.op.name for step in session.inspect.plan.steps] == ["LSTM"]


def test_onnxruntime_widens_stored_weights_when_it_loads(tmp_path):
    model, _, _ = written("convolutional", "weights16")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    exact_session(onnx_bytes(model), options)
    names = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert names["Cast"] == 0 and names["Conv"] + names["FusedConv"] == 4


@pytest.mark.parametrize("type_", ["weights8", "weights16"])
def test_stored_weights_leave_the_steps_of_a_run_as_they_are(type_):
    before, (after, _, x) = ps.compile(convolutional()), written("convolutional", type_)
    after = ps.compile(after)
    steps = []
    for session in (before, after):
        session(x)
        steps.append([step.node.op.name for step in session.inspect.plan.steps])
    assert steps[0] == steps[1]
