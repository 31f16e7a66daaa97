"""Kernels whose results count against the budget of a run."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.executors.control import Control
from penstock.frontends.load import load
from penstock.host.current_run import Budget, BudgetError, working_for
from penstock.ir.graph import Node
from penstock.ops.registry import TENSORFLOW, standard
from penstock.ops.result_bytes import counted, result_bytes
from tests.support.onnx_text import model_from_text


def node_of(text: str) -> Node:
    return load(model_from_text(text)).graph.nodes[0]


TILE = "g (float[N] x, int64[1] n) => (float[M] y) { y = Tile(x, n) }"
X = np.ones(500, np.float32)


def control_of(limit: int, max_dims: int = 64) -> Control:
    control = Control()
    control.budget = Budget(limit, max_dims=max_dims)
    return control


def test_result_bytes_follow_from_the_contents_of_inputs():
    node = node_of(TILE)
    assert result_bytes(node, [X, np.array([30])]) == 60_000
    assert result_bytes(node, [X, np.array([-1])]) == 0  # refused by the kernel


def test_counted_kernel_is_not_called_for_a_result_above_the_budget():
    calls = []
    kernel = counted(node_of(TILE), lambda *inputs: calls.append(inputs))
    with pytest.raises(BudgetError, match="60000 bytes"):
        working_for(control_of(50_000), kernel, X, np.array([30]))
    assert not calls
    kernel(X, np.array([30]))  # outside of a run
    assert len(calls) == 1


def test_counted_result_leaves_the_budget_when_it_is_freed():
    control = control_of(10_000)
    kernel = counted(node_of(TILE), np.tile)
    for _ in range(10):
        working_for(control, kernel, X, np.array([3]))
    first = working_for(control, kernel, X, np.array([3]))
    with pytest.raises(BudgetError):
        working_for(control, kernel, X, np.array([3]))
    assert first.nbytes == 6000


def test_counted_view_of_an_input_counts_nothing():
    control = control_of(2_000)
    kernel = counted(node_of("g (float[N] x) => (float[M] y) { y = Abs(x) }"), lambda x: x[1:])
    assert len(working_for(control, kernel, np.ones(1000, np.float32))) == 999


def test_counted_text_counts_with_its_characters():
    control = control_of(2_000)
    node = node_of("g (string[N] x) => (string[M] y) { y = StringConcat(x, x) }")
    kernel = counted(node, np.add)
    x = np.array(["a" * 700], object)
    with pytest.raises(BudgetError):
        for _ in range(3):
            x = working_for(control, kernel, x, x)


def test_counted_result_with_more_dims_than_the_limit_is_refused():
    kernel = counted(node_of(TILE), lambda x, n: x.reshape(1, 1, -1))
    with pytest.raises(BudgetError, match=r"3 dims, more than Limits.max_dims = 2"):
        working_for(control_of(10**6, 2), kernel, X, np.array([1]))


def test_result_bytes_of_space_to_batch_follow_from_its_padding():
    node = Node(standard("SpaceToBatchND", TENSORFLOW), [None] * 3, [None])
    x, block = np.ones((1, 4, 4, 2), np.float32), np.array([2, 2])
    assert result_bytes(node, [x, block, np.array([[0, 8_000_000], [0, 0]])]) == 256_000_128
    assert result_bytes(node, [x, block, np.array([[0, -1], [0, 0]])]) == 0  # refused by the kernel
