"""Kernels of nodes that run by tokens."""

from __future__ import annotations

import numpy as np

from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import NumpyBackend
from penstock.compiler.frame_kernels import FrameKernels
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext
from penstock.executors.control import NEVER
from penstock.ir.graph import Graph
from tests.support.onnx_text import graph_from_text


def kernels_of(graph: Graph) -> FrameKernels:
    infer_types(graph)
    return FrameKernels(graph, CompileContext(CompileOptions(), (NumpyBackend(),)))


def test_frame_kernels_nodes_with_side_effects_keep_their_kernel_in_copies() -> None:
    graph = graph_from_text("g () => (float[2] y) { y = RandomNormal<shape = [2]>() }")
    kernels = kernels_of(graph)
    first = kernels.kernel(graph.nodes[0])
    assert first is not None
    assert kernels.kernel(kernels.copy(kernels.copy(graph)).nodes[0]) is first


def test_frame_kernels_executor_of_a_segment_runs_it() -> None:
    graph = graph_from_text("g (float[2] x) => (float[2] y) { a = Neg(x) y = Abs(a) }")
    executor = kernels_of(graph).executor(graph)
    (y,) = executor.run([np.array([-1, 2], np.float32)], NEVER)
    assert y.tolist() == [1, 2]
