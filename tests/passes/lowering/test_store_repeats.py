"""Which Expand nodes StoreRepeats replaces by Tile."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.build import GraphBuilder
from penstock.passes.context import PassContext
from penstock.passes.lowering.store_repeats import StoreRepeats
from tests.support.onnx_text import graph_from_text


def model_of(dims, shape, *targets):
    b = GraphBuilder()
    repeated = b.op("Expand", b.input("x", "float32", list(dims)), np.array(shape))
    for i, target in enumerate(targets):
        y = b.op("Reshape", repeated, np.array(target), allowzero=1)
        b.output(f"y{i}", y)
    return b.model()


@pytest.mark.parametrize(
    ("dims", "shape", "target", "stored"),
    [
        ((2, 4, 1, 3), (2, 4, 5, 3), (2, 20, 3), True),
        ((2, 1, 3), (2, 4, 3), (8, 3), True),
        ((2, 1, 3), (2, 4, 3), (2, 12), True),
        ((1, 3), (4, 3), (12,), True),
        ((2, 1, 3), (2, 4, 3), (-1,), True),
        ((1, 1, 3), (4, 5, 3), (20, 3), False),  # both repeat
        ((2, 1, 3), (2, 4, 3), (2, 2, 2, 3), False),
        ((2, 1, 3), (2, 4, 3), (2, 1, 4, 3, 1), False),
        ((6, 1), (6, 4), (2, 3, 4), False),
        ((3,), (2, 3), (6,), False),  # of another rank
        ((2, 0, 1), (2, 0, 3), (0, 6), False),
    ],
)
def test_repeats_are_stored_where_a_reshape_would_copy_them(dims, shape, target, stored):
    model = model_of(dims, shape, target)
    graph = model.graph
    infer_types(graph)
    assert StoreRepeats().run(graph, PassContext()) == stored
    assert ("Tile" in [node.op.name for node in graph.nodes]) == stored
    x = np.random.default_rng(3).random(dims, np.float32)
    (got,) = ps.compile(model_of(dims, shape, target), cache=False).run({"x": x}).values()
    np.testing.assert_array_equal(got, np.broadcast_to(x, shape).reshape(target))


def test_repeats_with_other_readers_stay_a_view():
    graph = model_of((2, 1, 3), (2, 4, 3), (8, 3), (2, 4, 1, 3)).graph
    infer_types(graph)
    assert not StoreRepeats().run(graph, PassContext())


def test_repeats_that_are_an_output_stay_a_view():
    graph = graph_from_text(
        """g (float[2, 1] x) => (float[2, 4] r, float[8] y)
        <int64[2] s = {2, 4}, int64[1] t = {8}> { r = Expand(x, s) y = Reshape(r, t) }"""
    )
    infer_types(graph)
    assert not StoreRepeats().run(graph, PassContext())


def test_repeats_of_unknown_dims_stay_a_view():
    graph = graph_from_text(
        """g (float[n, 1] x) => (float[m] y)
        <int64[2] s = {1, 4}, int64[1] t = {-1}> { r = Expand(x, s) y = Reshape(r, t) }"""
    )
    infer_types(graph)
    assert not StoreRepeats().run(graph, PassContext())
