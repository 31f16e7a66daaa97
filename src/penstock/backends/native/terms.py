"""Elementwise operations as terms of the instructions of the interpreter in
``c/core/elementwise.c``.

    >>> x = Term("f4")
    >>> (x * 2.0 + x).operation, TERMS["Mean"]({}, x, x).arguments[1].constant
    ('add_f4', 2.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from penstock.backends.native.kernel import UnsupportedError
from penstock.ir.op import Attrs

if TYPE_CHECKING:
    from penstock.ops.common.fixed_point import Multiplier

BLOCK = 2**14  # elements per item of kernels other than the interpreter
QUANTIZED_KINDS = {"uint8": "u1", "int8": "s1", "uint16": "u2", "int16": "s2"}
KINDS = {
    "float32": "f4",
    "float64": "f8",
    "int32": "i4",
    "int64": "i8",
    "bool": "b1",
    **QUANTIZED_KINDS,
}
"""register representation of elements, by dtype"""


_WIDENING = ("half_", "bfloat_")  # operations that widen 16-bit floats to float32


class Term:
    """A value of a program: an input, a constant, or the result of an operation on other terms;
    ``kind`` is one of ``KINDS``."""

    __slots__ = ("arguments", "constant", "kind", "operation")

    def __init__(
        self,
        kind: str,
        operation: str = "",
        arguments: tuple[Term, ...] = (),
        constant: float | None = None,
    ) -> None:
        self.kind = kind
        self.operation = operation
        self.arguments = arguments
        self.constant = constant

    def __add__(self, other: _Operand) -> Term:
        return _typed("add", self, other)

    def __sub__(self, other: _Operand) -> Term:
        return _typed("sub", self, other)

    def __mul__(self, other: _Operand) -> Term:
        return _typed("mul", self, other)

    def __truediv__(self, other: _Operand) -> Term:
        return _typed("div", self, other)

    def __rtruediv__(self, other: float) -> Term:
        return _typed("div", Term(self.kind, constant=other), self)

    def __neg__(self) -> Term:
        return _typed("neg", self)


_Operand: TypeAlias = "Term | float"
TermRule: TypeAlias = Callable[..., Term]


def _typed(name: str, x: Term, *others: _Operand, kind: str = "") -> Term:
    """Return an operation on terms of the kind of ``x``; numbers become constants. The result has
    that kind unless ``kind`` is given."""
    operands = [y if isinstance(y, Term) else Term(x.kind, constant=y) for y in others]
    if [y for y in operands if y.kind != x.kind]:
        raise UnsupportedError
    return Term(kind or x.kind, f"{name}_{x.kind}", (x, *operands))


def _call(name: str) -> TermRule:
    """Return the rule of a single operation of the interpreter."""
    return lambda attrs, *values: _typed(name, *values)


def _folded(name: str) -> TermRule:
    """Return the rule that folds a binary operation over any number of operands."""

    def rule(attrs: Attrs, first: Term, *rest: Term) -> Term:
        for value in rest:
            first = _typed(name, first, value)
        return first

    return rule


def _compared(name: str, swapped: bool = False) -> TermRule:
    def rule(attrs: Attrs, a: Term, b: Term) -> Term:
        # The interpreter has logical operations on bools, but no comparisons.
        if a.kind == "b1" and name == "eq":
            return _typed("not", _typed("xor", a, b))
        return _typed(name, b, a, kind="b1") if swapped else _typed(name, a, b, kind="b1")

    return rule


def _max(x: Term, bound: _Operand) -> Term:
    return _typed("max", x, bound)


def _min(x: Term, bound: _Operand) -> Term:
    return _typed("min", x, bound)


def _where(condition: Term, a: Term, b: _Operand) -> Term:
    other = b if isinstance(b, Term) else Term(a.kind, constant=b)
    if condition.kind != "b1" or a.kind != other.kind:
        raise UnsupportedError
    return Term(a.kind, f"where_{a.kind[1]}", (condition, a, other))


def _clip(attrs: Attrs, x: Term, low: Term | None = None, high: Term | None = None) -> Term:
    if low is not None and high is not None and x.kind[0] == "f":
        return _typed("clip", x, low, high)
    x = x if low is None else _max(x, low)
    return x if high is None else _min(x, high)


def _sigmoid(x: Term) -> Term:
    return _typed("sigmoid", x)


def _gated(x: Term, gate: Term) -> Term:
    """``x * sigmoid(gate)``"""
    # One instruction instead of two, which float64 lacks.
    return _typed("gated", x, gate) if x.kind == "f4" else x * _sigmoid(gate)


def _gelu(attrs: Attrs, x: Term) -> Term:
    if attrs.get("approximate", "none") != "none":
        return _tanh_gelu(x)
    # One instruction instead of five, which float64 lacks.
    if x.kind == "f4":
        return _typed("gelu", x)
    return x * 0.5 * (_typed("erf", x * math.sqrt(0.5)) + 1.0)


def _tanh_gelu(x: Term) -> Term:
    # (1 + tanh(u)) / 2 is sigmoid(2 u), which saves two instructions.
    factor = 2 * math.sqrt(2 / math.pi)
    return _gated(x, x * (x * x * (0.044715 * factor) + factor))


def _exponential(x: Term, scale: float, gain: float = 1.0, width: float = 1.0) -> Term:
    """``gain * max(x, 0) + scale * (exp(min(x, 0) / width) - 1)``."""
    # Both parts are added for all elements, so x is clipped: exp of a large x would be infinite.
    low = _min(x, 0.0)
    below = _typed("expm1", low if width == 1 else low / width)
    above = _max(x, 0.0)
    return (above if gain == 1 else above * gain) + (below if scale == 1 else below * scale)


def _selu(attrs: Attrs, x: Term) -> Term:
    gamma = float(attrs.get("gamma", 1.0507009873554805))
    return _exponential(x, gamma * float(attrs.get("alpha", 1.6732632423543772)), gamma)


def _leaky(x: Term, slope: _Operand) -> Term:
    if x.kind == "f4":
        return _typed("leaky", x, slope)
    return _where(_typed("lt", x, 0.0, kind="b1"), x * slope, x)


def _hard_sigmoid(x: Term, alpha: float, beta: float) -> Term:
    if x.kind == "f4":
        return _typed("ramp", x, alpha, beta)
    return _min(_max(x * alpha + beta, 0.0), 1.0)


def _above(bound: float, x: Term) -> Term:
    """Compare elements with a number, rounded to their dtype."""
    if x.kind[0] != "f" or x.operation.startswith(_WIDENING):
        raise UnsupportedError
    return _typed("lt", Term(x.kind, constant=bound), x, kind="b1")


def _shrink(attrs: Attrs, x: Term) -> Term:
    if x.kind[0] == "i":
        return converted(_shrink(attrs, converted(x, "f8")), x.kind)
    bound, shift = float(attrs.get("lambd", 0.5)), float(attrs.get("bias", 0.0))
    above = _where(_above(bound, x), x - shift, 0.0)
    return _where(_typed("lt", x, -bound, kind="b1"), x + shift, above)


def _softplus(attrs: Attrs, x: Term) -> Term:
    # log(1 + e^x) would overflow for large x; this exponent is never positive.
    return _max(x, 0.0) + _typed("log1p", _typed("exp", -_typed("abs", x)))


def _mish(attrs: Attrs, x: Term) -> Term:
    e = _typed("exp", _min(x, 40.0))  # beyond, the quotient is 1
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))


CHEAP_POWERS = (2, 3, 4, 1, 0.5, 0.25, 1.5, -1, -2, -0.5)


def _pow(attrs: Attrs, x: Term, exponent: Term) -> Term:
    power = exponent.constant
    if x.kind[0] != "f" and (power not in (1, 2, 3) or exponent.kind[0] == "f"):
        raise UnsupportedError
    if power == 2:
        return x * x
    if power == 3:
        return x * x * x
    if power == 4:
        return (x * x) * (x * x)
    if power in (0.25, 1.5):
        root = _typed("sqrt", x)
        return _typed("sqrt", root) if power == 0.25 else x * root
    if power == 1:
        # Not x itself: programs only write instruction results.
        return _typed("mul", x, 1.0)
    if power == 0.5:
        return _typed("sqrt", x)
    if power in (-1, -2, -0.5):
        return 1.0 / (x if power == -1 else x * x if power == -2 else _typed("sqrt", x))
    return _typed("pow", x, converted(exponent, x.kind))


def _checked(rule: TermRule) -> TermRule:
    """Wrap a quotient or remainder as in TensorFlow, where integer division by 0 is an error."""

    def quotient(attrs: Attrs, x: Term, divisor: Term) -> Term:
        if x.kind[0] == "i" and not divisor.constant:
            divisor = _typed("divisor", divisor)
        return rule(attrs, x, divisor)

    return quotient


def _floor_div(attrs: Attrs, x: Term, divisor: Term) -> Term:
    # Quotients of 16-bit floats are rounded first.
    if x.operation.startswith(_WIDENING):
        raise UnsupportedError
    return _typed("floordiv", x, divisor) if x.kind[0] == "i" else _typed("floor", x / divisor)


def _mean(attrs: Attrs, *values: Term) -> Term:
    total = _folded("add")(attrs, *values)
    return total / float(len(values))


def _zero_nan(attrs: Attrs, x: Term) -> Term:
    # Only NaN differs from itself.
    return _where(_typed("eq", x, x, kind="b1"), x, 0.0)


def converted(x: Term, kind: str) -> Term:
    """Convert a term to another kind; 8-bit and 16-bit integers through 32 bits."""
    if x.kind == kind:
        return x
    # Convert constants at compile time, without an instruction.
    if x.constant is not None:
        return Term(kind, constant=x.constant)
    codes = QUANTIZED_KINDS.values()
    if kind != "i4" and (x.kind in codes or kind in codes):
        x = converted(x, "i4")
    if kind == "b1":
        return _typed("nonzero", x, kind="b1")
    return x if x.kind == kind else Term(kind, f"{x.kind}_{kind}", (x,))


def _rescaled(x: Term, by: Multiplier) -> Term:
    """Rescale integers held in float64, as ``ops/common/fixed_point.py`` does: exactly, except for
    sums of more than 52 bits near a tie, which a later rounding decides anyway."""
    number, shift = int(by.numbers), int(by.shifts)
    whole = _typed("floor", x * (number * 2.0 ** (max(-shift, 0) - 31)) + 0.5)
    if shift <= 0:
        return whole
    size = _typed("floor", _typed("abs", whole) * 2.0**-shift + 0.5)
    return size * _typed("sign", whole)


def _integer_arithmetic(attrs: Attrs, a: Term, b: Term) -> Term:
    """Return a sum, difference or product of 8-bit codes in integer arithmetic."""
    # Lazy import: only quantized models need it.
    from penstock.ops.common.fixed_point import bits_of_terms, pair_multipliers

    operation, zeros = attrs["operation"], attrs["zero_points"]
    *by, of_result = pair_multipliers(operation, attrs["scales"])
    if of_result.shifts < (0 if by else -13):
        raise UnsupportedError  # the multiplied integers would wrap
    x, y = [converted(v, "f8") - float(zero) for v, zero in zip((a, b), zeros, strict=False)]
    if by:
        one = 2.0 ** bits_of_terms(operation)
        x, y = [_rescaled(v * one, own) for v, own in zip((x, y), by, strict=True)]
    total = x * y if operation == "Mul" else x + y if operation == "Add" else x - y
    total = total * total if operation == "SquaredDifference" else total
    low, high = map(float, attrs["code_limits"])
    result = _min(_max(_rescaled(total, of_result) + float(zeros[2]), low), high)
    return converted(result, "i4")


TERMS: dict[str, TermRule] = {
    **{
        name: _call(name.lower())
        for name in (
            *("Abs", "Acos", "Asin", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Neg", "Sigmoid"),
            *("Sign", "Sin", "Sqrt", "Tanh", "Add", "Sub", "Mul", "And", "Or", "Xor", "Not"),
        )
    },
    **{name: _folded(name.lower()) for name in ("Max", "Min")},
    "Round": _call("rint"),
    "Sum": _folded("add"),
    "Mean": _mean,
    "Mod": lambda attrs, x, by: _typed("fmod" if attrs.get("fmod") else "mod", x, by),
    "Div": lambda attrs, a, b: a / b,
    "Pow": _pow,
    "Reciprocal": lambda attrs, x: 1.0 / x,
    "Equal": _compared("eq"),
    "Less": _compared("lt"),
    "LessOrEqual": _compared("le"),
    "Greater": _compared("lt", swapped=True),
    "GreaterOrEqual": _compared("le", swapped=True),
    "IsNaN": lambda attrs, x: _typed("not", _typed("eq", x, x, kind="b1")),
    "Where": lambda attrs, condition, a, b: _where(condition, a, b),
    "Clip": _clip,
    "Relu": lambda attrs, x: _max(x, 0.0),
    "LeakyRelu": lambda attrs, x: _leaky(x, float(attrs.get("alpha", 0.01))),
    "PRelu": lambda attrs, x, slope: _leaky(x, slope),
    "ThresholdedRelu": lambda attrs, x: _where(_above(float(attrs.get("alpha", 1.0)), x), x, 0.0),
    "Shrink": _shrink,
    "Elu": lambda attrs, x: _exponential(x, attrs.get("alpha", 1.0)),
    "Celu": lambda attrs, x: _exponential(x, attrs.get("alpha", 1.0), 1.0, attrs.get("alpha", 1.0)),
    "Selu": _selu,
    "HardSigmoid": lambda attrs, x: _hard_sigmoid(
        x, attrs.get("alpha", 0.2), attrs.get("beta", 0.5)
    ),
    "HardSwish": lambda attrs, x: x * _hard_sigmoid(x, 1 / 6, 0.5),
    "Softplus": _softplus,
    "Softsign": lambda attrs, x: x / (_typed("abs", x) + 1.0),
    "Swish": lambda attrs, x: _gated(
        x, x * alpha if (alpha := attrs.get("alpha", 1.0)) != 1 else x
    ),
    "Mish": _mish,
    "Gelu": _gelu,
    "penstock.ZeroNaN": _zero_nan,
    "tensorflow.Div": _checked(lambda attrs, x, by: x / by),
    "tensorflow.FloorDiv": _checked(_floor_div),
    "tensorflow.FloorMod": _checked(_call("mod")),
    "tensorflow.TruncateMod": _checked(_call("fmod")),
    "tflite.IntegerArithmetic": _integer_arithmetic,
}
"""terms of operations, by rules for their attributes and inputs"""
QUANTIZED = frozenset(
    {"Abs", "Add", "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    | {"Max", "Min", "Mul", "Neg", "Relu", "Sub", "Sum", "Where"}
)
"""operations that compute 8-bit and 16-bit integers directly; others through 32 bits"""
