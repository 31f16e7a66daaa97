"""Batches in parts: find the inputs with a row per sample, and prove that parts give equal results.

A batch whose plan does not fit into the memory of a session may run in parts, one after another,
if no row affects another. This is proven on the graph for the whole batch, node by node
(``passes.lowering.row_rules``). The graph for a part must be the same except for the number of
rows: a model that divides by the batch size does not run in parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.core.errors import RowsStay
from penstock.core.records import NamedTuple
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.ir.graph import Graph, Node, Value, all_reads
from penstock.passes.lowering.row_rules import (
    ROWS,
    Axes,
    Packed,
    Stays,
    axis_names,
    features,
    packed_form,
)

if TYPE_CHECKING:
    from penstock.compiler.compiler import Compiler
    from penstock.compiler.subgraph import Subgraph

_MOST_FOLDED = 1 << 29
"""bytes of a constant that depends on the number of rows, while both graphs are compared"""
_FORMED = ("Reshape", "Expand")
"""operations whose other inputs determine only the dims of their results"""


def batch_of(subgraph: Subgraph, values: RunValues) -> tuple[Sequence[int], int]:
    """Return the indices of the inputs with a row for each sample of a batch, and the number of
    samples, which is 1 without a batch."""
    batch_inputs = [
        i
        for i, (type_, value) in enumerate(zip(subgraph.types, values, strict=True))
        if isinstance(type_, TensorType) and isinstance(value, np.ndarray) and value.ndim
        if type_.shape is None or not isinstance(type_.shape[0], int)
    ]
    sizes = {len(values[i]) for i in batch_inputs}
    return (batch_inputs, sizes.pop()) if len(sizes) == 1 else ((), 1)


class Parts(NamedTuple):
    """A batch of ``samples`` in parts of ``rows`` each, with the indices of the inputs and outputs
    that have a row for each sample; other inputs and outputs are the same for all parts."""

    inputs: Sequence[int]
    samples: int
    rows: int
    outputs: Sequence[bool]


def part_of(values: RunValues, batch: Sequence[int], begin: int, end: int) -> list[RunValue]:
    """Return the feeds of the samples from ``begin`` up to ``end``."""
    return [value[begin:end] if i in batch else value for i, value in enumerate(values)]


def check_parts(
    compiler: Compiler, subgraph: Subgraph, values: RunValues, batch: Sequence[int], rows: int
) -> Parts:
    """Return the parts of a batch. Raises ``RowsStay`` unless parts of ``rows`` samples provably
    give the results of the whole batch."""
    # A tensor that is constant for a part may be too large to keep for the whole batch.
    compiler = compiler.folding(max(compiler.context.limits.max_folded_bytes, _MOST_FOLDED))
    whole = _Rows(compiler.specialized(subgraph, values), batch)
    part = _Rows(compiler.specialized(subgraph, part_of(values, batch, 0, rows)), batch)
    _compare(whole, part)
    outputs = [value in whole.axes for value in whole.graph.outputs]
    return Parts(batch, whole.rows[0][1], rows, outputs)


_Likeness: TypeAlias = "dict[Value | None, Value | None]"


class _Rows:
    """The ``axes`` of rows in the values of a graph. Each node computes a row of its results from
    the same row of its inputs, as ``forms`` says."""

    def __init__(self, graph: Graph, batch: Sequence[int]) -> None:
        self.graph = graph
        self.axes: dict[Value, Axes] = {}
        self.forms: dict[Node, Packed] = {}
        if any(inner is not graph for inner in graph.graphs()):
            raise RowsStay("the graph has loops or conditions")
        for i in batch:
            rows, *rest = graph.inputs[i].shape or ()
            sizes = [n for n in (rows, *rest) if isinstance(n, int)]
            self.axes[graph.inputs[i]] = (((ROWS, sizes[0]),), *map(features, sizes[1:]))
        self.rows = next(iter(self.axes.values()))[0]
        for node in graph.nodes:
            try:
                self._add(node)
            except Stays as reason:
                raise RowsStay(f"{node.label} {reason}") from None
        for value in graph.outputs:
            if self.axes.get(value, (self.rows,))[0] != self.rows:
                raise RowsStay(f"output {value.name!r} has its rows along another dim")

    def _add(self, node: Node) -> None:
        inputs = [None if value is None else self.axes.get(value) for value in node.inputs]
        if not any(value in self.axes for value in all_reads(node)):
            if not node.op.pure:
                raise Stays("has effects, or is random")
            return
        packed = self._by_number(node, inputs) or packed_form(node, inputs)
        self.forms[node] = packed
        if any(node.outputs[len(packed.outputs) :]):
            raise Stays("has other outputs")
        for value, axes in zip(node.outputs, packed.outputs, strict=False):
            if value is not None:
                self.axes[value] = axes

    def _by_number(self, node: Node, inputs: Sequence[Axes | None]) -> Packed | None:
        """Return how a node reads the row of each sample by its number, as exporters write
        indexing with ``arange(batch)``, or None if it does not."""
        index = node.inputs[1] if len(node.inputs) > 1 and not any(inputs[1:]) else None
        data, name = inputs[0], node.op.full_name
        numbers = None if index is None else index.peek if index.is_constant else None
        if name not in ("Gather", "GatherND") or numbers is None or data is None:
            return None
        if node.attrs.get("axis", 0) or node.attrs.get("batch_dims", 0) or not numbers.ndim:
            return None
        samples, (first, *rest) = self.rows[0][1], data
        width = math.prod(size for _, size in first[1:])  # of each row in the first dim
        if first[:1] != self.rows or not len(numbers) or len(numbers) % samples:
            return None
        if name == "GatherND":
            if width > 1 or ROWS in axis_names(rest) or len(numbers) != samples:
                return None
            tuples = numbers.reshape(samples, -1, numbers.shape[-1])
            at, inside = tuples[..., 0], tuples[..., 1:]
            dims, rest = numbers.shape[1:-1], rest[numbers.shape[-1] - 1 :]
        else:
            at, inside = np.divmod(numbers.reshape(samples, -1), width)
            dims = numbers.shape[1:]
        if ROWS in axis_names(rest) or not (at == np.arange(samples)[:, np.newaxis]).all():
            return None
        if not (inside == inside[:1]).all():  # as for a diagonal: the index depends on the row
            return None
        row = (*self.rows, *features(len(numbers) // samples))
        return Packed([(row, *map(features, dims), *rest)], [data, (row, *map(features, dims))])


def _compare(whole: _Rows, part: _Rows) -> None:
    """Raise ``RowsStay`` unless both graphs are the same except for the number of rows."""
    like: _Likeness = {None: None, **dict(zip(whole.graph.inputs, part.graph.inputs, strict=True))}
    if len(whole.graph.nodes) != len(part.graph.nodes):
        raise RowsStay("the graph has other nodes for other numbers of rows")
    for node, other in zip(whole.graph.nodes, part.graph.nodes, strict=True):
        same = node.op == other.op and _same_attrs(node, other) and node.label == other.label
        same &= len(node.inputs) == len(other.inputs) and len(node.outputs) == len(other.outputs)
        if not same or not _same_inputs(node, other, whole, part, like):
            raise RowsStay(f"{node.label} depends on the number of rows")
        for value, twin in zip(node.outputs, other.outputs, strict=True):
            if (value is None) != (twin is None):
                raise RowsStay(f"{node.label} depends on the number of rows")
            like[value] = twin
            if value is not None and twin is not None and not _same_axes(value, twin, whole, part):
                raise RowsStay(f"{node.label} depends on the number of rows")
    outputs = zip(whole.graph.outputs, part.graph.outputs, strict=True)
    if not all(like.get(value, value) is twin for value, twin in outputs):
        raise RowsStay("outputs depend on the number of rows")


def _same_axes(value: Value, twin: Value, whole: _Rows, part: _Rows) -> bool:
    ours, theirs = [
        [(name, 0 if name == ROWS else size) for axis in of.axes.get(v, ()) for name, size in axis]
        for of, v in ((whole, value), (part, twin))
    ]
    return ours == theirs and (value in whole.axes) == (twin in part.axes)


def _same_attrs(node: Node, other: Node) -> bool:
    ours, theirs = node.attrs, other.attrs
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[name], theirs[name]) for name in ours
    )


def _same_inputs(
    node: Node, other: Node, whole: _Rows, part: _Rows, like: Mapping[Value | None, Value | None]
) -> bool:
    """Whether a node reads equal values in both graphs, or equal values for each row."""
    form = whole.forms.get(node)
    for i, (value, twin) in enumerate(zip(node.inputs, other.inputs, strict=True)):
        if value in like:
            if like[value] is not twin:
                return False
            axes = None if form is None or i >= len(form.inputs) else form.inputs[i]
            # The value is computed for all rows at once, so it has no row of its own.
            if axes is not None and value not in whole.axes and value is not None:
                return False
        elif value is None or twin is None or not (value.is_constant and twin.is_constant):
            return False
        elif i and form and node.op.full_name in ("Gather", "GatherND"):
            if not _same_numbers(value, twin, whole, part):
                return False
        elif value is not twin and not (i and form and node.op.name in _FORMED):
            axes = None if form is None or i >= len(form.inputs) else form.inputs[i]
            if not _same_constants(value, twin, axes):
                return False
    return True


def _same_constants(value: Value, twin: Value, axes: Axes | None) -> bool:
    """Whether constants are equal, or have equal elements for all rows."""
    ours, theirs = value.peek, twin.peek
    if ours is None or theirs is None:
        return False
    at = [i for i, axis in enumerate(axes or ()) if ROWS in axis_names([axis])]
    if not at or ours.shape == theirs.shape:
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    first = np.take(ours, [0], at[0])
    return bool((ours == first).all() and (theirs == first).all())


def _same_numbers(value: Value, twin: Value, whole: _Rows, part: _Rows) -> bool:
    """Whether indices are equal, or those of a part equal the indices of the first samples."""
    rows, all_rows, ours, theirs = part.rows[0][1], whole.rows[0][1], value.peek, twin.peek
    if ours is None or theirs is None:
        return False
    if ours.shape == theirs.shape:
        return np.array_equal(ours, theirs)
    return ours.size % all_rows == 0 and np.array_equal(
        ours.reshape(all_rows, -1)[:rows], theirs.reshape(rows, -1)
    )
