"""Signatures of nodes: what they tell apart, and what they leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.core.types import BOOL, FLOAT32, INT64, STRING, SequenceType, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.tuning.node_signature import NodeSignature, node_signature, tensor_bytes
from tests.support.graphs import any_op


def tensor(
    name: str, *dims: int | str | None, dtype: np.dtype = FLOAT32, const: Any = None
) -> Value:
    return Value(name, TensorType(dtype, dims), const=const)


def add(*dims: int, **attrs: Any) -> Node:
    return Node(
        any_op("Add"), [tensor("a", *dims), tensor("b", *dims)], [tensor("c", *dims)], attrs
    )


def test_node_signature_has_operation_dtypes_shapes_and_bytes():
    assert node_signature(add(2, 3)) == NodeSignature(
        "Add", "float32, float32 -> float32", "2x3, 2x3 -> 2x3", 3 * 24
    )


def test_node_signature_marks_omitted_inputs_constants_and_attributes():
    inputs = [tensor("x", 8), None, tensor("w", 2, dtype=INT64, const=np.zeros(2, np.int64))]
    attrs = {"mode": "edge", "pads": [1, 2], "eps": 0.5, "value": np.ones(9), "exact": True}
    node = Node(any_op("Op", "com.example"), inputs, [tensor("y", 0), None], attrs)
    signature = node_signature(node)
    assert signature is not None
    shapes, digest = signature.exact.split("; ")
    assert shapes == "8, _, 2= -> 0, _"
    assert len(digest) == 32 and int(digest, 16)
    assert replace(signature, exact="") == NodeSignature(
        "com.example.Op", "float32, _, int64 -> float32, _", "", 32 + 16
    )


def test_node_signature_of_other_attributes_differs_and_shows_none_of_them():
    nodes = [add(2, 3), add(2, 3, offset=[13.25]), add(2, 3, offset=[13.5]), add(2, 3, key="13.25")]
    signatures = [node_signature(node) for node in nodes]
    assert len(set(signatures)) == 4
    assert not any(word in repr(signatures) for word in ("13.", "offset", "key"))


def test_node_signature_ignores_operation_version():
    nodes = [
        Node(any_op("Relu", "", version), [tensor("x", 4)], [tensor("y", 4)]) for version in (6, 14)
    ]
    assert node_signature(nodes[0]) == node_signature(nodes[1])


def test_node_signature_keeps_positions_of_omitted_values():
    x, y = tensor("x", 4), tensor("y", 4)
    forms = [([x, None, x], [y]), ([x, x, None], [y]), ([x, x], [y]), ([x], [x, y])]
    result = {node_signature(Node(any_op("Clip"), *form)) for form in forms}
    assert len(result) == len(forms)


@pytest.mark.parametrize(
    "kind",
    [
        TensorType(FLOAT32, ("N", 3)),
        TensorType(FLOAT32, (None,)),
        TensorType(FLOAT32, None),
        TensorType(None, (2,)),
        TensorType(STRING, (2,)),
        SequenceType(TensorType(FLOAT32, (2,))),
    ],
    ids=str,
)
def test_node_signature_without_static_numeric_type_is_none(kind):
    x, y = tensor("x", 4), Value("y", kind)
    assert tensor_bytes(y) is None
    assert node_signature(Node(any_op("Op"), [x, y], [x])) is None
    assert node_signature(Node(any_op("Op"), [x], [y])) is None
    assert (tensor_bytes(x), tensor_bytes(None)) == (16, 0)


def test_node_signature_of_node_with_graphs_is_none():
    attrs = {"then_branch": Graph([], [], [])}
    node = Node(any_op("If"), [tensor("c", dtype=BOOL)], [tensor("y", 2)], attrs)
    assert node_signature(node) is None


def test_long_node_signatures_are_shortened_and_stay_distinct():
    many = [add(2, 3, pads=[*range(1000), last]) for last in (1, 2)]
    wide = [Node(any_op("Sum"), [tensor("x", 4)] * n, [tensor("y", 4)]) for n in (1000, 1001)]
    result = [node_signature(node) for node in (*many, *wide)]
    assert len({each.exact for each in result}) == 4
    assert len({each.dtypes for each in result}) == 3
    assert all(len(each.exact) < 500 and len(each.dtypes) < 500 for each in result)
    assert result == [node_signature(node) for node in (*many, *wide)]
