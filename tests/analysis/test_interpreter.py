"""The plain interpreter, and what it relies on: kernels that give what they say they give."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

import penstock as ps
from penstock.analysis import interpreter as interpreter
from penstock.analysis.interpreter import evaluate
from penstock.analysis.type_inference import infer_types
from penstock.core.types import type_of
from penstock.ir.graph import Node
from tests.support.graphs import interpret
from tests.support.onnx_text import graph_from_text


def test_values_of_outer_graphs_are_read_where_they_are_needed():
    graph = graph_from_text(
        """g (float[2] x, bool c, int64 n) => (float[2] y) {
            a = Neg(x)
            y = If (c) <then_branch = t () => (float[2] p) {
                    p = Loop (n, , a) <body = b (int64 i, bool d, float[2] v) => (bool e, float[2] w)
                        { e = Identity(d) w = Add(v, a) }> },
                else_branch = e () => (float[2] x) { }>
        }"""
    )
    x = np.array([1, 2], np.float32)
    (y,) = interpret(graph, [x, np.array(True), np.array(2)])
    assert y.tolist() == [-3, -6]
    (y,) = interpret(graph, [x, np.array(False), np.array(2)])
    assert y.tolist() == [1, 2]


def test_rows_of_rank_zero_are_arrays():
    graph = graph_from_text(
        """g (string[3] x) => (string[3] y) {
            y = Scan <num_scan_inputs = 1, body = b (string s) => (string t) { t = StringConcat(s, s) }> (x)
        }"""
    )
    (y,) = interpret(graph, [np.array(["a", "", "bc"], object)])
    assert y.tolist() == ["aa", "", "bcbc"]


@pytest.mark.parametrize(
    ("limit", "condition", "rows"), [(3, 1, 3), (0, 1, 0), (-2, 1, 0), (3, 0, 0)]
)
def test_a_loop_of_no_iterations_gives_its_initial_values(limit, condition, rows):
    graph = graph_from_text(
        """g (float[2] x, int64 n, bool c) => (float[2] y, float[K, 2] k) {
            y, k = Loop (n, c, x) <body = b (int64 i, bool d, float[2] v) => (bool e, float[2] w, float[2] v)
                { e = Identity(d) w = Add(v, v) }> }"""
    )
    infer_types(graph)  # which says what rows there are none of
    y, k = interpret(graph, [np.ones(2, np.float32), np.array(limit), np.array(bool(condition))])
    assert y.tolist() == [2**rows] * 2
    assert k.shape == (rows, 2)


# What kernels promise, for one case of each operation in the suite.


def leaves(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from leaves(element)


@cache
def cases() -> dict[str, Any]:
    with np.errstate(all="ignore"):
        found = load_model_tests(kind="node")
    first: dict[str, Any] = {}
    for case in found:
        key = "+".join(sorted({node.op_type for node in case.model.graph.node}))
        if case.data_sets:
            first.setdefault(key, case)
    return first


def value_of(data: Any) -> Any:
    """A value of a data set: arrays, lists of them, and tensors of dtypes NumPy does not have."""
    if isinstance(data, list):
        return [value_of(element) for element in data]
    if isinstance(data, onnx.TensorProto):
        return numpy_helper.to_array(data)
    if isinstance(data, np.ndarray) and data.dtype.kind in "US":
        return data.astype(object)
    return data if data is None else np.asarray(data)


@pytest.mark.costly
def test_kernels_write_no_input_and_share_no_memory_unless_they_are_views(monkeypatch):
    seen: set[str] = set()

    def watched(node: Node, inputs: list[Any]) -> tuple[Any, ...]:
        types = [
            None if v is None else type_of(x) for v, x in zip(node.inputs, inputs, strict=True)
        ]
        copies = [array.tobytes() for array in leaves(inputs)]
        results = evaluate(node, inputs)
        seen.add(node.op.full_name)
        assert len(results) == len(node.outputs), node
        assert [array.tobytes() for array in leaves(inputs)] == copies, f"{node} writes an input"
        if not node.op.compile(node, types).view:
            # A list may hold what it was given; plans copy that first.
            mine = [x for x in results if isinstance(x, np.ndarray)]
            for i, array in enumerate(mine):
                for other in (*mine[:i], *leaves(inputs)):
                    assert not np.shares_memory(array, other), f"{node} shares memory"
        return results

    monkeypatch.setattr(interpreter, "evaluate", watched)
    for case in cases().values():
        try:
            graph = ps.load(case.model).graph
        except ps.Unsupported:
            continue
        for given, _ in case.data_sets:
            with np.errstate(all="ignore"):
                interpret(graph, [value_of(x) for x in given])
    assert len(seen) > 150
