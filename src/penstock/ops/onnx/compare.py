"""Comparisons, logic, bits and selection, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Compile, Consts, Infer, Kernel, Types
from penstock.ops.common.dtypes import BITS
from penstock.ops.common.elementwise import (
    BLOCK,
    carried,
    in_blocks,
    infer_unary,
    typed_scalar,
    ufunc,
)
from penstock.ops.common.shape_rules import (
    broadcast_shapes,
    broadcast_to,
    broadcast_type,
    same_dtype,
    tensor,
)
from penstock.ops.registry import operator
from penstock.types import BOOL, STRING, Dim, TensorType, Type


def _infer_equal(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    def each(a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return int(a == b)
        if a is not None and a == b:
            return 1
        # A name stands for a dim, which is never negative.
        low = min([c for c in (a, b) if isinstance(c, int)], default=0)
        return 0 if low < 0 and None not in (a, b) else None

    (type_,) = broadcast_to(BOOL)(types, attrs, consts)
    assert isinstance(type_, TensorType)
    return (carried(type_, types, consts, each),)


def _of(function: Callable[..., Any], inputs: int) -> Compile:
    def compile(node: Node, types: Types) -> Kernel:
        return ufunc(function, inputs)

    return compile


_BINARY: tuple[tuple[str, int, Callable[..., Any], Infer], ...] = (
    ("Equal", 7, np.equal, _infer_equal),
    ("Less", 7, np.less, broadcast_to(BOOL)),
    ("LessOrEqual", 12, np.less_equal, broadcast_to(BOOL)),
    ("Greater", 7, np.greater, broadcast_to(BOOL)),
    ("GreaterOrEqual", 12, np.greater_equal, broadcast_to(BOOL)),
    ("And", 7, np.logical_and, broadcast_to(BOOL)),
    ("Or", 7, np.logical_or, broadcast_to(BOOL)),
    ("Xor", 7, np.logical_xor, broadcast_to(BOOL)),
    ("BitwiseAnd", 18, np.bitwise_and, broadcast_type),
    ("BitwiseOr", 18, np.bitwise_or, broadcast_type),
    ("BitwiseXor", 18, np.bitwise_xor, broadcast_type),
)
for _name, _since, _function, _infer in _BINARY:
    _strings = _name == "Equal"
    operator(_name, since=_since, infer=_infer, elementwise=True, strings=_strings)(
        _of(_function, 2)
    )


def _infer_predicate(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(BOOL, tensor(types, 0).shape),)


operator("Not", since=1, infer=_infer_predicate, elementwise=True)(_of(np.logical_not, 1))
operator("BitwiseNot", since=18, infer=infer_unary(lambda a: ~a), elementwise=True)(
    _of(np.invert, 1)
)
operator("IsNaN", since=9, infer=_infer_predicate, elementwise=True)(_of(np.isnan, 1))


@operator("IsInf", since=10, infer=_infer_predicate, elementwise=True)
def is_inf(node: Node, types: Types) -> Kernel:
    positive = node.attrs.get("detect_positive", 1)
    negative = node.attrs.get("detect_negative", 1)
    if positive and negative:
        return ufunc(np.isinf, 1)
    if not positive and not negative:

        def nothing(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
            out = np.empty(x.shape, BOOL) if out is None else out
            out[...] = False
            return out

        return Kernel(nothing, nothing)

    def one_sign(x: np.ndarray, out: np.ndarray | None = None) -> Any:
        # Dtypes without infinities turn this constant into a NaN, which equals nothing.
        return np.equal(x, typed_scalar(math.inf if positive else -math.inf, x.dtype), out)

    return ufunc(one_sign, 1)


@operator("BitShift", since=11, infer=broadcast_type, elementwise=True)
def bit_shift(node: Node, types: Types) -> Kernel:
    """NumPy defines shifts by negative amounts, or by all bits and more, as ONNX does."""
    return ufunc(np.left_shift if node.attrs["direction"] == "LEFT" else np.right_shift, 2)


# Where


def _infer_where(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    def each(condition: Dim, x: Dim, y: Dim) -> Dim:
        if isinstance(condition, int):
            return x if condition else y
        return x if x == y else None

    shape = broadcast_shapes([tensor(types, i).shape for i in range(3)])
    type_ = TensorType(same_dtype(types, (1, 2)), shape)
    return (carried(type_, types, consts, each),)


@operator("Where", since=9, infer=_infer_where, elementwise=True, moves=True, strings=True)
def where(node: Node, types: Types) -> Kernel:
    type_ = _infer_where(types, node.attrs, ())[0]
    assert isinstance(type_, TensorType)
    large = type_.static and math.prod(type_.dims) >= BLOCK // 2
    if large and type_.dtype is not None and type_.dtype != STRING and type_.dtype.itemsize in BITS:
        size = min(math.prod(type_.dims), BLOCK)
        workspace = 2 * size * type_.dtype.itemsize
        return Kernel(_select_bits, _select_bits, inplace=(1, 2), workspace=workspace)
    return Kernel(np.where, _select, inplace=(2,))


def _select(c: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, y)
    np.copyto(out, x, where=c)


def _select_bits(
    c: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    out: np.ndarray | None = None,
    work: np.ndarray | None = None,
) -> np.ndarray:
    """``np.where`` without branches, which an irregular condition makes ten times as slow."""
    if out is None:
        out = np.empty(np.broadcast_shapes(c.shape, x.shape, y.shape), x.dtype)
    bits = BITS[x.dtype.itemsize]
    values = (c, x.view(bits), y.view(bits))
    in_blocks(_choose, values, out.view(bits), bits, 2, work)
    return out


def _choose(truth: Any, x: Any, y: Any, out: Any, mask: Any, changes: Any) -> None:
    """A mask of ones or zeros picks the bits in which x differs from y."""
    np.negative(truth, mask)
    np.bitwise_xor(x, y, changes)
    np.bitwise_and(changes, mask, changes)
    np.bitwise_xor(changes, y, out)
