"""Keys that equal nodes share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.op import frozen
from penstock.ops import find
from penstock.ops.internal.fused import fused
from penstock.ops.internal.node_key import node_key

LARGE = np.ones((64, 64), np.float32)


def value(*dims: int | None, name: str = "x") -> Value:
    return Value(name, TensorType(FLOAT32, dims))


def product(weights: Value, rows: int | None = None, name: str = "y") -> Node:
    out = value(rows, 64, name=name)
    return Node(find("MatMul"), [value(rows, 64), weights], [out], name=name)


def softmax(axis: int = -1, inputs: int = 64) -> Node:
    return Node(find("Softmax"), [value(None, inputs)], [value(None, inputs)], {"axis": axis})


def reshape(rows: int) -> Node:
    shape = Value("shape", TensorType(np.dtype(np.int64), (2,), (rows, None)))
    return Node(find("Reshape"), [value(None, 64), shape], [value(None, None)])


def chain(op: str = "Relu", swapped: bool = False) -> Node:
    x, y, between = value(None, 8), value(None, 8, name="y"), value(None, 8, name="between")
    first = Node(find("Sub"), [y, x] if swapped else [x, y], [between])
    second = Node(find(op), [between], [value(None, 8, name="z")])
    return fused([first, second]) if not swapped else fused_as(first, second, [x, y])


def fused_as(first: Node, second: Node, inputs: list[Value]) -> Node:
    """The fused node with its inputs in the given order."""
    whole = fused([first, second])
    region = whole.attrs["region"]
    ordered = type(region)(region.nodes, tuple(inputs))
    return whole.derived(inputs, whole.outputs, {**whole.attrs, "region": ordered})


def test_copies_of_a_node_share_a_key() -> None:
    weights = Value("w", const=LARGE)
    assert node_key(product(weights)) == node_key(product(weights))
    assert node_key(chain()) == node_key(chain())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: product(Value("w", const=LARGE)), lambda: product(Value("w", const=LARGE))),
        (lambda: softmax(-1), lambda: softmax(0)),
        (lambda: softmax(inputs=64), lambda: softmax(inputs=32)),
        (lambda: reshape(4), lambda: reshape(8)),
        (chain, lambda: chain(swapped=True)),
        (chain, lambda: chain("Sigmoid")),
    ],
    ids=["weights", "attribute", "type", "known contents", "operands", "operation"],
)
def test_other_nodes_have_other_keys(one: Callable[[], Node], other: Callable[[], Node]) -> None:
    first, second = one(), other()  # both alive, since large constants count by identity
    assert node_key(first) != node_key(second)


def test_nodes_of_other_names_have_other_keys() -> None:
    weights = Value("w", const=LARGE)
    assert node_key(product(weights, name="a")) != node_key(product(weights, name="b"))


def test_small_constants_are_compared_by_content() -> None:
    small = [product(Value("w", const=np.full((64, 1), x, np.float32))) for x in (1, 1, 2)]
    assert node_key(small[0]) == node_key(small[1]) != node_key(small[2])


def test_nodes_with_state_have_no_key() -> None:
    node = Node(find("RandomNormal"), [], [value(2, 2)], {"shape": [2, 2]})
    assert node_key(node) is None


def test_attributes_without_hash_have_no_key() -> None:
    node = softmax()
    node.attrs["own"] = {}
    assert node_key(node) is None


def test_numbers_that_compare_equal_are_told_apart() -> None:
    assert frozen(0.0) != frozen(-0.0)
    assert frozen([0.0]) != frozen([-0.0])
    assert frozen([1.0]) != frozen([1])
