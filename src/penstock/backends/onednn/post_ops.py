"""Post-ops: what a primitive does to its result before it writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.backends.onednn.eltwise_algorithms import (
    BINARY,
    COMMUTATIVE,
    ELTWISE,
    Eltwise,
)
from penstock.backends.onednn.layouts import broadcasts
from penstock.core.records import dataclass, replace
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value

PRELU = "prelu"
BROADCASTING_PRELU = 7
"""the version since which the slopes of PRelu broadcast"""


@dataclass(frozen=True, slots=True)
class PostOp:
    """A function of each element, or of the result and a tensor of the ``OpDesc``, by index."""

    eltwise: Eltwise | None = None
    binary: str = ""
    tensor: int = -1


def post_ops_of(
    nodes: Sequence[Node],
    index: Mapping[Value, int],
    tensors: Sequence[TensorType | None],
) -> tuple[PostOp, ...] | None:
    """The post-ops that the nodes behind the first are; None if post-ops do not express them.
    ``index`` maps the values that come from outside the nodes to ``tensors``."""
    (value,) = nodes[0].outputs
    assert value is not None
    type_ = value.type
    if not isinstance(type_, TensorType) or not type_.static:
        return None
    ops: list[PostOp] = []
    for node in nodes[1:]:
        (output,) = node.outputs
        assert value is not None and output is not None
        # A post-op writes where the result lies: it may not broadcast that to another shape.
        if not isinstance(output.type, TensorType) or output.type.shape != type_.shape:
            return None
        chain = ELTWISE[node.op.name](node) if node.op.name in ELTWISE else None
        if chain is not None and node.inputs[0 if node.inputs[0] is value else -1] is value:
            ops += map(PostOp, chain)
        else:
            binary = _binary(node, value, index)
            operand = tensors[binary[-1].tensor] if binary else None
            if operand is None or not broadcasts(operand.dims, type_.dims):
                return None
            ops += binary
        value = output
    return tuple(ops)


def _binary(node: Node, value: Value, index: Mapping[Value, int]) -> list[PostOp]:
    """A binary operation of the result and another tensor, as post-ops; empty if it is none."""
    if len(node.inputs) != 2 or None in node.inputs:
        return []
    first = node.inputs[0] is value
    other = node.inputs[1 if first else 0]
    assert other is not None
    name = BINARY.get(node.op.name)
    if node.op.name == "PRelu" and first and node.op.since >= BROADCASTING_PRELU:
        name = PRELU
    if name is None or other not in index:
        return []
    operand = PostOp(binary=name, tensor=index[other])
    if first or name in COMMUTATIVE:
        return [operand]
    if name == "sub":
        return [PostOp(Eltwise("linear", -1.0)), replace(operand, binary="add")]
    return []  # the quotient of an operand by the result would be rounded twice
