"""Activation functions.

All but the simplest are formulas (see ``elementwise``): functions of dtype and attributes that
return the body. Max and min with 0 use ``clip``, which is several times faster than
``np.maximum`` with a scalar; both propagate NaN. x * sigmoid(z) is x / (1 + exp(-z)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from penstock.core.records import replace
from penstock.core.types import FLOAT32, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Infer, Trait, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_float
from penstock.ops.common.elementwise import (
    BLOCK,
    Body,
    clip,
    formula,
    largest,
    maximum,
    minimum,
    smallest,
    typed_scalar,
    ufunc,
)
from penstock.ops.onnx.arithmetic import erf_argument
from penstock.ops.registry import ArrayFunction, operator

Formula: TypeAlias = Callable[[np.dtype, Attrs], Body]


def _constants(dtype: np.dtype, *values: float) -> list[np.ndarray]:
    return [typed_scalar(value, dtype) for value in values]


def relu(dtype: np.dtype, attrs: Attrs | None = None) -> ArrayFunction:
    """``max(x, 0)``, by default into a new array."""
    zero, bound = typed_scalar(0, dtype), largest(dtype)
    return lambda x, out=None: clip(x, zero, bound, out)


def _negative(dtype: np.dtype) -> Callable[[np.ndarray, np.ndarray], Any]:
    """``min(x, 0)`` into an array."""
    bound, zero = smallest(dtype), typed_scalar(0, dtype)
    return lambda x, out: clip(x, bound, zero, out)


def _prelu_formula(dtype: np.dtype) -> Body:
    zero = typed_scalar(0, dtype)

    def body(x: np.ndarray, slope: np.ndarray, out: np.ndarray, t: np.ndarray) -> None:
        below = np.less(x, zero)
        np.multiply(x, slope, t)
        np.copyto(out, x)
        # The parts are not summed: 0 times an infinite slope is NaN.
        np.copyto(out, t, where=below)

    return body


def _exponential(
    dtype: np.dtype, scale: float, gain: float | None = None, width: float | None = None
) -> Body:
    """``gain * max(x, 0) + scale * (exp(min(x, 0) / width) - 1)``, accurate near 0."""
    positive, negative, factor = relu(dtype), _negative(dtype), typed_scalar(scale, dtype)
    slope = None if gain is None else typed_scalar(gain, dtype)
    divisor = None if width is None else typed_scalar(width, dtype)

    def body(x: np.ndarray, out: np.ndarray, t: np.ndarray) -> None:
        negative(x, t)
        if divisor is not None:
            np.divide(t, divisor, t)
        np.expm1(t, t)
        np.multiply(t, factor, t)
        positive(x, out)
        if slope is not None:
            np.multiply(out, slope, out)
        np.add(out, t, out)

    return body


def _elu(dtype: np.dtype, attrs: Attrs) -> Body:
    return _exponential(dtype, attrs.get("alpha", 1.0))


def _selu(dtype: np.dtype, attrs: Attrs) -> Body:
    gamma = float(attrs.get("gamma", 1.0507009873554805))
    return _exponential(dtype, gamma * float(attrs.get("alpha", 1.6732632423543772)), gamma)


def _celu(dtype: np.dtype, attrs: Attrs) -> Body:
    alpha = attrs.get("alpha", 1.0)
    return _exponential(dtype, alpha, width=alpha)


def leaky_relu(dtype: np.dtype, attrs: Attrs) -> Body:
    slope = float(attrs.get("alpha", 0.01))
    alpha, split = typed_scalar(slope, dtype), _prelu_formula(dtype)
    # For a negative slope, the result is neither max(x, alpha x) nor min(x, alpha x).
    if slope <= 0:
        return lambda x, out, t: split(x, alpha, out, t)
    choose = maximum if slope <= 1 else minimum
    return lambda x, out, t: choose(x, np.multiply(x, alpha, t), out)


def _softplus(dtype: np.dtype, attrs: Attrs) -> Body:
    """log(1 + exp(x)), without overflow as max(x, 0) + log(1 + exp(-|x|))."""
    positive = relu(dtype)

    def body(x: np.ndarray, out: np.ndarray, t: np.ndarray) -> None:
        np.absolute(x, t)
        np.negative(t, t)
        np.exp(t, t)
        np.log1p(t, t)
        positive(x, out)
        np.add(out, t, out)

    return body


def _thresholded_relu(dtype: np.dtype, attrs: Attrs) -> Body:
    alpha, zero = _constants(dtype, attrs.get("alpha", 1.0), 0)

    def body(x: np.ndarray, out: np.ndarray) -> None:
        dropped = np.logical_not(np.greater(x, alpha))  # NaNs too
        np.copyto(out, x)
        np.copyto(out, zero, where=dropped)

    return body


def _shrink(dtype: np.dtype, attrs: Attrs) -> Body:
    bound = attrs.get("lambd", 0.5)
    low, high, shift, zero = _constants(dtype, -bound, bound, attrs.get("bias", 0.0), 0)

    def body(x: np.ndarray, out: np.ndarray, less: np.ndarray, more: np.ndarray) -> None:
        below, above = np.less(x, low), np.greater(x, high)
        np.subtract(x, shift, less)
        np.add(x, shift, more)
        np.copyto(out, zero)
        np.copyto(out, less, where=above)
        np.copyto(out, more, where=below)

    return body


def sigmoid(dtype: np.dtype, attrs: Attrs) -> Body:
    """1 / (1 + exp(-x)). Where exp overflows to infinity, the quotient is 0, as it should be."""
    one = typed_scalar(1, dtype)
    return lambda x, out: np.divide(one, np.add(np.exp(np.negative(x, out), out), one, out), out)


def swish(dtype: np.dtype, attrs: Attrs) -> Body:
    """x sigmoid(alpha x)."""
    factor, one = _constants(dtype, -attrs.get("alpha", 1.0), 1)
    return lambda x, out, t: np.divide(x, np.add(np.exp(np.multiply(x, factor, t), t), one, t), out)


def _swiglu(dtype: np.dtype, attrs: Attrs) -> Body:
    gate = swish(dtype, attrs)

    def body(a: np.ndarray, b: np.ndarray, out: np.ndarray, t: np.ndarray) -> None:
        gate(a, t, t)
        np.multiply(t, b, out)

    return body


def _gelu_exact(dtype: np.dtype, attrs: Attrs) -> Body:
    """x (1 + erf(x / sqrt(2))) / 2, where (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))."""
    argument, one = erf_argument(dtype, math.sqrt(0.5), -2.0), typed_scalar(1, dtype)

    def body(x: np.ndarray, out: np.ndarray, p: np.ndarray, q: np.ndarray, u: np.ndarray) -> None:
        argument(x, p, q, u)
        np.exp(p, p)
        np.add(p, one, p)
        np.divide(x, p, out)

    return body


def _gelu_tanh(dtype: np.dtype, attrs: Attrs) -> Body:
    """x (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (x + 0.044715 x^3), by the same identity."""
    factor = -2 * math.sqrt(2 / math.pi)
    linear, cubic, one = _constants(dtype, factor, 0.044715 * factor, 1)

    def body(x: np.ndarray, out: np.ndarray, t: np.ndarray) -> None:
        np.square(x, t)
        np.multiply(t, cubic, t)
        np.add(t, linear, t)
        np.multiply(t, x, t)
        np.exp(t, t)
        np.add(t, one, t)
        np.divide(x, t, out)

    return body


def _hard_sigmoid(dtype: np.dtype, attrs: Attrs) -> Body:
    alpha, beta = _constants(dtype, attrs.get("alpha", 0.2), attrs.get("beta", 0.5))
    zero, one = _constants(dtype, 0, 1)
    return lambda x, out: clip(np.add(np.multiply(x, alpha, out), beta, out), zero, one, out)


def _hard_swish(dtype: np.dtype, attrs: Attrs) -> Body:
    gate = _hard_sigmoid(dtype, {"alpha": 1 / 6, "beta": 0.5})

    def body(x: np.ndarray, out: np.ndarray, t: np.ndarray) -> None:
        gate(x, t)
        np.multiply(x, t, out)

    return body


def _softsign(dtype: np.dtype, attrs: Attrs) -> Body:
    one = typed_scalar(1, dtype)
    return lambda x, out, t: np.divide(x, np.add(np.absolute(x, t), one, t), out)


def _mish(dtype: np.dtype, attrs: Attrs) -> Body:
    """x tanh(log(1 + e)) with e = exp(x), which is x n / (n + 2) with n = e (e + 2)."""
    # For x > 40 the quotient is 1; the bound keeps e * e from overflowing.
    low, high, two = _constants(dtype, -math.inf, 40, 2)

    def body(x: np.ndarray, out: np.ndarray, n: np.ndarray, t: np.ndarray) -> None:
        clip(x, low, high, t)
        np.exp(t, t)
        np.add(t, two, n)
        np.multiply(n, t, n)
        np.add(n, two, t)
        np.divide(n, t, n)
        np.multiply(x, n, out)

    return body


def applied(make: Formula, scratch: int, attrs: Attrs) -> Callable[[np.ndarray, np.ndarray], Any]:
    """Return a formula as ``function(x, out)`` for floats of any dtype; ``out`` may be ``x``."""
    body = cache(lambda dtype: make(dtype, attrs))
    general = formula(body, (), scratch=scratch).function

    def function(x: np.ndarray, out: np.ndarray) -> None:
        # A single float32 block avoids the overhead of the general case. Scratch of rank 0
        # would be unpacked to scalars, which cannot be written to.
        if x.size <= BLOCK and x.dtype == out.dtype == FLOAT32 and (not scratch or x.ndim):
            body(FLOAT32)(x, out, *(np.empty((scratch, *x.shape), FLOAT32) if scratch else ()))
        else:
            general(x, out)

    return function


def _affine(dtype: np.dtype, attrs: Attrs) -> Body:
    return lambda x, out: np.add(np.multiply(x, attrs["alpha"], out), attrs["beta"], out)


def _scaled_tanh(dtype: np.dtype, attrs: Attrs) -> Body:
    alpha, beta = attrs["alpha"], attrs["beta"]
    return lambda x, out: np.multiply(np.tanh(np.multiply(x, beta, out), out), alpha, out)


def _recurrent_threshold(dtype: np.dtype, attrs: Attrs) -> Body:
    """Unlike ThresholdedRelu, this keeps elements equal to ``alpha``."""
    return lambda x, out: np.copyto(out, np.where(np.less(x, attrs["alpha"]), 0, x))


ACTIVATIONS: Mapping[str, tuple[Formula, int, Mapping[str, float]]] = {
    "tanh": (lambda dtype, attrs: np.tanh, 0, {}),
    "relu": (relu, 0, {}),
    "sigmoid": (sigmoid, 0, {}),
    "affine": (_affine, 0, {"alpha": 1.0, "beta": 0.0}),
    "leakyrelu": (leaky_relu, 1, {"alpha": 0.01}),
    "thresholdedrelu": (_recurrent_threshold, 0, {"alpha": 1.0}),
    "scaledtanh": (_scaled_tanh, 0, {"alpha": 1.0, "beta": 1.0}),
    "hardsigmoid": (_hard_sigmoid, 0, {"alpha": 0.2, "beta": 0.5}),
    "elu": (_elu, 1, {"alpha": 1.0}),
    "softsign": (_softsign, 1, {}),
    "softplus": (_softplus, 1, {}),
}
"""The activation functions of recurrent layers, by lower-case name: formula, number of scratch
arrays, and the defaults of its parameters."""


def _compiled(make: Formula, scratch: int, node: Node, types: Types, inputs: int = 1) -> Kernel:
    return formula(lambda dtype: make(dtype, node.attrs), types, inputs=inputs, scratch=scratch)


def _register(
    name: str, make: Formula, scratch: int, since: int = 1, traits: AbstractSet[Trait] = frozenset()
) -> None:
    operator(name, since=since, infer=rules.same_type, elementwise=True, traits=traits)(
        partial(_compiled, make, scratch)
    )


_register("Elu", _elu, 1)
_register("Selu", _selu, 1)
_register("Celu", _celu, 1, since=12)
_register("LeakyRelu", leaky_relu, 1)
_register("ThresholdedRelu", _thresholded_relu, 0)
_register("Shrink", _shrink, 2, since=9)
_register("Sigmoid", sigmoid, 0, traits={"nonnegative", "finite"})
_register("HardSigmoid", _hard_sigmoid, 0, traits={"nonnegative"})
_register("HardSwish", _hard_swish, 1, since=14)
_register("Softplus", _softplus, 1)
_register("Softsign", _softsign, 1)
_register("Swish", swish, 1, since=24)
_register("Mish", _mish, 2, since=18)


@operator("Gelu", since=20, infer=rules.same_type, elementwise=True, traits={"finite"})
def gelu(node: Node, types: Types) -> Kernel:
    mode = rules.choice(node.attrs, "approximate", "none", ("none", "tanh"))
    make, scratch = (_gelu_exact, 3) if mode == "none" else (_gelu_tanh, 1)
    return _compiled(make, scratch, node, types)


def _infer_like_first(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = rules.tensor(types, 0).shape
    rules.check_broadcasts("input 1", rules.tensor(types, 1).shape, shape)
    return (TensorType(rules.same_dtype(types, (0, 1)), shape),)


def _infer_equal_shapes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a, b = rules.tensor(types, 0).shape, rules.tensor(types, 1).shape
    rules.check_shape("input 1", b, a)
    shape = b if a is None else a
    if a is not None and b is not None:
        shape = tuple(y if x is None else x for x, y in zip(a, b, strict=True))
    return (TensorType(rules.same_dtype(types, (0, 1)), shape),)


def _checked(kernel: Kernel, infer: Infer, types: Types) -> Kernel:
    """Check the shapes of both inputs at run time: NumPy broadcasts in more ways than ``infer``
    allows."""
    infer(types, {}, ())
    if all(rules.tensor(types, i).static for i in range(2)):
        return kernel

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        infer([TensorType(x.dtype, x.shape) for x in (a, b)], {}, ())
        return kernel.function(a, b)

    return replace(kernel, function=function)


@operator("SwiGLU", since=28, infer=_infer_equal_shapes)
def swiglu_operator(node: Node, types: Types) -> Kernel:
    return _checked(_compiled(_swiglu, 1, node, types, 2), _infer_equal_shapes, types)


@operator("PRelu", since=7, infer=_infer_like_first, elementwise=True, traits={"may fail"})
def prelu(node: Node, types: Types) -> Kernel:
    dtype = rules.tensor(types, 0).dtype
    kernel = formula(_prelu_formula, types, inputs=2, scratch=1)
    if dtype is not None and not is_float(dtype):
        # Formulas compute in floating point only.
        kernel = returning(lambda x, slope: np.where(x < 0, x * slope, x))
    return _checked(kernel, _infer_like_first, types)


@operator(
    "Relu", since=1, infer=rules.same_type, elementwise=True, traits={"nonnegative", "finite"}
)
def relu_operator(node: Node, types: Types) -> Kernel:
    dtype = rules.tensor(types, 0).dtype
    if dtype is not None and dtype.kind in "iuf":
        return ufunc(relu(dtype), 1)
    if dtype is not None and is_float(dtype):
        return formula(relu, types)
    return ufunc(lambda x, out=None: maximum(x, typed_scalar(0, x.dtype), out), 1)
