"""Which nodes keep a frame because others may run meanwhile."""

from __future__ import annotations

from penstock.backends.numpy import NumpyBackend
from penstock.tuning.measure import CostModel
from penstock.tuning.overlap import OverlapPolicy
from tests.support.onnx_text import graph_from_text


def test_overlap_policy_kernels_of_penstock_keep_no_frame() -> None:
    graph = graph_from_text("g (float[2] x) => (float[2] y) { a = Neg(x) y = Abs(a) }")
    hosts = [NumpyBackend()]
    policy = OverlapPolicy(hosts, CostModel(hosts), 2, ())
    assert policy.must_stay(graph.nodes, True) is None
    assert policy.must_stay(graph.nodes, False) is None
