"""How much work a node is: floating-point operations, from its types alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from penstock.ir.graph import Node
from penstock.ops.internal.fused import is_fused, parts
from penstock.types import ANY, STRING, TensorType, Type

WORTH_THREADS = 500_000
"""operations of a node that are worth more than one thread: 5 us"""

# Of one core, roughly: floating-point operations of products per second, bytes per second through
# memory, and seconds for a call that does nothing.
_FLOPS_PER_S = 20e9
_BYTES_PER_S = 5e9
_CALL_S = 1e-6


def flops(node: Node) -> int:
    """Estimate the floating-point operations of one run of ``node``; 0 if its shapes are unknown. A
    multiplication and an addition count as two, as in the published figures of networks."""
    if is_fused(node):
        return sum([flops(part) for part in parts(node)])
    output = [*[v.type for v in node.outputs if v is not None], ANY][0]
    if not _is_static(output):
        return 0
    inputs = [ANY if v is None else v.type for v in node.inputs]
    elements = max([output.elements, *map(_elements, inputs)])
    if node.op.work is None:
        return elements
    dims = [t.dims if _is_static(t) else None for t in inputs]
    try:
        return node.op.work(node.attrs, dims, output.dims) or elements
    except (IndexError, ValueError):  # inputs that the operation does not take: the run fails
        return 0


def worth_threads(nodes: Iterable[Node]) -> bool:
    """Whether one of ``nodes`` computes enough to gain from more than one thread."""
    return any(not node.op.moves and flops(node) >= WORTH_THREADS for node in nodes)


def seconds(node: Node) -> float:
    """Estimate the time of one run of ``node`` on one core, for want of measurements."""
    values = [*node.inputs, *node.outputs]
    types = [v.type for v in values if v is not None and v.const is None]
    moved = sum([t.nbytes for t in types if isinstance(t, TensorType) and t.static])
    return _CALL_S + moved / _BYTES_PER_S + flops(node) / _FLOPS_PER_S


def _elements(type_: Type) -> int:
    """The number of elements of a tensor of numbers of static shape, -1 of all else."""
    if isinstance(type_, TensorType) and type_.dtype is not STRING:
        return type_.elements
    return -1


def _is_static(type_: Type) -> TypeGuard[TensorType]:
    return isinstance(type_, TensorType) and type_.static and type_.dtype is not STRING
