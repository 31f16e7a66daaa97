"""Vectorization of a loop: computes the rows of all of its iterations before the loop.

::

    for i in range(n):                          rows = xs[first : first + n] * 2
        x = Gather(xs, first + i)
        y = x * 2

A row is either a slice of a tensor from outside the loop, which an iteration reads by a Gather
whose index counts up or down, or as a scan input; or an elementwise function of rows, the iteration
number and values from outside. The rows of a Loop are only known if its trip count is.
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
"""the maximum size of a tensor of rows that is computed before a loop"""
_KINDS = "biuf"
_COUNTING = tuple([np.dtype(t) for t in (np.int32, np.int64, np.float32, np.float64)])


def trips_of(loop: Node) -> int | None:
    """Return the trip count of a Loop or Scan, if it is known and no condition ends it."""
    if loop.op.role is Role.SCAN:
        layout = ScanLayout(loop)
        # In ONNX, all scan inputs have the same length, so one known length suffices.
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
    # A body that passes on its condition never ends the loop.
    always = proceed is body.inputs[1] or (proceed.const is not None and bool(proceed.const.all()))
    begins = entered is None or (entered.const is not None and bool(entered.const.all()))
    if limit is None or limit.const is None or limit.const.size != 1 or not always or not begins:
        return None
    return max(int(limit.const.item()), 0)


class Count(NamedTuple):
    """A number whose value in iteration i is ``sign * i + start``."""

    sign: int
    start: int


def count_of(loop: Node, value: Value | None, depth: int = 8) -> Count | None:
    """Return the count that ``value``, a value of one element in the body of a Loop, follows; None
    if it does not count. For float32, the count is exact up to 2^24."""
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
        # Sub is not commutative: a constant minus the counter counts down.
        if x is node.inputs[0]:
            return Count(count.sign, count.start - number)
        return Count(-count.sign, number - count.start)
    return None


def _carried_count(loop: Node, value: Value) -> Count | None:
    """Return the count of a loop-carried value that each iteration changes by 1 or -1, or None."""
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
        # ``step - value`` changes its sign in each iteration, and does not count.
        if x is value and (sign > 0 or x is node.inputs[0]) and by in (1, -1):
            return Count(sign * by, start)
    return None


def _whole(value: Value | None) -> int | None:
    """Return the number of a constant of one element, if it is an integer."""
    const = None if value is None else value.const
    if const is None or const.size != 1 or const.dtype not in _COUNTING:
        return None
    number = const.item()
    return int(number) if math.isfinite(number) and number == int(number) else None


def _is_number(value: Value) -> bool:
    type_ = value.type
    return is_static(type_) and type_.elements == 1 and type_.dtype in _COUNTING


class LoopRows(Expansion):
    """The rows of a loop that runs ``trips`` times. ``nodes`` compute the rows; they belong before
    the loop if any row is used. ``taken``: the names of all values."""

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
        """Return a tensor [trips, ...] with the ``value`` of each iteration; None if it cannot be
        computed before the loop, or is invariant."""
        if value not in self.own or value.const is not None or not is_static(value.type, _KINDS):
            return None
        if value not in self._rows:
            self._rows[value] = None  # ends cycles while the rows are computed
            self._rows[value] = self._computed(value)
        return self._rows[value]

    def set(self, value: Value, rows: Value) -> None:
        """Use ``rows`` as the rows of ``value``."""
        self._rows[value] = rows

    def value(self, name: str, dims: Sequence[int], dtype: np.dtype) -> Value:
        """Return a new value with a unique name."""
        own = new_name(f"{self.loop.name}/{name.lower()}", self.taken)
        return Value(own, TensorType(dtype, tuple(dims)))

    def constant(self, array: Any) -> Value:
        """Return a new constant with a unique name."""
        return Value(new_name(f"{self.loop.name}/constant", self.taken), const=array)

    def _computed(self, value: Value) -> Value | None:
        dims, dtype = dims_and_dtype(value)
        if (count := count_of(self.loop, value)) is not None:
            numbers = count.sign * np.arange(self.trips) + count.start
            return self.constant(numbers.astype(dtype).reshape(-1, *dims))
        if value in self.body.inputs:
            return self._scanned(value)
        node = value.producer
        # A node with control inputs must run in each iteration, after these.
        if node is None or node.control_inputs or len(node.outputs) != 1:
            return None
        if node.op.full_name == "Gather":
            return self._gathered(node, dims)
        if "reshapes" in node.op.traits and node.inputs[0] is not None:
            # A target shape that the body computes may differ between iterations.
            if any(x in self.own for x in node.inputs[1:] if x is not None):
                return None
            rows = self.of(node.inputs[0])
            return None if rows is None else self.reshaped(rows, (self.trips, *dims))
        known = node.op.elementwise and node.op.pure
        return self._elementwise(node, dims, dtype) if known else None

    def _scanned(self, value: Value) -> Value | None:
        if self.loop.op.role is not Role.SCAN:
            return None
        layout, place = ScanLayout(self.loop), self.body.inputs.index(value) - self.loop_states
        if place < 0:
            return None
        source = self.loop.inputs[layout.states + place]
        sign = -1 if layout.input_backward[place] else 1
        # A backward scan input begins with its last slice.
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
        """Return the slices of ``source`` along ``axis`` that iterations read, along axis 0."""
        if source is None or not is_static(source.type, _KINDS):
            return None
        dims, dtype = dims_and_dtype(source)
        axis = normalize_axis(axis, len(dims))
        # An index out of range must fail in its own iteration. A negative index counts from the
        # end, which one slice for all iterations cannot represent.
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
        # In Slice, an end of -1 counts from the end, while an end below -dim lies before the first
        # element.
        bounds = count.start, end if end >= 0 else -dims[0] - 1, 0, count.sign
        numbers = [self.constant(np.array([number], np.int64)) for number in bounds]
        return self.emit("Slice", [source, *numbers], (self.trips, *dims[1:]), dtype)

    def _elementwise(self, node: Node, dims: tuple[int, ...], dtype: np.dtype) -> Value | None:
        operands: list[Value | None] = []
        large = self.trips * math.prod(dims) * dtype.itemsize > MOST_BYTES
        # A node that reads no value of the body is invariant (see HoistInvariants).
        if large or self.own.isdisjoint(node.inputs):
            return None
        # The bounds of Clip are scalars, and cannot have a trips axis.
        if node.op.full_name == "Clip" and not self.own.isdisjoint(node.inputs[1:]):
            return None
        for x in node.inputs:
            if x is None or x not in self.own:
                # The trips axis comes first, where an operand of higher rank has another axis.
                if x is not None and (x.rank is None or x.rank > len(dims)):
                    return None
                operands.append(x)
                continue
            rows = self.of(x)
            if rows is None:
                return None
            own = x.dims
            # Broadcasting aligns the last axes: without ones after it, the trips axis would be
            # aligned with another axis.
            aligned = (self.trips, *[1] * (len(dims) - len(own)), *own)
            operands.append(self.reshaped(rows, aligned))
        result = self.value(node.op.name, (self.trips, *dims), dtype)
        self.nodes.append(node.derived(operands, [result], name=result.name))
        return result
