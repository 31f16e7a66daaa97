"""Weights that passes convert, kept for all graphs of a session: several may read the same ones."""

from __future__ import annotations

from penstock.core.records import dataclass, field
from penstock.ir.graph import Value


@dataclass(frozen=True)
class ConvertedWeights:
    """Constants by those that they were computed from."""

    widened: dict[Value, Value] = field(default_factory=dict)
    """in float32, by those in float16 and bfloat16"""
    halves: dict[tuple[Value, Value | None], Value | None] = field(default_factory=dict)
    """quantized weights in two parts, by these and their zero point"""
