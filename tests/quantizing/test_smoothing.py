"""Smoothing between activations and weights."""

from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.quantizing.samples import samples_of
from penstock.quantizing.search import Goal, Search
from penstock.quantizing.smoothing import smoothed, smoothing_factors
from penstock.quantizing.source import float_model
from tests.support.exact_runtime import exact_session
from tests.support.onnx_text import model_from_text

TEXT = """g (float[n,64] x) => (float[n,64] y) {
    c = LayerNormalization(x, scale, bias)
    q = MatMul(c, w)
    k = Gemm<transB=1>(c, v, b)
    h = Mul(q, k)
    y = Add(h, x)
}"""
LARGE = [5, 40]  # channels


def transformer(text=TEXT):
    """A layer whose normalization has two channels that are far larger than the others, for which
    weights are small."""
    rng = np.random.default_rng(0)
    factor = np.ones(64)
    factor[LARGE] = 200
    weights = {
        "scale": factor,
        "bias": 0.1 * factor * rng.standard_normal(64),
        "w": rng.standard_normal((64, 64)) / 8 / factor[:, None],
        "v": rng.standard_normal((64, 64)) / 8 / factor,
        "b": rng.standard_normal(64),
    }
    model = model_from_text(text)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype("f"), name))
    return model


DATA = [np.random.default_rng(i).standard_normal((8, 64)).astype(np.float32) for i in range(12)]


def search_of(model, data=DATA):
    compile_ = partial(ps.compile, threads=1, cache=False)
    loaded = ps.load(model)
    samples = samples_of(data, ["x"])
    return Search(compile_(loaded), float_model(loaded), samples, Goal(0.01), compile_)


def test_smoothed_graph_computes_the_same():
    search = search_of(transformer())
    factors = smoothing_factors(search.folded, search.graph, search.samples)
    (own,) = factors.values()
    assert own[LARGE].min() > 20 * np.delete(own, LARGE).max()
    before = search.original(DATA[0])
    search.smooth(factors)
    np.testing.assert_allclose(search.folded(DATA[0]), before, atol=1e-4)
    (x,) = {layer.x for layer in search.layers}
    values = search.folded.run({"x": DATA[0]}, fetches=[x.name])
    (plain,) = search_of(transformer()).folded.run({"x": DATA[0]}, fetches=[x.name]).values()
    assert np.abs(values[x.name]).max() < np.abs(plain).max() / 10


def test_order_of_other_dims_does_not_matter():
    turned = TEXT.replace("float[n,64]", "float[m,n,64]").replace("MatMul(c, w)", "MatMul(t, w)")
    turned = turned.replace("k = Gemm<transB=1>(c, v, b)", "k = MatMul(t, v)")
    turned = turned.replace("    q =", "    t = Transpose<perm=[1,0,2]>(c)\n    q =")
    turned = turned.replace("y = Add(h, x)", "y = Identity(h)")
    search = search_of(transformer(turned), [x[None] for x in DATA])
    factors = smoothing_factors(search.folded, search.graph, search.samples)
    assert len(factors) == 1
    before = search.original(DATA[0][None])
    search.smooth(factors)
    np.testing.assert_allclose(search.folded(DATA[0][None]), before, atol=1e-4)


def test_layers_with_outliers_are_static_within_the_error(monkeypatch):
    quantized = ps.quantize(transformer(), DATA, max_error=0.02, threads=1)
    report = quantized.report
    assert report["clipping"].startswith("smoothed, ")
    least = min(error for way, error in report["clippings"].items() if "smoothed" not in way)
    assert report["clippings"][report["clipping"]] < least / 5
    (codes,) = [p for p in report["points"] if p["note"] == "codes everywhere"]
    assert codes["error_limit"] <= 0.02
    # Its optimizer makes products of codes of those with weights of 8 bits, with errors of their own.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    theirs = exact_session(quantized.onnx, options).run(None, {"x": DATA[0]})[0]
    np.testing.assert_allclose(theirs, ps.compile(quantized.model)(DATA[0]), atol=1e-3)


def test_resumed_search_has_the_smoothed_graph(tmp_path, monkeypatch):
    # The choice is measured again in the end, and left where the machine is busy: times are made up.
    for module in ("quantize", "search"):
        monkeypatch.setattr(
            f"penstock.quantizing.{module}.seconds_in_turns",
            lambda sessions, *_: [0.5, 1.0][-len(sessions) :],
        )
    options = {"max_error": 0.02, "threads": 1, "resume": tmp_path / "r.json"}
    first = ps.quantize(transformer(), DATA, **options)
    steps = []
    again = ps.quantize(
        transformer(), DATA, progress=lambda step, *_: steps.append(step), **options
    )
    assert "smooth activations" not in steps and "choose ranges" not in steps
    assert again.onnx == first.onnx


@pytest.mark.parametrize(
    "change",
    [
        ("y = Add(h, x)", "y = Add(h, c)"),  # something else reads the result
        ("float[n,64] y", "float[n,64] y, float[n,64] c"),
        ("c = LayerNormalization(x, scale, bias)", "d = Mul(scale, x) c = Add(d, bias)"),
    ],
)
def test_values_that_others_read_stay_as_they_are(change):
    search = search_of(transformer(TEXT.replace(*change)))
    assert smoothing_factors(search.folded, search.graph, search.samples) == {}
    graph = smoothed(search.graph, {"c": np.full(64, 2.0, np.float32)})
    consts = [value.const for node in graph.nodes for value in node.inputs if value.is_constant]
    before = [v.const for node in search.graph.nodes for v in node.inputs if v.is_constant]
    assert all(a is b for a, b in zip(consts, before, strict=True))
