"""Operations by element between a Reshape and one back, done without either::

    y = Reshape(Add(Reshape(x), c))      becomes      y = Add(x, c')      c' is c, reshaped

Attention in windows adds a mask of constants so: scores have one dim for images and windows, and
the mask is the same for all images. Next to the product and the softmax, the addition can be taken
in by their kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.registry import MICROSOFT
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.optimize.simplify import RESHAPES
from penstock.passes.rewrite import Replacement, forward
from penstock.types import TensorType

Dims: TypeAlias = tuple[int, ...]

# Elements of a constant that is repeated along dims which become one.
_MOST_ELEMENTS = 1 << 22


class CancelReshapes(Pass):
    """Do elementwise operations of a value and constants without the reshapes around them."""

    name = "cancel_reshapes"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        readers = readers_of(graph)
        return forward(graph, lambda node: _cancelled(node, readers))


def _cancelled(last: Node, readers: dict[Value, list[Node | None]]) -> Replacement:
    """What replaces the output of the second Reshape: that of the operation before it. The
    operations between the two are changed."""
    if last.op.full_name not in RESHAPES or last.control_inputs:
        return None
    result, output = last.inputs[0], last.outputs[0]
    outside = None if output is None else _dims(output)
    if result is None or output is None or outside is None:
        return None
    inside = _dims(result)
    moved: list[tuple[Node, list[Value | None]]] = []
    value, reader = result, last
    while readers.get(value) == [reader] and inside is not None and value.shape == inside:
        node = value.producer
        if node is None or node.control_inputs:
            return None
        if node.op.full_name in RESHAPES:
            source = node.inputs[0]
            if not moved or source is None or source.shape != outside:
                return None
            return _applied(moved, source, output, readers)
        operand = _only_operand(node)
        inputs = None if operand is None else _inputs(node, inside, outside)
        if operand is None or inputs is None:
            return None
        moved.append((node, inputs))
        value, reader = operand, node
    return None


def _applied(
    moved: Sequence[tuple[Node, list[Value | None]]],
    source: Value,
    output: Value,
    readers: dict[Value, list[Node | None]],
) -> Replacement:
    """Give the nodes, the last one first, these inputs, where None stands for the operand, which is
    ``source`` for the first."""
    for node, inputs in reversed(moved):
        node.inputs = [source if value is None else value for value in inputs]
        (result,) = node.outputs
        assert result is not None
        result.type = TensorType(result.dtype, output.shape)
        source = result
    readers[source] = readers.get(output, [])
    return (source,)


def _only_operand(node: Node) -> Value | None:
    """The one input of an elementwise operation that is no constant."""
    if not node.op.elementwise or node.op.domain not in ("", MICROSOFT) or len(node.outputs) != 1:
        return None
    others = [value for value in node.inputs if value is None or value.const is None]
    return others[0] if len(others) == 1 else None


def _inputs(node: Node, inside: Dims, outside: Dims) -> list[Value | None] | None:
    """The inputs of an operation on another shape; None for its operand."""
    inputs: list[Value | None] = []
    for i, value in enumerate(node.inputs):
        if value is None or value.const is None:
            inputs.append(None)
            continue
        const = _reshaped(value.const, inside, outside)
        if const is None:
            return None
        inputs.append(Value(f"{node.name or value.name}/reshaped{i}", const=const))
    return inputs


def _dims(value: Value) -> Dims | None:
    """The dims of a value, if they are known, and it has elements."""
    type_ = value.type
    if not isinstance(type_, TensorType) or not type_.static or 0 in type_.dims:
        return None
    return type_.dims


def _reshaped(const: np.ndarray, dims: Dims, others: Dims) -> np.ndarray | None:
    """A constant that broadcasts to ``dims``, as one that broadcasts to the same elements in the
    shape ``others``; None if it would be too large, or does not broadcast to ``dims`` alone."""
    if const.ndim > len(dims):
        return None
    own = (1,) * (len(dims) - const.ndim) + const.shape
    repeated: list[int] = []
    result: list[int] = []
    for here, there in _groups(dims, others):
        kept = own[here]
        if all(n == 1 for n in kept):
            repeated += kept
            result += (1,) * len(others[there])
        else:
            repeated += dims[here]
            result += others[there]
    if math.prod(repeated) > max(const.size, _MOST_ELEMENTS):
        return None
    return np.ascontiguousarray(np.broadcast_to(const.reshape(own), repeated)).reshape(result)


def _groups(dims: Dims, others: Dims) -> Iterator[tuple[slice, slice]]:
    """Slices of both shapes that have as many elements, each as short as can be."""
    i = j = 0
    while i < len(dims) or j < len(others):
        begin, other = i, j
        i, j = min(i + 1, len(dims)), min(j + 1, len(others))
        while (a := math.prod(dims[begin:i])) != (b := math.prod(others[other:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield slice(begin, i), slice(other, j)
