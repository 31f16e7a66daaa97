"""Batching rules: how operations compute several samples, along an additional first axis.

::

    Softmax(x, axis = 0)             Softmax(x', axis = 1)
    Add(x [3], y [2, 3])             Add(Unsqueeze(x', 1) [n, 1, 3], y)
    Conv(x [1, 4, 8], w)             Reshape(Conv(Reshape(x', [n * 1, 4, 8]), w), [n, 1, ...])
    Gather(table, i)                 Gather(table, i')

A rule writes the nodes that replace a node some of whose inputs, ``x'``, have samples. If it raises
``NoRule``, the node runs for one sample after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.op import Attrs, Op
from penstock.ops.onnx.softmax import SINGLE_AXIS
from penstock.ops.registry import standard


class NoRule(Exception):  # noqa: N818 - not an error: samples are computed one by one
    """A node cannot be computed for several samples together; the message states the reason."""


class SampledNode:
    """Builder of the ``nodes`` that replace ``node``. ``given``: its inputs after rewriting, of
    which those that are ``sampled`` have a first axis of samples. ``count``: the number of samples,
    an int64 tensor [1]. ``numbers``: make the names of values unique."""

    def __init__(
        self,
        node: Node,
        given: Sequence[Value | None],
        sampled: Sequence[bool],
        count: Value,
        numbers: Iterator[int],
    ) -> None:
        self.node, self.given, self.sampled, self.count = node, given, sampled, count
        self._numbers = numbers
        self.nodes: list[Node] = []

    # Properties of the node for one sample.

    def rank(self, i: int) -> int:
        """Return the rank of an input for one sample. Raises ``NoRule`` if it is unknown."""
        value = self.node.inputs[i]
        shape = None if value is None else value.shape
        if shape is None:
            raise NoRule("has an input of unknown rank")
        return len(shape)

    def numbers(self, i: int, attribute: str = "") -> list[int] | None:
        """Return the elements of an attribute, by default of a constant input; None if both are
        omitted. Raises ``NoRule`` if the input is not constant."""
        if attribute and self.node.attrs.get(attribute) is not None:
            return [int(n) for n in np.atleast_1d(self.node.attrs[attribute])]
        if self.node.input(i) is None:
            return None
        const = self.node.const(i)
        if const is None:
            raise NoRule("has axes that are not constant")
        return [int(n) for n in const.reshape(-1)]

    def want_alone(self, *places: int) -> None:
        """Raise ``NoRule`` unless only the inputs at these places have samples."""
        if any(own for i, own in enumerate(self.sampled) if i not in places):
            raise NoRule("has samples on other inputs")

    # Nodes to write.

    def add(
        self, op: str | Op, inputs: Sequence[Value | None], attrs: Attrs | None = None
    ) -> Value:
        """Add a node and return its first output."""
        return self.several(op, inputs, attrs, 1)[0]

    def several(
        self, op: str | Op, inputs: Sequence[Value | None], attrs: Attrs | None, count: int
    ) -> list[Value]:
        """Add a node and return its ``count`` outputs."""
        name = f"{self.node.label}/samples{next(self._numbers)}"
        outputs = [Value(f"{name}.{i}") for i in range(count)]
        op = standard(op) if isinstance(op, str) else op
        self.nodes.append(self.node.derived(inputs, outputs, attrs or {}, op=op))
        return outputs

    def same(self, inputs: Sequence[Value | None], **attrs: object) -> list[Value]:
        """Add a copy of the node with these inputs and changed attributes; return its outputs."""
        node = self.node
        return self.several(node.op, inputs, {**node.attrs, **attrs}, len(node.outputs))

    @staticmethod
    def ints(numbers: Sequence[int]) -> Value:
        """Return an int64 constant [n]."""
        return Value("numbers", const=np.array(numbers, np.int64))

    def reshaped(self, x: Value, *dims: Value) -> Value:
        """Return a tensor reshaped to the concatenation of ``dims``."""
        whole = dims[0] if len(dims) == 1 else self.add("Concat", dims, {"axis": 0})
        return self.add("Reshape", [x, whole])

    def dims(self, x: Value, start: int = 0, end: int | None = None) -> Value:
        """Return the dims of a tensor from ``start`` to ``end``, as a tensor."""
        return self.add("Shape", [x], {"start": start} | ({} if end is None else {"end": end}))

    def inserted(self, x: Value, axes: Sequence[int]) -> Value:
        """Return a tensor with axes of length 1 inserted."""
        return self.add("Unsqueeze", [x, self.ints(axes)]) if axes else x

    def aligned(self, i: int, rank: int) -> Value:
        """Return an input whose samples have this rank, by inserting axes before theirs."""
        x = self.given[i]
        assert x is not None
        missing = rank - self.rank(i)
        return self.inserted(x, range(1, 1 + missing)) if self.sampled[i] and missing > 0 else x

    def spread(self, i: int) -> Value:
        """Return an input with a samples axis, along which it is repeated if it had none."""
        x = self.given[i]
        assert x is not None
        return x if self.sampled[i] else self.repeated(x)

    def repeated(self, x: Value) -> Value:
        """Return a tensor repeated along a new samples axis."""
        dims = self.add("Concat", [self.count, self.dims(x)], {"axis": 0})
        return self.add("Expand", [x, dims])


Rule: TypeAlias = "Callable[[SampledNode], Sequence[Value]]"
_RULES: dict[str, Rule] = {}


def sampled_outputs(sampled: SampledNode) -> Sequence[Value]:
    """Return the outputs of a node's replacement, all with a samples axis. Raises ``NoRule``."""
    op = sampled.node.op
    name = op.full_name
    rule = _RULES.get("Reduce" if name.startswith("Reduce") else name)
    if rule is None and op.elementwise:
        rule = _of_elementwise
    if rule is None or not op.pure:
        raise NoRule("has no rule")
    return rule(sampled)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of these operations."""

    def registered(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return registered


def _behind(axis: int) -> int:
    """Return the index of an axis of one sample in a tensor with samples."""
    return axis + 1 if axis >= 0 else axis


def _of_elementwise(s: SampledNode) -> Sequence[Value]:
    places = [i for i, x in enumerate(s.given) if x is not None]
    rank = max(map(s.rank, places))
    return s.same([s.aligned(i, rank) if i in places else None for i in range(len(s.given))])


@_rule("Clip", "Dropout", "Trilu", "CastLike")
def _of_scalars(s: SampledNode) -> Sequence[Value]:
    """Operations on one tensor, with parameters that all samples share."""
    s.want_alone(0)
    return s.same(s.given)


@_rule("Identity")
def _of_identity(s: SampledNode) -> Sequence[Value]:
    return s.same(s.given)


def _along(s: SampledNode, default: int) -> Sequence[Value]:
    s.want_alone(0)
    return s.same(s.given, axis=_behind(s.node.attrs.get("axis", default)))


@_rule("Softmax", "LogSoftmax", "Hardmax")
def _of_softmax(s: SampledNode) -> Sequence[Value]:
    if s.node.op.since < SINGLE_AXIS:
        raise NoRule("flattens axes")
    return _along(s, -1)


@_rule("LayerNormalization", "RMSNormalization", "TopK", "LpNormalization", "OneHot")
def _of_last_axis(s: SampledNode) -> Sequence[Value]:
    return _along(s, -1)


@_rule("ArgMax", "ArgMin", "Split", "tflite.ArgMax", "tflite.ArgMin")
def _of_first_axis(s: SampledNode) -> Sequence[Value]:
    return _along(s, 0)


@_rule("Concat")
def _of_concat(s: SampledNode) -> Sequence[Value]:
    inputs = [s.spread(i) for i in range(len(s.given))]
    return s.same(inputs, axis=_behind(s.node.attrs["axis"]))


@_rule("GatherElements", "ScatterElements")
def _of_elements(s: SampledNode) -> Sequence[Value]:
    inputs = [s.spread(i) for i in range(len(s.given))]
    return s.same(inputs, axis=_behind(s.node.attrs.get("axis", 0)))


@_rule("GatherND")
def _of_places(s: SampledNode) -> Sequence[Value]:
    return s.same([s.spread(0), s.spread(1)], batch_dims=s.node.attrs.get("batch_dims", 0) + 1)


@_rule("Gather")
def _of_gather(s: SampledNode) -> Sequence[Value]:
    axis, rank = s.node.attrs.get("axis", 0), s.rank(0)
    axis += rank if axis < 0 else 0
    if not s.sampled[1]:
        return s.same(s.given, axis=axis + 1)
    # The indices put the samples axis at ``axis``; it is moved to the front.
    if not s.sampled[0]:
        y = s.same(s.given, axis=axis)
        perm = [axis, *range(axis), *range(axis + 1, rank + s.rank(1))]
        return y if axis == 0 else [s.add("Transpose", y, {"perm": perm})]
    if axis:
        raise NoRule("gathers by indices of each sample along an inner axis")
    picked = s.inserted(s.spread(1), [-1])
    return [s.add("GatherND", [s.spread(0), picked], {"batch_dims": 1})]


@_rule("CumSum")
def _of_sums(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    axes = s.numbers(1) or [0]
    return s.same([s.given[0], Value("axis", const=np.array(_behind(axes[0])))])


@_rule("Reduce")
def _of_reduction(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    axes = s.numbers(1, "axes")
    if not axes:
        if s.node.attrs.get("noop_with_empty_axes"):
            return s.same(s.given)
        axes = [*range(s.rank(0))]
    attrs = {"keepdims": s.node.attrs.get("keepdims", 1)}
    behind = s.ints([_behind(n) for n in axes])
    return [s.add(s.node.op.name, [s.given[0], behind], attrs)] if axes else s.same(s.given)


@_rule("Transpose")
def _of_transpose(s: SampledNode) -> Sequence[Value]:
    perm = s.node.attrs.get("perm") or [*range(s.rank(0))][::-1]
    return s.same(s.given, perm=[0, *[n + 1 for n in perm]])


@_rule("Squeeze", "Unsqueeze")
def _of_single_axes(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    axes, x = s.numbers(1, "axes"), s.node.inputs[0]
    if axes is None:
        type_ = None if x is None else x.type
        if not isinstance(type_, TensorType) or not type_.static:
            raise NoRule("drops axes that depend on the shape of a run")
        axes = [i for i, n in enumerate(type_.dims) if n == 1]
    return [s.add(s.node.op.name, [s.given[0], s.ints([_behind(n) for n in axes])])]


@_rule("Reshape")
def _of_reshape(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    dims = s.add("Concat", [s.count, s.given[1]], {"axis": 0})
    return s.same([s.given[0], dims])


@_rule("Flatten")
def _of_flatten(s: SampledNode) -> Sequence[Value]:
    x, axis = s.spread(0), s.node.attrs.get("axis", 1)
    axis += s.rank(0) if axis < 0 else 0
    parts = [s.dims(x, 1, axis + 1), s.dims(x, axis + 1)]
    return [s.reshaped(x, s.count, *[s.add("ReduceProd", [part]) for part in parts])]


@_rule("Expand")
def _of_expand(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    target = s.node.inputs[1]
    length = None if target is None or not target.shape else target.shape[0]
    if not isinstance(length, int):
        raise NoRule("expands to an unknown rank")
    rank = max(length, s.rank(0))
    ones = s.ints([1] * (1 + rank - length))
    dims = s.add("Concat", [ones, s.given[1]], {"axis": 0})
    return s.same([s.aligned(0, rank), dims])


@_rule("Tile")
def _of_tile(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    return s.same([s.given[0], s.add("Concat", [s.ints([1]), s.given[1]], {"axis": 0})])


@_rule("Slice")
def _of_slice(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    axes, starts = s.numbers(3), s.node.inputs[1]
    if axes is None:
        length = None if starts is None or not starts.shape else starts.shape[0]
        if not isinstance(length, int):
            raise NoRule("slices axes that are unknown before the run")
        axes = [*range(length)]
    dtype = np.int64 if starts is None or starts.dtype is None else starts.dtype
    behind = Value("axes", const=np.array([_behind(n) for n in axes], dtype))
    return s.same([*s.given[:3], behind, *s.given[4:]])


@_rule("Pad")
def _of_pad(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    pads, axes = s.numbers(1), s.numbers(3)
    if pads is None:
        raise NoRule("has no pads input")
    half = len(pads) // 2
    axes = [*range(half)] if axes is None else axes
    behind = s.ints([_behind(n) for n in axes])
    value = s.given[2] if len(s.given) > 2 else None
    return s.same([s.given[0], s.ints(pads), value, behind])


@_rule("QuantizeLinear", "DequantizeLinear")
def _of_codes(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    if s.rank(1) > 1 or s.node.attrs.get("block_size"):
        raise NoRule("has block-wise scales")
    return _along(s, 1) if s.rank(1) else s.same(s.given)


# Products.


def _product(s: SampledNode, a: Value, b: Value, ranks: tuple[int, int]) -> Value:
    """Return the product of matrices, with or without samples; ``ranks``: those of one sample."""
    rank = max(ranks)
    operands = [
        s.inserted(x, range(1, 1 + rank - own)) if on else x
        for x, on, own in zip((a, b), s.sampled, ranks, strict=False)
    ]
    return s.add("MatMul", operands)


@_rule("MatMul")
def _of_product(s: SampledNode) -> Sequence[Value]:
    (a, b), ranks = s.given[:2], [s.rank(0), s.rank(1)]
    assert a is not None
    assert b is not None
    vectors = [n == 1 for n in ranks]
    # A vector becomes a matrix of one row or column, whose axis is dropped from the product.
    if vectors[0]:
        a = s.inserted(a, [-2])
    if vectors[1]:
        b = s.inserted(b, [-1])
    y = _product(s, a, b, (max(ranks[0], 2), max(ranks[1], 2)))
    dropped = [n for n, own in zip((-2, -1), vectors, strict=True) if own]
    return [s.add("Squeeze", [y, s.ints(dropped)]) if dropped else y]


@_rule("Gemm")
def _of_gemm(s: SampledNode) -> Sequence[Value]:
    operands, attrs = [*s.given[:2]], s.node.attrs
    for i, name in enumerate(("transA", "transB")):
        if attrs.get(name):
            perm = [0, 2, 1] if s.sampled[i] else [1, 0]
            operands[i] = s.add("Transpose", [operands[i]], {"perm": perm})
    a, b = operands
    first = s.node.inputs[0]
    assert first is not None
    assert a is not None
    assert b is not None
    if first.dtype is None:
        raise NoRule("has an input of unknown dtype")

    def times(x: Value, name: str) -> Value:
        factor = attrs.get(name, 1.0)
        return (
            x
            if factor == 1
            else s.add("Mul", [x, Value(name, const=np.array(factor, first.dtype))])
        )

    y = times(_product(s, a, b, (2, 2)), "alpha") if s.sampled[0] or s.sampled[1] else None
    if y is None:
        y = times(s.add("MatMul", [a, b]), "alpha")
    if len(s.given) < 3 or s.given[2] is None:
        return [y]
    return [s.add("Add", [y, times(s.aligned(2, 2), "beta")])]


@_rule("Einsum")
def _of_einsum(s: SampledNode) -> Sequence[Value]:
    equation = s.node.attrs["equation"].replace(" ", "")
    free = [c for c in "abcdefghijklmnopqrstuvwxyz" if c not in equation]
    if "->" not in equation or "." in equation or not free:
        raise NoRule("has an equation without free letters")
    terms, result = equation.split("->")
    own = [free[0] * on + term for term, on in zip(terms.split(","), s.sampled, strict=True)]
    return s.same(s.given, equation=f"{','.join(own)}->{free[0]}{result}")


# Operations with a batch axis, with which the samples axis is merged.


@_rule(
    *("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalMaxPool"),
    *("GlobalAveragePool", "BatchNormalization", "InstanceNormalization", "GroupNormalization"),
    *("LRN", "DepthToSpace", "SpaceToDepth", "QLinearConv", "ConvInteger"),
)
def _of_batch(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0)
    if s.node.attrs.get("training_mode") or len(s.node.outputs) > 1:
        raise NoRule("computes statistics, or indices, of the whole batch")
    x = s.spread(0)
    # Merge the axes of samples and of the batch, and split them again.
    (y,) = s.same([s.reshaped(x, s.ints([-1]), s.dims(x, 2)), *s.given[1:]])
    return [s.reshaped(y, s.dims(x, 0, 2), s.dims(y, 1))]


@_rule("LSTM", "GRU", "RNN")
def _of_recurrence(s: SampledNode) -> Sequence[Value]:
    s.want_alone(0, 5, 6)
    if s.node.attrs.get("layout") or s.node.input(4) is not None:
        raise NoRule("has sequence lengths, or the batch as its first axis")
    x = s.spread(0)
    batch = s.dims(x, 2, 3)
    inputs = [*s.given]
    for i in (0, 5, 6):
        if s.node.input(i) is not None:
            # [n, steps, batch, size] as [steps, n * batch, size]
            turned = s.add("Transpose", [s.spread(i)], {"perm": [1, 0, 2, 3]})
            steps = s.dims(turned, 0, 1)
            inputs[i] = s.reshaped(turned, steps, s.ints([-1]), s.dims(turned, 3))
    results = []
    for place, y in enumerate(s.same(inputs)):
        lead = 1 if place else 2  # axes before the batch: directions; in Y, steps and directions
        whole = s.reshaped(y, s.dims(y, 0, lead), s.count, batch, s.dims(y, lead + 1))
        perm = [lead, *range(lead), lead + 1, lead + 2]
        results.append(s.add("Transpose", [whole], {"perm": perm}))
    return results
