"""Kernels of 8-bit codes other than interpreted programs: lookup tables, and binary operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError, Word
from penstock.backends.native.terms import BLOCK, Term
from penstock.core.records import dataclass, field
from penstock.ir.graph import Node
from penstock.ir.layout import strides_of
from penstock.ops.common.fixed_point import TERM_BITS, Multiplier, pair_multipliers, rescaled

# As in c/core/elementwise.c.
_PARTS, _SLACK, MOST_REPEATED = 14, 4, 4096
_LARGEST_CODE = 262144


def check_order(dims: tuple[int, ...], strides: Sequence[tuple[int, ...] | None]) -> None:
    """Raise ``UnsupportedError`` unless tensors of these dims are dense with the same order of dims
    in memory, so that they can be read as vectors."""
    own = [strides_of(dims, 1) if s is None else s for s in strides]
    wide = [axis for axis, dim in enumerate(dims) if dim > 1]
    wide.sort(key=lambda axis: -own[0][axis])
    packed = strides_of(tuple([dims[axis] for axis in wide]), 1)
    if any(tuple([s[axis] for axis in wide]) != packed for s in own):
        raise UnsupportedError


@family("tflite.CodeTable", work=by_memory)
def code_table_call(site: Site) -> NativeCall | None:
    """CodeTable of a dense tensor in any order of dims, which its result shares."""
    x, output = site.tensor(0), site.output()
    if not x.elements or output.dtype is None:
        return None
    size, is_byte = x.elements, output.dtype.itemsize == 1
    table = np.array(site.node.attrs["table"]).astype(output.dtype).view(np.uint8)

    def restrided(strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
        check_order(x.dims, strides)
        words = (Tensor(0), site.result(), table, size, BLOCK)
        name, item_ns = ("table", 2 * BLOCK) if is_byte else ("wide_table", 4 * BLOCK)
        return NativeCall(name, words, -(-size // BLOCK), rows_ns(item_ns), restrided=restrided)

    return restrided([None, None])


@dataclass(frozen=True, eq=False)
class CodePair:
    """A sum, difference or product of two quantized tensors, with a result of the same dtype: the
    kernel, the scales and zero points of operands and result, and its least and largest code."""

    kernel: str
    operation: str
    scales: Sequence[float]
    zeros: Sequence[int]
    limits: Sequence[int]
    known: dict[bool, tuple[np.ndarray, np.ndarray] | None] = field(default_factory=dict)
    """cached numbers for the operands in their order, and swapped"""

    def numbers(self, order: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the factors and numbers that the kernel takes, for operands in this ``order``;
        None where int32 overflows."""
        turned = order[0] == 1
        if turned not in self.known:
            self.known[turned] = self._numbers(order)
        return self.known[turned]

    def _numbers(self, order: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
        a, b, y = np.array([self.scales[i] for i in order], np.float32).astype(np.float64).tolist()
        zeros, shift, factor = [self.zeros[i] for i in order], 0, a * b / y
        factors, added, signs = [factor, -zeros[0] * factor], float(zeros[2]), [1, 1]
        size = 2 * 255**2 * factor + 1792
        if self.operation != "Mul":
            signs = [-1 if self.operation == "Sub" and i == 1 else 1 for i in order[:2]]
            factors = [signs[0] * a / y, signs[1] * b / y]
            added -= factors[0] * zeros[0] + factors[1] * zeros[1]
            size = 4 * 255 * (a + b) / y + 2 * abs(added + 257)
        # Error of float32, in 1/1024 parts; products may also underflow.
        exactly = size > 768 * _SLACK or a * b < 1e-30
        swapped = self.kernel.startswith("integer_add") and a < b
        numbers = [*zeros, *self.limits, int(exactly), swapped]
        if self.kernel.startswith("integer"):
            *terms, of_result = pair_multipliers(self.operation, [a, b, y])
            if terms and not exactly and self._are_ties_away():
                numbers[5] = 2
            shift = int(of_result.shifts)
            if shift < (0 if terms else -12):
                return None
            if swapped:
                numbers[:2], signs = zeros[1::-1], signs[::-1]
            numbers += [-(sign < 0) for sign in signs]
            numbers += _of_term(terms[not swapped]) if terms else [0] * 4
            numbers += _of_result(of_result)
        away = 0.5 ** (shift + 1) if shift > 0 else 0.0
        away = zeros[2] + 0.5 if numbers[5] == 2 else away
        parts = np.array([*factors, added + 0.5, away]) * 2**_PARTS
        parts[2] += _SLACK
        divided = np.array([a, b, y, np.float32(1) / np.float32(y), _LARGEST_CODE * y])
        return np.append(parts, divided).astype(np.float32), np.array(numbers, np.int32)

    def _are_ties_away(self) -> bool:
        """Whether many sums are near ties, all of which round away from zero."""
        a, b, y = np.array(self.scales, np.float32).astype(np.float64)
        sign, codes = -1 if self.operation == "Sub" else 1, np.arange(-128, 128)
        ones, others = (codes + 128 * self.kernel.endswith("u1") - zero for zero in self.zeros[:2])
        for step in (16, 1):  # sample pairs first
            real = (ones[::step, None] * a + sign * others * b) / y
            near = np.abs(real - np.floor(real) - 0.5) < 2 * _SLACK / 2**_PARTS
            if near.mean() < 1 / 256:
                return False
        *by, by_result = pair_multipliers(self.operation, self.scales)
        ones, others = (rescaled(x << TERM_BITS, by[i]) for i, x in enumerate((ones, others)))
        result = rescaled((ones[:, None] + sign * others)[near], by_result)
        return np.array_equal(result, np.trunc(real[near] + np.copysign(0.501, real[near])))


def _of_term(by: Multiplier) -> list[int]:
    """Return the numbers of the C struct TERM: the multiplier in two parts, the right shift of the
    product (at least 1), and its rounding constant."""
    number, shift = _bounded(by)
    if not shift:
        number, shift = 2 * number, 1
    return [number >> 16 << 5, number & 0xFFFF, 1 << shift >> 1, shift]


def _of_result(by: Multiplier) -> list[int]:
    """Return the numbers of the C struct RESCALED."""
    number, shift = _bounded(by)
    right = max(shift, 0)
    half = 1 << right >> 1
    return [3 - min(shift, 0), number, 4 * half + 2, -4 if right else 0, right + 2]


def _bounded(by: Multiplier) -> tuple[int, int]:
    """Return a multiplier and a right shift, (0, 28) if all integers below 2**28 become 0."""
    number, shift = int(by.numbers), int(by.shifts)
    return (0, 28) if shift > 28 else (number, shift)


def integer_pair(node: Node, kind: str) -> CodePair:
    """Return the binary operation of an IntegerArithmetic node."""
    attrs, operation = node.attrs, node.attrs["operation"]
    kernel = f"integer_{'mul' if operation == 'Mul' else 'add'}_{kind}"
    return CodePair(kernel, operation, attrs["scales"], attrs["zero_points"], attrs["code_limits"])


def pair_of_codes(result: Term, held: Sequence[Term], least: int, most: int) -> CodePair | None:
    """Return the sum or product, optionally clipped at 0, of the two quantized tensors ``held``, as
    codes from ``least`` to ``most``; None if ``result`` is something else."""
    kind = result.kind
    if result.operation != f"quantize_{kind}":
        return None
    real, *parameters = result.arguments
    if real.operation == "max_f4" and real.arguments[1].constant == 0:
        real, least = real.arguments[0], max(least, int(parameters[1].constant or 0))
    operands = real.arguments if real.operation in ("add_f4", "mul_f4") else ()
    terms = [o.arguments for value in held for o in operands if value in o.arguments[:1]]
    if len(terms) < 2 or any(operand.operation != f"dequantize_{kind}" for operand in operands):
        return None
    every = (*terms[0][1:], *terms[1][1:], *parameters)
    numbers = [v.constant for v in every if v.constant is not None]
    scales, zeros = numbers[::2], [int(zero) for zero in numbers[1::2]]
    if len(numbers) < 6 or not all(1e-30 < scale < 1e30 for scale in scales):
        return None
    operation = real.operation[:3]
    kernel = f"{operation}_codes_{kind}"
    return CodePair(kernel, operation.title(), scales, zeros, (least, most))


def pair_call(
    site: Site, pair: CodePair, read: Sequence[int], merged: tuple[list[int], list[list[int]]]
) -> NativeCall | None:
    """Return the call on two quantized tensors, inputs ``read``, that the kernel reads without
    copies; one may be broadcast along rows or columns of these merged dims. None for others."""
    dims, steps = merged
    dense, inner, size = strides_of(tuple(dims), 1), dims[-1], math.prod(dims)
    order = [0, 1, 2] if (*steps[0],) == dense else [1, 0, 2]
    x, y = [(*steps[i],) for i in order[:2]]
    ways = {dense: (0, 0)}
    if pair.kernel[-1] == "1":  # 8-bit codes
        ways |= {(0,) * len(dims): (1, 0), (0, 1): (inner, 0), (1, 0): (0, inner)}
    way = ways.get(y) if x == dense else None
    numbers = pair.numbers(order) if way is not None and way[0] <= MOST_REPEATED else None
    if numbers is None or way is None:
        return None
    words: tuple[Word, ...] = (*[Tensor(read[i]) for i in order[:2]], site.result())
    words += (*numbers, size, BLOCK, *way)
    return NativeCall(pair.kernel, words, -(-size // BLOCK), rows_ns(4 * BLOCK))
