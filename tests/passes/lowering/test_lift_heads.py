"""Attention whose heads are its first axis, with an axis of samples before them."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.ir.graph import Graph, Model
from penstock.passes.lowering.lift_heads import lift_heads
from tests.support.onnx_text import model_from_text

HEAD = """g (float[1, 4, 7, 8] q, float[1, 4, 9, 8] k, float[1, 4, 9, 6] v, float[4, 1, 9] added,
    float[1, 1, 7, 9] mask) => ({outputs}) <int64[3] of_q = {{4, 7, 8}}, int64[3] of_k = {{4, 9, 8}},
    int64[3] of_v = {{4, 9, 6}}, int64[4] four = {{1, 4, 7, 9}}, int64[3] three = {{4, 7, 9}},
    int64[4] of_y = {{1, 4, 7, 6}}, float scale = {{0.5}}> {{
    q3 = Reshape (q, of_q) k3 = Reshape (k, of_k) v3 = Reshape (v, of_v)
    kt = Transpose <perm = [0, 2, 1]> (k3) s = MatMul (q3, kt) """
LATE = """m = Mul (s, scale) a = Add (added, m) r = Reshape (a, four) b = Add (r, mask)
    w = Softmax <axis = -1> (b) w3 = Reshape (w, three)"""
EARLY = """r = Reshape (s, four) b = Add (r, mask) b3 = Reshape (b, three)
    w3 = Softmax <axis = 2> (b3)"""
TAIL = " y3 = MatMul (w3, v3) y = Reshape (y3, of_y) }"


def model_of(middle: str, outputs: str = "float[1, 4, 7, 6] y", opset: int = 19) -> Model:
    text = HEAD.format(outputs=outputs) + middle + TAIL
    model = ps.load(model_from_text(text, opset=opset))
    infer_types(model.graph)
    return model


def answers(model: Model) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    inputs = [(value.name, value.type) for value in model.graph.inputs]
    feeds = {name: rng.normal(size=t.dims).astype(np.float32) for name, t in inputs}
    return [*ps.compile(model).run(feeds).values()]


def ranks(graph: Graph, name: str) -> list[int]:
    return [len(n.outputs[0].shape) for n in graph.nodes if n.op.name == name]


@pytest.mark.parametrize("opset", [11, 19])
@pytest.mark.parametrize("middle", [LATE, EARLY], ids=["late", "early"])
def test_products_and_softmax_have_an_axis_of_samples(middle: str, opset: int) -> None:
    model = model_of(middle, opset=opset)
    wanted = answers(model)
    lift_heads(model.graph)
    assert ranks(model.graph, "MatMul") == [4, 4]
    assert ranks(model.graph, "Softmax") == [4]
    assert ranks(model.graph, "Reshape") == []
    for got, want in zip(answers(model), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_heads_of_several_samples_get_their_axis_back() -> None:
    text = HEAD.replace("float[1, 4, ", "float[3, 4, ").replace("{{4, ", "{{12, ")
    text = text.replace("{{1, 4, ", "{{3, 4, ").replace("float[4, 1, 9]", "float[1, 1, 9]")
    text = text.format(outputs="float[3, 4, 7, 6] y") + LATE + TAIL
    model = ps.load(model_from_text(text, opset=19))
    infer_types(model.graph)
    wanted = answers(model)
    lift_heads(model.graph, 3)
    assert ranks(model.graph, "MatMul") == [4, 4]
    assert ranks(model.graph, "Softmax") == [4]
    np.testing.assert_allclose(answers(model)[0], wanted[0], rtol=0, atol=1e-6)


def test_other_axis_of_softmax_stays() -> None:
    model = model_of(EARLY.replace("axis = 2", "axis = 1"))
    wanted = answers(model)
    lift_heads(model.graph)
    assert ranks(model.graph, "Softmax") == [3]
    np.testing.assert_allclose(answers(model)[0], wanted[0], rtol=0, atol=1e-6)


def test_softmax_of_old_opsets_without_an_axis_stays() -> None:
    model = model_of(EARLY.replace("<axis = 2>", ""), opset=11)
    wanted = answers(model)
    lift_heads(model.graph)
    np.testing.assert_allclose(answers(model)[0], wanted[0], rtol=0, atol=1e-6)


def test_values_that_are_read_otherwise_are_still_there() -> None:
    outputs = "float[1, 4, 7, 6] y, float[4, 7, 9] w3, float[1, 4, 7, 9] r"
    model = model_of(LATE, outputs)
    wanted = answers(model)
    lift_heads(model.graph)
    for got, want in zip(answers(model), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


ROWS_FIRST = """g (float[7, {batch}, 12] q, float[9, {batch}, 12] k, float[9, {batch}, 12] v, float[{merged}, 7, 9] bias)
    => (float[7, {batch}, 12] y) <int64[3] of_q = {{7, {merged}, 4}}, int64[3] of_k = {{9, {merged}, 4}},
    int64[3] of_y = {{7, {batch}, 12}}> {{
    q1 = Reshape (q, of_q) k1 = Reshape (k, of_k) v1 = Reshape (v, of_k)
    q3 = Transpose <perm = [1, 0, 2]> (q1) kt = Transpose <perm = [1, 2, 0]> (k1)
    v3 = Transpose <perm = [1, 0, 2]> (v1) s = MatMul (q3, kt) b = Add (s, bias)
    w3 = Softmax <axis = -1> (b) y3 = MatMul (w3, v3) y1 = Transpose <perm = [1, 0, 2]> (y3)
    y = Reshape (y1, of_y) }}"""


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_before_samples_and_heads_are_split_too(batch: int) -> None:
    text = ROWS_FIRST.format(batch=batch, merged=3 * batch)
    model = ps.load(model_from_text(text, opset=19))
    infer_types(model.graph)
    wanted = answers(model)
    lift_heads(model.graph, batch)
    assert ranks(model.graph, "MatMul") == [4, 4]
    assert ranks(model.graph, "Softmax") == [4]
    np.testing.assert_allclose(answers(model)[0], wanted[0], rtol=0, atol=1e-6)


def test_axis_that_is_no_multiple_of_the_samples_stays() -> None:
    model = ps.load(model_from_text(ROWS_FIRST.format(batch=1, merged=3), opset=19))
    infer_types(model.graph)
    lift_heads(model.graph, 2)
    assert ranks(model.graph, "MatMul") == [3, 3]
