"""Recognition of composite operations that a model spells out in simpler ones: GELU, SiLU,
LayerNormalization and so on, whose kernels read their input once.

``RULES`` has a rule for the last operation of each pattern. A rule returns a ``Match`` or ``None``.
Nodes of the pattern without readers are left to ``dead_code``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Op
from penstock.ops import find
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.rewrite import forward
from penstock.types import FLOAT32, TensorType


class Match(NamedTuple):
    """The operation, with its inputs and attributes, that gives the same value as a pattern."""

    op: Op
    inputs: Sequence[Value]
    attrs: Mapping[str, Any]


Rule = Callable[[Node], Match | None]

# Constants of such formulas are in float32, and rounded to a few digits by their authors.
_CLOSE = 2e-4


class Recompose(Pass):
    """Apply the rule of its operation once to every node, in order."""

    name = "recompose"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        def visit(node: Node) -> bool:
            rule = RULES.get(node.op.name)
            if rule is None or node.op.domain or node.control_inputs:
                return False
            (output,) = node.outputs
            match = rule(node) if output is not None and _is_float32(output) else None
            if match is None:
                return False
            node.op, node.inputs, node.attrs = match.op, list(match.inputs), dict(match.attrs)
            return True

        return forward(graph, visit)


def _operation(name: str) -> Op:
    op = find(name)
    assert op is not None
    return op


# Matching of values.


def _is_float32(value: Value) -> bool:
    kind = value.type
    return isinstance(kind, TensorType) and kind.dtype is not None and kind.dtype == FLOAT32


def _producer(value: Value | None, *names: str) -> Node | None:
    """The producer of ``value``, if it is one of these operations and has one output."""
    node = None if value is None else value.producer
    if node is None or node.op.domain or node.op.name not in names or node.control_inputs:
        return None
    return node if len(node.outputs) == 1 else None


def _number(value: Value | None) -> float | None:
    """The number of a constant with one element."""
    if value is None or value.const is None or value.const.size != 1:
        return None
    return float(value.const.reshape(()))


def _near(number: float | None, wanted: float) -> bool:
    return number is not None and math.isclose(number, wanted, rel_tol=_CLOSE)


def _operand(node: Node, wanted: float) -> Value | None:
    """The other operand of a binary node, of which one operand is a constant near ``wanted``."""
    if len(node.inputs) == 2:
        for i in (0, 1):
            if _near(_number(node.inputs[i]), wanted):
                return node.inputs[1 - i]
    return None


def _times(value: Value | None, wanted: float) -> Value | None:
    """x, if ``value`` is x times a number near ``wanted``."""
    node = _producer(value, "Mul", "Div")
    if node is None:
        return None
    if node.op.name == "Mul":
        return _operand(node, wanted)
    return node.inputs[0] if _near(_number(node.inputs[1]), 1 / wanted) else None


class _Product(NamedTuple):
    """A number times some values."""

    number: float
    values: list[Value]


def _product(node: Node, most: int = 4) -> _Product | None:
    """A Mul or Div, and those that produce its factors, as one product of ``most`` values."""
    number = 1.0
    values: list[Value] = []
    stack: list[Value | None] = []
    if node.op.name == "Div":
        divisor = _number(node.inputs[1])
        if not divisor:
            return None
        number, stack = 1 / divisor, [node.inputs[0]]
    else:
        stack = list(node.inputs)
    while stack:
        value = stack.pop()
        if value is None or len(values) + len(stack) > most:
            return None
        known = _number(value)
        before = _producer(value, "Mul", "Div")
        if known is not None:
            number *= known
        elif before is None or value.const is not None:
            values.append(value)
        elif before.op.name == "Mul":
            stack += before.inputs
        elif (divisor := _number(before.inputs[1])) is not None and divisor:
            number /= divisor
            stack.append(before.inputs[0])
        else:
            values.append(value)
    return _Product(number, values)


# Rules.


def _activation(node: Node) -> Match | None:
    """x times a function of x."""
    # The longest products first: a gate may itself be a product.
    product = _product(node)
    if product is None or len(product.values) != 2:
        return None
    number, values = product
    for x, gate in (values, values[::-1]):
        if not _same_shape(x, node.outputs[0]):
            continue
        for rule in (_gelu, _swish, _hard_swish, _mish):
            found = rule(x, gate, number)
            if found is not None:
                return found
    return None


def _gelu(x: Value, gate: Value, number: float) -> Match | None:
    """x / 2 (1 + erf(x / sqrt 2)), or with tanh(sqrt(2 / pi) (x + 0.044715 x^3)) in its place."""
    added = _producer(gate, "Add")
    inner = None if added is None or not _near(number, 0.5) else _operand(added, 1)
    erf = _producer(inner, "Erf")
    if erf is not None and _times(erf.inputs[0], math.sqrt(0.5)) is x:
        return Match(_operation("Gelu"), [x], {})
    tanh = _producer(inner, "Tanh")
    cubic = (
        None if tanh is None else _producer(_times(tanh.inputs[0], math.sqrt(2 / math.pi)), "Add")
    )
    if cubic is None:
        return None
    for a, b in (cubic.inputs, cubic.inputs[::-1]):
        cube = _times(b, 0.044715)
        if a is x and cube is not None and _is_cube(cube, x):
            return Match(_operation("Gelu"), [x], {"approximate": "tanh"})
    return None


def _is_cube(value: Value, x: Value) -> bool:
    power = _producer(value, "Pow")
    if power is not None:
        return power.inputs[0] is x and _number(power.inputs[1]) == 3
    node = _producer(value, "Mul")
    product = None if node is None else _product(node)
    return product is not None and product.number == 1 and product.values == [x, x, x]


def _swish(x: Value, gate: Value, number: float) -> Match | None:
    """x sigmoid(alpha x)."""
    sigmoid = _producer(gate, "Sigmoid")
    if sigmoid is None or number != 1:
        return None
    scaled = sigmoid.inputs[0]
    if scaled is x:
        return Match(_operation("Swish"), [x], {"alpha": 1.0})
    node = _producer(scaled, "Mul")
    for i in (0, 1) if node is not None else ():
        assert node is not None
        alpha = _number(node.inputs[i])
        if alpha is not None and node.inputs[1 - i] is x:
            return Match(_operation("Swish"), [x], {"alpha": alpha})
    return None


def _hard_swish(x: Value, gate: Value, number: float) -> Match | None:
    """x max(0, min(1, x / 6 + 1 / 2))."""
    node = _producer(gate, "HardSigmoid")
    if node is not None and number == 1:
        alpha, beta = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
        if node.inputs[0] is x and _near(alpha, 1 / 6) and beta == 0.5:
            return Match(_operation("HardSwish"), [x], {})
    if _near(number, 1 / 6) and _shifted(gate) is x:
        return Match(_operation("HardSwish"), [x], {})
    return None


def _shifted(value: Value | None) -> Value | None:
    """x, if ``value`` is max(0, min(6, x + 3))."""
    clip = _producer(value, "Clip")
    if clip is None or len(clip.inputs) != 3 or _number(clip.inputs[1]) != 0:
        return None
    added = _producer(clip.inputs[0], "Add")
    if _number(clip.inputs[2]) != 6 or added is None:
        return None
    return _operand(added, 3)


def _mish(x: Value, gate: Value, number: float) -> Match | None:
    """x tanh(softplus(x))."""
    tanh = _producer(gate, "Tanh")
    softplus = None if tanh is None else _producer(tanh.inputs[0], "Softplus")
    if softplus is None or number != 1 or softplus.inputs[0] is not x:
        return None
    return Match(_operation("Mish"), [x], {})


def _quotient(node: Node) -> Match | None:
    """A Div as HardSigmoid, as a normalization, or as an activation."""
    if _near(_number(node.inputs[1]), 6):
        x = _shifted(node.inputs[0])
        if x is not None and _same_shape(x, node.outputs[0]):
            return Match(_operation("HardSigmoid"), [x], {"alpha": 1 / 6, "beta": 0.5})
    return _normalization(node) or _activation(node)


def _normalization(node: Node) -> Match | None:
    """(x - mean) / sqrt(variance + epsilon), along trailing axes; and x / sqrt(mean of x^2)."""
    top, root = node.inputs[0], _producer(node.inputs[1], "Sqrt")
    added = None if root is None else _producer(root.inputs[0], "Add")
    if top is None or added is None or not _is_float32(top):
        return None
    for i in (0, 1):
        epsilon, variance = _number(added.inputs[i]), _producer(added.inputs[1 - i], "ReduceMean")
        if epsilon is None or variance is None or not 0 < epsilon < 1:
            continue
        axis = _trailing(variance)
        if axis is None or not _is_square(variance.inputs[0], top):
            continue
        scale = _ones(top, axis)
        if scale is None:
            continue
        attrs = {"axis": axis, "epsilon": epsilon}
        centred = _producer(top, "Sub")
        if centred is not None:
            x, mean = centred.inputs[0], _producer(centred.inputs[1], "ReduceMean")
            if x is not None and mean is not None and mean.inputs[0] is x:
                if _trailing(mean) == axis and _same_shape(x, top):
                    return Match(_operation("LayerNormalization"), [x, scale], attrs)
                continue
        return Match(_operation("RMSNormalization"), [top, scale], attrs)
    return None


def _is_square(value: Value | None, x: Value) -> bool:
    node = _producer(value, "Pow", "Mul")
    if node is None or node.inputs[0] is not x:
        return False
    return node.inputs[1] is x if node.op.name == "Mul" else _number(node.inputs[1]) == 2


def _trailing(node: Node) -> int | None:
    """The first of the axes of a reduction that keeps its dims, if they are all from there on;
    counted from the end."""
    kind = node.inputs[0].type if node.inputs[0] is not None else None
    if not isinstance(kind, TensorType) or kind.rank is None or not node.attrs.get("keepdims", 1):
        return None
    axes = node.attrs.get("axes")
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        if node.inputs[1].const is None:
            return None
        axes = node.inputs[1].const.reshape(-1).tolist()
    if not axes:
        return None
    found = sorted(axis % kind.rank - kind.rank for axis in axes)
    return found[0] if found == list(range(found[0], 0)) else None


def _ones(x: Value, axis: int) -> Value | None:
    """A scale of ones, for the dims from ``axis`` on."""
    kind = x.type
    if not isinstance(kind, TensorType) or kind.shape is None:
        return None
    dims = kind.shape[axis:]
    if not all(isinstance(dim, int) for dim in dims) or math.prod(dims) > _MOST_ONES:  # type: ignore[arg-type]
        return None
    return Value(f"{x.name}/ones", const=np.ones(dims, FLOAT32))  # type: ignore[arg-type]


_MOST_ONES = 1 << 20


def _scaled(node: Node) -> Match | None:
    """A Mul as a normalization with a scale, or as an activation."""
    for i in (0, 1):
        normal, scale = _producer(node.inputs[i], *_NORMAL), node.inputs[1 - i]
        if normal is None or scale is None or scale.const is None or len(normal.inputs) != 2:
            continue
        old = normal.inputs[1]
        assert old is not None
        if old.const is None or scale.const.shape != old.const.shape or not np.all(old.const == 1):
            continue
        return Match(normal.op, [_input(normal), scale], normal.attrs)
    return _activation(node)


def _biased(node: Node) -> Match | None:
    """An Add to a normalization, as its bias."""
    for i in (0, 1):
        normal, bias = _producer(node.inputs[i], "LayerNormalization"), node.inputs[1 - i]
        if normal is None or bias is None or bias.const is None or len(normal.inputs) != 2:
            continue
        scale = normal.inputs[1]
        if scale is not None and scale.const is not None and scale.const.shape == bias.const.shape:
            return Match(normal.op, [_input(normal), scale, bias], normal.attrs)
    return None


_NORMAL = ("LayerNormalization", "RMSNormalization")


def _where(node: Node) -> Match | None:
    """Where(IsNaN(x), 0, x)."""
    test, zero, x = node.inputs
    nan = _producer(test, "IsNaN")
    if nan is None or x is None or nan.inputs[0] is not x or _number(zero) != 0:
        return None
    return Match(ZERO_NAN, [x], {}) if _same_shape(x, node.outputs[0]) else None


def _input(node: Node) -> Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _same_shape(a: Value, b: Value | None) -> bool:
    one, other = a.type, None if b is None else b.type
    if not isinstance(one, TensorType) or not isinstance(other, TensorType):
        return False
    return one.shape is not None and one.shape == other.shape


RULES: dict[str, Rule] = {
    "Add": _biased,
    "Div": _quotient,
    "Mul": _scaled,
    "Where": _where,
}
