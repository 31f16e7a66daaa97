"""How much work a node is: floating-point operations, from its types alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.core.types import STRING, TensorType
from penstock.ir.graph import Node
from penstock.ops.internal.fused import FUSED

WORTH_THREADS = 500_000
"""operations of a node that are worth more than one thread: 5 us"""

WORTH_ROUNDING = 5_000_000
"""operations of a product from which on rounding its operands to bfloat16 saves time"""


def flops(node: Node) -> int:
    """Estimate the floating-point operations of one run of ``node``; 0 if its shapes are unknown. A
    multiplication and an addition count as two, as in the published figures of networks."""
    op = node.op
    if op is FUSED:
        return sum(map(flops, node.attrs["region"].nodes))
    # Asked for each node and each backend: few calls, instead of some for each value.
    output = node.outputs[0] if node.outputs else None
    if output is None:
        output = next(filter(None, node.outputs), None)
    types: list[Any] = [None if v is None else v.type for v in (*node.inputs, output)]
    shapes = [
        t.dims if t.__class__ is TensorType and t.static and t.dtype is not STRING else None
        for t in types
    ]
    result = shapes.pop()
    if result is None:
        return 0
    most = types.pop().elements
    for type_, shape in zip(types, shapes, strict=True):
        if shape is not None and type_.elements > most:
            most = type_.elements
    try:
        return op.work(node.attrs, shapes, result) or most if op.work is not None else most
    except (IndexError, ValueError):  # inputs that the operation does not take: the run fails
        return 0


def worth_threads(nodes: Iterable[Node]) -> bool:
    """Whether one of ``nodes`` computes or copies enough to gain from more than one thread."""
    return any(not node.op.view and flops(node) >= WORTH_THREADS for node in nodes)
