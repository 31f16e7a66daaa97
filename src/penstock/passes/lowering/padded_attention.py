"""Unfused attention between packed parts: computed for all rows, unpacked.

Scores may be sums of several products, some of them gathered by relative position. Then queries,
keys and values are unpacked, with zeros in rows that a mask hides, attention is computed as the
model has it, and its result is packed again::

    q, k, v                     [1, T, width]
    UnpackRows                  samples, features, rows, features
    MatMul(q, transposed k)     samples, features, rows, rows
    Softmax(scores + bias)      samples, features, rows, weights
    MatMul(weights, v)          samples, features, rows, features
    Gather                      [1, T, width]

The rules prove that no masked row affects a live one. Axes are as in ``row_rules``, but a value may
have several axes of rows. An element depends only on its sample's rows at its indices, two for a
score. Along an axis of weights it also depends on all live rows, and is 0 for masked ones: the
exponential of a score is exactly 0 in float32 where a bias of ``LOWEST`` or less was added, as
scores do not differ that much. Such weights may be contracted with rows, or with values that all
rows share.

0 times infinity is NaN, so values must be finite in masked rows, whose weight is 0: only operations
that map finite numbers to finite ones may precede a Softmax.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import zip_longest
from typing import TypeAlias

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.common.shape_rules import normalize_axes
from penstock.ops.internal.arrays import ZERO_NAN
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.internal.packed import LOWEST
from penstock.ops.onnx.softmax import SINGLE_AXIS
from penstock.passes.lowering.recognize_attention import ScoreTerm
from penstock.passes.lowering.row_rules import (
    ROWS,
    SAMPLES,
    Axes,
    Axis,
    Stays,
    are_features,
    axes_rule,
    axis_names,
    check_pure,
    features,
    static_dims,
)

WEIGHTS = "weights"

_HIGHEST_SCORE = 1e3
"""a constant whose magnitudes are all below this is not a mask of scores"""


class Padded(NamedTuple):
    """An unpacked value with rows: its axes; the ``terms`` that were added to scores, in order; and
    whether it is ``weighed``, computed after a Softmax, where masked rows need not be finite."""

    axes: Axes
    terms: Sequence[ScoreTerm] = ()
    weighed: bool = False


_Inputs: TypeAlias = "Sequence[Padded | None]"


def padded_form(
    node: Node, inputs: _Inputs, samples: Axis, row: Axis
) -> tuple[Padded, Sequence[ScoreTerm]]:
    """Return the unpacked form of a node's result, and the terms that mask rows there. Raises
    ``Stays``.

    Args:
        node: The node.
        inputs: The form of each input; None for inputs without rows. samples: The axis of samples.
        row: The axis of rows of a sample.
    """
    check_pure(node)
    if any(node.outputs[1:]):
        raise Stays("has more than one output")
    name = node.op.full_name
    hiding: Sequence[ScoreTerm] = ()
    if node.op is ATTENTION:
        result, hiding = _attention(node, inputs, samples, row)
    elif name == "Softmax":
        result, hiding = _softmax(_single(node, inputs), node, samples, row)
    elif name == "MatMul":
        a, b = [x or _plain(value) for x, value in zip(inputs, node.inputs, strict=True)]
        result = _product(a, b)
    elif name == "GatherElements":
        result = _elements(node, _single(node, inputs))
    elif node.op.elementwise and _is_finite(node):
        result = _elementwise(node, inputs)
    elif node.op.view or ("selects" in node.op.traits and name != "Concat"):
        (found,) = axes_rule(node, [None if x is None else x.axes for x in inputs]).outputs
        result = Padded(found, (), any(x is not None and x.weighed for x in inputs))
    else:
        raise Stays("combines rows of attention that was not fused into one node")
    if axis_names(result.axes).count(SAMPLES) > 1:
        raise Stays("combines different samples")
    return result, hiding


def given_terms(value: Value | None, products: Container[Value]) -> list[Value]:
    """Return the terms of scores, added or selected by Where, that are not among ``products``."""
    if value is None:
        return []
    if value not in products:
        return [value]
    node = value.producer
    if node is None or node.op.full_name not in ("Add", "Where", "Max", "Cast", "Identity"):
        return []
    return [term for x in node.inputs for term in given_terms(x, products)]


def has_rows(axes: Axes) -> bool:
    """Whether a value has one element per row, rather than per sample alone."""
    return not {ROWS, WEIGHTS}.isdisjoint(axis_names(axes))


def _plain(value: Value | None) -> Padded:
    """Return the form of a value without rows."""
    return Padded(tuple(map(features, static_dims(value))))


def _single(node: Node, inputs: _Inputs) -> Padded:
    """Return the first input, if it is the only one with rows."""
    first, *others = inputs
    if first is None or any(others):
        raise Stays("combines different rows")
    return first


def _joined(known: Sequence[Axes]) -> Axes:
    """Return the broadcast axes of values: an axis of rows where one of them has rows."""
    joined: list[Axis] = []
    for column in zip_longest(*[axes[::-1] for axes in known], fillvalue=()):
        # Features of the same size have no rows: an index picks one for each key.
        named = {axis for axis in column if not are_features([axis])}
        if len(named) > 1:
            raise Stays("combines different rows")
        joined.append(named.pop() if named else next(filter(None, column), ()))
    return tuple(joined[::-1])


def _elementwise(node: Node, inputs: _Inputs) -> Padded:
    name, known = node.op.full_name, [x for x in inputs if x is not None]
    axes = _joined([(x or _plain(v)).axes for x, v in zip(inputs, node.inputs, strict=True) if v])
    if name == "Div" and inputs[1] is not None:
        raise Stays("divides by rows, which are 0 where they are padding")
    # Results must be 0 where weights are: later nodes rely on it.
    if any(WEIGHTS in axis_names(x.axes) for x in known) and not _keeps_zero(node, inputs):
        raise Stays("may change attention weights of 0 to other values")
    return Padded(axes, _terms(node, inputs), any(x.weighed for x in known))


def _is_finite(node: Node) -> bool:
    """Whether results of finite numbers are finite, apart from division."""
    known = node.op.moves or "finite" in node.op.traits
    return known or node.op is ZERO_NAN or node.op.full_name == "Div"


def _keeps_zero(node: Node, inputs: _Inputs) -> bool:
    """Whether results are 0 where weights are."""
    name = node.op.full_name
    if name == "Where":
        _, yes, no = inputs
        constant = node.inputs[2 if no is None else 1]
        is_zero = constant is not None and constant.const is not None and not constant.const.any()
        return inputs[0] is None and (yes is None or no is None) and is_zero
    if name == "Mul":  # the other factor is finite, as far as it is computed from rows
        return sum(x is not None and x.weighed for x in inputs) < 2
    moves = node.op.moves and len(inputs) == 1
    return moves or node.op is ZERO_NAN or (name == "Div" and inputs[1] is None)


def _terms(node: Node, inputs: _Inputs) -> Sequence[ScoreTerm]:
    """Return the terms that have been added to scores so far, as far as they are known."""
    # After any other operation, terms are unknown: a scaled bias may mask nothing.
    name = node.op.full_name
    if name in ("Cast", "Identity"):
        (x,) = inputs
        return x.terms if x is not None else ()
    if name == "Add":
        terms: tuple[ScoreTerm, ...] = ()
        for x, value in zip(inputs, node.inputs, strict=True):
            if x is not None:
                terms += tuple(x.terms)
            elif value is not None and _may_hide(value):
                terms += (ScoreTerm(value),)
        return terms
    if name == "Max" and len(inputs) == 2:  # with the lowest number, a bound of masked scores
        for x, other in zip(inputs, node.inputs[::-1], strict=True):
            bound = None if other is None else other.const
            if x is not None and bound is not None and (bound <= LOWEST).all():
                return x.terms
    if name == "Where" and inputs[0] is None:
        condition, yes, no = node.inputs
        for x, number, holds in ((inputs[2], yes, True), (inputs[1], no, False)):
            if x is not None and condition is not None and number is not None:
                const = number.const
                if const is not None and const.size == 1 and float(const.item()) <= LOWEST:
                    return (*x.terms, ScoreTerm(condition, float(const.item()), holds))
    return ()


def _may_hide(value: Value) -> bool:
    """Whether an additive term of scores may be a mask."""
    if not isinstance(value.type, TensorType) or value.type.dtype != FLOAT32:
        return False
    return value.const is None or not bool((np.abs(value.const) < _HIGHEST_SCORE).all())


def _elements(node: Node, x: Padded) -> Padded:
    """Return the form of a GatherElements along features, whose other indices stay in place."""
    at = normalize_axes([node.attrs.get("axis", 0)], len(x.axes))[0]
    dims, picked = [[*static_dims(value)] for value in node.inputs]
    size = picked[at]
    del dims[at], picked[at]
    if not are_features([x.axes[at]]) or dims != picked:
        raise Stays("reads several rows for one result row")
    return Padded((*x.axes[:at], features(size), *x.axes[at + 1 :]), (), x.weighed)


def _product(a: Padded, b: Padded) -> Padded:
    if min(len(a.axes), len(b.axes)) < 2:
        raise Stays("multiplies rows by a vector, which is not supported here")
    # A weight of 0 times a non-finite number is NaN.
    for x, other in ((a, b), (b, a)):
        if WEIGHTS in axis_names(x.axes) and other.weighed:
            raise Stays("applies attention weights to rows that may not be finite")
    # The contracted axis has features, or weights and the rows that they weight: those of one axis,
    # since samples and heads are along the others.
    summed = a.axes[-1], b.axes[-2]
    names = [name for name in axis_names(summed) if name]
    weighs = len(summed[0]) == len(summed[1]) == 1 and WEIGHTS in names
    if names and not (weighs and names.count(WEIGHTS) == 1 and SAMPLES not in names):
        raise Stays("sums over rows that no mask hides")
    lead = _joined([a.axes[:-2], b.axes[:-2]])
    return Padded((*lead, a.axes[-2], b.axes[-1]), (), a.weighed or b.weighed)


def _softmax(x: Padded, node: Node, samples: Axis, row: Axis) -> tuple[Padded, Sequence[ScoreTerm]]:
    """Return the weights of scores, and the terms that make the weights of masked rows 0."""
    rank = len(x.axes)
    last = node.attrs.get("axis", -1) in (-1, rank - 1) and node.op.since >= SINGLE_AXIS
    if not last:
        raise Stays("is a Softmax over rows along an axis other than the last one")
    if x.weighed:
        raise Stays("applies attention weights to rows that may not be finite")
    # The last axis may also be of features alone, as in scores of queries with positions.
    terms = x.terms if _are_scores(x.axes, samples, row) else ()
    if terms:
        weights = tuple((WEIGHTS, size) for _, size in row)
        return Padded((*x.axes[:-1], weights), (), True), terms
    if not are_features(x.axes[-1:]):
        raise Stays("normalizes scores of rows to which no mask is known to be added")
    return Padded(x.axes, (), True), ()


def _are_scores(axes: Axes, samples: Axis, row: Axis) -> bool:
    """Whether axes are [samples, heads, rows or 1, rows], as of a bias."""
    if len(axes) != 4 or axes[0] != samples or not are_features(axes[1:2]):
        return False
    return axes[2] in (row, ()) and axes[3] in (row, features(row[0][1]))


def _attention(
    node: Node, inputs: _Inputs, samples: Axis, row: Axis
) -> tuple[Padded, Sequence[ScoreTerm]]:
    """Return the form of an Attention whose bias depends on rows."""
    values = node.inputs
    q, k, v = [x or _plain(value) for x, value in zip(inputs[:3], values, strict=False)]
    if not node.attrs.get("keys_last", 0):
        k = k._replace(axes=(*k.axes[:-2], k.axes[-1], k.axes[-2]))
    terms: tuple[ScoreTerm, ...] = ()
    axes, _, weighed = _product(q, k)
    for x, value in zip(inputs[3:], values[3:], strict=True):
        if x is not None:
            terms, weighed = (*terms, *x.terms), weighed or x.weighed
        elif value is not None and _may_hide(value):
            terms = (*terms, ScoreTerm(value))
        if value is not None:
            axes = _joined([axes, (x or _plain(value)).axes])
    if weighed:
        raise Stays("applies attention weights to rows that may not be finite")
    if not (terms and _are_scores(axes, samples, row)):
        raise Stays("normalizes scores of rows to which no mask is known to be added")
    weights = tuple((WEIGHTS, size) for _, size in row)
    return _product(Padded((*axes[:-1], weights), (), True), v), terms
