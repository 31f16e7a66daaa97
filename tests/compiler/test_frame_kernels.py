"""Kernels of nodes that run by tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import NumpyBackend
from penstock.compiler.frame_kernels import FrameKernels
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext
from penstock.core.types import Type
from penstock.executors.control import NEVER
from penstock.ir.graph import Graph, Node
from penstock.ir.kernel import Kernel
from tests.support.far_backend import MeetingBackend, TanhIsFar
from tests.support.onnx_text import graph_from_text, model_from_text
from tests.support.timing import slow


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


def test_frame_kernels_of_far_backends_run_at_the_same_time() -> None:
    text = "g (float[2] x, float[2] z) => (float[2] y) { b = Tanh(x) c = Tanh(z) y = Add(b, c) }"
    far = [MeetingBackend(name, ["Tanh"]) for name in ("one", "two")]
    session = ps.compile(
        model_from_text(text),
        executor="frames",
        backends=[*far, "numpy"],
        expert=ps.ExpertOptions(cost_model=TanhIsFar()),
    )
    x, z = np.array([[-1, 2], [3, 0]], np.float32)
    for _ in range(3):
        y = session.run({"x": x, "z": z})["y"]
        np.testing.assert_allclose(y, np.tanh(x) + np.tanh(z), rtol=1e-6)
    assert session.inspect.effective.backends == ("one", "two", "numpy")


class Sleeping(NumpyBackend):
    """Counts the runs of kernels, which sleep before they compute."""

    def __init__(self, name: str, said: float, slept: float) -> None:
        self.name, self.said, self.slept = name, said, slept
        self.ran = Counter[str]()

    def seconds(self, node: Node) -> float:
        return self.said

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        kernel = super().kernel(node, types)
        assert kernel is not None

        def function(*inputs: Any) -> Any:
            self.ran[node.op.name] += 1
            slow(self.slept)
            return kernel.function(*inputs)

        return Kernel(function)


def test_frame_kernels_are_measured_if_asked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    quick, idle = Sleeping("quick", 1.0, 0.0), Sleeping("idle", 1e-6, 2e-3)
    backends = [idle, quick]
    model = model_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    feeds = {"x": np.ones(2, np.float32)}
    estimated = ps.compile(model, executor="frames", backends=backends)
    estimated.run(feeds)
    assert idle.ran["Neg"] and not quick.ran["Neg"]
    session = ps.compile(model, executor="frames", backends=backends, autotune=True)
    session.run(feeds)
    quick.ran.clear()
    idle.ran.clear()
    session.run(feeds)
    assert quick.ran["Neg"] and not idle.ran["Neg"]
