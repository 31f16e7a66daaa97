"""Proof that each sample gets the same results in a padded batch as alone.

``row_packing`` proves that masked rows do not affect others after the point where rows are packed.
Values before that point, such as the mask itself, are computed for the padded batch. A sample in a
batch with longer ones is zero-padded at its end and must get the same results as alone, so nodes
before that point must not mix rows either::

    ids, mask [batch, rows]    every element depends on its own row
    Unsqueeze, Cast, Where     so does every element of elementwise results
    CumSum                     on earlier rows, which are not padding
    ReduceSum                  on all rows of a sample, where padding rows are 0

For each value, the pass tracks the axes of samples and rows (``row_rules``) and, where known, the
elements in padding rows.
"""

from __future__ import annotations

import numpy as np

from penstock.core.errors import RowsStay
from penstock.core.records import NamedTuple
from penstock.core.types import is_static
from penstock.ir.graph import Graph, Node, Value, all_reads
from penstock.ops.common.shape_rules import normalize_axes
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.lowering.pack_rows import packings_of
from penstock.passes.lowering.row_packing import RowPacking
from penstock.passes.lowering.row_rules import (
    ROWS,
    SAMPLES,
    Axes,
    Axis,
    Stays,
    are_features,
    axes_rule,
    axis_names,
    features,
    repeats,
    static_dims,
)


class _Known(NamedTuple):
    """The axes of a value, and its elements in padding rows."""

    axes: Axes
    pads: np.ndarray | None = None


class ProveApart(Pass):
    """Raise ``RowsStay`` unless samples that are zero-padded at their end get the same results as
    alone (bitwise if results must be reproducible). The graph is invalid afterwards."""

    invalidates = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        packing, *others = packings_of(graph, context)
        if others:
            first, *_ = [*others[0].attention, *others[0].scores]
            raise RowsStay(
                f"{first.label} has another batch size or number of rows than other attention"
            )
        packing.find(anything=True)
        if context.numerics.reproducible:
            packing.refuse_all_rows()
            for node in graph.nodes:  # the summation order depends on the number of rows
                if node.op.full_name == "Conv" and node not in packing.packed:
                    raise RowsStay(
                        f"{node.label} convolves padding rows, which changes the rounding "
                        "(reproducible=True)"
                    )
        check_apart(packing)
        return True


def check_apart(packing: RowPacking) -> None:
    """Raise ``RowsStay`` for a node through which padding rows may affect other rows before rows
    are packed, in a batch [samples, rows, ...] of samples that are zero-padded at their end."""
    known, seeds = _of_inputs(packing), _seeds(packing)
    proven = {*packing.packed, *packing.in_place}
    behind: set[Value] = set()
    for node in packing.graph.nodes:
        reads = [value for value in dict.fromkeys(all_reads(node)) if value in known]
        late = node in proven or not behind.isdisjoint(all_reads(node))
        for value in reads:
            if value in seeds and known[value].axes != seeds[value]:
                raise RowsStay(
                    f"{node.label} reads {value.name!r} with samples and rows along other axes"
                )
            beside = late and node not in proven and _has_rows(known[value])
            if beside and not _is_guard(value, packing):
                raise RowsStay(
                    f"{node.label} reads packed values together with padded rows of {value.name!r}"
                )
        if late:
            behind.update([value for value in node.outputs if value is not None])
        elif reads:
            try:
                _add(node, known, packing)
            except Stays as reason:
                raise RowsStay(f"{node.label} {reason}") from None


def _of_inputs(packing: RowPacking) -> dict[Value, _Known]:
    """Return the axes and padding of the graph's inputs. Raises ``RowsStay``."""
    known: dict[Value, _Known] = {}
    for value in packing.graph.inputs:
        dims = value.shape or ()
        if dims[:2] != (packing.batch, packing.rows) or not is_static(value.type):
            raise RowsStay(f"the first dims of input {value.name!r} are not samples and rows")
        rest = [features(n) for n in static_dims(value)[2:]]
        known[value] = _Known((packing.samples, packing.row, *rest), _zero(value))
    return known


def _seeds(packing: RowPacking) -> dict[Value, Axes]:
    """Return the values that are packed where they are read, with the axes assumed for them."""
    return {
        value: axes
        for node, form in packing.packed.items()
        for value, axes in zip(node.inputs, form.inputs, strict=False)
        if value is not None and axes is not None and value not in packing.axes
    }


def _is_guard(value: Value, packing: RowPacking) -> bool:
    return any(value is guard for guard, _ in packing.guards)


def _zero(value: Value) -> np.ndarray | None:
    return None if value.dtype is None else np.zeros((), value.dtype)


def _has_rows(known: _Known | None) -> bool:
    return known is not None and ROWS in axis_names(known.axes)


def _add(node: Node, known: dict[Value, _Known], packing: RowPacking) -> None:
    """Record the axes and padding of a node's results. Raises ``Stays``."""
    inputs = [None if value is None else known.get(value) for value in node.inputs]
    result = _of_all_rows(node, inputs) or _by_place(node, inputs, packing)
    result = result or _of_table(node, inputs, packing) or _index(node, inputs, packing)
    if result is None:
        outputs = axes_rule(node, [None if x is None else x.axes for x in inputs]).outputs
        pads = _pads(node, inputs)
        results = [_Known(axes, pads) for axes in outputs]
    else:
        results = [result]
    if any(node.outputs[len(results) :]):
        raise Stays("has several outputs that are read")
    known.update({v: x for v, x in zip(node.outputs, results, strict=False) if v is not None})


def _of_all_rows(node: Node, inputs: list[_Known | None]) -> _Known | None:
    """Return the result of a node over all rows of a sample, if padding does not change it."""
    x, name = inputs[0] if inputs else None, node.op.full_name
    if x is None or any(inputs[1:]):
        return None
    if name == "CumSum":
        forwards = node.const(1) is not None and not node.attrs.get("reverse", 0)
        return _Known(x.axes) if forwards else None
    if name == "Conv":
        return _convolved(node, x)
    # The first maximum is not a padding row, unless all elements are negative.
    first = name == "ArgMax" and not node.attrs.get("select_last_index", 0)
    first = first and _is_not_negative(node.inputs[0])
    pads = x.pads is None or x.pads.any() or not _has_rows(x)
    return None if pads or not (first or name == "ReduceSum") else _reduced(node, x.axes)


def _convolved(node: Node, x: _Known) -> _Known | None:
    """Return the result of a convolution along rows: its zero padding equals zero padding rows."""
    steps, dims = node.attrs.get("strides") or (1,), static_dims(node.outputs[0])
    along = len(x.axes) == 3 and len(x.axes[2]) == 1 and x.axes[2][0][0] == ROWS
    zeros = x.pads is not None and not x.pads.any()
    if not along or not zeros or {*steps} != {1} or dims[2] != static_dims(node.inputs[0])[2]:
        return None
    return _Known((x.axes[0], features(dims[1]), x.axes[2]))


def _reduced(node: Node, axes: Axes) -> _Known | None:
    """Return the result of a reduction over any axes except those of samples."""
    given = node.const(1)
    spelled = node.attrs.get("axes") if given is None else given.reshape(-1).tolist()
    if node.op.full_name == "ArgMax":
        spelled = [node.attrs.get("axis", 0)]
    reduced = normalize_axes(spelled or range(len(axes)), len(axes))
    if SAMPLES in axis_names(axes[i] for i in reduced):
        return None
    keeps = node.attrs.get("keepdims", 1)
    kept = [(i, axis) for i, axis in enumerate(axes) if keeps or i not in reduced]
    return _Known(tuple([() if i in reduced else axis for i, axis in kept]))


def _is_not_negative(value: Value | None) -> bool:
    """Whether a value is a condition cast to numbers, or holds token ids."""
    while value is not None:
        dtype, node = value.dtype, value.producer
        is_input = node is None and not value.is_constant
        if dtype == np.bool_ or (is_input and dtype is not None and dtype.kind in "iu"):
            return True
        if node is None or node.op.full_name not in ("Cast", "Identity", "Reshape", "Squeeze"):
            return False
        value = node.inputs[0]
    return False


def _by_place(node: Node, inputs: list[_Known | None], packing: RowPacking) -> _Known | None:
    """Return the result of a Gather whose constant index of samples and rows is the identity, as
    exporters write masks."""
    x, index = inputs[0] if inputs else None, node.const(1)
    name = node.op.full_name
    if x is None or index is None or any(inputs[1:]) or name not in ("Gather", "GatherND"):
        return None
    samples, row, rows = packing.samples, packing.row, packing.rows
    axis = normalize_axes([node.attrs.get("axis", 0)], len(x.axes))[0]
    before: Axes = ()
    if name == "GatherND" and index.shape[-1] == 2 and x.axes[:2] == (samples, row):
        parts = [(index[..., 0], samples, packing.batch), (index[..., 1], row, rows)]
        rest = x.axes[2:]
    elif name == "Gather" and x.axes[axis] == samples + row:
        sample, place = np.divmod(index, rows)
        parts = [(sample, samples, packing.batch), (place, row, rows)]
        before, rest = x.axes[:axis], x.axes[axis + 1 :]
    elif name == "Gather" and x.axes[axis] == row:
        parts, before, rest = [(index, row, rows)], x.axes[:axis], x.axes[axis + 1 :]
    else:
        return None
    own = _axes_by_place(parts)
    return None if own is None else _Known((*before, *own, *rest), x.pads)


def _of_table(node: Node, inputs: list[_Known | None], packing: RowPacking) -> _Known | None:
    """Return the result of a Gather by row index from a table that all samples share."""
    if node.op.full_name != "GatherElements" or inputs[0] is not None or inputs[1] is None:
        return None
    axes, dims = inputs[1].axes, static_dims(node.inputs[0])
    at = normalize_axes([node.attrs.get("axis", 0)], len(dims))[0]
    others = [axis for i, axis in enumerate(axes) if i != at and not are_features([axis])]
    same = dims[0] == 1 or repeats(node.inputs[0], packing.batch)
    # Only broadcasting along samples is allowed: all samples get the same elements.
    return _Known(axes) if others == [axes[0]] == [packing.samples] and same else None


def _index(node: Node, inputs: list[_Known | None], packing: RowPacking) -> _Known | None:
    """Return an index of one row per sample: the sample's index and a known value."""
    y = node.outputs[0]
    if y is None or not _is_guard(y, packing):
        return None
    own = [x for x in inputs if x is not None]
    numbers = [v.const for v in node.inputs if v is not None and v.const is not None]
    if len(own) != 1 or len(numbers) != 1 or _has_rows(own[0]) or len(node.inputs) != 2:
        return None
    step = {"Concat": 1, "Add": packing.rows}.get(node.op.full_name)
    count = numbers[0].reshape(-1)
    if step is None or not np.array_equal(count, step * np.arange(packing.batch)):
        return None
    return _Known((packing.samples, *map(features, static_dims(y)[1:])))


def _axes_by_place(parts: list[tuple[np.ndarray, Axis, int]]) -> Axes | None:
    """Return the axes of the gathered value if each index part is an arange along one axis."""
    shape = parts[0][0].shape
    axes = [features(size) for size in shape]
    for numbers, axis, size in parts:
        for at in range(len(shape)):
            places = np.arange(size).reshape([-1 if i == at else 1 for i in range(len(shape))])
            if shape[at] == size and are_features([axes[at]]) and (numbers == places).all():
                axes[at] = axis
                break
        else:
            return None
    return tuple(axes)


def _pads(node: Node, inputs: list[_Known | None]) -> np.ndarray | None:
    """Return the elements in padding rows after an elementwise or data-movement node."""
    if not node.op.elementwise:
        x = inputs[0]
        moved = node.op.view or node.op.moves
        return x.pads if moved and x is not None and not any(inputs[1:]) else None
    operands: list[np.ndarray | None] = []
    for value, x in zip(node.inputs, inputs, strict=True):
        const = None if value is None or x is not None else value.const
        if const is not None and const.size == 1:
            operands.append(const.reshape(()))
        else:
            operands.append(x.pads if x is not None and _has_rows(x) else None)
    # A factor of 0 gives 0 whatever the other operand is: masks are finite.
    if node.op.full_name in ("Mul", "And"):
        y = node.outputs[0]
        if y is not None and any(x is not None and not x.any() for x in operands):
            return _zero(y)
    if any(x is None for x in operands):
        return None
    from penstock.analysis.interpreter import evaluate

    return np.asarray(evaluate(node, operands)[0])
