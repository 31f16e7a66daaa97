"""Which factors HoistScales moves behind a product."""

from __future__ import annotations

from penstock.analysis.type_inference import infer_types
from penstock.passes.lowering.hoist_scales import HoistScales
from tests.support.onnx_text import graph_from_text
from tests.support.passes import fusing_context


def test_hoist_scales_factors_behind_views_scale_the_product():
    graph = graph_from_text(
        """g (float[2, 3, 4] q, float[2, 5, 4] k) => (float[2, 3, 5] y)
        <float a = {0.5}, float b = {4}> {
            qs = Mul(q, a)
            kt = Transpose <perm = [0, 2, 1]> (ks)
            ks = Div(k, b)
            y = MatMul(qs, kt)
        }"""
    )
    infer_types(graph)
    assert HoistScales().run(graph, fusing_context())
    assert [node.op.name for node in graph.nodes] == ["Transpose", "MatMul", "Mul"]
    (scale,) = [v.const for v in graph.nodes[-1].inputs if v.const is not None]
    assert scale == 0.125
    assert graph.outputs[0].name == "y"
    assert not HoistScales().run(graph, fusing_context())


def test_hoist_scales_scaled_value_with_other_readers_stays():
    graph = graph_from_text(
        """g (float[3, 4] q, float[4, 5] k) => (float[3, 5] y, float[3, 4] qs)
        <float a = {0.5}> { qs = Mul(q, a) y = MatMul(qs, k) }"""
    )
    assert not HoistScales().run(graph, fusing_context())
