"""Fusion of recurrent cells in a loop into one Recurrence before the loop.

::

    for i in range(n):                          ys, h = Recurrence(xs, u, h)
        x = Gather(xs, i)                       for i in range(n):
        h = GruCell(x, h @ u, h)                    y = Gather(ys, i)
        y = h                                       y

A cell is recognized if its gates are sums of rows (``loop_rows``), constants, and products of its
state and constant weights, which may be one product or several. The loop then carries the cell's
state no longer: all readers read the states as rows, among them the next layer's cell. A step may
be masked, by Where or by sums of products; all readers of the unmasked state must then have the
same mask. A loop-carried value with the initial value and the mask of the state equals the state.
Scan outputs that are rows are computed before the loop; a loop without further use is dead code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple
from penstock.core.types import BOOL, FLOAT32, TensorType, is_static
from penstock.ir.graph import Graph, Node, Value, all_reads
from penstock.ir.op import Role
from penstock.ops.internal.recurrence import RECURRENCE
from penstock.ops.onnx.control_flow import ScanLayout, loop_carried
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.loops.cell_gates import CellGates, CellMatcher, Columns, row_of
from penstock.passes.loops.loop_rows import LoopRows, trips_of
from penstock.passes.rewrite import Substitution, argument, names_of, produced_by, swapped

# In a loop of one iteration, no step reads a state that another step has computed.
_FEWEST_TRIPS = 2


class HoistRecurrences(Pass):
    """Move the cells of Loops and Scans before them, and scan outputs that are rows."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        # Values of a graph with frames may be dead, which a Recurrence cannot represent.
        if context.framed:
            return False
        taken, substitution, changed = names_of(graph), Substitution(), False
        # Graphs are listed before any is changed. The cell of an inner loop moves to the body of
        # the outer loop, where its Recurrence runs once for each outer iteration.
        for outer in graph.graphs():
            nodes: list[Node] = []
            for node in with_checkpoints(outer.nodes):
                if node.op.role in (Role.LOOP, Role.SCAN):
                    hoister = _Hoister(node, taken, substitution)
                    if hoister.hoist():
                        nodes += hoister.before
                        changed = True
                nodes.append(node)
            outer.nodes = nodes
        if changed:
            # Applied once, at the end, since it visits the whole graph. Until then, comparisons of
            # the results of loops look them up in the substitution.
            substitution.apply_throughout(graph)
            # The nodes of the cells, and loops without further use, are dead now; later passes
            # would still place and fuse them.
            prune(graph)
        return changed


class _Mask(NamedTuple):
    """A mask of the steps that change the state: its value ``of`` a step, and ``rows`` of all."""

    of: Value
    rows: Value


class _Hoister:
    """Rewrites one loop. ``before``: the nodes to insert before the loop."""

    def __init__(self, loop: Node, taken: Counter[str], substitution: Substitution) -> None:
        self.loop, self.taken, self.substitution = loop, taken, substitution
        self.body: Graph = loop.attrs["body"]
        self.before: list[Node] = []

    def hoist(self) -> bool:
        """Hoist cells and rows out of the loop. Return whether the loop has changed."""
        trips = trips_of(self.loop)
        if trips is None or trips < _FEWEST_TRIPS:
            return False
        # One by one: the states of a hoisted cell are rows, which are needed to recognize the next
        # layer's cell.
        changed = False
        while self._hoist_one(trips):
            changed = True
        return self._hoist_rows(trips) or changed

    def _rows(self, trips: int) -> LoopRows:
        # New for each attempt: it caches which values are rows, and the body has changed since.
        return LoopRows(self.loop, trips, self.taken)

    def _hoist_one(self, trips: int) -> bool:
        rows = self._rows(trips)
        entering, leaving = loop_carried(self.loop)
        inside, updated = self.body.inputs[entering], self.body.outputs[leaving]
        for state, after in zip(inside, updated, strict=True):
            if _is_matrix(state) and _is_matrix(after) and state is not after:
                cell = _CarriedCell(self.loop, rows, state, after)
                if cell.hoist(self.substitution):
                    # Added only on success: a failed attempt may have emitted unused nodes.
                    self.before += rows.nodes
                    return True
        return False

    def _hoist_rows(self, trips: int) -> bool:
        """Compute the loop's scan outputs before it, as far as they are rows."""
        rows, changed = self._rows(trips), False
        first = len(self.body.inputs[loop_carried(self.loop)[0]])
        begin = loop_carried(self.loop)[1].stop
        layout = ScanLayout(self.loop) if self.loop.op.role is Role.SCAN else None
        for i, value in enumerate(self.body.outputs[begin:]):
            result = self.loop.outputs[first + i] if first + i < len(self.loop.outputs) else None
            plain = layout is None or not (layout.output_axes[i] or layout.output_backward[i])
            # Rows are stacked along axis 0 in the order of iterations, as in a Scan by default.
            if result is None or not plain or self.substitution.of(result) is not result:
                continue
            if (known := rows.of(value)) is not None and known.const is None:
                self.substitution[result] = self.substitution.of(known)
                changed = True
        if changed:
            self.before += rows.nodes
        return changed


# Why a Recurrence, and not ONNX's LSTM or GRU (decision 65): these have a fixed order of gates and
# no masks other than lengths, and multiply the inputs themselves. Here the products of the inputs
# of all steps are one large product before the recurrence, on any backend, however the exporter
# wrote it.
#
# Why gates are decomposed into sums, instead of matching a pattern of nodes: exporters write a cell
# with one product or several, with gates in any order, split before or after they are added. All of
# these are the same sums (``cell_gates``), so one definition of a cell recognizes them.
#
# The loop stays in place and reads the states as rows, so only the cell has to be recognized.
# If nothing else of the loop is used, it is dead code, which another pass removes anyway.


class _CarriedCell:
    """A cell whose ``state`` is loop-carried; ``after`` is the state at the end of an iteration."""

    def __init__(self, loop: Node, rows: LoopRows, state: Value, after: Value) -> None:
        self.loop, self.rows, self.state, self.after = loop, rows, state, after
        self.body: Graph = loop.attrs["body"]
        entering, leaving = loop_carried(loop)
        self.inside, self.updated = self.body.inputs[entering], self.body.outputs[leaving]
        self.initial, self.finals = loop.inputs[entering], loop.outputs
        self.batch, self.units = state.dims

    # Recognition.

    def hoist(self, substitution: Substitution) -> bool:
        """Compute all steps before the loop. Return whether the cell was recognized."""
        new, mask = self._unmasked()
        node = new.producer
        # A state computed outside the loop does not depend on the previous state.
        if node is None or node not in self.body.nodes:
            return False
        for gates, cell, following in CellMatcher(self.rows, self.state).cells(node):
            carried = self._carried_cell(cell, following, mask) if cell is not None else None
            if gates.cell == "LSTM" and carried is None:
                continue
            # All checks precede the first change, since a partial rewrite cannot be undone.
            states = [self._place(self.state), *self._alike(new, mask)]
            if not self._is_free(new, mask, states, carried):
                continue
            y, h, c = self._recurrence(gates, mask, carried)
            if y is None:
                continue
            for place in states:
                self._substitute(place, h, substitution)
            if carried is not None:
                self._substitute(carried, c, substitution)
            self._replace(new, mask, y, states)
            self._release([*states, *([] if carried is None else [carried])])
            return True
        return False

    def _place(self, state: Value) -> int:
        return self.inside.index(state)

    def _substitute(self, place: int, last: Value | None, substitution: Substitution) -> None:
        result = self.finals[place]
        if result is not None and last is not None:
            substitution[result] = last

    def _unmasked(self) -> tuple[Value, _Mask | None]:
        """Return the next state before it is masked, and the mask if any."""
        # A mask keeps the old state in some steps. A selection between other values is no mask, but
        # part of the cell.
        for new, old, mask in self._selections(self.after):
            if old is self.state:
                return new, mask
        return self.after, None

    def _selections(self, value: Value) -> Iterator[tuple[Value, Value, _Mask]]:
        """Yield a, b and the mask, if ``value`` is Where(mask, a, b), or mask * a + (1 - mask) * b
        with a mask of 0 and 1."""
        # The forms differ for values that are not finite: 0 * inf is NaN, while Where returns the
        # finite value. A Recurrence has both forms, so its states equal those of the loop (decision
        # 65).
        node = value.producer
        if node is None or node.control_inputs or node not in self.body.nodes:
            return
        if node.op.full_name == "Where":
            condition, a, b = node.inputs
            if (mask := self._mask(condition)) is not None and a is not None and b is not None:
                yield a, b, mask
            kept = argument(condition, "Not")
            if (mask := self._mask(kept)) is not None and a is not None and b is not None:
                yield b, a, mask
        # Exporters write the operands of Add and Mul in any order.
        for left, right in swapped(node) if node.op.full_name == "Add" else ():
            for a, share in swapped(produced_by(left, "Mul")):
                for b, rest in swapped(produced_by(right, "Mul")):
                    if a is None or b is None or not _are_complements(share, rest):
                        continue
                    if (mask := self._mask(share)) is not None:
                        yield a, b, mask

    def _mask(self, value: Value | None) -> _Mask | None:
        """Return the mask of a value with one element for each row of the batch; else None."""
        if value is None or not isinstance(value.type, TensorType) or not value.type.static:
            return None
        # Kernels keep or replace whole rows of the state, so a mask has no units dim.
        if value.type.dims != (self.batch, 1) or value.type.dtype not in (BOOL, FLOAT32):
            return None
        rows = self.rows.of(value)
        return None if rows is None else _Mask(value, rows)

    # Other loop-carried values.

    def _carried_cell(self, cell: Value, following: Value | None, mask: _Mask | None) -> int | None:
        """Return the index of the loop-carried ``cell``, if its next value is ``following``."""
        if cell not in self.inside or following is None:
            return None
        place = self._place(cell)
        after = self.updated[place]
        if mask is None:
            return place if after is following else None
        for new, old, other in self._selections(after):
            if new is following and old is cell and other == mask:
                return place
        return None

    def _alike(self, new: Value, mask: _Mask | None) -> list[int]:
        """Return the indices of loop-carried values that always equal the state."""
        # TensorFlow's loops carry the last output in addition to the state, with the same mask.
        # Left in the loop, it would read the old state, and so keep the cell in the loop.
        alike: list[int] = []
        begin = self.initial[self._place(self.state)]
        places = zip(self.inside, self.updated, self.initial, strict=True)
        for place, (inside, after, initial) in enumerate(places):
            if inside is self.state or not _is_same(initial, begin):
                continue
            if mask is None:
                same = after is self.after
            else:
                same = after is self.after or any(
                    a is new and b is inside and other == mask
                    for a, b, other in self._selections(after)
                )
            if same:
                alike.append(place)
        return alike

    def _is_free(
        self, new: Value, mask: _Mask | None, states: Sequence[int], cell: int | None
    ) -> bool:
        """Whether only the cell itself reads its loop-carried values, since other readers can use
        rows. ``states``: the indices of states; ``cell``: the index of an LSTM's cell state."""
        # A search back from the outputs of the loop and the targets, which must stay. A reader of
        # the new state can read a row instead. The old state is not a row of any tensor, so a
        # reader of it keeps the cell in the loop.
        _, leaving = loop_carried(self.loop)
        known = {self.updated[i] for i in states}
        if mask is None:
            known.add(new)
        places = [*states, *([] if cell is None else [cell])]
        carried = {self.inside[i] for i in places}
        skipped = {leaving.start + i for i in places}
        left: list[Value] = [v for i, v in enumerate(self.body.outputs) if i not in skipped]
        waiting, seen = list(self.body.targets), set[Node]()
        while left or waiting:
            if waiting:
                node: Node | None = waiting.pop()
            else:
                value = left.pop()
                if value in carried:
                    return False
                node = value.producer if value in self.rows.own and value not in known else None
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += node.control_inputs
            # Rows hold the masked state, which makes no difference to readers with the same mask.
            masked = mask is not None and self._is_masked(node, new, mask)
            left += [value for value in all_reads(node) if not (masked and value is new)]
        return True

    def _is_masked(self, node: Node, new: Value, mask: _Mask) -> bool:
        """Whether ``node`` reads ``new`` only in steps where ``mask`` selects it."""
        if node.op.full_name == "Where":
            condition, a, b = node.inputs
            if condition is mask.of:
                return a is new and b is not new
            return argument(condition, "Not") is mask.of and b is new and a is not new
        if node.op.full_name == "Mul" and mask.of.dtype == FLOAT32:
            return [*node.inputs].count(new) == 1 and mask.of in node.inputs
        return False

    # Rewriting.

    def _recurrence(
        self, gates: CellGates, mask: _Mask | None, carried: int | None
    ) -> tuple[Value | None, Value | None, Value | None]:
        """Write a Recurrence before the loop. Return the states of all steps, the last state and
        the last cell state; all are None if the Recurrence cannot compute the cell."""
        sums, inner, units, rows = gates.sums, gates.inner, self.units, self.rows
        # For a gate without rows, the node would need a tensor of zeros for all steps.
        if any(not sum_.is_known for sum_ in sums) or not all(sum_.rows for sum_ in sums):
            return None, None, None
        if inner is not None and (not inner.is_known or sums[2].weights):
            return None, None, None
        of_state = [*sums[:2], inner] if inner is not None else sums
        matrices = [_total(sum_.weights, (units, units)) for sum_ in of_state]
        # Without weights of the state, steps have no product and the node saves nothing.
        if not any(sum_.weights for sum_ in of_state):
            return None, None, None
        weights = np.concatenate([matrix.T for matrix in matrices])[None]
        biases = [_total(sum_.constants, (units,)) for sum_ in sums]
        # Constants are added to the bias at compile time, instead of to all rows in a run.
        products, places, added = self._products([sum_.rows for sum_ in sums])
        biases = [bias + own for bias, own in zip(biases, added, strict=True)]
        of_h = [np.zeros(units, FLOAT32) for _ in sums]
        if inner is not None:
            of_h[2] = _total(inner.constants, (units,))
        bias = np.concatenate([*biases, *of_h])[None]
        flags = None
        if mask is not None:
            flags = rows.reshaped(mask.rows, (rows.trips, self.batch))
        begin = [self.initial[self._place(self.state)]]
        if carried is not None:
            begin.append(self.initial[carried])
        constants = [rows.constant(np.ascontiguousarray(weights))]
        constants.append(rows.constant(bias) if bias.any() else None)  # type: ignore[arg-type]
        state = self.batch, units
        outputs = [rows.value("states", (rows.trips, *state), FLOAT32)]
        outputs += [rows.value(name, state, FLOAT32) for name in ("state", "cell")[: len(begin)]]
        attrs = {
            "cell": gates.cell,
            "hidden_size": units,
            "places": places,
            "linear_before_reset": int(inner is not None),
            "activations": (gates.activation,) if gates.cell == "RNN" else (),
        }
        inputs = [products, *constants, flags, *begin]
        node = self.loop.derived(inputs, outputs, attrs, op=RECURRENCE, name=outputs[0].name)
        rows.nodes.append(node)
        return outputs[0], outputs[1], outputs[2] if carried is not None else None

    def _products(
        self, gates: Sequence[Sequence[Columns]]
    ) -> tuple[Value, tuple[int, ...], Sequence[np.ndarray | float]]:
        """Return a tensor [trips, batch, gates * units] of the sums of all gates, the place of each
        gate in it, and the constants to be added."""
        units, rows = self.units, self.rows
        # The best case is one tensor with all gates side by side, in any order, which the node
        # reads in place. Next, tensors that are products of the same x, which become one product.
        # Otherwise, the gates are added and concatenated, which copies all rows.
        single = [gate[0] for gate in gates if len(gate) == 1]
        tensors = list(dict.fromkeys([columns.value for columns in single]))
        widths = [tensor.type.dims[-1] for tensor in tensors]  # type: ignore[union-attr]
        whole = all(columns.begin % units == 0 for columns in single)
        if len(single) < len(gates) or sum(widths) != len(gates) * units or not whole:
            tensors = [self._added(gate) for gate in gates]
            single = [Columns(tensor, 0) for tensor in tensors]
            widths = [units] * len(gates)
        firsts = dict(zip(tensors, np.cumsum([0, *widths[:-1]]).tolist(), strict=True))
        places = tuple([(firsts[value] + begin) // units for value, begin in single])
        none = [0.0] * len(gates)
        if len(tensors) == 1:
            return tensors[0], places, none
        joined = _joined_product(tensors)
        dims = rows.trips, self.batch, len(gates) * units
        if joined is None:
            return rows.emit("Concat", tensors, dims, FLOAT32, axis=2), places, none
        x, matrix, bias = joined
        product = rows.emit("MatMul", [x, rows.constant(matrix)], dims, FLOAT32)
        added = [bias[place * units : (place + 1) * units] for place in places]
        return product, places, added

    def _added(self, columns: Sequence[Columns]) -> Value:
        """Return the sum of ``columns``, [trips, batch, units]."""
        rows, dims = self.rows, (self.rows.trips, self.batch, self.units)
        total: Value | None = None
        for value, begin in columns:
            part = value
            if value.shape != dims:
                bounds = [np.array([n], np.int64) for n in (begin, begin + self.units, 2)]
                numbers = [rows.constant(bound) for bound in bounds]
                part = rows.emit("Slice", [value, *numbers], dims, FLOAT32)
            total = part if total is None else rows.emit("Add", [total, part], dims, FLOAT32)
        assert total is not None
        return total

    def _replace(self, new: Value, mask: _Mask | None, y: Value, states: Sequence[int]) -> None:
        """Let nodes of the body read the new state, and values ``states``, as rows of ``y``."""
        # A substitution for the body only: that of the pass replaces results of loops.
        row, own = self._row_of(y), Substitution()
        for value in {new if mask is None else self.after, *[self.updated[i] for i in states]}:
            own[value] = row
        for node in self.body.nodes if mask is not None else ():
            if self._is_masked(node, new, mask):  # type: ignore[arg-type]
                node.inputs = [row if x is new else x for x in node.inputs]
        own.apply_throughout(self.body)

    def _release(self, places: Sequence[int]) -> None:
        """Let the loop carry the values at ``places`` unchanged."""
        # Another pass removes unchanged loop-carried values, with their inputs and outputs.
        start = loop_carried(self.loop)[1].start
        for place in places:
            self.body.outputs[start + place] = self.inside[place]

    def _row_of(self, y: Value) -> Value:
        """Return the row of ``y`` of each iteration, as a value of the body."""
        loop, rows = self.loop, self.rows
        row = rows.value("row", (self.batch, self.units), FLOAT32)
        if loop.op.role is Role.LOOP:
            inputs = [y, self.body.inputs[0]]
            gather = loop.derived(inputs, [row], {"axis": 0}, op=standard("Gather"), name=row.name)
            self.body.nodes.insert(0, gather)  # before all nodes that may read the row
            return row
        # In a Scan, the row is a new scan input, which is the last one.
        layout = ScanLayout(loop)
        loop.attrs["scan_input_axes"] = [*layout.input_axes, 0]
        loop.attrs["scan_input_directions"] = [*layout.input_backward, 0]
        loop.attrs["num_scan_inputs"] += 1
        loop.inputs.append(y)
        self.body.inputs.append(row)
        return row


def _joined_product(tensors: Sequence[Value]) -> tuple[Value, np.ndarray, np.ndarray] | None:
    """Return x, weights and a bias of one product that has ``tensors`` side by side, if each of
    these is a product of x; else None."""
    xs: set[Value] = set()
    matrices: list[np.ndarray] = []
    biases: list[np.ndarray] = []
    for tensor in tensors:
        product, bias = tensor, None
        for summand, added in swapped(produced_by(tensor, "Add")):
            if summand is not None and added is not None and added.const is not None:
                product, bias = summand, added.const
        node = produced_by(product, "MatMul")
        weights = None if node is None else node.const(1)
        if node is None or node.inputs[0] is None or weights is None or weights.ndim != 2:
            return None
        width = weights.shape[1]
        row = np.zeros(width, FLOAT32) if bias is None else row_of(bias, 0, width)
        if row is None or product.shape != tensor.shape:
            return None
        xs.add(node.inputs[0])
        matrices.append(weights)
        biases.append(row)
    if len(xs) != 1:
        return None
    return xs.pop(), np.concatenate(matrices, axis=1), np.concatenate(biases)


def _is_matrix(value: Value) -> bool:
    type_ = value.type
    if not is_static(type_) or type_.dtype != FLOAT32:
        return False
    return len(type_.dims) == 2 and type_.elements > 0 and value.const is None


def _total(arrays: Sequence[np.ndarray], dims: tuple[int, ...]) -> np.ndarray:
    total = np.zeros(dims, FLOAT32)
    for array in arrays:
        total = total + array
    return total


def _are_complements(share: Value | None, rest: Value | None) -> bool:
    """Whether one value is 1 where the other is 0, as casts of a condition and its negation."""
    a, b = argument(share, "Cast"), argument(rest, "Cast")
    if a is None or b is None or a.dtype != BOOL or b.dtype != BOOL:
        return False
    return argument(a, "Not") is b or argument(b, "Not") is a


def _is_same(a: Value | None, b: Value | None) -> bool:
    """Whether two values are known to be equal."""
    if a is b or a is None or b is None:
        return a is b and a is not None
    if a.const is None or b.const is None or a.const.dtype != b.const.dtype:
        return False
    return np.array_equal(a.const, b.const)
