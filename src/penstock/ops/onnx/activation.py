"""Activation functions.

All but the simplest are formulas (see ``elementwise``): a function of dtype and attributes that
returns the body. Max and min with 0 are taken by ``clip``, which is several times faster than
``np.maximum`` with a scalar, and NaNs pass through both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Compile, Consts, Infer, Kernel, Types
from penstock.ops.common.dtypes import is_float
from penstock.ops.common.elementwise import (
    Body,
    clip,
    first_only,
    formula,
    largest,
    maximum,
    minimum,
    smallest,
    typed_scalar,
)
from penstock.ops.common.shape_rules import (
    check_broadcasts,
    check_shape,
    choice,
    same_dtype,
    same_type,
    tensor,
)
from penstock.ops.onnx.arithmetic import erf_argument
from penstock.ops.registry import MICROSOFT, operator
from penstock.types import TensorType, Type

Formula: TypeAlias = Callable[[np.dtype, Attrs], Body]

# Piecewise linear and exponential formulas: max(x, 0) plus something of min(x, 0).


def _positive(dtype: np.dtype) -> Callable[[Any, Any], Any]:
    """``max(x, 0)`` into an array."""
    zero, bound = typed_scalar(0, dtype), largest(dtype)
    return lambda x, out: clip(x, zero, bound, out)


def relu(dtype: np.dtype, attrs: Attrs) -> Body:
    return _positive(dtype)


def _negative(dtype: np.dtype) -> Callable[[Any, Any], Any]:
    """``min(x, 0)`` into an array."""
    bound, zero = smallest(dtype), typed_scalar(0, dtype)
    return lambda x, out: clip(x, bound, zero, out)


def _split(dtype: np.dtype, below: Callable[[Any], Any], gain: float = 1.0) -> Body:
    """``gain * max(x, 0) + below(min(x, 0))``; ``below`` works in place and leaves 0 alone."""
    positive, negative = _positive(dtype), _negative(dtype)
    factor = None if gain == 1.0 else typed_scalar(gain, dtype)

    def body(x: Any, out: Any, t: Any) -> None:
        negative(x, t)
        below(t)
        positive(x, out)
        if factor is not None:
            np.multiply(out, factor, out)
        np.add(out, t, out)

    return body


def _scaled_expm1(dtype: np.dtype, factor: float) -> Callable[[Any], None]:
    """``factor * (exp(t) - 1)`` in place, accurate near 0."""
    constant = typed_scalar(factor, dtype)

    def below(t: Any) -> None:
        np.expm1(t, t)
        np.multiply(t, constant, t)

    return below


def elu(dtype: np.dtype, attrs: Attrs) -> Body:
    return _split(dtype, _scaled_expm1(dtype, attrs.get("alpha", 1.0)))


def _selu(dtype: np.dtype, attrs: Attrs) -> Body:
    gamma = float(attrs.get("gamma", 1.0507009873554805))
    alpha = float(attrs.get("alpha", 1.6732632423543772))
    return _split(dtype, _scaled_expm1(dtype, gamma * alpha), gamma)


def _celu(dtype: np.dtype, attrs: Attrs) -> Body:
    alpha = typed_scalar(attrs.get("alpha", 1.0), dtype)
    positive, negative = _positive(dtype), _negative(dtype)

    def body(x: Any, out: Any, t: Any) -> None:
        np.divide(x, alpha, t)
        np.expm1(t, t)
        np.multiply(t, alpha, t)
        negative(t, t)
        positive(x, out)
        np.add(out, t, out)

    return body


def leaky_relu(dtype: np.dtype, attrs: Attrs) -> Body:
    slope = float(attrs.get("alpha", 0.01))
    alpha = typed_scalar(slope, dtype)
    if slope <= 0:
        return _split(dtype, lambda t: np.multiply(t, alpha, t))
    choose = maximum if slope <= 1 else minimum

    def body(x: Any, out: Any, t: Any) -> None:
        np.multiply(x, alpha, t)
        choose(x, t, out)

    return body


def softplus(dtype: np.dtype, attrs: Attrs) -> Body:
    """log(1 + exp(x)), without overflow as max(x, 0) + log(1 + exp(-|x|))."""
    positive = _positive(dtype)

    def body(x: Any, out: Any, t: Any) -> None:
        np.absolute(x, t)
        np.negative(t, t)
        np.exp(t, t)
        np.log1p(t, t)
        positive(x, out)
        np.add(out, t, out)

    return body


def _thresholded_relu(dtype: np.dtype, attrs: Attrs) -> Body:
    alpha, zero = typed_scalar(attrs.get("alpha", 1.0), dtype), typed_scalar(0, dtype)

    def body(x: Any, out: Any) -> None:
        dropped = np.logical_not(np.greater(x, alpha))  # NaNs too
        np.copyto(out, x)
        np.copyto(out, zero, where=dropped)

    return body


def _shrink(dtype: np.dtype, attrs: Attrs) -> Body:
    bound, bias = attrs.get("lambd", 0.5), attrs.get("bias", 0.0)
    low, high, shift = (
        typed_scalar(-bound, dtype),
        typed_scalar(bound, dtype),
        typed_scalar(bias, dtype),
    )
    zero = typed_scalar(0, dtype)

    def body(x: Any, out: Any, less: Any, more: Any) -> None:
        below, above = np.less(x, low), np.greater(x, high)
        np.subtract(x, shift, less)
        np.add(x, shift, more)
        np.copyto(out, zero)
        np.copyto(out, less, where=above)
        np.copyto(out, more, where=below)

    return body


# Formulas with a sigmoid: x / (1 + exp(-z)) for x * sigmoid(z).


def sigmoid(dtype: np.dtype, attrs: Attrs) -> Body:
    """1 / (1 + exp(-x)): where exp overflows, the quotient is the 0 that it should be."""
    one = typed_scalar(1, dtype)

    def body(x: Any, out: Any) -> None:
        np.negative(x, out)
        np.exp(out, out)
        np.add(out, one, out)
        np.divide(one, out, out)

    return body


def swish(dtype: np.dtype, attrs: Attrs) -> Body:
    return _swish(dtype, attrs.get("alpha", 1.0))


def _quick_gelu(dtype: np.dtype, attrs: Attrs) -> Body:
    return _swish(dtype, attrs.get("alpha", 1.702))


def _swish(dtype: np.dtype, alpha: float) -> Body:
    factor, one = typed_scalar(-alpha, dtype), typed_scalar(1, dtype)

    def body(x: Any, out: Any, t: Any) -> None:
        np.multiply(x, factor, t)
        np.exp(t, t)
        np.add(t, one, t)
        np.divide(x, t, out)

    return body


def _swiglu(dtype: np.dtype, attrs: Attrs) -> Body:
    gate = swish(dtype, attrs)

    def body(a: Any, b: Any, out: Any, t: Any) -> None:
        gate(a, t, t)
        np.multiply(t, b, out)

    return body


def _gelu_exact(dtype: np.dtype, attrs: Attrs) -> Body:
    """x (1 + erf(x / sqrt(2))) / 2, where (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))."""
    argument, one = erf_argument(dtype, math.sqrt(0.5), -2.0), typed_scalar(1, dtype)

    def body(x: Any, out: Any, p: Any, q: Any, u: Any) -> None:
        argument(x, p, q, u)
        np.exp(p, p)
        np.add(p, one, p)
        np.divide(x, p, out)

    return body


def _gelu_tanh(dtype: np.dtype, attrs: Attrs) -> Body:
    """x (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (x + 0.044715 x^3), by the same identity."""
    factor = -2 * math.sqrt(2 / math.pi)
    linear, cubic = typed_scalar(factor, dtype), typed_scalar(0.044715 * factor, dtype)
    one = typed_scalar(1, dtype)

    def body(x: Any, out: Any, t: Any) -> None:
        np.square(x, t)
        np.multiply(t, cubic, t)
        np.add(t, linear, t)
        np.multiply(t, x, t)
        np.exp(t, t)
        np.add(t, one, t)
        np.divide(x, t, out)

    return body


def _biased(make: Formula) -> Formula:
    """A formula of the sum of two inputs; it takes one scratch array more."""

    def made(dtype: np.dtype, attrs: Attrs) -> Body:
        inner = make(dtype, attrs)

        def body(x: Any, bias: Any, out: Any, total: Any, *scratch: Any) -> None:
            np.add(x, bias, total)
            inner(total, out, *scratch)

        return body

    return made


# Other formulas.


def hard_sigmoid(dtype: np.dtype, attrs: Attrs) -> Body:
    alpha, beta = (
        typed_scalar(attrs.get("alpha", 0.2), dtype),
        typed_scalar(attrs.get("beta", 0.5), dtype),
    )
    zero, one = typed_scalar(0, dtype), typed_scalar(1, dtype)

    def body(x: Any, out: Any) -> None:
        np.multiply(x, alpha, out)
        np.add(out, beta, out)
        clip(out, zero, one, out)

    return body


def _hard_swish(dtype: np.dtype, attrs: Attrs) -> Body:
    gate = hard_sigmoid(dtype, {"alpha": 1 / 6, "beta": 0.5})

    def body(x: Any, out: Any, t: Any) -> None:
        gate(x, t)
        np.multiply(x, t, out)

    return body


def softsign(dtype: np.dtype, attrs: Attrs) -> Body:
    one = typed_scalar(1, dtype)

    def body(x: Any, out: Any, t: Any) -> None:
        np.absolute(x, t)
        np.add(t, one, t)
        np.divide(x, t, out)

    return body


def _mish(dtype: np.dtype, attrs: Attrs) -> Body:
    """x tanh(log(1 + e)) with e = exp(x), which is x n / (n + 2) with n = e (e + 2)."""
    # Beyond 40 the quotient is 1, and e * e must not overflow.
    low, high, two = smallest(dtype), typed_scalar(40, dtype), typed_scalar(2, dtype)

    def body(x: Any, out: Any, n: Any, t: Any) -> None:
        clip(x, low, high, t)
        np.exp(t, t)
        np.add(t, two, n)
        np.multiply(n, t, n)
        np.add(n, two, t)
        np.divide(n, t, n)
        np.multiply(x, n, out)

    return body


def applied(make: Formula, scratch: int, attrs: Attrs) -> Callable[[Any, Any], Any]:
    """A formula as ``function(x, out)`` on floats of any dtype, where ``out`` may be ``x``."""
    function: Callable[[Any, Any], Any] = formula(
        lambda dtype: make(dtype, attrs), (), scratch=scratch
    ).function
    return function


# Registration


def _of(make: Formula, scratch: int) -> Compile:
    def compile(node: Node, types: Types) -> Kernel:
        return formula(lambda dtype: make(dtype, node.attrs), types, scratch=scratch)

    return compile


_FORMULAS: tuple[tuple[str, int, Formula, int], ...] = (
    ("Elu", 1, elu, 1),
    ("Selu", 1, _selu, 1),
    ("Celu", 12, _celu, 1),
    ("LeakyRelu", 1, leaky_relu, 1),
    ("ThresholdedRelu", 1, _thresholded_relu, 0),
    ("Shrink", 9, _shrink, 2),
    ("Sigmoid", 1, sigmoid, 0),
    ("HardSigmoid", 1, hard_sigmoid, 0),
    ("HardSwish", 14, _hard_swish, 1),
    ("Softplus", 1, softplus, 1),
    ("Softsign", 1, softsign, 1),
    ("Swish", 24, swish, 1),
    ("Mish", 18, _mish, 2),
)
for _name, _since, _make, _scratch in _FORMULAS:
    operator(_name, since=_since, infer=same_type, elementwise=True)(_of(_make, _scratch))

operator("Gelu", domain=MICROSOFT, infer=same_type, elementwise=True)(_of(_gelu_exact, 3))
operator("QuickGelu", domain=MICROSOFT, infer=same_type, elementwise=True)(_of(_quick_gelu, 1))


@operator("Gelu", since=20, infer=same_type, elementwise=True)
def gelu(node: Node, types: Types) -> Kernel:
    mode = choice(node.attrs, "approximate", "none", ("none", "tanh"))
    make, scratch = (_gelu_exact, 3) if mode == "none" else (_gelu_tanh, 1)
    return formula(lambda dtype: make(dtype, node.attrs), types, scratch=scratch)


# Two inputs, the second of which broadcasts to the first.


def _infer_like_first(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    check_broadcasts("input 1", tensor(types, 1).shape, shape)
    return (TensorType(same_dtype(types, (0, 1)), shape),)


def _infer_equal_shapes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a, b = tensor(types, 0).shape, tensor(types, 1).shape
    dtype = same_dtype(types, (0, 1))
    if a is None or b is None:
        return (TensorType(dtype, b if a is None else a),)
    check_shape("input 1", b, a)
    return (TensorType(dtype, tuple(y if x is None else x for x, y in zip(a, b, strict=True))),)


def _checked(kernel: Kernel, infer: Infer, types: Types) -> Kernel:
    """A kernel of two inputs that NumPy would broadcast in more ways than ``infer`` allows."""
    infer(types, {}, ())
    if all(tensor(types, i).static for i in range(2)):
        return kernel

    def function(a: np.ndarray, b: np.ndarray) -> Any:
        infer([TensorType(x.dtype, x.shape) for x in (a, b)], {}, ())
        return kernel.function(a, b)

    return replace(kernel, function=function)


@operator("SwiGLU", since=28, infer=_infer_equal_shapes)
def swiglu_operator(node: Node, types: Types) -> Kernel:
    kernel = formula(lambda dtype: _swiglu(dtype, node.attrs), types, inputs=2, scratch=1)
    return _checked(kernel, _infer_equal_shapes, types)


@operator("BiasGelu", domain=MICROSOFT, infer=_infer_like_first)
def bias_gelu(node: Node, types: Types) -> Kernel:
    make = _biased(_gelu_exact)
    kernel = formula(lambda dtype: make(dtype, node.attrs), types, inputs=2, scratch=4)
    return _checked(kernel, _infer_like_first, types)


@operator("FastGelu", domain=MICROSOFT, infer=_infer_like_first, elementwise=True)
def fast_gelu(node: Node, types: Types) -> Kernel:
    if len(node.inputs) == 1:
        return formula(lambda dtype: _gelu_tanh(dtype, node.attrs), types, scratch=1)
    if node.inputs[1] is None:
        return first_only(formula(lambda dtype: _gelu_tanh(dtype, node.attrs), types, scratch=1))
    make = _biased(_gelu_tanh)
    kernel = formula(lambda dtype: make(dtype, node.attrs), types, inputs=2, scratch=2)
    return _checked(kernel, _infer_like_first, types)


def _prelu_formula(dtype: np.dtype) -> Body:
    positive, negative = _positive(dtype), _negative(dtype)

    def body(x: Any, slope: Any, out: Any, t: Any) -> None:
        negative(x, t)
        np.multiply(t, slope, t)
        positive(x, out)
        np.add(out, t, out)

    return body


def _integer_prelu(x: np.ndarray, slope: np.ndarray, out: np.ndarray | None = None) -> Any:
    result = np.where(x < 0, x * slope, x)
    if out is None:
        return result
    np.copyto(out, result)
    return out


@operator("PRelu", since=7, infer=_infer_like_first, elementwise=True)
def prelu(node: Node, types: Types) -> Kernel:
    dtype = tensor(types, 0).dtype
    kernel = formula(_prelu_formula, types, inputs=2, scratch=1)
    if dtype is not None and not is_float(dtype):
        kernel = Kernel(_integer_prelu, _integer_prelu, inplace=(0,))
    return _checked(kernel, _infer_like_first, types)


@operator("PRelu", since=1, version=6, infer=same_type)
def channel_prelu(node: Node, types: Types) -> Kernel:
    """The slope is of one element, or has one for each channel."""

    def run(x: np.ndarray, slope: np.ndarray, out: np.ndarray | None = None) -> Any:
        if slope.size != 1:
            slope = slope.reshape(-1, *[1] * (x.ndim - 2))
        operand_types = TensorType(x.dtype, x.shape), TensorType(slope.dtype, slope.shape)
        _infer_like_first(operand_types, node.attrs, ())
        return inner.function(x, slope, out)

    inner = formula(_prelu_formula, (), inputs=2, scratch=1)
    return Kernel(run, run, inplace=(0,))


@operator("Relu", since=1, infer=same_type, elementwise=True)
def relu_operator(node: Node, types: Types) -> Kernel:
    dtype = tensor(types, 0).dtype
    if dtype is not None and dtype.kind in "iuf":
        zero, bound = typed_scalar(0, dtype), largest(dtype)

        def clipped(x: np.ndarray, out: np.ndarray | None = None) -> Any:
            return clip(x, zero, bound, out)

        return Kernel(clipped, clipped, inplace=(0,))
    if dtype is not None and is_float(dtype):
        return formula(_positive, types)

    def run(x: np.ndarray, out: np.ndarray | None = None) -> Any:
        return np.maximum(x, typed_scalar(0, x.dtype), out=out)

    return Kernel(run, run, inplace=(0,))
