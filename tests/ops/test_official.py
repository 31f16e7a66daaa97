"""Every kernel, in every form it has, on what flows through the official ONNX node cases.

``tests/test_onnx_backend.py`` runs the same cases as a user would, and compares with the results
wanted. Here each node is compiled for itself, so that each form is certain to run: allocating and
writing, for types and inputs that are known when compiling and that are not, from and into memory
of other strides, full of garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx.backend.test.runner import _normalize_tensor

from penstock.analysis.interpreter import evaluate
from penstock.core.errors import PenstockError
from penstock.core.types import ANY, TensorType
from penstock.frontends.onnx.importer import load_onnx
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.onnx.control_flow import is_control
from penstock.testing import assert_same, check_infer, check_into, epsilon
from tests.support.onnx_cases import node_cases
from tests.support.sweeps import drawn


@cache
def graphs() -> Mapping[str, tuple[Graph, Sequence[Any]]]:
    """The graph of every case, with its inputs."""
    found = {}
    for case in node_cases():
        try:
            graph = load_onnx(case.model).graph
        except PenstockError:  # what is not supported
            continue
        ((inputs, _), *_) = case.data_sets
        arrays = [_normalize_tensor(x) for x in inputs]
        arrays = [np.asarray(x) if isinstance(x, np.generic) else x for x in arrays]
        found[case.name] = graph, arrays
    return found


def variants(node: Node, values: Sequence[Any]) -> Iterator[Node]:
    """The node as it is, and with constants for all inputs but the first."""
    yield node
    if not any(isinstance(x, np.ndarray) for x in values[1:]):
        return
    inputs = [
        Value(value.name, const=x)
        if i and value is not None and isinstance(x, np.ndarray)
        else value
        for i, (value, x) in enumerate(zip(node.inputs, values, strict=True))
    ]
    outputs = [None if value is None else Value(value.name) for value in node.outputs]
    yield Node(node.op, inputs, outputs, node.attrs, name=node.name)


def check(node: Node, values: Sequence[Any]) -> Sequence[Any]:
    """All checks of one node; returns its outputs."""
    results = evaluate(node, values)
    if not node.op.pure:
        return results
    for variant in variants(node, values):
        known = evaluate(variant, values)
        unknown = [
            None if x is None else TensorType() if isinstance(x, np.ndarray) else ANY
            for x in values
        ]
        found = variant.op.compile(variant, unknown)(*values)
        free = found if len(node.outputs) != 1 else (found,)
        for want, value, *others in zip(results, node.outputs, known, free, strict=True):
            for other in others if value is not None else ():
                tolerance = epsilon(want.dtype) if isinstance(want, np.ndarray) else 1e-5
                assert_same(other, want, tolerance, tolerance)
        check_infer(variant, values, known)
        check_into(variant, values, known)
    return results


def compute_case(name: str, compute: Callable[[Node, list[Any]], Sequence[Any]]) -> None:
    """Call ``compute`` with each node of a case, up to one of control flow, and its inputs, which
    are what it returned before."""
    graph, inputs = graphs()[name]
    values = dict(zip(graph.inputs, inputs, strict=False))
    for node in graph.nodes:
        given = [
            None if v is None else v.const if v.const is not None else values[v]
            for v in node.inputs
        ]
        if is_control(node):
            return
        results = compute(node, given)
        values.update((v, x) for v, x in zip(node.outputs, results, strict=False) if v is not None)


@pytest.mark.parametrize("name", drawn(graphs(), 600))
def test_official_case_passes_in_every_form_of_kernel(name):
    compute_case(name, check)
