"""Floating-point operations of products, from shapes; a multiplication and an addition are two."""

from __future__ import annotations

import math

from penstock.ir.op import Attrs, Dims, Work


def convolution_work(weights: int) -> Work:
    """The work of a convolution whose input ``weights`` is the filters [M, C / group, ...]."""

    def work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
        filters = inputs[weights]
        return 2 * math.prod(output) * math.prod(filters[1:]) if filters else 0

    return work


def deconvolution_work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    x, filters = inputs[:2]
    return 2 * math.prod(x) * math.prod(filters[1:]) if x and filters else 0


def product_work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    """The work of a product of matrices of which input 0 is the left one."""
    left = inputs[0]
    if not left:
        return 0
    inner = left[-2 if attrs.get("transA") and len(left) > 1 else -1]
    return 2 * math.prod(output) * inner


def recurrent_work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    """The work of a recurrent layer for x [steps, batch, ...] and both its weights."""
    x, weights, recurrence = inputs[:3]
    if not x or not weights or not recurrence:
        return 0
    return 2 * x[0] * x[1] * (math.prod(weights) + math.prod(recurrence))


def attention_work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    """The work of both products of attention with keys [..., positions, size]."""
    keys = inputs[1]
    return 4 * math.prod(output) * keys[-2] if inputs[0] and keys else 0
