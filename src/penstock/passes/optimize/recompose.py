"""Pattern matching of composite operations that a model spells out in elementary ones: GELU, SiLU,
LayerNormalization and so on, whose kernels read their input once.

``RULES`` maps the last operation of each pattern to rules, with operations of which a graph must
have at least one, if any are given, for the rule to apply. A rule returns a ``Match`` or ``None``.
Unread nodes of the pattern are left to ``dead_code``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Op
from penstock.ops.internal.arrays import ZERO_NAN
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import argument, forward, number_of, produced_by, swapped


class Match(NamedTuple):
    """An operation with inputs and attributes that computes the same value as a pattern."""

    op: Op
    inputs: Sequence[Value | None]
    attrs: Mapping[str, Any]


Rule = Callable[[Node], Match | None]

# Tolerance: constants of such formulas are float32, or rounded to a few digits by their authors.
_CLOSE = 2e-4


class Recompose(Pass):
    """Apply to every node, in order, the rules of its operation until one matches."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        present = {op.full_name for op in graph.ops}
        visits = {}
        for name, rules in RULES.items():
            asked = [rule for rule, any_of in rules if not any_of or any_of & present]
            if asked and name in present:
                visits[name] = partial(_visit, asked)
        return bool(visits) and forward(graph, visits)


def _visit(rules: Sequence[Rule], node: Node, value: Value, output: Value) -> bool:
    if not isinstance(output.type, TensorType) or output.type.dtype != FLOAT32:
        return False
    for rule in rules:
        match = rule(node)
        if match is not None:
            node.op, node.inputs, node.attrs = match.op, list(match.inputs), dict(match.attrs)
            return True
    return False


# Pattern matching.


def _near(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=_CLOSE)


def _operand(node: Node | None, wanted: float) -> Value | None:
    """Return the other operand of a binary node with a constant operand near ``wanted``."""
    return next((b for a, b in swapped(node) if _near(number_of(a), wanted)), None)


def _times(value: Value | None, wanted: float) -> Value | None:
    """Return x, if ``value`` is x times a number near ``wanted``."""
    node = produced_by(value, "Mul", "Div")
    if node is None or node.op.name == "Mul":
        return _operand(node, wanted)
    return node.inputs[0] if _near(number_of(node.inputs[1]), 1 / wanted) else None


def _product(node: Node, most: int = 4) -> tuple[float, list[Value]] | None:
    """Return a tree of Mul and Div as a number times at most ``most`` values."""
    number = 1.0
    values: list[Value] = []
    stack = node.outputs[:1]
    while stack:
        value = stack.pop()
        if value is None or len(values) + len(stack) > most:
            return None
        factor = number_of(value) if value.is_constant else None
        before = None if value.is_constant else produced_by(value, "Mul", "Div")
        if factor is not None:
            number *= factor
        elif before is not None and before.op.name == "Mul":
            stack += before.inputs
        # Only division by a number other than 0 is merged; a Div by a tensor is one factor.
        elif before is not None and (divisor := number_of(before.inputs[1])):
            number /= divisor
            stack.append(before.inputs[0])
        else:
            values.append(value)
    return number, values


# Rules.


def _activation(node: Node) -> Match | None:
    """x times a function of x."""
    # Longest products first: a gate may itself be a product.
    product = _product(node)
    number, values = product or (0, [])
    if len(values) != 2:
        return None
    for x, gate in (values, values[::-1]):
        # If the gate broadcasts x, the product is not an elementwise function of x.
        last = gate.producer
        if last is None or not _same_shape(x, node.outputs[0]):
            continue
        match last.op.full_name:
            case "Add":
                composite = _gelu(x, gate, number)
            case "Clip" | "HardSigmoid":
                composite = _hard_swish(x, gate, number)
            case "Sigmoid":
                composite = _swish(x, gate, number)
            case "Tanh":
                composite = _mish(x, gate, number)
            case _:
                continue
        if composite is not None:
            return composite
    return None


def _gelu(x: Value, gate: Value, number: float) -> Match | None:
    """x / 2 (1 + erf(x / sqrt 2)), or with tanh(sqrt(2 / pi) (x + 0.044715 x^3)) in its place."""
    inner = _operand(produced_by(gate, "Add"), 1) if _near(number, 0.5) else None
    if inner is None:
        return None
    if _times(argument(inner, "Erf"), math.sqrt(0.5)) is x:
        return Match(standard("Gelu"), [x], {})
    cubic = produced_by(_times(argument(inner, "Tanh"), math.sqrt(2 / math.pi)), "Add")
    for a, b in swapped(cubic):
        if a is x and _is_cube(_times(b, 0.044715), x):
            return Match(standard("Gelu"), [x], {"approximate": "tanh"})
    return None


def _is_cube(value: Value | None, x: Value) -> bool:
    power = produced_by(value, "Pow")
    if power is not None:
        return power.inputs[0] is x and number_of(power.inputs[1]) == 3
    node = produced_by(value, "Mul")
    return node is not None and _product(node) == (1, [x, x, x])


def _swish(x: Value, gate: Value, number: float) -> Match | None:
    """x sigmoid(alpha x)."""
    scaled = argument(gate, "Sigmoid") if number == 1 else None
    if scaled is x:
        return Match(standard("Swish"), [x], {"alpha": 1.0})
    for a, b in swapped(produced_by(scaled, "Mul")):
        alpha = number_of(a)
        if alpha is not None and b is x:
            return Match(standard("Swish"), [x], {"alpha": alpha})
    return None


def _hard_swish(x: Value, gate: Value, number: float) -> Match | None:
    """x max(0, min(1, x / 6 + 1 / 2))."""
    node = produced_by(gate, "HardSigmoid")
    if node is not None and number == 1:
        # ONNX's defaults for HardSigmoid.
        alpha, beta = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
        if node.inputs[0] is x and _near(alpha, 1 / 6) and beta == 0.5:
            return Match(standard("HardSwish"), [x], {})
    if _near(number, 1 / 6) and _shifted(gate) is x:
        return Match(standard("HardSwish"), [x], {})
    return None


def _shifted(value: Value | None) -> Value | None:
    """x, if ``value`` is max(0, min(6, x + 3))."""
    clip = produced_by(value, "Clip")
    if clip is None or number_of(clip.input(1)) != 0 or number_of(clip.input(2)) != 6:
        return None
    return _operand(produced_by(clip.inputs[0], "Add"), 3)


def _mish(x: Value, gate: Value, number: float) -> Match | None:
    """x tanh(softplus(x))."""
    if number != 1 or argument(argument(gate, "Tanh"), "Softplus") is not x:
        return None
    return Match(standard("Mish"), [x], {})


def _hard_sigmoid(node: Node) -> Match | None:
    """max(0, min(6, x + 3)) / 6."""
    if _near(number_of(node.inputs[1]), 6):
        x = _shifted(node.inputs[0])
        if x is not None and _same_shape(x, node.outputs[0]):
            return Match(standard("HardSigmoid"), [x], {"alpha": 1 / 6, "beta": 0.5})
    return None


def _quotient(node: Node) -> Match | None:
    """A Div by a root, as a normalization."""
    radicand = argument(node.inputs[1], "Sqrt")
    return None if radicand is None else _normalization(node.inputs[0], radicand)


def _factor(node: Node) -> Match | None:
    """A Mul by the reciprocal of a root, as a normalization."""
    for top, factor in swapped(node):
        radicand = _radicand(factor)
        match = None if radicand is None else _normalization(top, radicand)
        if match is not None:
            return match
    return None


def _radicand(value: Value | None) -> Value | None:
    """x, if ``value`` is 1 / sqrt(x)."""
    node = produced_by(value, "Reciprocal", "tensorflow.Rsqrt")
    if node is None:
        return None
    return argument(node.inputs[0], "Sqrt") if node.op.name == "Reciprocal" else node.inputs[0]


class _Squares(NamedTuple):
    """The mean of the squares of ``x`` over all axes from ``axis`` on, plus ``epsilon``."""

    x: Value
    axis: int
    epsilon: float


def _squares(radicand: Value | None) -> _Squares | None:
    for number, squares in swapped(produced_by(radicand, "Add")):
        epsilon, mean = number_of(number), produced_by(squares, "ReduceMean")
        if epsilon is None or mean is None or not 0 < epsilon < 1:
            continue
        axis, square = _trailing(mean), produced_by(mean.inputs[0], "Pow", "Mul")
        x = None if square is None else square.inputs[0]
        if axis is not None and x is not None and _is_square(mean.inputs[0], x):
            return _Squares(x, axis, epsilon)
    return None


def _centred(squares: _Squares) -> tuple[Value, Value] | None:
    """Return x and its mean over the same axes, if their difference is squared."""
    difference = produced_by(squares.x, "Sub")
    x, mean = (None, None) if difference is None else difference.inputs
    node = produced_by(mean, "ReduceMean")
    if x is None or mean is None or node is None or node.inputs[0] is not x:
        return None
    same = _trailing(node) == squares.axis and _same_shape(x, squares.x)
    return (x, mean) if same else None


def _normalization(top: Value | None, radicand: Value | None) -> Match | None:
    """(x - mean) / sqrt(variance + epsilon), along trailing axes; and x / sqrt(mean of x^2)."""
    squares = _squares(radicand)
    # The radicand must be the variance of the numerator.
    if top is None or squares is None or squares.x is not top or top.dtype != FLOAT32:
        return None
    scale = _ones(top, squares.axis)
    if scale is None:
        return None
    attrs = {"axis": squares.axis, "epsilon": squares.epsilon}
    difference = produced_by(top, "Sub")
    mean = None if difference is None else produced_by(difference.inputs[1], "ReduceMean")
    if difference is None or mean is None or mean.inputs[0] is not difference.inputs[0]:
        return Match(standard("RMSNormalization"), [top, scale], attrs)
    centred = _centred(squares)
    return centred and Match(standard("LayerNormalization"), [centred[0], scale], attrs)


def _scaled_and_shifted(node: Node) -> Match | None:
    """x f + (bias - mean f) with f = scale / sqrt(variance + epsilon), as a LayerNormalization."""
    for scaled, shift in swapped(node):
        for x, factor in swapped(produced_by(scaled, "Mul")):
            root, scale = _scaled_root(factor)
            squares = None if root is None else _squares(root)
            centred = None if squares is None else _centred(squares)
            if squares is None or centred is None or centred[0] is not x or x.dtype != FLOAT32:
                continue
            if not _same_shape(x, node.outputs[0]):
                continue
            shifted, bias = _mean_from(shift, centred[1], factor)
            axis, attrs = squares.axis, {"axis": squares.axis, "epsilon": squares.epsilon}
            scale = _ones(x, axis) if scale is None else _parameter(scale, x, axis)
            if not shifted or scale is None:
                continue
            terms = [] if bias is None else [_parameter(bias, x, axis)]
            if None not in terms:
                return Match(standard("LayerNormalization"), [x, scale, *terms], attrs)
    return None


def _scaled_root(factor: Value | None) -> tuple[Value | None, Value | None]:
    """Return x and a constant scale (None for 1), if ``factor`` is scale / sqrt(x)."""
    for inverse, scale in swapped(produced_by(factor, "Mul")):
        if scale is not None and scale.is_constant and _radicand(inverse) is not None:
            return _radicand(inverse), scale
    return _radicand(factor), None


def _mean_from(shift: Value | None, mean: Value, factor: Value | None) -> tuple[bool, Value | None]:
    """Return whether ``shift`` is bias - mean * factor, and the bias, None if there is none."""
    difference = produced_by(shift, "Sub")
    if difference is not None:
        return _is_product(difference.inputs[1], mean, factor), difference.inputs[0]
    for product, bias in [(shift, None), *swapped(produced_by(shift, "Add"))]:
        for negative, other in swapped(produced_by(product, "Mul")):
            if other is factor and argument(negative, "Neg") is mean:
                return True, bias
    return False, None


def _is_product(value: Value | None, x: Value | None, y: Value | None) -> bool:
    return any(a is x and b is y for a, b in swapped(produced_by(value, "Mul")))


def _parameter(value: Value, x: Value, axis: int) -> Value | None:
    """Return a constant with the dims of ``x`` from ``axis`` on, without leading dims of 1."""
    dims = None if x.shape is None else x.shape[axis:]
    if value.const is None or dims is None or value.const.shape[axis:] != dims:
        return None
    if value.const.dtype != FLOAT32 or value.const.size != math.prod(value.const.shape[axis:]):
        return None
    if value.const.shape == dims:
        return value
    return Value(f"{value.name}/flat", const=value.const.reshape(value.const.shape[axis:]))


def _is_square(value: Value | None, x: Value) -> bool:
    node = produced_by(value, "Pow", "Mul")
    if node is None or node.inputs[0] is not x:
        return False
    return node.inputs[1] is x if node.op.name == "Mul" else number_of(node.inputs[1]) == 2


def _trailing(node: Node) -> int | None:
    """Return the first axis (negative) of a reduction over trailing axes with keepdims."""
    x = node.inputs[0]
    # Without keepdims, the quotient would broadcast along other axes.
    if x is None or x.rank is None or not node.attrs.get("keepdims", 1):
        return None
    # Since opset 18, the axes of ReduceMean are an input.
    axes = node.attrs.get("axes") if node.input(1) is None else node.const(1)
    if axes is None or not np.size(axes):
        return None
    negative = sorted(int(axis) % x.rank - x.rank for axis in np.ravel(axes))
    return negative[0] if negative == list(range(negative[0], 0)) else None


def _ones(x: Value, axis: int) -> Value | None:
    """Return a scale of ones, for the dims from ``axis`` on."""
    dims = [dim for dim in (x.shape or ())[axis:] if isinstance(dim, int)]
    if len(dims) < -axis or math.prod(dims) > _MOST_ONES:
        return None
    return Value(f"{x.name}/ones", const=np.ones(dims, FLOAT32))


# ONNX's normalizations require a scale: ones are created, at most 4 MiB.
_MOST_ONES = 1 << 20


def _onto_normalization(node: Node) -> Match | None:
    """Merge a Mul into a normalization as its scale, or an Add as its bias."""
    for value, operand in swapped(node):
        if operand is None or operand.const is None:
            continue
        normal = produced_by(value, "LayerNormalization", "RMSNormalization")
        scale = None if normal is None else normal.const(1)
        if value is None or normal is None or scale is None:
            continue
        # After a bias, a factor would scale that as well.
        parameter = _parameter(operand, value, -scale.ndim)
        if len(normal.inputs) != 2 or parameter is None or operand.const.size != scale.size:
            continue
        if not _same_shape(value, node.outputs[0]):
            continue
        if node.op.name == "Mul" and np.all(scale == 1):
            return Match(normal.op, [normal.inputs[0], parameter], normal.attrs)
        if node.op.name == "Add" and normal.op.name == "LayerNormalization":
            return Match(normal.op, [*normal.inputs, parameter], normal.attrs)
    return None


def _where(node: Node) -> Match | None:
    """Where(IsNaN(x), 0, x)."""
    test, zero, x = node.inputs
    if x is None or argument(test, "IsNaN") is not x or number_of(zero) != 0:
        return None
    return Match(ZERO_NAN, [x], {}) if _same_shape(x, node.outputs[0]) else None


def _same_shape(a: Value, b: Value | None) -> bool:
    return b is not None and a.shape is not None and a.shape == b.shape


_ROOTS = frozenset({"Sqrt", "tensorflow.Rsqrt"})
# Normalizations that rules may create from roots.
_NORMALIZATIONS = _ROOTS | {"LayerNormalization", "RMSNormalization"}
_ANY: frozenset[str] = frozenset()

RULES: Mapping[str, Sequence[tuple[Rule, frozenset[str]]]] = {
    "Add": ((_onto_normalization, _NORMALIZATIONS), (_scaled_and_shifted, _ROOTS)),
    "Div": (
        (_hard_sigmoid, frozenset({"Clip"})),
        (_quotient, frozenset({"Sqrt"})),
        (_activation, _ANY),
    ),
    "Mul": ((_onto_normalization, _NORMALIZATIONS), (_factor, _ROOTS), (_activation, _ANY)),
    "Where": ((_where, frozenset({"IsNaN"})),),
}
