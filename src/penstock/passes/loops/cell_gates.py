"""Decomposition of the gates of a recurrent cell in a loop into summands.

::

    z = Sigmoid(Split(x + h @ u)[0] + 1)        rows x, weights u[:, :units], constant 1

A gate is a sum of columns: of rows known before the loop (``loop_rows``), of products of the state
with constant weights, and of constants. Additions may be in any order, before or after gates are
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

# A term that is added to itself counts twice at each level, so that the terms of n nodes may be
# 2^n.
_MOST_TERMS = 32


class Columns(NamedTuple):
    """Some columns of a value [..., units], from ``begin`` on."""

    value: Value
    begin: int


class GateSum(NamedTuple):
    """Summands of a gate: columns of rows, weights [units, units] of products with the state,
    constants [units], and other values."""

    rows: list[Columns]
    weights: list[np.ndarray]
    constants: list[np.ndarray]
    others: list[Columns]

    def plus(self, other: GateSum) -> GateSum:
        """The sum of both."""
        return GateSum(
            self.rows + other.rows,
            self.weights + other.weights,
            self.constants + other.constants,
            self.others + other.others,
        )

    @property
    def is_known(self) -> bool:
        """Whether it is the same product of the state for all states."""
        return not self.others


class CellGates(NamedTuple):
    """The gates of a cell in ONNX's order; ``inner`` is what a reset gate acts on."""

    cell: str
    sums: Sequence[GateSum]
    inner: GateSum | None = None
    activation: str = "Tanh"


class CellMatcher:
    """Matches cells whose ``state`` a loop carries; ``rows`` are those of the loop."""

    def __init__(self, rows: LoopRows, state: Value) -> None:
        self.rows, self.state = rows, state
        assert isinstance(state.type, TensorType)
        self.batch, self.units = state.type.dims

    def cells(self, node: Node) -> Iterator[tuple[CellGates, Value | None, Value | None]]:
        """The gates of cells of which ``node`` computes the next state; for an LSTM, its cell and
        the next one as well."""
        if node.op is LSTM_CELL:
            gates, cell = node.inputs
            order = node.attrs["order"]
            if gates is not None and node.outputs[0] is not None:
                i, f, o, n = (self._sum(gates, place * self.units) for place in order)
                # LstmCell keeps the number that is added to its forget gate as an attribute.
                bias = np.full(self.units, node.attrs["forget_bias"], FLOAT32)
                if i and f and o and n:
                    f.constants.append(bias)
                    yield CellGates("LSTM", (i, o, f, n)), cell, node.outputs[1]
        for parts in lstm_cells(node):
            sums = [self._sum(x) for x in (parts.input, parts.output, parts.forget, parts.new)]
            if all(sums):
                yield CellGates("LSTM", sums), parts.cell, parts.following  # type: ignore[arg-type]
        # A cell that mixes its new state with another value than the old one is no step of a
        # recurrence.
        if node.op in (GRU_CELL, GRU_STATE) and node.inputs[2] is self.state:
            found = self._gru_of_two(node) if node.op is GRU_CELL else self._gru(node)
            if found is not None:
                yield found, None, None
        if node.op.full_name in ("Tanh", "Relu", "Sigmoid") and not node.control_inputs:
            sum_ = None if node.inputs[0] is None else self._sum(node.inputs[0])
            if sum_ is not None:
                yield CellGates("RNN", [sum_], activation=node.op.name), None, None

    def _gru_of_two(self, node: Node) -> CellGates | None:
        """The gates of a GruCell."""
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
        # ONNX's GRU with linear_before_reset multiplies its reset gate by H R + b alone, without x.
        if None in sums or new is None or inner is None or inner.rows:
            return None
        return CellGates("GRU", [*sums, new], inner)  # type: ignore[list-item]

    def _gru(self, node: Node) -> CellGates | None:
        """The gates of a GruState."""
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
        # With linear_before_reset=0 the gate is multiplied before the product, not behind it.
        new.weights.append(weights)
        new.constants.extend(bias)
        return CellGates("GRU", [z, r, new])

    def _reset(self, value: Value) -> GateSum | None:
        """The gate that resets the state to ``value``."""
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
        # Sigmoid may be applied to all gates at once, before they are cut apart, or to each of
        # them.
        part = _part_of(value)
        whole = argument(part.value, "Sigmoid")
        return None if whole is None else self._sum(whole, part.begin)

    def _sum(self, value: Value, begin: int = 0) -> GateSum | None:
        """Return the summands of the columns of ``value`` from ``begin`` on; None if there are too
        many or they are no rows of float32."""
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
        """The columns that add up to ``columns``, or none where they were added to ``total``."""
        value, begin = columns
        if value.const is not None:
            row = row_of(value.const, begin, self.units)
            if row is not None:
                total.constants.append(row)
            return None if row is None else []
        type_ = value.type
        if not isinstance(type_, TensorType) or not type_.static or type_.dtype != FLOAT32:
            return None
        # The batch may have axes of length 1 beside it, as Gather of one index leaves them.
        if not type_.dims or type_.elements != self.batch * type_.dims[-1]:
            return None
        if (rows := self.rows.of(value)) is not None and not _adds_constant(value):
            dims = self.rows.trips, self.batch, type_.dims[-1]
            total.rows.append(Columns(self.rows.reshaped(rows, dims), begin))
            return []
        node = value.producer
        # A value from outside is the same in all iterations, but a Recurrence takes constants
        # alone.
        if node is None or value not in self.rows.own or node.control_inputs:
            return None
        return self._computed(node, columns, type_.dims, total)

    def _computed(
        self, node: Node, columns: Columns, dims: tuple[int, ...], total: GateSum
    ) -> list[Columns] | None:
        """As ``_terms``: the columns that add up to those of a sum, or that an operation has moved
        there; else what a product adds."""
        value, begin = columns
        name, x, last = node.op.full_name, node.input(0), len(dims) - 1
        if name == "Add":
            parts = [x for x in node.inputs if x is not None]
            # An operand that Add broadcasts along the columns has none at ``begin``.
            wide = all(x.const is not None or _last(x) == dims[-1] for x in parts)
            return [Columns(x, begin) for x in parts] if wide else None
        if name in ("Split", "Slice"):
            part = _part_of(value)
            return None if part.value is value else [Columns(part.value, part.begin + begin)]
        if name == "Concat":
            joined = normalize_axis(node.attrs["axis"], last + 1) == last
            return self._joined(node, begin) if joined else None
        if "reshapes" in node.op.traits:
            return None if x is None or _last(x) != dims[-1] else [Columns(x, begin)]
        return self._product_terms(node, columns, total)

    def _product_terms(self, node: Node, columns: Columns, total: GateSum) -> list[Columns] | None:
        """As ``_terms``, of a product of the state, or of what is something else."""
        value, begin = columns
        added: list[Columns] = []
        if node.op.full_name == "Gemm" and self._has_summand(node):
            # An operand that is broadcast has other columns than the sum, as for Add.
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
        """Whether a Gemm adds a tensor that is computed."""
        c = gemm.input(2)
        return c is not None and c.const is None and gemm.attrs.get("beta", 1.0) == 1

    def _joined(self, node: Node, begin: int) -> list[Columns] | None:
        """The operand of a Concat that has all columns from ``begin`` on."""
        for x in node.inputs:
            width = x.shape[-1] if x is not None and x.shape else None
            if x is None or not isinstance(width, int):
                return None
            if begin < width:
                # Columns that lie in two of the operands have no one source.
                return [Columns(x, begin)] if begin + self.units <= width else None
            begin -= width
        return None

    def _multiplied(
        self, value: Value, begin: int
    ) -> tuple[Value, np.ndarray, list[np.ndarray]] | None:
        """x, weights and a bias, if there is one, of columns of a product of x [batch, units]."""
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
    """The last dim."""
    return value.shape[-1] if value.shape else None


def _adds_constant(value: Value) -> bool:
    """Whether a constant is added to ``value``, which the Recurrence does beside the rest."""
    node = produced_by(value, "Add")
    return node is not None and any(x is not None and x.const is not None for x in node.inputs)


def row_of(const: np.ndarray, begin: int, width: int) -> np.ndarray | None:
    """Columns of a constant that is the same for all rows."""
    # All axes but the last must have length 1, or rows would have different constants.
    if const.dtype != FLOAT32 or (const.ndim and const.size != const.shape[-1]):
        return None
    if const.size == 1:
        return np.full(width, const.reshape(()), FLOAT32)
    row = const.reshape(-1)[begin : begin + width]
    return row if row.size == width else None


def _part_of(value: Value) -> Columns:
    """Return the value that ``value`` is a part of along the last axis, or itself; the offset."""
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
            # A Split may leave outputs out, whose widths are then not known.
            part = None if output is None else _last(output)
            if not isinstance(part, int):
                break
            begin += part
    if node.op.full_name == "Slice":
        first, width = begin_of(node, value.rank), _last(whole)
        if first is not None and isinstance(width, int):
            # ONNX counts a negative start from the end.
            return Columns(whole, first + width if first < 0 else first)
    return Columns(value, 0)
