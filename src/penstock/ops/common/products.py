"""Matrix products that take long, in parts between which the run may be stopped."""

from __future__ import annotations

import math

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.ir.op import Attrs, Dims, Work

MOST_FLOPS = 4_000_000_000
"""Operations of one part: a tenth of a second, on one core."""
# Integers, which no library multiplies, take NumPy 1 to 30 ns each, by the stride of columns.
_SLOWER = 160


def is_long(flops: float, dtype: np.dtype) -> bool:
    """Whether a product of ``flops`` operations is more than one part."""
    return flops > (MOST_FLOPS if dtype.kind in "fc" else MOST_FLOPS / _SLOWER)


def product_in_parts(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """``np.matmul(a, b, out)``; of operands of two dims or more halved as long as it is large."""
    work = 2 * out.size * a.shape[-1]
    # A single sum has no axis of the result to halve.
    if not is_long(work, out.dtype) or out.size == 1 or min(a.ndim, b.ndim) < 2:
        checkpoint()
        np.matmul(a, b, out)
        return
    # The longest: the squarer the parts are, the fewer times the operands are read.
    axis = int(np.argmax(out.shape)) - out.ndim
    middle = out.shape[axis] // 2
    for half in (slice(middle), slice(middle, None)):
        left = a if axis == -1 else _part(a, axis, half)
        right = b if axis == -2 else _part(b, axis, half)
        product_in_parts(left, right, _part(out, axis, half))


def _part(x: np.ndarray, axis: int, half: slice) -> np.ndarray:
    """Half of ``x`` along an axis that counts from the last; all of it where it is broadcast."""
    if -axis > x.ndim or x.shape[axis] == 1:
        return x
    return np.moveaxis(np.moveaxis(x, axis, 0)[half], 0, axis)


# Floating-point operations of products, from shapes; a multiplication and an addition are two.


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
