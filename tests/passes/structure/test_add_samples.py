"""An axis of samples: each official case of ONNX gives the stacked answers of its samples alone, and
models with loops those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.core.records import replace
from penstock.frontends.load import check_and_sort
from penstock.ir.graph import Graph, Model
from penstock.passes.structure.add_samples import add_samples
from tests.support.onnx_cases import node_cases
from tests.support.onnx_text import model_from_text
from tests.support.sweeps import drawn

_HALF = 2
_DRAWS = ("bernoulli", "dropout", "random")


@cache
def cases() -> dict[str, tuple[bytes, list[np.ndarray]]]:
    """The models and inputs of cases of tensors alone, but for those that draw numbers."""
    found = {}
    for case in node_cases():
        if case.model is None or any(word in case.name for word in _DRAWS):
            continue
        arrays = [
            np.asarray(x) for x in case.data_sets[0][0] if isinstance(x, np.ndarray | np.generic)
        ]
        if arrays and len(arrays) == len(case.model.graph.input):
            found[case.name] = case.model.SerializeToString(), arrays
    return found


def with_samples(model: Model, shared: list[str]) -> tuple[ps.Session, Graph]:
    graph = add_samples(model.graph, shared)
    stacked = replace(model, graphs={**model.graphs, model.entry: graph})
    check_and_sort(stacked)
    return ps.compile(stacked, executor="linear"), graph


def check(got: Mapping[str, np.ndarray], samples: list[Mapping[str, np.ndarray]]) -> None:
    assert got.keys() == samples[0].keys()
    for name, array in got.items():
        want = np.stack([sample[name] for sample in samples])
        assert (array.shape, array.dtype) == (want.shape, want.dtype)
        if array.dtype.kind in "fV" and array.dtype.name not in ("str", "object"):
            wide = np.float64
            bound = 2e-2 if array.dtype.itemsize <= _HALF else 1e-4
            np.testing.assert_allclose(array.astype(wide), want.astype(wide), bound, bound)
        else:
            np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("name", drawn(sorted(cases()), 200))
def test_case_gives_the_stacked_answers_of_its_samples(name: str, floats: bool) -> None:
    """With samples in tensors of floats, and in all."""
    content, arrays = cases()[name]
    model = ps.load(content)
    feeds = dict(zip([value.name for value in model.graph.inputs], arrays, strict=True))
    alone = ps.compile(model, executor="linear")
    first = alone.run(feeds)
    if not all(isinstance(value, np.ndarray) for value in first.values()):
        pytest.skip("a result is no tensor")
    of_floats = [n for n, x in feeds.items() if x.dtype.kind == "f"]
    sampled = of_floats if floats and of_floats else [*feeds]
    # Other numbers may be no indices, or have results of another shape.
    other = {
        n: np.flip(x.reshape(-1)).reshape(x.shape) if n in of_floats else x
        for n, x in feeds.items()
    }
    second = alone.run(other)
    if any(second[n].shape != first[n].shape for n in first):
        other, second = feeds, first
    try:
        session, _ = with_samples(model, [n for n in feeds if n not in sampled])
    except RowsStay:
        assert "optional" in name
        return
    stacked = {n: np.stack([x, other[n]]) if n in sampled else x for n, x in feeds.items()}
    check(session.run(stacked), [first, second])


LOOP = """g (float[3] x, float[3] w{more}) => (float[3] y, float[{rows}, 3] ys)
    <int64 trips = {{4}}, bool go = {{1}}, float low = {{-2}}> {{
    y, ys = Loop (trips, {go}, x) <body = body (int64 i, bool c, float[3] v)
        => (bool d, float[3] z, float[3] row) {{
            s = Mul (v, w) z = Tanh (s) row = Add (z, x) n = ReduceSum <keepdims = 0> (z)
            d = {condition} }}> }}"""


def by_runtime(text: str, samples: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    runtime = onnxruntime.InferenceSession(model_from_text(text).SerializeToString())
    names = [port.name for port in runtime.get_outputs()]
    return [dict(zip(names, runtime.run(None, feeds), strict=True)) for feeds in samples]


def samples_of(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{n: rng.standard_normal(3).astype(np.float32) for n in "xw"} for _ in range(count)]


@pytest.mark.parametrize("condition", ["Identity (c)", "Greater (n, low)"])
@pytest.mark.parametrize("shared", [[], ["w"], ["x"]])
def test_loop_computes_all_samples_in_each_iteration(condition: str, shared: list[str]) -> None:
    text = LOOP.format(more="", rows="n", go="go", condition=condition)
    samples = samples_of(3)
    for sample in samples:
        sample |= {name: samples[0][name] for name in shared}
    session, graph = with_samples(ps.load(model_from_text(text)), shared)
    # Whether a sample goes on may depend on its own numbers: then each has a loop of its own.
    assert [n.op.name for n in graph.nodes].count("Scan") == (condition != "Identity (c)")
    feeds = {n: samples[0][n] if n in shared else np.stack([s[n] for s in samples]) for n in "xw"}
    check(session.run(feeds), by_runtime(text, samples))


def test_branches_compute_all_samples_where_the_condition_is_that_of_all() -> None:
    text = """g (float[3] x, float[3] w, bool c) => (float[3] y) {
        y = If (c) <then_branch = a () => (float[3] p) { p = Mul (x, w) },
            else_branch = b () => (float[3] q) { q = Identity (w) }> }"""
    session, graph = with_samples(ps.load(model_from_text(text)), ["c", "w"])
    assert "Scan" not in [node.op.name for node in graph.nodes]
    samples = samples_of(2)
    for c in (True, False):
        own = [{**s, "w": samples[0]["w"], "c": np.array(c)} for s in samples]
        feeds = {"x": np.stack([s["x"] for s in own]), "w": samples[0]["w"], "c": np.array(c)}
        check(session.run(feeds), by_runtime(text, own))


def test_outputs_without_samples_are_those_of_each() -> None:
    text = "g (float[3] x, float[2] w) => (int64[1] n, float[2] y, float[3] z) { n = Shape (x) y = Neg (w) z = Identity (x) }"
    session, _ = with_samples(ps.load(model_from_text(text)), ["w"])
    w = np.float32([1, 2])
    outputs = session.run({"x": np.zeros((4, 3), np.float32), "w": w})
    np.testing.assert_array_equal(outputs["n"], [[3]] * 4)
    np.testing.assert_array_equal(outputs["y"], [-w] * 4)
    np.testing.assert_array_equal(outputs["z"], np.zeros((4, 3)))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("g (float[3] x) => (float[3] y) { r = RandomNormalLike (x) y = Add (x, r) }", "draws"),
        ("g (seq(float[3]) x) => (float[?] y) { y = ConcatFromSequence <axis = 0> (x) }", "only tensors"),
        ("g (float[3] x) => (float[n, 3] y) { s = SequenceConstruct (x, x) y = ConcatFromSequence <axis = 0, new_axis = 1> (s) }", "not tensors"),
    ],
)  # fmt: skip
def test_effects_and_sequences_stay(text: str, match: str) -> None:
    with pytest.raises(RowsStay, match=match):
        add_samples(ps.load(model_from_text(text)).graph)
