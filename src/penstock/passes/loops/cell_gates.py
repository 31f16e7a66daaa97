"""Decomposition of the gates of a recurrent cell in a loop into summands.

::

    z = Sigmoid(Split(x + h @ u)[0] + 1)        rows x, weights u[:, :units], constant 1

A gate is a sum of columns of rows known before the loop (``loop_rows``), of products of the state
and constant weights, and of constants. Additions may be in any order, before or after the gates are
split, and a product may compute one gate or several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.internal.cells import GRU_CELL, GRU_GATES, GRU_STATE, LSTM_CELL
from penstock.passes.loops.loop_rows import LoopRows
from penstock.passes.loops.recompose_cells import begin_of, lstm_cells
from penstock.passes.rewrite import argument, produced_by, swapped

# A sum x + x visits x twice, so nested sums of n nodes may have 2^n terms. The gates of cells have
# few.
_MOST_TERMS = 32


class Columns(NamedTuple):
    """``units`` columns of a value, from ``begin`` on."""

    value: Value
    begin: int


class GateSum(NamedTuple):
    """The summands of a gate: columns of ``rows``, ``weights`` [units, units] of products of the
    state, ``constants`` [units], and columns of ``others``, values that are none of these."""

    rows: list[Columns]
    weights: list[np.ndarray]
    constants: list[np.ndarray]
    others: list[Columns]

    def plus(self, other: GateSum) -> GateSum:
        """Return the sum of both."""
        return GateSum(
            self.rows + other.rows,
            self.weights + other.weights,
            self.constants + other.constants,
            self.others + other.others,
        )

    @property
    def is_known(self) -> bool:
        """Whether only rows, products of the state and constants are added."""
        return not self.others


class CellGates(NamedTuple):
    """The gates of a cell, in ONNX's order. ``inner``: the sum that a reset gate multiplies."""

    cell: str
    sums: Sequence[GateSum]
    inner: GateSum | None = None
    activation: str = "Tanh"


class CellMatcher:
    """Matches cells whose ``state`` is loop-carried; ``rows`` are those of the loop."""

    def __init__(self, rows: LoopRows, state: Value) -> None:
        self.rows, self.state = rows, state
        self.batch, self.units = state.dims

    def cells(self, node: Node) -> Iterator[tuple[CellGates, Value | None, Value | None]]:
        """Yield the gates of the cells whose next state ``node`` computes; for an LSTM, also its
        cell state and the next one."""
        if node.op is LSTM_CELL:
            gates, cell = node.inputs
            order = node.attrs["order"]
            if gates is not None and node.outputs[0] is not None:
                i, f, o, n = (self._sum(gates, place * self.units) for place in order)
                # LstmCell has the constant that is added to its forget gate as an attribute.
                bias = np.full(self.units, node.attrs["forget_bias"], FLOAT32)
                if i and f and o and n:
                    f.constants.append(bias)
                    yield CellGates("LSTM", (i, o, f, n)), cell, node.outputs[1]
        for parts in lstm_cells(node):
            sums = [self._sum(x) for x in (parts.input, parts.output, parts.forget, parts.new)]
            if all(sums):
                yield CellGates("LSTM", sums), parts.cell, parts.following  # type: ignore[arg-type]
        # A cell that blends its new state with another value than its old state is not a step of a
        # recurrence.
        if node.op in (GRU_CELL, GRU_STATE) and node.inputs[2] is self.state:
            gru = self._gru_cell(node) if node.op is GRU_CELL else self._gru_state(node)
            if gru is not None:
                yield gru, None, None
        if node.op.full_name in ("Tanh", "Relu", "Sigmoid") and not node.control_inputs:
            sum_ = None if node.inputs[0] is None else self._sum(node.inputs[0])
            if sum_ is not None:
                yield CellGates("RNN", [sum_], activation=node.op.name), None, None

    def _gru_cell(self, node: Node) -> CellGates | None:
        """Return the gates of a GruCell, if they can be decomposed."""
        x, h, _ = node.inputs
        places = [place * self.units for place in node.attrs["order"]]
        if x is None or h is None:
            return None
        of_x, of_h = ([self._sum(whole, place) for place in places] for whole in (x, h))
        sums = [
            None if a is None or b is None else a.plus(b)
            for a, b in zip(of_x[:2], of_h, strict=False)
        ]
        new, inner = of_x[2], of_h[2]
        # In ONNX's GRU with linear_before_reset, the reset gate multiplies H R + b, without x.
        if None in sums or new is None or inner is None or inner.rows:
            return None
        return CellGates("GRU", [*sums, new], inner)  # type: ignore[list-item]

    def _gru_state(self, node: Node) -> CellGates | None:
        """Return the gates of a GruState, if they can be decomposed."""
        product, update, _, x = (*node.inputs, None)[:4]
        new = None if product is None else self._sum(product)
        if x is not None and new is not None:
            of_x = self._sum(x, node.attrs["order"][0] * self.units)
            new = None if of_x is None else new.plus(of_x)
        z = self._gate(update, 0)
        # In ONNX's GRU the new state depends on the old one through the reset gate only.
        if new is None or z is None or len(new.others) != 1 or new.weights:
            return None
        other, begin = new.others.pop()
        for reset, of_h in swapped(produced_by(other, "Mul")) if not begin else ():
            r = self._gate(reset, 0)
            inner = None if of_h is None else self._sum(of_h)
            if r is not None and inner is not None and inner.is_known and not inner.rows:
                return CellGates("GRU", [z, r, new], inner)
        multiplied = self._multiplied(other, begin)
        if multiplied is None:
            return None
        left, weights, bias = multiplied
        r = self._reset(left)
        if r is None:
            return None
        # With linear_before_reset=0, the gate multiplies the operand of the product.
        new.weights.append(weights)
        new.constants.extend(bias)
        return CellGates("GRU", [z, r, new])

    def _reset(self, value: Value) -> GateSum | None:
        """Return the gate of which ``value`` is the product with the state."""
        node = value.producer
        if node is not None and node.op is GRU_GATES:
            return self._gate(value, 1) if node.inputs[1] is self.state else None
        for gate, state in swapped(produced_by(value, "Mul")):
            if state is self.state:
                return self._gate(gate, 1)
        return None

    def _gate(self, value: Value | None, which: int) -> GateSum | None:
        """Return the summands under a sigmoid, or under output ``which`` of a GruGates."""
        node = None if value is None else value.producer
        if value is None or node is None:
            return None
        if node.op is GRU_GATES:
            h, _, x = (*node.inputs, None)[:3]
            order = node.attrs["order"]
            if value is not node.outputs[which] or h is None:
                return None
            total = self._sum(h, order[which] * self.units)
            of_x = (
                GateSum([], [], [], [])
                if x is None
                else self._sum(x, order[2 + which] * self.units)
            )
            return None if total is None or of_x is None else total.plus(of_x)
        # Sigmoid may be applied to all gates together, before they are split, or to each of them.
        part = _part_of(value)
        whole = argument(part.value, "Sigmoid")
        return None if whole is None else self._sum(whole, part.begin)

    def _sum(self, value: Value, begin: int = 0) -> GateSum | None:
        """Return the summands of the columns of ``value`` from ``begin`` on; None if there are too
        many, or if ``value`` is not a float32 value with one row for each sample."""
        total = GateSum([], [], [], [])
        left, count = [Columns(value, begin)], 0
        while left:
            columns = left.pop()
            count += 1
            parts = self._terms(columns, total) if count <= _MOST_TERMS else None
            if parts is None:
                return None
            left += parts
        return total

    def _terms(self, columns: Columns, total: GateSum) -> list[Columns] | None:
        """Return the operands whose sum ``columns`` is; empty if ``columns`` was added to
        ``total``; None if they cannot be decomposed."""
        value, begin = columns
        if value.const is not None:
            row = row_of(value.const, begin, self.units)
            if row is not None:
                total.constants.append(row)
            return None if row is None else []
        type_ = value.type
        if not isinstance(type_, TensorType) or not type_.static or type_.dtype != FLOAT32:
            return None
        # There may be axes of length 1 beside the batch axis, as after a Gather of one index.
        if not type_.dims or type_.elements != self.batch * type_.dims[-1]:
            return None
        if (rows := self.rows.of(value)) is not None and not _adds_constant(value):
            dims = self.rows.trips, self.batch, type_.dims[-1]
            total.rows.append(Columns(self.rows.reshaped(rows, dims), begin))
            return []
        node = value.producer
        # A value from outside the loop is invariant, but a Recurrence only takes constants.
        if node is None or value not in self.rows.own or node.control_inputs:
            return None
        return self._computed(node, columns, type_.dims, total)

    def _computed(
        self, node: Node, columns: Columns, dims: tuple[int, ...], total: GateSum
    ) -> list[Columns] | None:
        """Return the same as ``_terms``, for the columns that ``node`` computes."""
        value, begin = columns
        name, x, last = node.op.full_name, node.input(0), len(dims) - 1
        if name == "Add":
            parts = [x for x in node.inputs if x is not None]
            # An operand that is broadcast along the columns has no column ``begin``.
            wide = all(x.const is not None or _last(x) == dims[-1] for x in parts)
            return [Columns(x, begin) for x in parts] if wide else None
        if name in ("Split", "Slice"):
            part = _part_of(value)
            return None if part.value is value else [Columns(part.value, part.begin + begin)]
        if name == "Concat":
            joined = normalize_axis(node.attrs["axis"], last + 1) == last
            return self._joined(node, begin) if joined else None
        if "reshapes" in node.op.traits:
            # A reshape that keeps the last dim keeps the columns.
            return None if x is None or _last(x) != dims[-1] else [Columns(x, begin)]
        return self._product_terms(node, columns, total)

    def _product_terms(self, node: Node, columns: Columns, total: GateSum) -> list[Columns] | None:
        """Add a product of the state to ``total.weights``, or another value to ``total.others``.
        Return the columns that a Gemm adds to its product."""
        value, begin = columns
        added: list[Columns] = []
        if node.op.full_name == "Gemm" and self._has_summand(node):
            # An operand that is broadcast has no column ``begin``, as for Add.
            summand = node.inputs[2]
            if summand is None or _last(summand) != _last(value):
                return None
            added = [Columns(summand, begin)]
        multiplied = self._multiplied(value, begin)
        if multiplied is not None and multiplied[0] is self.state:
            total.weights.append(multiplied[1])
            total.constants.extend(multiplied[2])
        else:
            total.others.append(columns)
        return added

    def _has_summand(self, gemm: Node) -> bool:
        """Whether a Gemm adds a tensor that is not constant."""
        c = gemm.input(2)
        return c is not None and c.const is None and gemm.attrs.get("beta", 1.0) == 1

    def _joined(self, node: Node, begin: int) -> list[Columns] | None:
        """Return the operand of a Concat that has all ``units`` columns from ``begin`` on."""
        for x in node.inputs:
            width = x.shape[-1] if x is not None and x.shape else None
            if x is None or not isinstance(width, int):
                return None
            if begin < width:
                # Columns that span two operands have no single source.
                return [Columns(x, begin)] if begin + self.units <= width else None
            begin -= width
        return None

    def _multiplied(
        self, value: Value, begin: int
    ) -> tuple[Value, np.ndarray, list[np.ndarray]] | None:
        """Return x, the weights, and the bias if any, of the columns of a product of x [batch,
        units]; None if ``value`` is not such a product."""
        node = produced_by(value, "MatMul", "Gemm")
        weights = None if node is None else node.const(1)
        if node is None or weights is None or weights.ndim != 2 or weights.dtype != FLOAT32:
            return None
        x, attrs, bias = node.inputs[0], node.attrs, []
        if node.op.name == "Gemm":
            c = node.input(2)
            if attrs.get("transA") or attrs.get("alpha", 1.0) != 1 or attrs.get("beta", 1.0) != 1:
                return None
            weights = weights.T if attrs.get("transB") else weights
            if c is not None and c.const is not None:
                row = row_of(c.const, begin, self.units)
                if row is None:
                    return None
                bias = [row]
        if x is None or x.shape != self.state.shape or len(weights) != self.units:
            return None
        part = weights[:, begin : begin + self.units]
        return (x, part, bias) if part.shape[1] == self.units else None


def _last(value: Value) -> object:
    """Return the last dim."""
    return value.shape[-1] if value.shape else None


def _adds_constant(value: Value) -> bool:
    """Whether ``value`` is a sum with a constant, which a Recurrence can add as its bias."""
    node = produced_by(value, "Add")
    return node is not None and any(x is not None and x.const is not None for x in node.inputs)


def row_of(const: np.ndarray, begin: int, width: int) -> np.ndarray | None:
    """Return columns [width] of a float32 constant that is the same for all rows; else None."""
    # All axes except the last must have length 1, or constants would differ between rows.
    if const.dtype != FLOAT32 or (const.ndim and const.size != const.shape[-1]):
        return None
    if const.size == 1:
        return np.full(width, const.reshape(()), FLOAT32)
    row = const.reshape(-1)[begin : begin + width]
    return row if row.size == width else None


def _part_of(value: Value) -> Columns:
    """Return the value of which ``value`` is a part along the last axis, or itself; the offset."""
    node = value.producer
    if node is None or node.control_inputs or not value.rank or node.inputs[0] is None:
        return Columns(value, 0)
    whole, last = node.inputs[0], value.rank - 1
    if (
        node.op.full_name == "Split"
        and normalize_axis(node.attrs.get("axis", 0), value.rank) == last
    ):
        begin = 0
        for output in node.outputs:
            if output is value:
                return Columns(whole, begin)
            # The width of an omitted output is unknown.
            part = None if output is None else _last(output)
            if not isinstance(part, int):
                break
            begin += part
    if node.op.full_name == "Slice":
        first, width = begin_of(node, value.rank), _last(whole)
        if first is not None and isinstance(width, int):
            # In ONNX, a negative start counts from the end.
            return Columns(whole, first + width if first < 0 else first)
    return Columns(value, 0)
