"""TensorFlow's arithmetic as far as it is not ONNX's, with NumPy's broadcasting.

Quotients of integers by zero are errors, of the run and only if it comes to them. Gradients of
functions take what the function gave (``y``) or took, and what flows back (``dy``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Infer, Kernel, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.elementwise import infer_unary, ufunc
from penstock.ops.common.shape_rules import (
    broadcast_to,
    broadcast_type,
    same_dtype,
    same_type,
    tensor,
)
from penstock.ops.registry import TENSORFLOW, operator
from penstock.types import BOOL, FLOAT32, ShapeError, TensorType, Type

Function = Callable[..., Any]


def _register(name: str, function: Function, infer: Infer) -> None:
    @operator(name, domain=TENSORFLOW, infer=infer)
    def compile(node: Node, types: Types) -> Kernel:
        return Kernel(function)


# Quotients and remainders.


def _no_zeros(y: np.ndarray) -> None:
    if not y.all():
        raise ShapeError("Integer division by zero")


def _whole(function: Function) -> Function:
    def divide(x: np.ndarray, y: np.ndarray) -> Any:
        _no_zeros(y)
        return function(x, y)

    return divide


def _towards_zero(x: np.ndarray, y: np.ndarray) -> Any:
    rest = np.fmod(x, y)
    return np.subtract(x, rest) // y


_QUOTIENTS: dict[str, tuple[Function, Function]] = {
    # of integers, and of floats
    "FloorDiv": (_whole(np.floor_divide), lambda x, y: np.floor(np.true_divide(x, y))),
    "FloorMod": (_whole(np.mod), np.mod),
    "TruncateDiv": (_whole(_towards_zero), lambda x, y: np.trunc(np.true_divide(x, y))),
    "TruncateMod": (_whole(np.fmod), np.fmod),
    "Div": (_whole(_towards_zero), np.true_divide),
}


def _quotient(name: str) -> None:
    whole, real = _QUOTIENTS[name]

    @operator(name, domain=TENSORFLOW, infer=broadcast_type)
    def compile(node: Node, types: Types) -> Kernel:
        dtype = same_dtype(types, (0, 1))
        if dtype is not None:
            return Kernel(whole if dtype.kind in "iu" else real)
        return Kernel(lambda x, y: whole(x, y) if x.dtype.kind in "iu" else real(x, y))


for _name in _QUOTIENTS:
    _quotient(_name)


# Two inputs.


def _no_nan(x: np.ndarray, y: np.ndarray) -> Any:
    return np.where(y == 0, np.zeros((), x.dtype), np.true_divide(x, y))


def _times(function: Function) -> Function:
    def times(x: np.ndarray, y: np.ndarray) -> Any:
        return np.where(x == 0, np.zeros((), x.dtype), function(x, y))

    return times


_BINARY: dict[str, Function] = {
    "Atan2": np.arctan2,
    "DivNoNan": _no_nan,
    "MulNoNan": lambda x, y: np.where(y == 0, np.zeros((), x.dtype), np.multiply(x, y)),
    "SquaredDifference": lambda x, y: np.square(np.subtract(x, y)),
    "Xdivy": _times(np.true_divide),
    "Xlogy": _times(lambda x, y: np.multiply(x, np.log(y))),
    "LeftShift": np.left_shift,
    "RightShift": np.right_shift,
    # Gradients, from y and dy.
    "TanhGrad": lambda y, dy: dy * (1 - y * y),
    "SigmoidGrad": lambda y, dy: dy * y * (1 - y),
    "SqrtGrad": lambda y, dy: dy * y.dtype.type(0.5) / y,
    "RsqrtGrad": lambda y, dy: dy * y.dtype.type(-0.5) * (y * y * y),
    "ReciprocalGrad": lambda y, dy: -dy * y * y,
    "InvGrad": lambda y, dy: -dy * y * y,
    # Gradients, from dy and x.
    "ReluGrad": lambda dy, x: np.where(x > 0, dy, np.zeros((), dy.dtype)),
    "Relu6Grad": lambda dy, x: np.where((x > 0) & (x < 6), dy, np.zeros((), dy.dtype)),
}
for _name, _function in _BINARY.items():
    _register(_name, _function, broadcast_type)


@operator("NotEqual", domain=TENSORFLOW, infer=broadcast_to(BOOL), strings=True)
def not_equal(node: Node, types: Types) -> Kernel:
    return ufunc(np.not_equal, 2)


@operator("ApproximateEqual", domain=TENSORFLOW, infer=broadcast_to(BOOL))
def approximate_equal(node: Node, types: Types) -> Kernel:
    tolerance = node.attrs["tolerance"]
    return Kernel(lambda x, y: np.abs(x - y) < tolerance)


# One input.


def _like(dtype: np.dtype | None) -> Infer:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        type_ = tensor(types, 0)
        return (TensorType(dtype or type_.dtype, type_.shape),)

    return infer


_UNARY: dict[str, Function] = {
    "Expm1": np.expm1,
    "Log1p": np.log1p,
    "Rint": np.rint,
    "Rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "OnesLike": np.ones_like,
    "Conj": np.conjugate,
}
for _name, _function in _UNARY.items():
    _register(_name, _function, same_type)
_register("ZerosLike", np.zeros_like, infer_unary(lambda _: 0))
_register("IsFinite", np.isfinite, _like(BOOL))


def _part_type(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = tensor(types, 0)
    dtype = None if type_.dtype is None else np.empty(0, type_.dtype).real.dtype
    return (TensorType(dtype, type_.shape),)


_register("ComplexAbs", np.abs, _part_type)
_register("Real", lambda x: np.array(x.real), _part_type)
_register("Imag", lambda x: np.array(x.imag), _part_type)


@operator("CheckNumerics", domain=TENSORFLOW, infer=same_type, pure=False)
def check_numerics(node: Node, types: Types) -> Kernel:
    message = node.attrs.get("message", "")

    def function(x: np.ndarray) -> np.ndarray:
        if not np.isfinite(x).all():
            raise ShapeError(f"{message}: the tensor has Inf or NaN values")
        return x.copy()

    return Kernel(function)


@operator("L2Loss", domain=TENSORFLOW, infer=lambda t, a, c: (TensorType(tensor(t, 0).dtype, ()),))
def l2_loss(node: Node, types: Types) -> Kernel:
    return Kernel(lambda x: np.square(x).sum(dtype=x.dtype) * x.dtype.type(0.5))


# Biases.


def _infer_bias_grad(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = tensor(types, 0)
    if type_.shape is None:
        return (TensorType(type_.dtype),)
    return (TensorType(type_.dtype, (type_.shape[_channels(attrs, len(type_.shape))],)),)


def _channels(attrs: Attrs, rank: int) -> int:
    if rank < 2:
        raise ShapeError(f"a tensor with a bias has two dims or more, not {rank}")
    return 1 if attrs.get("data_format") == "NCHW" else rank - 1


@operator("BiasAddGrad", domain=TENSORFLOW, infer=_infer_bias_grad)
def bias_grad(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray) -> Any:
        channels = _channels(node.attrs, x.ndim)
        return x.sum(axis=tuple([i for i in range(x.ndim) if i != channels]), dtype=x.dtype)

    return Kernel(function)


# Truth.


def _infer_truth(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(BOOL, ()),)


@operator("ToBool", domain=TENSORFLOW, infer=_infer_truth, strings=True)
def to_bool(node: Node, types: Types) -> Kernel:
    """What an If takes for true: a scalar that is not 0 or "", or else a tensor with elements."""
    return Kernel(lambda x: np.bool_(x[()] if x.ndim == 0 else x.size))


@operator(
    "BranchIndex", domain=TENSORFLOW, infer=lambda types, attrs, consts: (TensorType(INT32, ()),)
)
def branch_index(node: Node, types: Types) -> Kernel:
    """Which branch a Case takes: the last one where there is none of that number."""
    last = node.attrs["branches"] - 1

    def function(x: np.ndarray) -> Any:
        if x.size != 1:
            raise ShapeError(f"the index of a branch is a scalar, not of shape {x.shape}")
        index = int(x.reshape(()))
        return np.int32(index if 0 <= index < last else last)

    return Kernel(function)


@operator("Assert", domain=TENSORFLOW, pure=False, strings=True)
def assert_true(node: Node, types: Types) -> Kernel:
    shown = node.attrs.get("summarize", 3)

    def function(condition: np.ndarray, *data: np.ndarray) -> None:
        if condition.size != 1:
            raise ShapeError(f"a condition is a scalar, not of shape {condition.shape}")
        if not condition.reshape(())[()]:
            values = " ".join(f"[{_summary(x, shown)}]" for x in data)
            raise ShapeError(f"assertion failed: {values}")

    return Kernel(function)


def _summary(x: np.ndarray, shown: int) -> str:
    flat = x.reshape(-1)
    count = flat.size if shown < 0 else shown
    return " ".join(map(str, flat[:count].tolist())) + ("..." if flat.size > count else "")


# 8-bit numbers as floats.


def _infer_fake(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(FLOAT32, tensor(types, 0).shape),)


def _nudged(low: Any, high: Any, bits: int, narrow: bool) -> tuple[Any, Any, Any]:
    """Range and step moved so that 0 is one of the numbers."""
    first, last = np.float32(int(narrow)), np.float32(2**bits - 1)
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    step = (high - low) / (last - first)
    zero = first - low / step
    zero = np.clip(np.floor(zero + np.float32(0.5)), first, last)
    return (first - zero) * step, (last - zero) * step, step


def _fake(x: np.ndarray, low: Any, high: Any, bits: int, narrow: bool) -> Any:
    low, high, step = _nudged(low, high, bits, narrow)
    shifted = np.clip(x, low, high) - low
    return (np.floor(shifted / step + np.float32(0.5)) * step + low).astype(np.float32)


@operator("FakeQuantWithMinMaxArgs", domain=TENSORFLOW, infer=_infer_fake)
def fake_quant_args(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    bits, narrow = attrs["num_bits"], bool(attrs["narrow_range"])
    return Kernel(lambda x: _fake(x, attrs["min"], attrs["max"], bits, narrow))


@operator("FakeQuantWithMinMaxVars", domain=TENSORFLOW, infer=_infer_fake)
@operator("FakeQuantWithMinMaxVarsPerChannel", domain=TENSORFLOW, infer=_infer_fake)
def fake_quant_vars(node: Node, types: Types) -> Kernel:
    bits, narrow = node.attrs["num_bits"], bool(node.attrs["narrow_range"])
    return Kernel(lambda x, low, high: _fake(x, low, high, bits, narrow))


# Gradients of broadcasting.


@operator("BroadcastGradientArgs", domain=TENSORFLOW)
def broadcast_gradient(node: Node, types: Types) -> Kernel:
    """Along which axes to add up what flows back to each of two operands."""

    def function(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rank = max(a.size, b.size)
        dims = [[1] * (rank - x.size) + x.tolist() for x in (a, b)]
        axes: list[list[int]] = [[], []]
        for axis, (x, y) in enumerate(zip(*dims, strict=True)):
            if x != y and 1 not in (x, y):
                raise ShapeError(f"shapes {a.tolist()} and {b.tolist()} do not broadcast")
            if x == 1:
                axes[0].append(axis)
            if y == 1:
                axes[1].append(axis)
        if dims[0] == dims[1]:
            axes = [[], []]
        return np.array(axes[0], a.dtype), np.array(axes[1], a.dtype)

    return Kernel(function)
