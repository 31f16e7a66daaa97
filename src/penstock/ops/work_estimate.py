"""How much work a node is: floating-point operations, from its types alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.core.types import STRING, TensorType, Type
from penstock.ir.graph import Node
from penstock.ops.internal.fused import FUSED

WORTH_THREADS = 500_000
"""operations of a node that are worth more than one thread: 5 us"""

WORTH_ROUNDING = 5_000_000
"""operations of a product from which on rounding its operands to bfloat16 saves time"""

# Of one core, roughly: floating-point operations of products per second, bytes per second through
# memory, and seconds for a call that does nothing.
_FLOPS_PER_S = 20e9
_BYTES_PER_S = 5e9
_CALL_S = 1e-6

# Of copies with channels innermost, or behind: of one that copies nothing, and bytes of the image
# per second.
_COPY_S = 0.25e-6
_REORDERED_PER_S, _FEW_REORDERED_PER_S, _FEW_CHANNELS = 16e9, 6e9, 16
# Operations whose results have their dims in their own order in memory.
_OWN_ORDER = frozenset({"Gemm", "MatMul", "Reshape", "Unsqueeze"})
_OUTSIDE = ""
_OWN_ORDER_READERS = _OWN_ORDER | {"Flatten", "Squeeze", _OUTSIDE}


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


def seconds(node: Node) -> float:
    """Estimate the time of one run of ``node`` on one core, for want of measurements."""
    values = [*node.inputs, *node.outputs]
    types = [v.type for v in values if v is not None and not v.is_constant]
    moved = sum([t.nbytes for t in types if isinstance(t, TensorType) and t.static])
    return _CALL_S + moved / _BYTES_PER_S + flops(node) / _FLOPS_PER_S


def layout_seconds(node: Node) -> tuple[float, float]:
    """Estimate the time to bring the images of a convolution into the order of dims that a kernel
    wants: with their channels innermost, and in their own order.

    Images that enter the graph, and results of products, are in their own order; those of other
    nodes are as oneDNN's fast convolutions have them, channels innermost. What reads the result is
    not known; mostly another convolution: a quarter of the copy is charged to the first order, and
    the rest to the second.
    """
    x, y = node.inputs[0], node.outputs[0]
    of_x = 0.0 if x is None else _copy_seconds(x.type)
    of_y = 0.0 if y is None else _copy_seconds(y.type)
    source = None if x is None else x.producer
    if source is None or source.op.name in _OWN_ORDER:
        return of_x + of_y / 4, of_y * 3 / 4
    return of_y / 4, of_x + of_y * 3 / 4


def wanted_in_own_order(node: Node, readers: Sequence[Node | None]) -> float:
    """What ``layout_seconds`` charges too little for one order, and too much for the other, if all
    ``readers`` of the result, None for those outside of the graph, want its dims in their own
    order; else 0."""
    names = [_OUTSIDE if reader is None else reader.op.name for reader in readers]
    y = node.outputs[0]
    if node.op.name not in ("Conv", "ConvTranspose") or y is None:
        return 0.0
    return _copy_seconds(y.type) * 3 / 4 if _OWN_ORDER_READERS.issuperset(names) else 0.0


def _copy_seconds(image: Type) -> float:
    """The seconds of a copy; 0 of what is no tensor of numbers of static shape."""
    if not isinstance(image, TensorType) or not image.static or image.dtype is STRING:
        return 0.0
    few = len(image.dims) > 1 and image.dims[1] < _FEW_CHANNELS
    return _COPY_S + image.nbytes / (_FEW_REORDERED_PER_S if few else _REORDERED_PER_S)
