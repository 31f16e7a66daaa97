"""ONNX Runtime's operations on 8-bit codes, written as ONNX's operations on the real numbers that
they represent, between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32
from penstock.frontends.onnx.microsoft_rules import rewrites
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict
from penstock.ops.common.dtypes import INT8, UINT8
from penstock.ops.registry import TFLITE


def _reals(b: NodeUpgrade, i: int, scale: Value | None = None) -> Value:
    """Return the real numbers of input ``i``, which is followed by its scale and zero point."""
    inputs = [b.input(i), b.input(i + 1) if scale is None else scale, b.optional(i + 2)]
    return b.emit("DequantizeLinear", inputs)


def _zero(b: NodeUpgrade, i: int, codes: int) -> Value:
    """Return the zero point at input ``i``, by default 0, with the type of the ``codes``."""
    zero = b.optional(i)
    return b.like(0, b.input(codes)) if zero is None else zero


def _become_quantized(b: NodeUpgrade, y: Value, i: int) -> None:
    """Become the codes of ``y``, with the scale at input ``i`` and the zero point at the next."""
    b.become("QuantizeLinear", [y, b.input(i), _zero(b, i + 1, 0)])


@rewrites("QLinearAdd", "QLinearMul")
def qlinear_binary(b: NodeUpgrade) -> None:
    _become_quantized(b, b.emit(b.op.removeprefix("QLinear"), [_reals(b, 0), _reals(b, 3)]), 6)


@rewrites("QLinearLeakyRelu", "QLinearSigmoid")
def qlinear_function(b: NodeUpgrade) -> None:
    op = b.op.removeprefix("QLinear")
    _become_quantized(b, b.emit(op, [_reals(b, 0)], b.kept(op, b.attrs)), 3)


@rewrites("QLinearSoftmax")
def qlinear_softmax(b: NodeUpgrade) -> None:
    """Before version 13 of ONNX, over all axes from ``axis`` on."""
    x, axis, rank = _reals(b, 0), b.attrs.get("axis", -1), b.rank(0)
    if b.attrs.get("opset", 13) >= 13 or axis in (-1, (rank or 0) - 1):
        y = b.emit("Softmax", [x], axis=axis)
    else:
        y = b.emit("Softmax", [b.emit("Flatten", [x], axis=axis)], axis=-1)
        y = b.emit("Reshape", [y, b.emit("Shape", [x])])
    _become_quantized(b, y, 3)


def _recoded(b: NodeUpgrade, i: int, target: int) -> Value:
    """Return the codes of input ``i`` for the scale that is input ``target``."""
    own, wanted = ([b.input(j), _zero(b, j + 1, i)] for j in (i + 1, target))
    if all(np.array_equal(*map(_known, pair)) for pair in zip(own, wanted, strict=True)):
        return b.input(i)
    return b.emit("QuantizeLinear", [_reals(b, i), *wanted])


def _known(value: Value) -> Any:
    """Return the array of a constant, else the value itself."""
    return value if value.const is None else value.const.reshape(-1)


@rewrites("QLinearConcat")
def qlinear_concat(b: NodeUpgrade) -> None:
    count = len(b.inputs)
    if count < 5 or count % 3 != 2:
        raise ValueError(f"{count} inputs are not 2 and some triples")
    b.become("Concat", [_recoded(b, i, 0) for i in range(2, count, 3)], {"axis": b.attrs["axis"]})


@rewrites("QLinearWhere")
def qlinear_where(b: NodeUpgrade) -> None:
    b.become("Where", [b.input(0), _recoded(b, 1, 7), _recoded(b, 4, 7)])


# Means of codes minus their zero points, so that exact ties between equal scales stay ties.


def _become_mean_of_codes(b: NodeUpgrade, axes: Sequence[int], keepdims: int) -> bool:
    """Become an IntegerMean if scales and zero points are known, and return whether they are."""
    values = (b.input(1), b.input(3), _zero(b, 2, 0), _zero(b, 4, 0))
    numbers = [v.const.item() for v in values if v.const is not None and v.const.size == 1]
    rank = b.rank(0)
    if rank is None or b.dtype(0) not in (INT8, UINT8) or len(numbers) < 4:
        return False
    attrs: AttrDict = {"axes": sorted(axis % rank for axis in axes), "keepdims": keepdims}
    attrs |= {"scales": numbers[:2], "zero_points": numbers[2:], "form": "mean"}
    b.emit_final("IntegerMean", [b.input(0)], attrs, domain=TFLITE)
    return True


def _become_mean(b: NodeUpgrade, axes: Sequence[Value | None] = ()) -> None:
    op = b.op.removeprefix("QLinear")
    x, last = _reals(b, 0, b.constant(1.0, FLOAT32)), bool(b.attrs.get("channels_last"))
    x = _turned(b, x, (0, -1, *range(1, (b.rank(0) or 2) - 1)), "a...b->ab...") if last else x
    y = b.emit(op, [x, *axes], b.kept(op, b.attrs))
    y = _turned(b, y, (0, *range(2, b.rank(0) or 2), 1), "ab...->a...b") if last else y
    ratio = b.emit("Div", [b.input(3), b.input(1)])
    b.become("QuantizeLinear", [y, ratio, _zero(b, 4, 0)])


def _turned(b: NodeUpgrade, x: Value, axes: Sequence[int], equation: str) -> Value:
    """Return ``x`` with its axes permuted as ``equation`` says, for any rank."""
    rank = b.rank(0)
    if rank is None:
        return b.emit("Einsum", [x], equation=equation)
    return b.emit("Transpose", [x], perm=[axis % rank for axis in axes])


@rewrites("QLinearAveragePool", "QLinearGlobalAveragePool")
def qlinear_pool(b: NodeUpgrade) -> None:
    first = 1 if b.attrs.get("channels_last") else 2
    spatial = range(first, first + (b.rank(0) or 2) - 2)
    if b.op == "QLinearAveragePool" or not _become_mean_of_codes(b, spatial, 1):
        _become_mean(b)


@rewrites("QLinearReduceMean")
def qlinear_reduce_mean(b: NodeUpgrade) -> None:
    axes = b.attrs.get("axes")
    every = axes or range(b.rank(0) or 0)
    if not _become_mean_of_codes(b, every, b.attrs.get("keepdims", 1)):
        _become_mean(b, [b.constant(axes)] if axes else [])
