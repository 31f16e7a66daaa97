"""Images with channels last, in operations of ONNX, which have channels first.

The operation is put between two Transposes, which are views and cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.frontends.common.builder import NodeBuilder
from penstock.ir.graph import Value


def channels_first_order(rank: int) -> list[int]:
    """The axes of [N, ..., C] in the order [N, C, ...]."""
    return [0, rank - 1, *range(1, rank - 1)]


def channels_last_order(rank: int) -> list[int]:
    """The axes of [N, C, ...] in the order [N, ..., C]."""
    return [0, *range(2, rank), 1]


def to_channels_first(b: NodeBuilder, image: Value, rank: int) -> Value:
    """Emit a Transpose of ``image`` from [N, ..., C] to [N, C, ...]."""
    return b.emit("Transpose", [image], {"perm": channels_first_order(rank)})


def emit_final_channels_last(
    b: NodeBuilder,
    op: str,
    inputs: Sequence[Value],
    attrs: Mapping[str, Any],
    rank: int,
    domain: str = "",
) -> None:
    """Emit an operation with channels first, then the final Transpose of its result to [N, ..., C]
    for the first output."""
    result = b.emit(op, inputs, attrs, domain=domain)
    order = channels_last_order(rank)
    b.emit_final("Transpose", [result], {"perm": order}, outputs=b.outputs[:1])
