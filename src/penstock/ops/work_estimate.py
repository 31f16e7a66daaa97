"""How much work a node is: floating-point operations, from its types alone."""

from __future__ import annotations

import math

import numpy as np

from penstock.ir.graph import Node
from penstock.ops.internal.fused import is_fused, parts
from penstock.types import TensorType, Type

_OBJECT = np.dtype(object)

# Of one core, roughly: floating-point operations of products per second, bytes per second through
# memory, and seconds for a call that does nothing.
_FLOPS_PER_S = 20e9
_BYTES_PER_S = 5e9
_CALL_S = 1e-6


def flops(node: Node) -> int:
    """Estimate the floating-point operations of one run of ``node``; 0 if its shapes are unknown.

    A multiplication and an addition count as two, as in the published figures of networks.
    """
    if is_fused(node):
        return sum(flops(part) for part in parts(node))
    outputs = [_dims(v.type) for v in node.outputs if v is not None]
    if not outputs or outputs[0] is None:
        return 0
    inputs = [None if v is None else _dims(v.type) for v in node.inputs]
    elements = max(math.prod(dims) for dims in (outputs[0], *inputs) if dims is not None)
    if node.op.work is None:
        return elements
    try:
        return node.op.work(node.attrs, inputs, outputs[0]) or elements
    except (IndexError, ValueError):  # inputs that the operation does not take: the run fails
        return 0


def seconds(node: Node) -> float:
    """Estimate the time of one run of ``node`` on one core, for want of measurements."""
    values = [*node.inputs, *node.outputs]
    types = [v.type for v in values if v is not None and v.const is None]
    moved = sum(t.nbytes for t in types if isinstance(t, TensorType) and t.static)
    return _CALL_S + moved / _BYTES_PER_S + flops(node) / _FLOPS_PER_S


def _dims(type_: Type) -> tuple[int, ...] | None:
    if isinstance(type_, TensorType) and type_.static and type_.dtype != _OBJECT:
        return type_.shape  # type: ignore[return-value] # all of it is known
    return None
