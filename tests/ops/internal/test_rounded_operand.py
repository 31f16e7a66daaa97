"""Fused nodes that round the input of a product, and these nodes without that."""

import numpy as np

from penstock.core.types import FLOAT32, TensorType, dtypes
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import fused, parts, rounds_operand
from penstock.ops.internal.rounded_operand import without_rounding
from penstock.ops.registry import standard

REAL = TensorType(FLOAT32, (4, 4))


def nodes_of(*ops: str) -> list[Node]:
    """A chain of operations; those of two inputs read a constant, or x for "Add"."""
    x = value = Value("x", REAL)
    nodes = []
    for i, op in enumerate(ops):
        narrow = op == "Cast" and i == 0
        type_ = TensorType(dtypes()["bfloat16"], (4, 4)) if narrow else REAL
        second = {"MatMul": [Value("w", const=np.ones((4, 4), FLOAT32))], "Add": [x]}.get(op, [])
        attrs = {"to": 16 if narrow else 1} if op == "Cast" else {}
        output = Value(f"v{i}", type_)
        nodes.append(Node(standard(op), [value, *second], [output], attrs, name=op))
        value = output
    return nodes


def test_node_without_rounding_has_the_same_inputs_and_reads_x_itself():
    node = fused(nodes_of("Cast", "Cast", "MatMul", "Add"))
    producers = [part.outputs[0].producer for part in parts(node)]
    plain = without_rounding(node)
    assert rounds_operand(node) and not rounds_operand(plain)
    product, add = parts(plain)
    assert plain.inputs == node.inputs == list(plain.attrs["region"].inputs)
    assert product.inputs == node.inputs
    assert add.inputs == [product.outputs[0], node.inputs[0]]
    assert [part.outputs[0].producer for part in parts(node)] == producers
    assert node.outputs[0].producer is node


def test_other_fused_nodes_round_nothing():
    for ops in (["Cast", "Cast"], ["MatMul", "Relu"], ["Cast", "MatMul"], ["Cast", "Cast", "Relu"]):
        assert not rounds_operand(fused(nodes_of(*ops)))
    assert not rounds_operand(nodes_of("MatMul")[0])
