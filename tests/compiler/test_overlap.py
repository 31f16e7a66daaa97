"""Which nodes keep a frame because others may run meanwhile."""

from __future__ import annotations

from penstock.backends.numpy import NumpyBackend
from penstock.compiler.options import CompileOptions
from penstock.compiler.overlap import OverlapPolicy
from penstock.compiler.stages import CompileContext
from tests.support.onnx_text import graph_from_text


def test_overlap_policy_kernels_of_penstock_keep_no_frame() -> None:
    graph = graph_from_text("g (float[2] x) => (float[2] y) { a = Neg(x) y = Abs(a) }")
    policy = OverlapPolicy(CompileContext(CompileOptions(), (NumpyBackend(),)))
    assert policy.must_stay(graph.nodes, True) is None
    assert policy.must_stay(graph.nodes, False) is None
