"""Vectorization of a loop: computes rows of all its iterations at once before the loop.

::

    for i in range(n):                          rows = xs[first : first + n] * 2
        x = Gather(xs, first + i)
        y = x * 2

A row is a slice of an outside tensor that an iteration reads, by a Gather whose index counts up or
down or as an input of a Scan, or an elementwise function of rows, the number of the iteration
and values from outside. The rows of a Loop are known if its trip count is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import TensorType, is_static
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Role
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.onnx.control_flow import ScanLayout, loop_carried
from penstock.passes.rewrite import Expansion, dims_and_dtype, new_name, swapped

MOST_BYTES = 1 << 27
"""of what is computed before a loop in place of a row in each iteration"""
_KINDS = "biuf"
_COUNTING = tuple([np.dtype(t) for t in (np.int32, np.int64, np.float32, np.float64)])


def trips_of(loop: Node) -> int | None:
    """Return the trip count of a Loop or Scan, if it is known and no condition ends it."""
    if loop.op.role is Role.SCAN:
        layout = ScanLayout(loop)
        # ONNX demands the same length of all scan inputs: any known one will do.
        for x, axis in zip(loop.inputs[layout.states :], layout.input_axes, strict=True):
            length = x.shape[axis] if x is not None and x.shape else None
            if isinstance(length, int):
                return length
        return None
    if loop.op.role is not Role.LOOP:
        return None
    body: Graph = loop.attrs["body"]
    limit, entered = loop.inputs[:2]
    proceed = body.outputs[0]
    # A body that hands on the condition it got never ends the loop.
    always = proceed is body.inputs[1] or (proceed.const is not None and bool(proceed.const.all()))
    begins = entered is None or (entered.const is not None and bool(entered.const.all()))
    if limit is None or limit.const is None or limit.const.size != 1 or not always or not begins:
        return None
    return max(int(limit.const.item()), 0)


class Count(NamedTuple):
    """A number that iteration i has as ``sign * i + start``."""

    sign: int
    start: int


def count_of(loop: Node, value: Value | None, depth: int = 8) -> Count | None:
    """Return the count that ``value``, one whole number in the body of a Loop, follows; of float32
    only while it is at most 2^24."""
    body: Graph = loop.attrs["body"]
    if value is None or loop.op.role is not Role.LOOP or not _is_number(value) or not depth:
        return None
    if value is body.inputs[0]:
        return Count(1, 0)
    if value in body.inputs:
        return _carried_count(loop, value)
    node = value.producer
    if node is None or node.control_inputs or node not in body.nodes:
        return None
    if node.op.full_name == "Cast" or "reshapes" in node.op.traits:
        return count_of(loop, node.inputs[0], depth - 1)
    for x, other in swapped(node) if node.op.full_name in ("Add", "Sub") else ():
        number = _whole(other)
        if number is None:
            continue
        count = count_of(loop, x, depth - 1)
        if count is None:
            return None
        if node.op.full_name == "Add":
            return Count(count.sign, count.start + number)
        # Sub is not commutative: a constant less the counter counts downwards.
        if x is node.inputs[0]:
            return Count(count.sign, count.start - number)
        return Count(-count.sign, number - count.start)
    return None


def _carried_count(loop: Node, value: Value) -> Count | None:
    """Return the count of a loop-carried value to which each iteration adds 1, or subtracts it."""
    body: Graph = loop.attrs["body"]
    entering, leaving = loop_carried(loop)
    carried = body.inputs[entering]
    if value not in carried:
        return None
    place = carried.index(value)
    begin, node = loop.inputs[entering][place], body.outputs[leaving][place].producer
    start = _whole(begin)
    if start is None or node is None or node.control_inputs:
        return None
    for x, step in swapped(node) if node.op.full_name in ("Add", "Sub") else ():
        sign = 1 if node.op.full_name == "Add" else -1
        by = _whole(step)
        # ``step - value`` changes its sign in each iteration and does not count.
        if x is value and (sign > 0 or x is node.inputs[0]) and by in (1, -1):
            return Count(sign * by, start)
    return None


def _whole(value: Value | None) -> int | None:
    """The number of a constant of one element, if it is a whole number."""
    const = None if value is None else value.const
    if const is None or const.size != 1 or const.dtype not in _COUNTING:
        return None
    number = const.item()
    return int(number) if math.isfinite(number) and number == int(number) else None


def _is_number(value: Value) -> bool:
    type_ = value.type
    return is_static(type_) and type_.elements == 1 and type_.dtype in _COUNTING


class LoopRows(Expansion):
    """The rows of a loop that runs ``trips`` times. ``nodes`` compute them, to be put in front of
    the loop if any is used; ``taken`` are the names that values have."""

    def __init__(self, loop: Node, trips: int, taken: Counter[str]) -> None:
        super().__init__(loop)
        self.loop, self.trips, self.taken = loop, trips, taken
        self.body: Graph = loop.attrs["body"]
        self.own: set[Value] = {*self.body.inputs}
        for node in self.body.nodes:
            self.own.update([value for value in node.outputs if value is not None])
        self._rows: dict[Value, Value | None] = {}
        self._slices: dict[tuple[Value, int, Count], Value | None] = {}

    def of(self, value: Value) -> Value | None:
        """A tensor [trips, ...] with ``value`` of every iteration; None if it is not known before
        the loop, or is the same in all."""
        if value not in self.own or value.const is not None or not is_static(value.type, _KINDS):
            return None
        if value not in self._rows:
            self._rows[value] = None  # until it is known
            self._rows[value] = self._made(value)
        return self._rows[value]

    def set(self, value: Value, rows: Value) -> None:
        """Let ``rows`` be those of ``value``."""
        self._rows[value] = rows

    def value(self, name: str, dims: Sequence[int], dtype: np.dtype) -> Value:
        """A new value with a name that no other has."""
        own = new_name(f"{self.loop.name}/{name.lower()}", self.taken)
        return Value(own, TensorType(dtype, tuple(dims)))

    def constant(self, array: Any) -> Value:
        """A new constant."""
        return Value(new_name(f"{self.loop.name}/constant", self.taken), const=array)

    def _made(self, value: Value) -> Value | None:
        dims, dtype = dims_and_dtype(value)
        if (count := count_of(self.loop, value)) is not None:
            numbers = count.sign * np.arange(self.trips) + count.start
            return self.constant(numbers.astype(dtype).reshape(-1, *dims))
        if value in self.body.inputs:
            return self._scanned(value)
        node = value.producer
        # A node with control inputs must run at its own time in each iteration.
        if node is None or node.control_inputs or len(node.outputs) != 1:
            return None
        if node.op.full_name == "Gather":
            return self._gathered(node, dims)
        if "reshapes" in node.op.traits and node.inputs[0] is not None:
            # A target shape that the body computes may differ from iteration to iteration.
            if any(x in self.own for x in node.inputs[1:] if x is not None):
                return None
            rows = self.of(node.inputs[0])
            return None if rows is None else self.reshaped(rows, (self.trips, *dims))
        return (
            self._elementwise(node, dims, dtype) if node.op.elementwise and node.op.pure else None
        )

    def _scanned(self, value: Value) -> Value | None:
        if self.loop.op.role is not Role.SCAN:
            return None
        layout, place = ScanLayout(self.loop), self.body.inputs.index(value) - self.loop_states
        if place < 0:
            return None
        source = self.loop.inputs[layout.states + place]
        sign = -1 if layout.input_backward[place] else 1
        start = 0 if sign > 0 else self.trips - 1
        return self._slice(source, layout.input_axes[place], Count(sign, start))

    @property
    def loop_states(self) -> int:
        return ScanLayout(self.loop).states

    def _gathered(self, node: Node, dims: tuple[int, ...]) -> Value | None:
        source, index = node.inputs
        if source is None or source in self.own:
            return None
        count = count_of(self.loop, index)
        if count is None or index is None or index.type.dtype.kind == "f":  # type: ignore[union-attr]
            return None
        rows = self._slice(source, node.attrs.get("axis", 0), count)
        return None if rows is None else self.reshaped(rows, (self.trips, *dims))

    def _slice(self, source: Value | None, axis: int, count: Count) -> Value | None:
        """Return what all iterations read of ``source`` along ``axis``, as the first axis."""
        if source is None or not is_static(source.type, _KINDS):
            return None
        dims, dtype = dims_and_dtype(source)
        axis = normalize_axis(axis, len(dims))
        # An index out of range must fail in its own iteration, and a negative one counts from the
        # end, which a slice over all iterations cannot follow.
        ends = sorted((count.start, count.start + count.sign * (self.trips - 1)))
        if ends[0] < 0 or ends[1] >= dims[axis]:
            return None
        key = source, axis, count
        if key not in self._slices:
            self._slices[key] = self._cut(source, axis, count, dims, dtype)
        return self._slices[key]

    def _cut(
        self, source: Value, axis: int, count: Count, dims: tuple[int, ...], dtype: np.dtype
    ) -> Value:
        if axis:
            order = [axis, *[i for i in range(len(dims)) if i != axis]]
            dims = tuple([dims[i] for i in order])
            source = self.transposed(source, order)
        if count == Count(1, 0) and dims[0] == self.trips:
            return source
        end = count.start + count.sign * self.trips
        # Slice would count an end of -1 from the end; any end below -dim stands before the first
        # element.
        bounds = count.start, end if end >= 0 else -dims[0] - 1, 0, count.sign
        numbers = [self.constant(np.array([number], np.int64)) for number in bounds]
        return self.emit("Slice", [source, *numbers], (self.trips, *dims[1:]), dtype)

    def _elementwise(self, node: Node, dims: tuple[int, ...], dtype: np.dtype) -> Value | None:
        operands: list[Value | None] = []
        large = self.trips * math.prod(dims) * dtype.itemsize > MOST_BYTES
        # A node that reads nothing of the body is the same in all iterations (see HoistInvariants).
        if large or self.own.isdisjoint(node.inputs):
            return None
        # Bounds are numbers: they have no axis of trips.
        if node.op.full_name == "Clip" and not self.own.isdisjoint(node.inputs[1:]):
            return None
        for x in node.inputs:
            if x is None or x not in self.own:
                # The axis of trips stands in front, where an operand of higher rank has an axis of
                # its own.
                if x is not None and (x.rank is None or x.rank > len(dims)):
                    return None
                operands.append(x)
                continue
            rows = self.of(x)
            if rows is None:
                return None
            own, _ = dims_and_dtype(x)
            # Broadcasting aligns the last axes: without ones behind it, the axis of trips would
            # meet another.
            aligned = (self.trips, *[1] * (len(dims) - len(own)), *own)
            operands.append(self.reshaped(rows, aligned))
        result = self.value(node.op.name, (self.trips, *dims), dtype)
        self.nodes.append(node.derived(operands, [result], name=result.name))
        return result
