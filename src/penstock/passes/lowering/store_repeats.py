"""Store the repeated elements that a Reshape would copy anyway.

Expand is a view, which costs nothing for readers that broadcast. Reshape cannot merge an axis that
it repeats with another one without a copy, made in each run outside of the arena. So repeats of
elements along an axis, as of ``repeat_interleave``, are copied to their place at once::

    Reshape(Expand(x [8, 1, 64], [8, 2, 64]), [16, 64])
    becomes  Reshape(Tile(x, [1, 2, 1]), [16, 64])
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from penstock.core.types import INT64, TensorType
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext


class StoreRepeats(Pass):
    """Replace an Expand by a Tile where all its readers are Reshapes that would copy it."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        readers, changed = readers_of(graph), False
        for node in graph.walk():
            if node.op.name != "Expand" or node.op.domain:
                continue
            (output,) = node.outputs
            reading = () if output is None else readers.get(output, ())
            given, dims = _dims(node.inputs[0]), _dims(output)
            if reading and all(_copies(reader, given, dims) for reader in reading):
                _tile(node, given, dims)
                changed = True
        return changed


def _dims(value: Value | None) -> Sequence[int]:
    """The dims of a value; none if they are not known, or some are 0."""
    type_ = None if value is None else value.type
    known = isinstance(type_, TensorType) and type_.static and 0 not in type_.dims
    return type_.dims if known and isinstance(type_, TensorType) else ()


def _copies(reader: Node | None, given: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether a reader is a Reshape of ``dims``, to which those ``given`` are repeated, that merges
    a repeated axis with another one."""
    target = _dims(reader.outputs[0]) if reader and reader.op.name == "Reshape" else ()
    if not target or len(given) != len(dims):
        return False
    # Axes end where those of the result do, or are merged with the next.
    ends = {1, *accumulate(target, mul)}
    merged: list[bool] = []  # whether each of some axes is repeated
    for own, n, end in zip(given, dims, accumulate(dims, mul), strict=True):
        if n > 1:
            merged.append(own != n)
        if end in ends:
            if {True, False} <= {*merged}:
                return True
            merged = []
    return False


def _tile(node: Node, given: Sequence[int], dims: Sequence[int]) -> None:
    repeats = np.array([n // own for own, n in zip(given, dims, strict=True)], INT64)
    (output,) = node.outputs
    assert output is not None
    node.op, node.attrs = standard("Tile"), {}
    node.inputs = [node.inputs[0], Value(f"{output.name}/repeats", const=repeats)]
