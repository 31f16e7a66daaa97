"""The compile line: its stages, and the one copy of a graph that they work on."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.compiler import LINES
from penstock.compiler.options import EXECUTORS
from penstock.ir.graph import Graph
from penstock.passes.pipeline import LOWER, OPTIMIZE
from tests.support.onnx_text import compile_text

#   x -> MatMul -> Add -> Relu -> y, with a weight and a bias
DENSE = """g (float[N, 8] x) => (float[N, 8] y)
    <float[8, 8] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8,
     1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8,
     1, 2, 3, 4, 5, 6, 7, 8}, float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}> {
    p = MatMul(x, w) s = Add(p, b) y = Relu(s) }"""
STATIC = DENSE.replace("[N, 8]", "[2, 8]")


def test_lines_exist_for_all_executors() -> None:
    # A cluster is asked for by an option of its own.
    assert LINES.keys() == {*EXECUTORS, "cluster"}


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
@pytest.mark.parametrize("text", [DENSE, STATIC], ids=["symbolic", "static"])
def test_graph_is_copied_once_for_a_set_of_shapes(executor: str, text: str) -> None:
    graphs: list[Graph] = []  # kept alive, so that no two have the same id
    session = compile_text(
        text, executor=executor, after_pass=lambda _, graph: graphs.append(graph)
    )
    graphs.clear()
    session.run({"x": np.zeros((2, 8), np.float32)})
    assert len({id(graph) for graph in graphs}) == 1
    graphs.clear()
    session.run({"x": np.zeros((2, 8), np.float32)})
    assert graphs == []  # the plan is there


@pytest.mark.parametrize("text", [DENSE, STATIC], ids=["symbolic", "static"])
def test_compiling_leaves_the_graph_of_the_session_as_it_was(text: str) -> None:
    session = compile_text(text)
    before = [node.op.name for node in session.model.graph.nodes]
    session.run({"x": np.zeros((2, 8), np.float32)})
    assert [node.op.name for node in session.model.graph.nodes] == before


def test_passes_run_in_the_order_of_the_pipeline() -> None:
    names: list[str] = []
    session = compile_text(DENSE, after_pass=lambda step, _: names.append(step.name))
    names.clear()
    session.run({"x": np.zeros((2, 8), np.float32)})
    optimized = [step.name for step in OPTIMIZE]
    assert names[: len(optimized)] == optimized
    lowered = [step.name for step in LOWER]
    assert names[-len(lowered) :] == lowered


def test_shapes_that_the_model_cannot_run_with_raise_invalid_input() -> None:
    session = compile_text(
        """g (float[N] x, float[M] z) => (float[K] y) { y = Add(x, z) }""", executor="linear"
    )
    with pytest.raises(ps.InvalidInput, match=r"the model cannot run with \(x: float32\[2\]"):
        session(np.zeros(2, np.float32), np.zeros(3, np.float32))
