"""Cancellation of a Reshape and its inverse around elementwise operations::

    y = Reshape(Add(Reshape(x), c))      becomes      y = Add(x, c')      c' is c, reshaped

Window attention adds a constant mask in this way: scores have one dim for images and windows, and
all images share the mask. Adjacent to the product and the softmax, the addition can be fused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.registry import MICROSOFT
from penstock.passes.context import Pass, PassContext
from penstock.passes.optimize.simplify import RESHAPES
from penstock.passes.rewrite import Replacement, forward

Dims: TypeAlias = tuple[int, ...]

# Most elements of a constant that is broadcast along merged dims.
_MOST_ELEMENTS = 1 << 22


class CancelReshapes(Pass):
    """Remove the reshapes around elementwise operations on a value and constants."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        readers = readers_of(graph)
        return forward(graph, dict.fromkeys(RESHAPES, partial(_cancelled, readers)))


def _cancelled(
    readers: dict[Value, list[Node | None]], last: Node, value: Value, output: Value
) -> Replacement:
    """Return the replacement of the second Reshape's output: the output of the operation before it.
    Modifies the operations in between."""
    inside, outside = _dims(value), _dims(output)
    between: list[Node] = []
    reader = last
    while inside and outside and readers.get(value) == [reader] and value.shape == inside:
        node = value.producer
        if node is None or node.control_inputs:
            return None
        if "reshapes" in node.op.traits:
            source = node.inputs[0]
            if not between or source is None or source.shape != outside:
                return None
            return _moved(between[::-1], inside, source, output, readers)
        operand = _only_operand(node)
        if operand is None:
            return None
        between.append(node)
        value, reader = operand, node
    return None


def _moved(
    nodes: Sequence[Node],
    inside: Dims,
    source: Value,
    output: Value,
    readers: dict[Value, list[Node | None]],
) -> Replacement:
    """Let a chain of operations begin with ``source``, which has the shape of ``output``. Return
    None if constants would be too large."""
    outside = _dims(output)
    assert outside is not None
    constants = [_constants(node, inside, outside) for node in nodes]
    if None in constants:
        return None
    value = source
    for node, moved in zip(nodes, constants, strict=True):
        assert moved is not None
        node.inputs = [moved.get(i, value) for i in range(len(node.inputs))]
        (result,) = node.outputs
        assert result is not None
        result.type = TensorType(result.dtype, outside)
        value = result
    # Keep ``readers`` current, for a later pair of reshapes in the same walk.
    readers[value] = readers.get(output, [])
    return (value,)


def _only_operand(node: Node) -> Value | None:
    """Return the only non-constant input of an elementwise operation."""
    if not node.op.elementwise or node.op.domain not in ("", MICROSOFT) or len(node.outputs) != 1:
        return None
    others = [value for value in node.inputs if value is None or value.const is None]
    return others[0] if len(others) == 1 else None


def _constants(node: Node, inside: Dims, outside: Dims) -> dict[int, Value] | None:
    """Return the reshaped constant inputs of an operation, by index."""
    constants: dict[int, Value] = {}
    for i, value in enumerate(node.inputs):
        if value is None or value.const is None:
            continue
        constants[i] = value
        if value.const.ndim:  # scalars, such as the bounds of a Clip, stay scalars
            const = _reshaped(value.const, inside, outside)
            if const is None:
                return None
            constants[i] = Value(f"{node.name or value.name}/reshaped{i}", const=const)
    return constants


def _dims(value: Value) -> Dims | None:
    """Return the dims of a value, if they are static and non-zero."""
    type_ = value.type
    # Dims are grouped by comparing their products, which a 0 would make equal.
    if not isinstance(type_, TensorType) or not type_.static or 0 in type_.dims:
        return None
    return type_.dims


def _reshaped(const: np.ndarray, dims: Dims, others: Dims) -> np.ndarray | None:
    """Return a constant that broadcasts to ``dims`` as one that broadcasts to the same elements in
    the shape ``others``; None if it would be too large."""
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
    """Yield slices of both shapes with equal numbers of elements, each as short as possible."""
    i = j = 0
    while i < len(dims) or j < len(others):
        begin, other = i, j
        i, j = min(i + 1, len(dims)), min(j + 1, len(others))
        while (a := math.prod(dims[begin:i])) != (b := math.prod(others[other:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield slice(begin, i), slice(other, j)
