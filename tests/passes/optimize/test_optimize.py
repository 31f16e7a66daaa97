"""Passes: what is folded, merged, simplified and dropped, and what must stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops import find
from penstock.passes.context import PassContext
from penstock.passes.dead_code import prune
from penstock.passes.optimize.common_subexpressions import CommonSubexpressions
from penstock.passes.optimize.fold_constants import FoldConstants
from penstock.passes.optimize.simplify import Simplify
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import compile_text, graph_from_text
from tests.support.random_graphs import seeded

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret")


def optimized(text: str, limits: Limits = DEFAULT_LIMITS) -> Graph:
    graph = graph_from_text(text)
    optimize(graph, PassContext(limits=limits))
    return graph


def value(name: str, *dims: int) -> Value:
    return Value(name, TensorType(np.dtype(np.float32), dims or (2,)))


IF = """g (float[2] x) => (float[2] y) <bool c = {CONDITION}> {
    a = Exp(x)
    b = If (c) <then_branch = t () => (float[2] u) { u = Neg(a) },
                else_branch = e () => (float[2] v) { w = Abs(a) v = Sqrt(w) }>
    y = Sin(b)
}"""


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("x", "body", "numbers"),
    [
        ("float x", "Tile(x, n)", [2]),
        ("float[2, 3] x", "Tile(x, n)", [-1, 1]),
        ("float x", "Squeeze(x, n)", [0]),
        ("float[6] x", "Reshape(x, n)", [5]),
        ("float[3] x", "Expand(x, n)", [2]),
        ("float x", "Pad(x, n)", [0, 0]),
    ],
)
def test_operations_that_runs_may_refuse_stay(x, body, numbers, executor):
    session = compile_text(
        f"g ({x}, int64[N] n) => ({x[:-1]}y) {{ y = {body} }}", executor=executor
    )
    shape = session.inputs[0].type.dims
    with pytest.raises((ps.InvalidInput, ps.RunError)):
        session.run({"x": np.zeros(shape, np.float32), "n": np.array(numbers)})


def test_passes_are_idempotent():
    graph = optimized(IF.replace("CONDITION", "1"))
    before = [repr(node) for node in graph.nodes]
    optimize(graph)
    assert [repr(node) for node in graph.nodes] == before


@pytest.mark.parametrize("seed", range(50))
def test_after_all_passes_none_finds_more_to_do(seed):
    graph = clone(seeded(seed, 30))
    optimize(graph)
    assert not FoldConstants().run(graph, PassContext())
    assert not Simplify().run(graph, PassContext())
    assert not CommonSubexpressions().run(graph, PassContext())
    assert not prune(graph)


def node(op: str, inputs, outputs, after=(), attrs=None, *, pure=True) -> Node:
    found = find(op)
    assert found is not None
    return Node(replace(found, pure=pure), inputs, outputs, attrs, control_inputs=after)


def waits(graph: Graph, output: str) -> set[str]:
    """What the node that makes ``output`` waits for, by the names of what these make."""
    (found,) = [n for n in graph.nodes if n.outputs[0].name == output]
    assert all(n in graph.nodes for n in found.control_inputs)
    return {n.outputs[0].name for n in found.control_inputs}


def test_a_loop_that_may_not_begin_has_no_known_number_of_rows():
    text = """g (float[2] x, bool z) => (float[2] y, float[K, 2] k) <int64 n = {3}> {
        y, k = Loop (n, START, x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w, float[2] v)
            { d = Identity(c) w = Add(v, v) }> }"""
    rows = {
        start: optimized(text.replace("START", start)).outputs[1].type.shape for start in ("", "z")
    }
    assert rows == {"": (3, 2), "z": (None, 2)}


@pytest.mark.parametrize("limit", ["float n = {2}", "int64[2] n = {1, 2}", "int64[0] n = {}"])
def test_a_trip_count_is_one_integer(limit):
    text = f"""g (float[2] x) => (float[2] y) <{limit}> {{
        y = Loop (n, , x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
            {{ d = Identity(c) w = Add(v, v) }}> }}"""
    with pytest.raises(ps.InvalidModel, match=r"one integer|reads tensor\(float\)"):
        compile_text(text)
