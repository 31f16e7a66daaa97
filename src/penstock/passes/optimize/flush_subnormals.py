"""Subnormal weights of products and convolutions become 0.

Training with weight decay leaves them in channels that nothing reads. Processors of Intel multiply
them many times slower: a detector of text took 94 ms instead of 23, for the same output.
"""

from __future__ import annotations

import numpy as np

from penstock.core.types import FLOAT32
from penstock.ir.graph import Graph, Value
from penstock.ir.layout import unbroadcast
from penstock.passes.context import Pass, PassContext

_SMALLEST = np.finfo(np.float32).smallest_normal
_LARGE = 2.0**-100
"""of a weight beside which subnormal ones do not count: its product with an input is rounded by
more than their products with inputs of the same size are"""
_BLOCK = 1 << 15  # elements that a cache holds with what is computed of them


class FlushSubnormals(Pass):
    """Replace float32 weights with subnormal numbers among larger ones; these become zeros."""

    operations = frozenset(
        ("Conv", "ConvTranspose", "GRU", "Gemm", "GruCell", "LSTM", "LstmCell", "MatMul", "RNN")
    )

    def run(self, graph: Graph, context: PassContext) -> bool:
        known: dict[Value, Value] = {}
        changed = False
        for node in graph.walk():
            if node.op.name not in self.operations:
                continue
            for i, value in enumerate(node.inputs):
                # A constant that was released has been through this pass.
                held = value.const if value is not None and value.is_held else None
                if value is None or held is None or held.dtype != FLOAT32:
                    continue
                if value not in known:
                    flushed = without_subnormals(held)
                    same = flushed is held
                    known[value] = value if same else Value(value.name, const=flushed)
                if known[value] is not value:
                    node.inputs[i], changed = known[value], True
        return changed


def without_subnormals(weights: np.ndarray) -> np.ndarray:
    """``weights`` of float32, without subnormal numbers that do not count beside others."""
    # Of what is repeated, one: a constant may be larger than memory.
    own = unbroadcast(weights)
    if not _has_subnormals(own.reshape(-1)):
        return weights
    magnitudes = np.abs(own)
    if not magnitudes.max() >= _LARGE:  # nor is NaN
        return weights
    return np.broadcast_to(np.where(magnitudes < _SMALLEST, FLOAT32.type(0), own), weights.shape)


def _has_subnormals(numbers: np.ndarray) -> bool:
    """Whether any of ``numbers`` is subnormal: without the sign, its bits are 1 to 2^23 - 1."""
    bits = numbers.view(np.uint32)
    # Twice that, and less 1, which takes zeros to the other end.
    for i in range(0, bits.size, _BLOCK):
        if ((bits[i : i + _BLOCK] << 1) - 1).min() < 2**24 - 1:
            return True
    return False
