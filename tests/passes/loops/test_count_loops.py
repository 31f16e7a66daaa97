"""Loops whose number of iterations is computed before them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.passes.pipeline import optimize
from tests.support.graphs import interpret
from tests.support.onnx_text import compile_text, graph_from_text

# Doubles x while i < n, which is computed before the loop as well where START says so.
COUNTING = """g (int32 i, int32 n, float[2] x) => (int32 j, float[2] y)
    <int32 one = {1}, int32 ten = {10}, int64 most = {9223372036854775807}> {
    START
    j, y = Loop (LIMIT, c, FIRST, x) <body = b (int64 k, bool d, int32 a, float[2] v)
        => (bool e, int32 p, float[2] w) { w = Add(v, v) UPDATE CONDITION }>
}"""
GUARD = "c = Less(i, n)"
UPDATE = "p = Add(a, one)"


def counting(
    start: str = GUARD,
    condition: str = "e = Less(p, n)",
    update: str = UPDATE,
    first: str = "i",
    limit: str = "",
) -> str:
    text = COUNTING.replace("START", start).replace("CONDITION", condition)
    text = text.replace("UPDATE", update).replace("FIRST", first).replace("LIMIT", limit)
    return text if start else text.replace(", c,", ", ,")


def is_counted(text: str) -> bool:
    graph = graph_from_text(text)
    optimize(graph)
    return any(node.op.name == "TripCount" for node in graph.walk())


def by_definition(text: str, *inputs: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(x) for x in interpret(graph_from_text(text), inputs)]


EQUIVALENT = {
    "guarded": counting(),
    "greater": counting(condition="e = Greater(n, p)"),
    "of_another_guard": counting("m = Neg(n) c = Less(m, ten)", first="one"),
    "without_a_guard": counting("", first="one"),
    "of_two_bounds": counting(
        "c0 = Less(i, n) c1 = Less(i, ten) c = And(c0, c1)",
        "e0 = Less(p, n) e1 = Less(p, ten) e = And(e0, e1)",
    ),
    "with_an_endless_limit": counting(limit="most"),
}


@pytest.mark.parametrize("name", EQUIVALENT)
@pytest.mark.parametrize("bounds", [(0, 5), (3, 3), (7, 2), (0, 20), (-(2**31), -(2**31) + 3)])
def test_counted_loop_equals_the_loop_that_computes_its_condition(name, bounds):
    text = EQUIVALENT[name]
    inputs = [*np.array(bounds, np.int32), np.array([1, 3], np.float32)]
    if bounds[1] - bounds[0] > 100:
        return
    assert is_counted(text)
    results = compile_text(text).run(dict(zip("inx", inputs, strict=True)))
    for result, wanted in zip(results.values(), by_definition(text, *inputs), strict=True):
        np.testing.assert_array_equal(result, wanted)
        assert result.dtype == wanted.dtype


NOT_COUNTED = {
    "steps_of_two": counting(update="two = Add(one, one) p = Add(a, two)"),
    "a_limit_that_changes": counting(condition="m = Sub(n, p) e = Less(p, m)"),
    "an_inclusive_limit": counting(condition="e = LessOrEqual(p, n)"),
    "an_unknown_start_behind_another_guard": counting("c = Less(n, i)"),
    "a_limit_of_iterations": counting(limit="three").replace(
        "int64 most", "int64 three = {3}, int64 most"
    ),
    "another_condition_beside": counting(
        condition="e0 = Less(p, n) s = ReduceMax <keepdims = 0> (w) b0 = Cast <to = 9> (s) "
        "e = And(e0, b0)"
    ),
}


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_loop_with_another_condition_computes_it(name):
    assert not is_counted(NOT_COUNTED[name])


def test_loop_that_only_counts_is_gone():
    text = counting().replace("(int32 j, float[2] y)", "(int32 j)")
    session = compile_text(text)
    inputs = {"i": np.int32(3), "n": np.int32(1000), "x": np.zeros(2, np.float32)}
    assert session.run(inputs)["j"] == 1000
    assert [step.node.op.name for step in session.inspect.plan.walk()] == ["Max"]


def test_loop_drops_what_it_carries_for_no_one():
    text = counting().replace("(int32 j, float[2] y)", "(float[2] y)")
    graph = graph_from_text(text)
    optimize(graph)
    (loop,) = [node for node in graph.nodes if node.op.name == "Loop"]
    assert len(loop.inputs) == 3
    assert [node.op.name for node in loop.attrs["body"].nodes] == ["Add"]


def test_loop_keeps_what_it_carries_for_another_carried_value():
    text = """g (float x, float z) => (float y) <int64 n = {4}> {
        y, u, t = Loop (n, , x, z, z) <body = b (int64 k, bool d, float a, float v, float w)
            => (bool e, float p, float q, float r)
            { e = Identity(d) p = Add(a, v) q = Neg(v) r = Mul(w, p) }> }"""
    graph = graph_from_text(text)
    inputs = [np.float32(1), np.float32(2)]
    (wanted,) = interpret(graph, inputs)
    optimize(graph)
    (loop,) = [node for node in graph.nodes if node.op.name == "Loop"]
    assert len(loop.inputs) == 4
    assert interpret(graph, inputs) == [wanted]


CONSTANT = """g (float[2] x) => (float[2] y, int64[] js)
    <int32 zero = {0}, int32 one = {1}, float limit = {4.5}, int64 most = {9}, bool yes = {1}> {
    j, y, js = Loop (LIMIT, yes, zero, x) <body = b (int64 k, bool d, int32 a, float[2] v)
        => (bool e, int32 p, float[2] w, int64 q) {
            w = Add(v, v) p = Add(a, one) f = Cast <to = 1> (p) e0 = Less(f, limit)
            e1 = Less(k, most) e = And(e0, e1) q = Identity(k) }>
}"""


@pytest.mark.parametrize(("limit", "trips"), [("", 5), ("most", 5), ("three", 3)])
def test_loop_below_constants_of_any_type_runs_a_constant_number_of_times(limit, trips):
    text = CONSTANT.replace("LIMIT", limit).replace("bool yes", "int64 three = {3}, bool yes")
    graph = graph_from_text(text)
    optimize(graph)
    (loop,) = [node for node in graph.walk() if node.op.name == "Loop"]
    assert loop.inputs[0].const == trips
    body = loop.attrs["body"]
    assert body.outputs[0] is body.inputs[1]
    x = np.array([1, 2], np.float32)
    y, js = compile_text(text).run({"x": x}).values()
    np.testing.assert_array_equal(y, x * 2**trips)
    np.testing.assert_array_equal(js, range(trips))


@pytest.mark.parametrize("start", ["0.5", "20000000"])
def test_loop_whose_counter_is_no_small_whole_number_is_not_counted(start):
    text = CONSTANT.replace("LIMIT", "").replace("int32 zero = {0}", f"float zero = {{{start}}}")
    text = text.replace("int32 one = {1}", "float one = {1}").replace("int32 a", "float a")
    text = text.replace("int32 p", "float p")
    graph = graph_from_text(text)
    optimize(graph)
    (loop,) = [node for node in graph.walk() if node.op.name == "Loop"]
    assert loop.inputs[0] is None
    interpreted = by_definition(text, np.ones(2, np.float32))
    got = compile_text(text).run({"x": np.ones(2, np.float32)}).values()
    for y, want in zip(got, interpreted, strict=True):
        np.testing.assert_array_equal(y, want)
