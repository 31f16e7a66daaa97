"""Kernels whose results count against the budget of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.core.types import TensorType, type_of
from penstock.executors.control import Control
from penstock.frontends.load import load
from penstock.host.current_run import Budget, BudgetError, working_for
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import fused
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


def of_tensorflow(name: str, inputs: Sequence[np.ndarray], **attrs: Any) -> Node:
    count = {"CombinedNonMaxSuppression": 4, "NonMaxSuppression": attrs.get("outputs", 1)}
    outputs = [Value(f"y{i}") for i in range(count.get(name, 1))]
    values = [Value(f"x{i}", type_of(x)) for i, x in enumerate(inputs)]
    return Node(standard(name, TENSORFLOW), values, outputs, attrs)


IMAGE, BLOCK, PAIRS = (
    np.ones((4, 4, 4, 2), np.float32),
    np.array([2, 2]),
    np.array([[1, 1], [0, 2]]),
)
WHOLE = np.array([5, 7])
BOXES = [np.ones((2, 3, 1, 4), np.float32), np.ones((2, 3, 2), np.float32)]
LIMITS = [np.array(x) for x in (3, 50, 0.5, 0.0)]
COMBINED = "CombinedNonMaxSuppression"
SIZED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Fill", [WHOLE, np.float32(1)], {}),
    ("LinSpace", [np.float32(0), np.float32(1), np.int32(9)], {}),
    ("OneHot", [WHOLE, np.int32(9), np.float32(1), np.float32(0)], {"axis": 0}),
    ("ScatterNd", [np.array([[1, 2]]), np.ones(1, np.float32), WHOLE], {}),
    ("ConcatV2", [IMAGE, IMAGE[:, :1], IMAGE, np.int32(-3)], {}),
    ("Pack", [IMAGE, IMAGE], {"axis": 1}),
    ("GatherV2", [IMAGE, np.zeros(9, np.int32), np.int32(2)], {}),
    ("Slice", [IMAGE, np.array([0, 1, 0, 0]), np.array([-1, 2, 4, 1])], {}),
    ("SpaceToBatchND", [IMAGE, BLOCK, PAIRS], {}),
    ("BatchToSpaceND", [IMAGE, BLOCK, PAIRS], {}),
    ("MirrorPad", [IMAGE[0, 0], PAIRS], {"mode": "SYMMETRIC"}),
    ("MatrixDiag", [IMAGE], {}),
    ("MatrixDiagV3", [IMAGE, *map(np.int32, ([-2, 1], 6, -1)), np.float32(0)], {}),
    ("MatrixDiagV3", [IMAGE, *map(np.int32, (3, 2, 5)), np.float32(0)], {}),
    ("MatrixDiagPartV3", [IMAGE, np.int32([-1, 0]), np.float32(0)], {}),
    ("MatrixDiagPartV3", [IMAGE, np.int32([1]), np.float32(0)], {}),
    (COMBINED, [*BOXES, *LIMITS], {"pad_per_class": False, "clip_boxes": True}),
    (COMBINED, [*BOXES, *LIMITS], {"pad_per_class": True, "clip_boxes": False}),
    ("NonMaxSuppression", [BOXES[0][0, :, 0], BOXES[1][0, :, 0], np.array(70)],
     {"pad_to_max_output_size": True, "outputs": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inputs", "attrs"), SIZED)
def test_result_bytes_are_those_of_the_kernels_results(name, inputs, attrs):
    given = [np.asarray(x) for x in inputs]
    node = of_tensorflow(name, given, **attrs)
    results = node.op.compile(node, [type_of(x) for x in given]).function(*given)
    arrays = results if isinstance(results, tuple) else (results,)
    assert result_bytes(node, given) == sum(x.nbytes for x in arrays)


@pytest.mark.parametrize(
    ("name", "inputs", "nbytes"),
    [
        ("SpaceToBatchND", [IMAGE, BLOCK, np.array([[0, 8_000_000], [0, 0]])], 1_024_000_512),
        ("SpaceToBatchND", [IMAGE, BLOCK, np.array([[0, -1], [0, 0]])], 0),
        ("BatchToSpaceND", [IMAGE, BLOCK, np.array([[0, 9], [0, 0]])], 0),
        ("LinSpace", [np.float32(0), np.float32(1), np.int64(2**40)], 2**42),
        ("LinSpace", [np.float32(0), np.float32(1), np.int64(0)], 0),
        ("ScatterNd", [np.array([[0]]), np.ones(1, np.float32), np.array([2**40])], 2**42),
        ("MatrixDiagPartV3", [IMAGE, np.int32([-(2**30), 0]), np.float32(0)], 2**37 + 128),
        ("MatrixDiagPartV3", [IMAGE, np.int32([9]), np.float32(0)], 0),
    ],
)
def test_result_bytes_of_inputs_that_ask_for_much_or_are_refused(name, inputs, nbytes):
    given = [np.asarray(x) for x in inputs]
    assert result_bytes(of_tensorflow(name, given), given) == nbytes


def test_result_bytes_of_a_fused_node_follow_from_its_parts() -> None:
    a, b = [Value(name, TensorType(np.dtype(np.int64), (None, None))) for name in "ab"]
    add = Node(standard("Add"), [a, b], [Value("s", TensorType(np.dtype(np.int64), (None, None)))])
    out = Value("y", TensorType(np.dtype(np.float32), (None, None)))
    node = fused([add, Node(standard("Cast"), [add.outputs[0]], [out], {"to": 1})])
    inputs = [np.zeros((1, 500), np.int64), np.zeros((300, 1), np.int64)]
    assert result_bytes(node, inputs) == 4 * 300 * 500
