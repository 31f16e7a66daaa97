"""Kernels of 8-bit codes beside the interpreter of programs: tables, and pairs of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns
from penstock.backends.native.formulas import Term
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.ir.graph import Node
from penstock.ir.layout import packed_strides
from penstock.ops.common.fixed_point import pair_multipliers

BLOCK = 2**14  # elements of an item
# As in c/core/elementwise.c.
_PARTS, _SLACK, MOST_REPEATED = 14, 4, 4096
_FINEST = 16  # scales of the result that those of operands may be, to be rounded once


def check_order(dims: tuple[int, ...], strides: Sequence[tuple[int, ...] | None]) -> None:
    """Raise ``UnsupportedError`` unless tensors of these dims have no gaps and the same order of
    dims in memory, so that they can be read as vectors."""
    own = [packed_strides(dims, 1) if s is None else s for s in strides]
    wide = [axis for axis, dim in enumerate(dims) if dim > 1]
    wide.sort(key=lambda axis: -own[0][axis])
    packed = packed_strides([dims[axis] for axis in wide], 1)
    if any(tuple([s[axis] for axis in wide]) != packed for s in own):
        raise UnsupportedError


@family("tflite.CodeTable", work=by_memory)
def code_table_call(site: Site) -> NativeCall | None:
    """A CodeTable of a tensor without gaps, which its result has in the same order."""
    x, output = site.input(0), site.output()
    if x is None or not x.elements or output.dtype is None:
        return None
    size = x.elements
    table = np.array(site.node.attrs["table"]).astype(output.dtype).view(np.uint8)

    def restrided(strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
        check_order(x.dims, strides)
        words = (Tensor(0), site.result(), table, size, BLOCK)
        item_ns = rows_ns(2 * BLOCK)
        return NativeCall("table", words, -(-size // BLOCK), item_ns, restrided=restrided)

    return restrided([None, None])


def pair_of_codes(result: Term) -> tuple[str, tuple[Term, Term], np.ndarray] | None:
    """The kernel of a sum or product of two tensors of codes, not negative perhaps, as codes of the
    same type; with the two, and the parameters in the order of C. None if it is something else."""
    kind, least = result.kind, -math.inf
    if result.operation != f"quantize_{kind}":
        return None
    real, *parameters = result.arguments
    if real.operation == "max_f4" and real.arguments[1].constant == 0:
        real, least = real.arguments[0], 0.0
    operands = real.arguments if real.operation in ("add_f4", "mul_f4") else ()
    if any(operand.operation != f"dequantize_{kind}" for operand in operands) or not operands:
        return None
    (x, *x_parameters), (y, *y_parameters) = [operand.arguments for operand in operands]
    numbers = [v.constant for v in (*x_parameters, *y_parameters, *parameters)]
    if x.operation or y.operation or None in numbers:
        return None
    if not all(1e-30 < scale < 1e30 for scale in numbers[::2] if scale is not None):
        return None
    return f"{real.operation[:3]}_codes_{kind}", (x, y), np.array([*numbers, least], np.float32)


def arithmetic_numbers(node: Node, order: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The factors and numbers of a pair of codes and their result, whose places among the scales of
    ``node`` are given, in the order of C."""
    attrs = node.attrs
    a, b, y = np.array([attrs["scales"][i] for i in order], np.float64)
    zeros = [attrs["zero_points"][i] for i in order]
    *by, of_result = pair_multipliers(attrs["operation"], attrs["scales"])
    low, high = attrs["code_limits"]
    shift = int(of_result.shifts)
    if shift < -13:
        raise UnsupportedError  # products would wrap
    more = 0.5 ** (shift + 1) if shift > 0 else 0.0
    factors, signs, terms, added = [a * b / y, 0.0], [1, 1], [(0, 0)] * 2, float(zeros[2])
    if by:
        signs = [-1 if attrs["operation"] == "Sub" and i == 1 else 1 for i in order[:2]]
        factors = [signs[0] * a / y, signs[1] * b / y]
        added -= factors[0] * zeros[0] + factors[1] * zeros[1]
        terms = [(int(by[i].numbers), int(by[i].shifts)) for i in order[:2]]
    # Terms are rounded to parts of the larger scale, which matter where the result's is small.
    exactly = max(map(abs, factors)) > _FINEST
    numbers = [zeros[0], *terms[0], zeros[1], *terms[1], zeros[2], int(of_result.numbers), shift]
    numbers += [low, high, *signs, int(exactly)]
    # So that what is added is positive, and its last 8 bits are the code.
    bounds = [added + 256.5, low + 256.5, high + 256.5]
    parts = np.array([*factors, *bounds, more]) * 2**_PARTS
    parts[2] += _SLACK
    return parts.astype(np.float32), np.array(numbers, np.int32)
