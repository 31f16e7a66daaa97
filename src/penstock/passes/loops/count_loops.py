"""Trip counts: compute the number of iterations of counting loops before the loop.

::

    if i < n:                           for _ in range(n - i):
        while True:                         body
            body; i = i + 1             i = max(i, n)
            if not i < n: break

Iterations then compute neither the condition nor, if nothing else reads it, the counter: DeadCode
drops unread loop-carried values. If the starts and limits of counters are constants, these may have
any dtype and the Loop may have a trip limit: the trip count is a constant as well.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple
from penstock.core.types import is_static, without_data
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Role
from penstock.ops.internal.arrays import TRIP_COUNT
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.loops.loop_rows import count_of

_COMPARISONS = frozenset({"Greater", "Less"})
_MOST_CONDITIONS = 16
_EXACT = 2**23
"""the largest magnitude of start and limit of a counter: float32 represents their sum exactly"""
_ENDLESS = 2**62
"""the least trip limit that is treated as no limit"""


class CountLoops(Pass):
    """Compute the trip counts of Loops whose condition is that counters are below limits."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed = False
        for inner in graph.graphs():
            nodes: list[Node] = []
            for node in with_checkpoints(inner.nodes):
                counted = _counted(node) if node.op.role is Role.LOOP else None
                changed |= counted is not None
                if counted is None and node.op.role is Role.LOOP:
                    changed |= _count_constant(node)
                nodes += counted or (node,)
            inner.nodes = nodes
        return changed


class _Bound(NamedTuple):
    """The condition that ``counter`` is below ``limit``."""

    counter: Value
    limit: Value


class _Counter(NamedTuple):
    """A carried value that each iteration increments by 1: its index, its start, its limit."""

    place: int
    start: Value
    limit: Value


def _counted(node: Node) -> list[Node] | None:
    """Return the Loop, preceded by the node that computes its trip count, and followed by nodes
    that compute the final values of its counters; None if the Loop does not count."""
    limit, guard, *initial = node.inputs
    body: Graph = node.attrs["body"]
    # TripCount only takes counters, but a trip limit could end the Loop earlier.
    if limit is not None and not _is_endless(limit):
        return None
    bounds = _bounds(body.outputs[0])
    counters = [counter for bound in bounds if (counter := _counter(node, bound)) is not None]
    if not bounds or len(counters) < len(bounds) or None in initial:
        return None
    # TripCount makes a guard redundant that compares the initial counters in the same way.
    checked = guard is not None and _same(_bounds(guard), counters)
    entered = guard is None or (guard.const is not None and bool(guard.const.all()))
    # Without the check, the first iteration runs and adds 1 even if a counter is past its limit.
    if not checked and any(not _may_grow(counter.start) for counter in counters):
        return None
    # A Loop that is entered without a check runs at least once.
    least = 0 if checked else 1
    inputs: list[Value | None] = [value for own in counters for value in (own.start, own.limit)]
    trips = Value(f"{body.outputs[0].name}/trips")
    before = node.derived(inputs, [trips], {"least": least}, op=TRIP_COUNT)
    before.origin, trips.type = node.origin, TRIP_COUNT.infer((), {}, ())[0]
    node.inputs[:2] = [trips, None if checked or entered else guard]
    # The body passes on its condition input, which is true: the condition never ends the Loop.
    body.outputs[0] = body.inputs[1]
    # The final values of several counters are unknown, since the limit of one ends them all. With
    # another guard, the counter may keep its start.
    ends = _ends(node, counters[0], least) if len(counters) == 1 and (checked or entered) else []
    return [before, node, *ends]


def _count_constant(node: Node) -> bool:
    """Replace the condition of a Loop by its trip count, if that is a constant."""
    body: Graph = node.attrs["body"]
    trips = _constant_trips(node)
    if trips is None:
        return False
    name = f"{body.outputs[0].name}/trips"
    node.inputs[0], body.outputs[0] = Value(name, const=np.array(trips, np.int64)), body.inputs[1]
    return True


def _constant_trips(node: Node) -> int | None:
    """Return the trip count of a Loop whose conditions are that counters are below constants."""
    limit, guard = node.inputs[:2]
    body: Graph = node.attrs["body"]
    most = None if limit is None or limit.const is None else max(int(limit.const.item()), 0)
    entered = guard is None or (guard.const is not None and bool(guard.const.all()))
    if (limit is not None and most is None) or most == 0 or not entered:
        return None
    ends = [most] if most is not None else []
    conditions = _bounds(body.outputs[0], "iuf")
    for bound in conditions:
        count, end = count_of(node, bound.counter), bound.limit.const
        # A decreasing counter stays below its limit until it wraps around.
        if count is None or count.sign < 0 or end is None or abs(count.start) > _EXACT:
            return None
        # Negated, so that NaN is refused as well.
        if not abs(float(end.item())) <= _EXACT:
            return None
        # Each iteration computes the condition for the next, so there is one more iteration than
        # there are true conditions.
        ends.append(max(math.ceil(float(end.item()) - count.start), 0) + 1)
    return min(ends) if conditions else None


def _is_endless(limit: Value) -> bool:
    const = limit.const
    return const is not None and _is_number(limit) and const.item() >= _ENDLESS


def _bounds(condition: Value, kinds: str = "iu") -> list[_Bound]:
    """Return the bounds, of these kinds, whose conjunction a condition is; else none."""
    bounds: list[_Bound] = []
    left, seen = [condition], {condition}
    while left:
        node = left.pop().producer
        # Nested Ands may read the same condition many times, which is visited once.
        if node is None or node.control_inputs or len(seen) > _MOST_CONDITIONS:
            return []
        operands = [value for value in node.inputs if value is not None]
        name = node.op.full_name
        reshapes = "reshapes" in node.op.traits
        if reshapes or name == "And":
            parts = operands[: 1 if reshapes else 2]
            left += [part for part in parts if part not in seen]
            seen.update(parts)
        elif name in _COMPARISONS and all(_is_number(x, kinds) for x in operands):
            bounds.append(_Bound(*operands[:: 1 if name == "Less" else -1]))
        else:
            return []
    return bounds


def _is_number(value: Value, kinds: str = "iu") -> bool:
    """Whether a value has one element, of a dtype of these kinds."""
    return is_static(value.type, kinds) and value.type.elements == 1


def _counter(node: Node, bound: _Bound) -> _Counter | None:
    """Return the counter of a bound that is computed at the end of an iteration, or None."""
    body: Graph = node.attrs["body"]
    inside, updated = body.inputs[2:], body.outputs[1 : len(node.inputs) - 1]
    add = bound.counter.producer
    if add is None or add.op.full_name != "Add" or add.control_inputs or add not in body.nodes:
        return None
    for value, step in (add.inputs, add.inputs[::-1]):
        const = None if step is None else step.const
        if const is None or const.size != 1 or const.item() != 1 or value not in inside:
            continue
        place = inside.index(value)
        start, limit = node.inputs[2 + place], bound.limit
        # Converters write limits as loop-carried values that do not change.
        if limit in inside and updated[inside.index(limit)] is limit:
            limit = node.inputs[2 + inside.index(limit)] or limit
        outside = limit not in body.inputs and limit.producer not in body.nodes
        if outside and updated[place] is bound.counter and start is not None and start.type:
            return _Counter(place, start, limit) if _is_number(start) else None
    return None


def _same(bounds: list[_Bound], counters: list[_Counter]) -> bool:
    """Whether ``bounds`` compare the starts of ``counters`` with their limits."""
    return bool(bounds) and {(b.counter, b.limit) for b in bounds} == {
        (c.start, c.limit) for c in counters
    }


def _may_grow(start: Value) -> bool:
    """Whether a counter's start is known and incrementing it does not overflow."""
    const = start.const
    return const is not None and const.item() < np.iinfo(const.dtype).max


def _ends(node: Node, counter: _Counter, least: int) -> list[Node]:
    """Return the node that computes a counter's final value: the maximum of its limit and of its
    value after ``least`` iterations."""
    end, start = node.outputs[counter.place], counter.start
    if end is None:
        return []
    # Max takes operands of one type.
    types_ = [without_data(value.type) for value in (start, counter.limit, end)]
    if types_ != types_[:1] * 3:
        return []
    if least:
        assert start.const is not None
        first = np.asarray(start.const + start.const.dtype.type(least))
        start = Value(f"{end.name}/least", const=first)
    node.outputs[counter.place] = Value(f"{end.name}/counted", end.type, node)
    return [node.derived([start, counter.limit], [end], {}, op=standard("Max"))]
