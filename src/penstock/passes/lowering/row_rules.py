"""Rules for row-wise operations on packed rows: each result row depends on one row alone.

The rules track where the axes of samples and rows are. An axis is a tuple of its factors, each with
a name and a size: samples, rows, or features, whose name is empty::

    [batch, rows, heads * size]               samples, rows, features
    Reshape    [batch, rows, heads, size]     samples, rows, features, features
    Transpose  [batch, heads, rows, size]     samples, features, rows, features
    Reshape    [batch * heads, rows, size]    samples and features, rows, features

A packed batch has one sample, with the rows of all samples. Along axes of features an operation is
unchanged; only constants that contain numbers of samples or rows must be rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.op import Attrs
from penstock.ops.common.shape_rules import normalize_axes
from penstock.ops.onnx.rotary import cache_places

SAMPLES, ROWS = "samples", "rows"

Axis: TypeAlias = "tuple[tuple[str, int], ...]"
"""factors (samples, rows or features), the last varying fastest; empty for an axis of length 1"""
Axes: TypeAlias = "tuple[Axis, ...]"


class Stays(Exception):  # noqa: N818 - not an error: all rows are computed
    """The reason why a node cannot be computed row by row."""


class Packed(NamedTuple):
    """Form of a node for packed rows: the axes of its outputs; those of each packed input, None for
    unpacked ones; and, where they change, the operation name, the attributes, and the constant
    inputs after the first one."""

    outputs: Sequence[Axes]
    inputs: Sequence[Axes | None]
    op: str = ""
    attrs: Attrs | None = None
    constants: Sequence[np.ndarray] = ()


_Inputs: TypeAlias = "Sequence[Axes | None]"
_Rule: TypeAlias = "Callable[[Node, _Inputs], Packed]"
_RULES: dict[str, _Rule] = {}


def packed_form(node: Node, inputs: _Inputs) -> Packed:
    """Return the form of a node for packed rows, given the axes of its inputs. Raises ``Stays``."""
    form = axes_rule(node, inputs)
    for axes in form.outputs:
        if axis_names(axes).count(ROWS) != 1:
            raise Stays("combines several rows into one result")
    return form


def axes_rule(node: Node, inputs: _Inputs) -> Packed:
    """Apply the rule of an operation, without checking the resulting axes."""
    check_pure(node)
    name = node.op.full_name
    rule = _RULES.get("Reduce" if name.startswith("Reduce") else name)
    if node.op.elementwise:
        rule = _of_elementwise
    if rule is None:
        raise Stays("is not known to compute each row separately")
    return rule(node, inputs)


def check_pure(node: Node) -> None:
    """Raise ``Stays`` for a node that is not a pure function of its inputs."""
    if not node.op.pure or node.control_inputs or node.graphs or node.op.role is not None:
        raise Stays("has side effects, control edges or control flow")


def static_dims(value: Value | None) -> tuple[int, ...]:
    """Return the static dims of a tensor. Raises ``Stays`` if any is unknown."""
    type_ = None if value is None else value.type
    if not isinstance(type_, TensorType) or not type_.static:
        raise Stays("has an input or output with unknown dims")
    return type_.dims


def features(size: int) -> Axis:
    """Return an axis of ``size`` features."""
    return () if size == 1 else (("", size),)


def axis_names(axes: Iterable[Axis]) -> list[str]:
    """Return the names of the factors of axes, in order: samples, rows, and "" for features."""
    return [name for axis in axes for name, _ in axis]


def are_features(axes: Iterable[Axis]) -> bool:
    """Whether axes have factors of features only."""
    return not any(axis_names(axes))


def place_of_rows(axes: Axes) -> int:
    """Return the index of the axis of rows."""
    return next(i for i, axis in enumerate(axes) if ROWS in axis_names([axis]))


def without_samples(axes: Axes) -> Axes:
    """Return the axes without samples, for a value that all samples share."""
    return tuple([_merged(tuple([p for p in axis if p[0] != SAMPLES])) for axis in axes])


def repeats(value: Value | None, batch: int) -> bool:
    """Whether a value is known to be ``batch`` equal parts along the first axis."""
    dims = value.shape if value is not None else None
    if value is None or not dims or not isinstance(dims[0], int) or dims[0] % batch:
        return False
    if value.const is not None:
        parts = value.const.reshape(batch, -1)
        return bool((parts[1:] == parts[0]).all())
    node = value.producer
    if node is None or node.control_inputs:
        return False
    x, name = node.inputs[0], node.op.full_name
    if name == "Tile":
        times = node.const(1)
        return times is not None and times.size > 0 and int(times.reshape(-1)[0]) % batch == 0
    if name == "Expand":
        before = static_dims(x)
        return len(before) < len(dims) or before[0] == 1
    if name == "Transpose":
        perm = node.attrs.get("perm") or range(len(dims))[::-1]
        return perm[0] == 0 and repeats(x, batch)
    return name in ("Cast", "Reshape", "Unsqueeze") and repeats(x, batch)


def beside(value: Value, axes: Sequence[Axis]) -> Axes | None:
    """Return the axes of a ``value`` combined with rows along ``axes``; None if rows share it."""
    own: list[Axis] = []
    for size, axis in zip(reversed(static_dims(value)), reversed(axes), strict=False):
        own.insert(0, features(size) if size == 1 or are_features([axis]) else axis)
    if are_features(own):
        return None
    if ROWS not in axis_names(own):
        raise Stays("combines rows with a value that has one entry per sample")
    return tuple(own)


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register the packed-row rule of the operations ``names``."""

    def registered(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return registered


def _want_plain(axes: Iterable[Axis]) -> None:
    if not are_features(axes):
        raise Stays("computes over the axis of rows or samples")


def _want_no_rows(axes: Iterable[Axis]) -> None:
    """Raise ``Stays`` for axes of rows."""
    if ROWS in axis_names(axes):
        raise Stays("multiplies rows by a stack of matrices")


def _merged(axis: Axis) -> Axis:
    """Return an axis with adjacent features merged."""
    merged: list[tuple[str, int]] = []
    for name, size in axis:
        if merged and not name and not merged[-1][0]:
            merged[-1] = "", merged[-1][1] * size
        else:
            merged.append((name, size))
    return tuple(merged)


def _joined(column: Sequence[Axis]) -> Axis:
    """Return the broadcast of axes. Raises ``Stays``."""
    different = {_merged(axis) for axis in column if axis}
    if len(different) > 1:
        raise Stays("combines different rows")
    return different.pop() if different else ()


def _only(inputs: _Inputs, place: int = 0) -> Axes:
    """Return the axes of the only input with rows. Raises ``Stays``."""
    axes = inputs[place] if place < len(inputs) else None
    if axes is None or sum(a is not None for a in inputs) > 1:
        raise Stays("combines different rows")
    return axes


def _of_rank(axes: Axes, rank: int) -> Axes:
    return ((),) * (rank - len(axes)) + axes


def _axis(node: Node, default: int, rank: int) -> int:
    """Return the attribute ``axis`` as a non-negative index."""
    return normalize_axes([node.attrs.get("axis", default)], rank)[0]


def _of_elementwise(node: Node, inputs: _Inputs) -> Packed:
    rank = len(static_dims(node.outputs[0]))
    known = [_of_rank(axes, rank) for axes in inputs if axes is not None]
    joined = [_joined(column) for column in zip(*known, strict=True)]
    others: list[Axes | None] = []
    for value, axes in zip(node.inputs, inputs, strict=True):
        own = None if value is None or axes else beside(value, joined)
        others.append(axes or own)
        dims = () if axes or value is None else static_dims(value)
        for at, size in enumerate(dims, rank - len(dims)):
            joined[at] = joined[at] or features(size)
    return Packed([tuple(joined)], others)


@_rule("QuantizeLinear", "DequantizeLinear")
def _of_codes(node: Node, inputs: _Inputs) -> Packed:
    axes, scale = _only(inputs), static_dims(node.inputs[1])
    if prod(scale) > 1:  # such as one per feature
        at = _axis(node, 1, len(axes))
        _want_plain(axes if len(scale) > 1 else axes[at : at + 1])
    return Packed([axes], inputs)


@_rule("Gather")
def _of_gather(node: Node, inputs: _Inputs) -> Packed:
    if inputs[0] is not None:  # some of the features
        axes = _only(inputs)
        at = _axis(node, 0, len(axes))
        _want_plain(axes[at : at + 1])
        index = tuple([features(n) for n in static_dims(node.inputs[1])])
    else:
        axes = tuple([features(n) for n in static_dims(node.inputs[0])])
        at, index = _axis(node, 0, len(axes)), _only(inputs, 1)
    return Packed([axes[:at] + index + axes[at + 1 :]], inputs)


@_rule("com.microsoft.GatherBlockQuantized")
def _of_gathered_codes(node: Node, inputs: _Inputs) -> Packed:
    index, dims = _only(inputs, 1), static_dims(node.outputs[0])
    at = normalize_axes([node.attrs.get("gather_axis", 0)], len(dims) + 1 - len(index))[0]
    before, behind = dims[:at], dims[at + len(index) :]
    return Packed([(*map(features, before), *index, *map(features, behind))], inputs)


@_rule("GatherND")
def _of_places(node: Node, inputs: _Inputs) -> Packed:
    """Return the form of a Gather: rows of a table by index, or selected features of rows."""
    index = static_dims(node.inputs[1])
    depth = index[-1]
    if node.attrs.get("batch_dims", 0):
        raise Stays("reads several rows for one result row")
    if inputs[0] is not None:
        axes = _only(inputs)
        _want_plain(axes[:depth])
        return Packed([(*map(features, index[:-1]), *axes[depth:])], inputs)
    places = _only(inputs, 1)
    _want_plain(places[-1:])
    rest = map(features, static_dims(node.inputs[0])[depth:])
    return Packed([(*places[:-1], *rest)], inputs)


@_rule("Tile")
def _of_repetition(node: Node, inputs: _Inputs) -> Packed:
    axes, times = _only(inputs), node.const(1)
    if times is None:
        raise Stays("repeats rows by a factor that is not constant")
    pairs = [*zip(axes, times.reshape(-1).tolist(), static_dims(node.outputs[0]), strict=True)]
    _want_plain(axis for axis, n, _ in pairs if n != 1)
    return Packed([tuple([axis if n == 1 else features(size) for axis, n, size in pairs])], inputs)


def _along(node: Node, inputs: _Inputs) -> tuple[int, list[Axis], list[Axes | None]]:
    """Return the attribute ``axis``, an axis of features; the inputs' broadcast other axes; and the
    axes of each input."""
    known = [axes for axes in inputs if axes is not None]
    at = _axis(node, 0, len(known[0]))
    _want_plain(axes[at] for axes in known)
    columns = enumerate(zip(*known, strict=True))
    joined = [() if i == at else _joined(column) for i, column in columns]
    others = [
        axes or (None if value is None else beside(value, joined))
        for value, axes in zip(node.inputs, inputs, strict=True)
    ]
    return at, joined, others


@_rule("GatherElements")
def _of_elements(node: Node, inputs: _Inputs) -> Packed:
    if inputs[0] is None:  # indices into a table, one per other element
        index = _only(inputs, 1)
        at = _axis(node, 0, len(index))
        _want_plain(index[:at] + index[at + 1 :])
        return Packed([index], inputs)
    at, joined, others = _along(node, inputs)
    dims, picked = [[*static_dims(value)] for value in node.inputs]
    del dims[at], picked[at]
    if None in others or dims != picked:
        raise Stays("gathers a selection of rows")
    joined[at] = features(static_dims(node.outputs[0])[at])
    return Packed([tuple(joined)], others)


@_rule("MatMul")
def _of_product(node: Node, inputs: _Inputs) -> Packed:
    if inputs[0] is not None and inputs[1] is not None:
        return _of_products(inputs[0], inputs[1])
    a, b = static_dims(node.inputs[0]), static_dims(node.inputs[1])
    first = inputs[0] is not None
    axes, other = _only(inputs, 0 if first else 1), b if first else a
    if not 2 <= len(other) <= len(axes):
        raise Stays("multiplies rows by a stack of matrices")
    _want_plain(axes[-1:] if first else axes[-2:-1])
    lead = [*axes[:-2]]
    known, at = [*inputs], len(axes) - len(other)
    for i, size in enumerate(other[:-2], at):
        if size > 1 and are_features([lead[i]]):  # one matrix per element of an axis
            lead[i] = features(size)
        elif size > 1:  # for each sample
            _want_no_rows([lead[i]])
            of_samples = tuple(
                [axis if n > 1 else () for axis, n in zip(lead[at:], other, strict=False)]
            )
            known[1 if first else 0] = (*of_samples, *map(features, other[-2:]))
    ends = (axes[-2], features(b[-1])) if first else (features(a[-2]), axes[-1])
    return Packed([(*lead, *ends)], known)


def _of_products(a: Axes, b: Axes) -> Packed:
    """Return the form of products of matrices within each row."""
    rank = max(len(a), len(b))
    a, b = _of_rank(a, rank), _of_rank(b, rank)
    _want_plain(a[-2:] + b[-2:])
    lead = [_joined(column) for column in zip(a[:-2], b[:-2], strict=True)]
    return Packed([(*lead, a[-2], b[-1])], [a, b])


@_rule("Gemm")
def _of_gemm(node: Node, inputs: _Inputs) -> Packed:
    axes = inputs[0]
    if axes is None or node.attrs.get("transA") or inputs[1] is not None:
        raise Stays("combines different rows")
    _want_plain(axes[1:])
    result = axes[0], features(static_dims(node.outputs[0])[1])
    added = node.input(2)
    own = None if added is None else inputs[2] or beside(added, result)
    return Packed([result], [axes, None, own][: len(node.inputs)])


@_rule("com.microsoft.MatMulNBits", "com.microsoft.MatMulBnb4")
def _of_block_product(node: Node, inputs: _Inputs) -> Packed:
    axes = _only(inputs)
    _want_plain(axes[-1:])
    return Packed([(*axes[:-1], features(static_dims(node.outputs[0])[-1]))], inputs)


@_rule("com.microsoft.MoE", "com.microsoft.QMoE")
def _of_experts(node: Node, inputs: _Inputs) -> Packed:
    x, router = inputs[:2]
    if x is None or router is None or any(inputs[2:]):
        raise Stays("has weights per row, or a router input without rows")
    rows = [part for axis in x[:-1] for part in axis]
    if rows != [*router[0]]:
        raise Stays("has a router input whose rows do not match those of its input")
    _want_plain([x[-1], router[1]])
    return Packed([x], inputs)


@_rule("RotaryEmbedding", "com.microsoft.RotaryEmbedding")
def _of_rotation(node: Node, inputs: _Inputs) -> Packed:
    x, (cos, sin, positions) = inputs[0], cache_places(node.op)
    if x is None:
        raise Stays("rotates a value without rows")
    row = x[0], x[1 if len(x) == 3 else 2]
    _want_plain([axis for i, axis in enumerate(x) if i not in (0, 1 if len(x) == 3 else 2)])
    of_rows = (cos, sin) if node.input(positions) is None else (positions,)
    axes_of_inputs: list[Axes | None] = [*inputs, None]
    for i in (cos, sin, positions):
        wanted = row if i == positions else (*row, features(static_dims(node.inputs[cos])[-1]))
        if i in of_rows and axes_of_inputs[i] is None:  # of the padded batch, such as constants
            sizes = tuple([prod(n for _, n in axis) for axis in wanted])
            axes_of_inputs[i] = wanted if static_dims(node.inputs[i]) == sizes else None
        if i in of_rows and axes_of_inputs[i] != wanted:
            raise Stays("rotates rows by positions or angles that are not given per row")
        if i not in of_rows and i < len(inputs) and inputs[i] is not None:
            raise Stays("rotates rows by caches that depend on rows")
    return Packed([x], axes_of_inputs[: len(inputs)])


@_rule("LayerNormalization", "RMSNormalization")
def _of_normalization(node: Node, inputs: _Inputs) -> Packed:
    axes = _only(inputs)
    at = _axis(node, -1, len(axes))
    _want_plain(axes[at:])
    single = axes[:at] + ((),) * (len(axes) - at)
    return Packed([axes, single, single], inputs)


@_rule("Softmax", "LogSoftmax")
def _of_softmax(node: Node, inputs: _Inputs) -> Packed:
    axes = _only(inputs)
    _want_plain(axes[_axis(node, -1, len(axes)) :])
    return Packed([axes], inputs)


@_rule("Reduce")
def _of_reduction(node: Node, inputs: _Inputs) -> Packed:
    axes, spelled = _only(inputs), node.attrs.get("axes")
    given = node.const(1)
    if given is not None:
        spelled = given.reshape(-1).tolist()
    if not spelled:
        raise Stays("computes over the axis of rows or samples")
    reduced = normalize_axes(spelled, len(axes))
    _want_plain(axes[i] for i in reduced)
    keeps = node.attrs.get("keepdims", 1)
    kept = [(i, axis) for i, axis in enumerate(axes) if keeps or i not in reduced]
    return Packed([tuple([() if i in reduced else axis for i, axis in kept])], inputs)


@_rule("Flatten", "Reshape", "Squeeze", "Unsqueeze")
def _of_reshape(node: Node, inputs: _Inputs) -> Packed:
    left = [part for axis in _only(inputs) for part in axis]
    result: list[Axis] = []
    for size in static_dims(node.outputs[0]):
        axis: list[tuple[str, int]] = []
        while size > 1:
            name, number = left[0] if left else ("", 0)
            if number and size % number == 0:
                axis.append(left.pop(0))
                size //= number
            elif number and not name and number % size == 0:
                axis.append(("", size))
                left[0] = "", number // size
                size = 1
            else:
                raise Stays("merges a row with parts of other rows")
        result.append(_merged(tuple(axis)))
    # A packed batch is one sample, with a variable number of rows.
    sizes = [
        -1 if ROWS in axis_names([axis]) else prod(n for name, n in axis if not name)
        for axis in result
    ]
    return Packed([tuple(result)], inputs[:1], "Reshape", {}, [np.array(sizes)])


@_rule("CumSum")
def _of_sums(node: Node, inputs: _Inputs) -> Packed:
    axes, named = _only(inputs), node.const(1)
    if named is None:
        raise Stays("computes over the axis of rows or samples")
    _want_plain([axes[i] for i in normalize_axes(named.reshape(-1).tolist(), len(axes))])
    return Packed([axes], inputs)


@_rule("ArgMax", "ArgMin", "Hardmax", "TopK", "tflite.ArgMax", "tflite.ArgMin")
def _of_order(node: Node, inputs: _Inputs) -> Packed:
    axes = _only(inputs)
    at = _axis(node, 0 if node.op.name.startswith("Arg") else -1, len(axes))
    _want_plain(axes[at : at + 1])
    parts = []
    for dims in [static_dims(y) for y in node.outputs if y is not None]:
        kept = [features(dims[at])] if len(dims) == len(axes) else []
        parts.append((*axes[:at], *kept, *axes[at + 1 :]))
    return Packed(parts, inputs)


@_rule("Pad")
def _of_padding(node: Node, inputs: _Inputs) -> Packed:
    axes, dims = _only(inputs), static_dims(node.inputs[0])
    result = static_dims(node.outputs[0])
    amounts = node.const(1)
    if amounts is None or len(node.inputs) > 3:
        raise Stays("reads several rows for one result row")
    ends = amounts.reshape(2, -1)
    for axis, begin, end in zip(axes, *ends, strict=True):
        if begin or end:
            _want_plain([axis])
    pairs = zip(axes, dims, result, strict=True)
    return Packed([tuple([axis if n == m else features(m) for axis, n, m in pairs])], inputs)


@_rule("Transpose")
def _of_transpose(node: Node, inputs: _Inputs) -> Packed:
    axes = _only(inputs)
    perm = node.attrs.get("perm") or range(len(axes))[::-1]
    return Packed([tuple([axes[i] for i in perm])], inputs)


@_rule("Concat")
def _of_concat(node: Node, inputs: _Inputs) -> Packed:
    at, joined, others = _along(node, inputs)
    if None in others:
        raise Stays("concatenates rows with a value without rows")
    joined[at] = features(static_dims(node.outputs[0])[at])
    return Packed([tuple(joined)], others)


@_rule("Split")
def _of_split(node: Node, inputs: _Inputs) -> Packed:
    axes = _only(inputs)
    at = _axis(node, 0, len(axes))
    _want_plain(axes[at : at + 1])
    sizes = [static_dims(y)[at] for y in node.outputs]
    return Packed([(*axes[:at], features(n), *axes[at + 1 :]) for n in sizes], inputs)


@_rule("Slice")
def _of_slice(node: Node, inputs: _Inputs) -> Packed:
    axes, named = _only(inputs), node.const(3)
    if named is None:
        raise Stays("computes over the axis of rows or samples")
    cut = normalize_axes(named.reshape(-1).tolist(), len(axes))
    _want_plain(axes[i] for i in cut)
    pairs = enumerate(zip(axes, static_dims(node.outputs[0]), strict=True))
    return Packed([tuple([features(n) if i in cut else axis for i, (axis, n) in pairs])], inputs)


@_rule("Expand")
def _of_expand(node: Node, inputs: _Inputs) -> Packed:
    dims = static_dims(node.outputs[0])
    axes = _of_rank(_only(inputs), len(dims))
    # Samples and rows are not broadcast: their target dim is 1.
    target = [n if are_features([axis]) else 1 for axis, n in zip(axes, dims, strict=True)]
    result = tuple([axis or features(n) for axis, n in zip(axes, dims, strict=True)])
    return Packed([result], inputs[:1], "Expand", {}, [np.array(target)])


@_rule("Conv")
def _of_convolution(node: Node, inputs: _Inputs) -> Packed:
    axes, sizes = _only(inputs), {*static_dims(node.inputs[1])[2:], *node.attrs.get("strides", ())}
    if sizes != {1} or any(node.attrs.get("pads", ())):
        return _of_samples(node, inputs)
    _want_plain(axes[1:2])
    return Packed([(axes[0], features(static_dims(node.outputs[0])[1]), *axes[2:])], inputs)


@_rule(
    *("ConvTranspose", "QLinearConv", "ConvInteger", "MaxPool", "AveragePool", "LpPool"),
    *("GlobalMaxPool", "GlobalAveragePool", "BatchNormalization", "InstanceNormalization"),
    *("GroupNormalization", "LRN", "DepthToSpace", "SpaceToDepth", "tflite.DynamicRangeCodes"),
)
def _of_samples(node: Node, inputs: _Inputs) -> Packed:
    """Return the form of a node that maps each element along the first axis of its first input
    separately, without outputs such as batch statistics or indices into the batch. Other inputs
    with rows have numbers for each of these elements."""
    axes = _only(inputs[:1])
    for own in filter(None, inputs):
        if len(own) != len(axes) or own[0] != axes[0]:
            raise Stays("combines different rows")
        _want_plain(own[1:])
    if node.attrs.get("training_mode", 0):
        raise Stays("computes statistics over all rows")
    # Further outputs are indices into the batch, but for those of codes.
    outputs = node.outputs if node.op.name == "DynamicRangeCodes" else node.outputs[:1]
    dims = [static_dims(output)[1:] for output in outputs]
    return Packed([(axes[0], *map(features, rest)) for rest in dims], inputs)


@_rule("LSTM", "GRU", "RNN")
def _of_recurrence(node: Node, inputs: _Inputs) -> Packed:
    """Return the form of recurrent layers over independent sequences, rows along the batch axis."""
    batch, x = (0 if node.attrs.get("layout", 0) else 1), inputs[0]
    if x is None:
        raise Stays("has an input sequence without rows")
    row, own = x[batch], [*inputs]
    for i, value in enumerate(node.inputs):
        if value is None or i in (1, 2, 3, 7):  # weights
            if inputs[i] is not None:
                raise Stays("has weights that depend on rows")
            continue
        at = 0 if i == 4 else batch  # lengths have the batch axis only
        expected = [features(n) for n in static_dims(value)]
        expected[at] = row
        if inputs[i] not in (None, tuple(expected)):
            raise Stays("combines different rows")
        own[i] = tuple(expected)
    results = []
    for value in node.outputs:
        axes = [row] if value is None else [features(n) for n in static_dims(value)]
        at = 0 if value is None or batch == 0 else len(axes) - 2
        results.append((*axes[:at], row, *axes[at + 1 :]))
    return Packed(results, own)


@_rule("penstock.Attention")
def _of_attention(node: Node, inputs: _Inputs) -> Packed:
    q, k, v = inputs[:3]
    keys = 3 if node.attrs.get("keys_last", 0) else 2
    known = [axes for axes in (q, k, v) if axes is not None and len(axes) == 4]
    rows = [axes[at] for axes, at in zip(known, (2, keys, 2), strict=False)]
    if len(known) < 3 or axis_names(rows[:1]) != [ROWS]:
        raise Stays("has queries, keys or values whose axis of rows is unknown")
    samples = {axes[0] for axes in known}
    if {*rows} != {rows[0]} or samples not in (
        {()},
        {((SAMPLES, static_dims(node.inputs[0])[0]),)},
    ):
        raise Stays("has keys or values whose samples and rows differ from those of its queries")
    return Packed([(*known[0][:3], known[2][3])], inputs[:3], "PackedAttention")
