"""Estimated work of nodes, against figures counted by hand."""

from __future__ import annotations

import pytest

from penstock.analysis.type_inference import infer_types
from penstock.ops.work_estimate import flops
from tests.support.onnx_text import graph_from_text


@pytest.mark.parametrize(
    ("signature", "call", "wanted"),
    [
        ("float[2, 3] a, float[3, 5] b", "MatMul(a, b)", 2 * 2 * 5 * 3),
        ("float[7, 2, 3] a, float[3, 5] b", "MatMul(a, b)", 2 * 7 * 2 * 5 * 3),
        ("float[3, 2] a, float[3, 5] b", "Gemm <transA = 1> (a, b)", 2 * 2 * 5 * 3),
        # 8 filters of 3x3 over 4 channels, 6x6 windows
        ("float[1, 4, 8, 8] x, float[8, 4, 3, 3] w", "Conv(x, w)", 2 * 8 * 36 * 4 * 9),
        # the same in 4 groups: each filter sees one channel
        ("float[1, 4, 8, 8] x, float[8, 1, 3, 3] w", "Conv <group = 4> (x, w)", 2 * 8 * 36 * 9),
        ("float[1, 4, 8, 8] x, float[4, 2, 3, 3] w", "ConvTranspose(x, w)", 2 * 4 * 64 * 2 * 9),
        ("float[2, 3] a, float[3] b", "Add(a, b)", 6),
        ("float[2, 300] a", "ReduceMax <keepdims = 0> (a)", 600),
        ("float[N, 3] a, float[3, 5] b", "MatMul(a, b)", 0),
    ],
)
def test_flops_count_multiplications_and_additions(signature, call, wanted):
    graph = graph_from_text(f"g ({signature}) => (float[M] y) {{ y = {call} }}")
    infer_types(graph)
    (node,) = graph.nodes
    assert flops(node) == wanted
