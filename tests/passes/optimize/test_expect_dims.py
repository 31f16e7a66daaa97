"""Dims that are the same for several shapes of the inputs are expected to be so for all."""

from __future__ import annotations

from penstock.core.types import FLOAT32, TensorType
from penstock.passes.context import PassContext
from penstock.passes.optimize.expect_dims import ExpectDims
from penstock.passes.pipeline import run_passes
from tests.support.onnx_text import graph_from_text

# Of a cache of p positions the last one, and the sum of the cache.
CUT = """g (float[b, p, 4] x) => (float[b, u, 4] y, float[b, 1, 4] z)
    <int64[1] one = {1}, int64[1] first = {0}, int64[1] axis = {1}> {
    end = Shape <start = 1, end = 2> (x)
    begin = Sub (end, one)
    row = Slice (x, begin, end, axis)
    y = Neg (row)
    z = ReduceSum (x, axis)
}"""


def expected(text: str, samples: list[tuple[int, ...]], own: tuple[int | None, ...]):
    graph = graph_from_text(text)
    graph.inputs[0].type = TensorType(FLOAT32, own)
    sampled = [[TensorType(FLOAT32, dims)] for dims in samples]
    changed = run_passes((ExpectDims(sampled),), graph, PassContext())
    return changed, graph


def test_expect_dims_guards_what_is_alike_in_all_samples():
    changed, graph = expected(CUT, [(1, 6, 4), (1, 10, 4)], (1, None, 4))
    guards = [node for node in graph.nodes if node.op.name == "Expected"]
    assert changed and [node.attrs["dims"] for node in guards] == [[1, 1, 4]]
    assert guards[0].inputs[0].producer.op.name == "Slice"
    assert str(graph.outputs[0].type) == "float32[1, 1, 4]"


def test_expect_dims_leaves_open_what_differs():
    text = "g (float[b, p, 4] x) => (float[b, p, 4] y) { y = Neg (x) }"
    changed, graph = expected(text, [(1, 6, 4), (1, 10, 4)], (1, None, 4))
    assert not changed and len(graph.nodes) == 1
    assert str(graph.outputs[0].type) == "float32[1, ?, 4]"


def test_expect_dims_with_samples_that_the_model_refuses_infers_types_alone():
    text = "g (float[b, p, 4] x, float[5] c) => (float[b, p, 5] y) { y = Add (x, c) }"
    graph = graph_from_text(text)
    own = [TensorType(FLOAT32, (1, None, None)), TensorType(FLOAT32, (5,))]
    for value, type_ in zip(graph.inputs, own, strict=True):
        value.type = type_
    sample = [TensorType(FLOAT32, (1, 2, 4)), own[1]]
    assert not run_passes((ExpectDims([sample]),), graph, PassContext())
    assert [value.type for value in graph.inputs] == own
    assert str(graph.outputs[0].type) == "float32[1, ?, 5]"


def test_expect_dims_leaves_graphs_with_effects_as_they_are():
    text = CUT.replace("y = Neg (row)", "n = RandomNormalLike (row) y = Neg (n)")
    changed, graph = expected(text, [(1, 6, 4), (1, 10, 4)], (1, None, 4))
    assert not changed
    assert all(node.op.name != "Expected" for node in graph.nodes)
