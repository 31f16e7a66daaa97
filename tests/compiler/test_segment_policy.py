"""Which nodes join segments."""

from __future__ import annotations

from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import NumpyBackend
from penstock.compiler.frame_kernels import FrameKernels
from penstock.compiler.options import CompileOptions
from penstock.compiler.segment_policy import ObservedPolicy, SegmentPolicy, SlowNodes
from penstock.compiler.stages import CompileContext
from tests.support.onnx_text import graph_from_text


def test_segment_policy_nodes_join_unless_they_are_refused_or_have_effects() -> None:
    graph = graph_from_text(
        """g (float[2] x) => (float[2] y) {
            [a_] a = Neg(x) [r_] r = RandomNormal<shape = [2]>() [y_] y = Add(a, r) }"""
    )
    infer_types(graph)
    kernels = FrameKernels(graph, CompileContext(CompileOptions(), (NumpyBackend(),)))
    policy = SegmentPolicy(kernels, SlowNodes(graph, kernels), {graph.nodes[0].name})
    assert [policy.joins(node) for node in graph.nodes] == [False, False, True]
    assert not policy.separates


def test_observed_policy_separates_the_devices_of_a_session() -> None:
    context = CompileContext(CompileOptions(devices=2), (NumpyBackend(),))
    assert ObservedPolicy(context).separates
    assert not ObservedPolicy(CompileContext(CompileOptions(), (NumpyBackend(),))).separates
