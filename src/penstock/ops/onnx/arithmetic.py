"""Elementwise arithmetic and mathematical functions, with NumPy's broadcasting.

Integers wrap around. Cases that ONNX leaves undefined yield 0: integer division by 0, and 0 to a
negative power. Sums of 16-bit floats accumulate in float32 and are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.core.types import FLOAT32, Dim, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Trait, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import FLOAT64, is_float, is_small, wide
from penstock.ops.common.elementwise import (
    Body,
    carrying,
    clip,
    compile_elementwise,
    elementwise,
    first_only,
    formula,
    infer_unary,
    largest,
    maximum,
    minimum,
    smallest,
    typed_scalar,
    ufunc,
)
from penstock.ops.registry import ArrayFunction, operator


def _pairs(of_ints: Callable[[int, int], Dim], named: Callable[[Dim, Dim], Dim]) -> Infer:
    """Inference for two broadcast inputs; ``named`` combines elements that are not both ints."""
    return carrying(
        rules.broadcast_type,
        lambda a, b: of_ints(a, b) if isinstance(a, int) and isinstance(b, int) else named(a, b),
    )


def _neutral(a: Dim, b: Dim, element: int) -> Dim:
    """Return the other operand if ``a`` or ``b`` is the identity element of the operation."""
    return b if a == element else a if b == element else None


def _truncated(a: int, b: int) -> Dim:
    """Integer quotient towards zero."""
    if b == 0:
        return None
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _product(a: Dim, b: Dim) -> Dim:
    return 0 if 0 in (a, b) else _neutral(a, b, 1)


def _difference(a: Dim, b: Dim) -> Dim:
    return 0 if a == b and a is not None else a if b == 0 else None


_infer_div = _pairs(_truncated, lambda a, b: a if b == 1 else None)


for _name, _function, _infer in (
    ("Add", np.add, _pairs(lambda a, b: a + b, lambda a, b: _neutral(a, b, 0))),
    ("Sub", np.subtract, _pairs(lambda a, b: a - b, _difference)),
    ("Mul", np.multiply, _pairs(lambda a, b: a * b, _product)),
):
    _register = operator(_name, since=7, infer=_infer, elementwise=True, traits={"finite"})
    _register(compile_elementwise(_function, 2))


def _signed_quotient(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Integer division rounded towards zero: (a - a fmod b) / b, which is exact. 0 for b = 0."""
    return np.floor_divide(np.subtract(a, np.fmod(a, b)), b, out)


_QUOTIENTS: dict[str, Callable[..., RunValue]] = {"i": _signed_quotient, "u": np.floor_divide}


@operator("Div", since=7, infer=_infer_div, elementwise=True, traits={"fails on integers"})
def div(node: Node, types: Types) -> Kernel:
    dtype = rules.tensor(types, 0).dtype
    if dtype is not None:
        return elementwise(_QUOTIENTS.get(dtype.kind, np.divide), types, 2)
    return ufunc(lambda a, b, out=None: _QUOTIENTS.get(a.dtype.kind, np.divide)(a, b, out), 2)


def _infer_mod(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    def remainder(a: int, b: int) -> Dim:
        if b == 0:
            return None
        # With fmod=1, the result has the sign of the dividend.
        return abs(a) % abs(b) * (-1 if a < 0 else 1) if attrs.get("fmod") else a % b

    return _pairs(remainder, lambda a, b: None)(types, attrs, consts)


@operator("Mod", since=10, infer=_infer_mod, elementwise=True, traits={"jumps", "may fail"})
def mod(node: Node, types: Types) -> Kernel:
    # NumPy's remainder has the sign of the divisor, and gives 0 for integers modulo 0.
    return elementwise(np.fmod if node.attrs.get("fmod") else np.remainder, types, 2)


def _pow_type(types: Types, attrs: Attrs, consts: Consts) -> tuple[TensorType]:
    """The inputs may differ in dtype; the result has the dtype of the base."""
    base, exponent = rules.tensor(types, 0), rules.tensor(types, 1)
    return (TensorType(base.dtype, rules.broadcast_shapes([base.shape, exponent.shape])),)


def _pow_element(a: Dim, b: Dim) -> Dim:
    # Larger exponents would yield Python integers of unbounded length, which no dim can hold.
    if isinstance(a, int) and isinstance(b, int) and 0 <= b <= 64:
        return a**b
    return a if b == 1 else None


_POWERS: dict[float, tuple[Body, int]] = {
    -0.5: (lambda x, out: np.reciprocal(np.sqrt(x, out), out), 0),
    3.0: (lambda x, out, t: np.multiply(np.square(x, t), x, out), 1),
    4.0: (lambda x, out: np.square(np.square(x, out), out), 0),
}
"""bodies of powers with constant exponents, and the numbers of their scratch arrays"""
_POWER_UFUNCS = {-1.0: np.reciprocal, 0.5: np.sqrt, 1.0: np.positive, 2.0: np.square}


def _power(x: np.ndarray, y: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Powers of any two dtypes."""
    if x.dtype.kind in "iu":
        result = _integer_power(x, y)
    elif x.dtype == y.dtype:
        return np.power(x, y, out)
    else:
        # Exponents of up to 16 bits are exact in float32.
        common = FLOAT32 if wide(x.dtype) == FLOAT32 and y.dtype.itemsize <= 2 else FLOAT64
        result = np.power(x.astype(common), y.astype(common))
    if out is None:
        return np.asarray(result).astype(x.dtype)
    np.copyto(out, result, casting="unsafe")
    return out


def _integer_power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Integer powers, which wrap around on overflow; rounded towards zero for y < 0."""
    if is_float(y.dtype):
        y = y.astype(np.float64)
        if not np.array_equal(np.trunc(y), y) or np.any(np.abs(y) >= 2**63):
            return np.power(x.astype(np.float64), y)
    y = y.astype(np.int64)
    dtype = np.dtype(np.uint64 if x.dtype.kind == "u" else np.int64)
    powers = np.power(x.astype(dtype), np.maximum(y, 0).astype(dtype))
    if not np.any(y < 0):
        return powers
    # Only 1 and -1 have integer reciprocals; the reciprocal of 0 is 0, as in division.
    signs = np.where(y & 1, x, 1)
    return np.where(y < 0, np.where(x == 1, 1, np.where(x == -1, signs, 0)), powers)


@operator(
    "Pow",
    since=7,
    infer=carrying(_pow_type, _pow_element),
    elementwise=True,
    traits={"fails on integers"},
)
def power(node: Node, types: Types) -> Kernel:
    base, exponent = rules.tensor(types, 0), rules.tensor(types, 1)
    y = None if node.inputs[1] is None else node.inputs[1].const
    if base.dtype is None or not is_float(base.dtype):
        return ufunc(_power, 1)
    # A constant exponent of higher rank adds axes to the result.
    if y is not None and y.size == 1 and (y.ndim == 0 or y.ndim <= (base.rank or 0)):
        number = float(y.reshape(()))
        if number in _POWER_UFUNCS:
            return first_only(elementwise(_POWER_UFUNCS[number], types))
        if number in _POWERS:
            body, scratch = _POWERS[number]
            return first_only(formula(lambda _: body, types, scratch=scratch))
    if base.dtype == exponent.dtype:
        return elementwise(np.power, types, 2)
    if y is not None:
        same = y.astype(base.dtype)
        if np.array_equal(same.astype(np.float64), y.astype(np.float64)):
            return ufunc(lambda x, _, out=None: np.power(x, same, out), 1)
    return ufunc(_power, 1)


_ON_INTEGERS = {
    "Abs": infer_unary(abs),
    "Neg": infer_unary(lambda a: -a),
    "Sign": infer_unary(lambda a: (a > 0) - (a < 0)),
}
_TABLE: Sequence[tuple[int, Trait | None, Mapping[str, ArrayFunction]]] = (
    (1, "finite", {"Neg": np.negative, "Tanh": np.tanh}),
    (1, None, {"Log": np.log, "Sqrt": np.sqrt}),
    (1, "nonnegative", {"Abs": np.absolute, "Exp": np.exp}),
    (1, "fails on integers", {"Reciprocal": np.reciprocal}),
    (1, "jumps", {"Floor": np.floor, "Ceil": np.ceil}),
    (7, None, {"Sin": np.sin, "Cos": np.cos, "Tan": np.tan}),
    (7, None, {"Asin": np.arcsin, "Acos": np.arccos, "Atan": np.arctan}),
    (9, None, {"Sinh": np.sinh, "Cosh": np.cosh}),
    (9, "jumps", {"Sign": np.sign}),
    (9, None, {"Asinh": np.arcsinh, "Acosh": np.arccosh, "Atanh": np.arctanh}),
    (11, "jumps", {"Round": np.rint}),  # halves to even
)
for _since, _trait, _functions in _TABLE:
    for _name, _ufunc in _functions.items():
        _infer, _traits = _ON_INTEGERS.get(_name, rules.same_type), {_trait} if _trait else set()
        _register = operator(_name, since=_since, infer=_infer, elementwise=True, traits=_traits)
        _register(compile_elementwise(_ufunc))


# Erf. The error function is tanh(x R(x * x)) with R a rational function, because atanh(erf(x)) / x
# is smooth and even. tanh brings symmetry, saturation and a small error near 0, and forgives errors
# of its argument where it is flat. The coefficients minimize the relative error of the result
# (Lawson's iteration in 60 digits): 3.4e-9 up to x * x = 16 for float32, 1.7e-16 up to 36 for
# float64; beyond those bounds the result is 1 to within the last bit.

_ERF: dict[bool, tuple[float, tuple[float, ...], tuple[float, ...]]] = {
    True: (
        16.0,
        (1.1283791708549813, 0.2798069971607083, 0.04264660525500053, 0.002178285808102008),
        (1.0, 0.1568927271343145, 0.023689955631594177, 0.0003249252847342662),
    ),
    False: (
        36.0,
        (
            *(1.1283791670955123652, 0.48741883316509266269, 0.13722945472885301509),
            *(0.023972150459471971459, 0.0030174175635039428615, 0.00025651979991622170762),
            *(1.4570859627996708588e-05, 4.3457608854268030839e-07, 2.705944844243352775e-09),
        ),
        (
            *(1.0, 0.34088384567859635461, 0.090754182735607652624, 0.013565068739247148453),
            *(0.0015765361168829514267, 0.00011113898703878218582, 5.420544375082441717e-06),
            *(8.8457628565391915286e-08, 1.4417930780738965474e-10),
        ),
    ),
}


def erf_argument(dtype: np.dtype, scale: float = 1.0, factor: float = 1.0) -> Body:
    """``body(x, p, q, u)`` leaves ``factor * atanh(erf(scale * x))`` in ``p``."""
    bound, over, under = _ERF[dtype == FLOAT32]
    # With a leading coefficient of 1 below, a multiplication is saved.
    lead = under[-1] * scale ** (2 * len(under) - 2)
    above = [
        typed_scalar(factor * c * scale ** (2 * k + 1) / lead, dtype) for k, c in enumerate(over)
    ]
    below = [typed_scalar(c * scale ** (2 * k) / lead, dtype) for k, c in enumerate(under)]
    low, high = typed_scalar(0, dtype), typed_scalar(bound / scale**2, dtype)

    def body(x: np.ndarray, p: np.ndarray, q: np.ndarray, u: np.ndarray) -> None:
        np.square(x, u)
        clip(u, low, high, u)
        np.multiply(u, above[-1], p)
        for c in above[-2:0:-1]:
            np.add(p, c, p)
            np.multiply(p, u, p)
        np.add(p, above[0], p)
        np.add(u, below[-2], q)
        for c in below[-3::-1]:
            np.multiply(q, u, q)
            np.add(q, c, q)
        np.divide(p, q, p)
        np.multiply(p, x, p)

    return body


def _erf(dtype: np.dtype) -> Body:
    argument = erf_argument(dtype)

    def body(x: np.ndarray, out: np.ndarray, p: np.ndarray, q: np.ndarray, u: np.ndarray) -> None:
        argument(x, p, q, u)
        np.tanh(p, out)

    return body


@operator("Erf", since=9, infer=rules.same_type, elementwise=True, traits={"finite"})
def erf_operator(node: Node, types: Types) -> Kernel:
    return formula(_erf, types, scratch=3)


def _chain(function: ArrayFunction, node: Node) -> Kernel:
    """Fold the inputs from left to right; sums of 16-bit floats accumulate in float32."""
    n, mean = len(node.inputs), node.op.name == "Mean"

    def run(*arguments: np.ndarray) -> np.ndarray:
        first = arguments[0]
        if len(arguments) > n:
            out = arguments[n]
        else:
            out = np.empty(np.broadcast_shapes(*[v.shape for v in arguments]), first.dtype)
        total, dtype = out, first.dtype
        if function is np.add and is_small(dtype):
            dtype = FLOAT32
            total = np.empty(out.shape, dtype)
        if n == 1:
            np.copyto(total, first)
        else:
            # NumPy would round the sum of two 16-bit operands before widening it.
            function(first, arguments[1], out=total, dtype=dtype)
        for value in arguments[2:n]:
            function(total, value, out=total)
        if mean:
            np.divide(total, dtype.type(n), total)
        if total is not out:
            np.copyto(out, total, casting="unsafe")
        return out

    return Kernel(run, run, inplace=(0, 1)[:n])


@operator("Mean", since=1, infer=rules.broadcast_type, elementwise=True)
@operator("Sum", since=1, infer=rules.broadcast_type, elementwise=True)
def sum_operator(node: Node, types: Types) -> Kernel:
    if len(node.inputs) == 2 and node.op.name == "Sum":
        return elementwise(np.add, types, 2)
    return _chain(np.add, node)


def _infer_extremum(
    of_ints: Callable[[Sequence[int]], int], named: Callable[[str, int], Dim]
) -> Infer:
    """``named`` computes the extremum of a symbolic dim, which is at least 0, and an int."""

    def element(*cells: Dim) -> Dim:
        numbers = [c for c in cells if isinstance(c, int)]
        names = {c for c in cells if isinstance(c, str)}
        if None in cells or len(names) > 1:
            return None
        bound = of_ints(numbers) if numbers else None
        if not names:
            return bound
        (name,) = names
        return name if bound is None else named(name, bound)

    return carrying(rules.broadcast_type, element)


_infer_max = _infer_extremum(max, lambda name, bound: name if bound <= 0 else None)
_infer_min = _infer_extremum(min, lambda name, bound: bound if bound <= 0 else None)


@operator("Max", since=1, infer=_infer_max, elementwise=True, traits={"finite"})
@operator("Min", since=1, infer=_infer_min, elementwise=True, traits={"finite"})
def extremum(node: Node, types: Types) -> Kernel:
    to_max = node.op.name == "Max"
    input_types = [rules.tensor(types, i) for i in range(len(node.inputs))]
    dtype = input_types[0].dtype
    if len(node.inputs) != 2:
        return _chain(np.maximum if to_max else np.minimum, node)
    single = any(type_.shape is not None and set(type_.shape) <= {1} for type_ in input_types)
    if not single or dtype is None or dtype.kind != "f":
        return ufunc(maximum if to_max else minimum, 2)
    if to_max:
        high = largest(dtype)
        return ufunc(lambda a, b, out=None: clip(a, b, high, out), 2)
    low = smallest(dtype)
    return ufunc(lambda a, b, out=None: clip(a, low, b, out), 2)


def _infer_clip(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.same_dtype(types, range(len(types)))
    for i in range(1, len(types)):
        shape = rules.tensor(types, i).shape
        if shape is not None and any(isinstance(d, int) and d != 1 for d in shape):
            raise ShapeError(f"the bounds of Clip must be scalars, but input {i} has shape {shape}")
    return rules.same_type(types, attrs, consts)


@operator("Clip", since=11, infer=_infer_clip, elementwise=True, traits={"may fail", "finite"})
def clip_operator(node: Node, types: Types) -> Kernel:
    """Both bounds are scalars. If max < min, all elements become max; NaN is propagated."""
    n = len(node.inputs)
    bounds = rules.pad_with_none(node.inputs, 3)[1:]
    dtype = rules.tensor(types, 0).dtype
    if dtype is not None and dtype.kind in "iuf":
        if None not in bounds and {rules.tensor(types, i).shape for i in (1, 2)} == {()}:
            return ufunc(clip, 1)
        if all(bound is None or bound.const is not None for bound in bounds):
            low, high = (
                limit(dtype) if bound is None else rules.one_element(bound.const, "a bound")
                for bound, limit in zip(bounds, (smallest, largest), strict=True)
            )

            def clipped(*arguments: np.ndarray) -> np.ndarray:
                return clip(arguments[0], low, high, arguments[n] if len(arguments) > n else None)

            return ufunc(clipped, 1)

    def run(*arguments: RunValue) -> np.ndarray:
        x, *bounds = arguments[:n]
        out = arguments[n] if len(arguments) > n else np.empty(x.shape, x.dtype)
        for function, bound in zip((np.maximum, np.minimum), bounds, strict=False):
            if bound is not None:
                function(x, rules.one_element(bound, "a bound"), out=out)
                x = out
        if x is not out:
            np.copyto(out, x)
        return out

    return ufunc(run, 1)
