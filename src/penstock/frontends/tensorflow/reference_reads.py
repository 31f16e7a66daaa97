"""Reads of TensorFlow 1's reference variables at the time when their value is used.

What a reference variable is read as (``v/read``, an Identity) shares the variable's buffer, which
assignments write in place. So a node that runs after an assignment sees it, though the Identity ran
before, even outside of the loop that the node is in::

    v ──> read ──> Enter ──> Add      becomes      v ──> Enter ──> read ──> Add
                 AssignAdd ····^                       AssignAdd ···^

Only nodes that depend on an assignment are changed: for others, TensorFlow leaves it open what they
see. Reshapes of what was read, which share the buffer too, and values that a loop carries on, keep
what was read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import ANY
from penstock.frontends.common.inferred_types import source_of
from penstock.ir.graph import Node, Value
from penstock.ir.op import PRIMITIVES, Op, Role
from penstock.ops.registry import TENSORFLOW, standard

_PASSING = frozenset({Role.ENTER, Role.SWITCH, Role.EXIT})
"""the primitives that pass on what was read, as they do references"""


def late_reads(nodes: Sequence[Node]) -> list[Node]:
    """Let nodes that depend on an assignment read the variable themselves; return the nodes that
    this adds to ``nodes``, those of a graph in any order."""
    assignments: dict[Value, set[Node]] = defaultdict(set)
    for node in with_checkpoints(nodes):
        if not node.op.pure and "forwards handle" in node.op.traits:
            assignments[_variable(node.outputs[0])].add(node)
    return _LateReads(nodes, assignments).nodes if assignments else []


def _variable(value: Value | None) -> Value:
    """The output of the VariableV2 that a reference refers to, or another value that is none."""
    seen = set()
    while value is not None and value not in seen:
        seen.add(value)
        value = source_of(value)
        node = value.producer
        if node is None or not (node.op.role in _PASSING or "forwards handle" in node.op.traits):
            return value
        value = node.inputs[0]
    return Value("#none")


class _LateReads:
    """The ``nodes`` that are added. ``assignments``: those to each variable."""

    def __init__(self, nodes: Sequence[Node], assignments: dict[Value, set[Node]]) -> None:
        self.nodes: list[Node] = []
        self.assignments = assignments
        self.handles: dict[Value, Value] = {}
        self.readers: dict[Value, list[tuple[Node, int]]] = defaultdict(list)
        self.followers: dict[Node, list[Node]] = defaultdict(list)
        for node in with_checkpoints(nodes):
            for i, value in enumerate(node.inputs):
                if value is not None:
                    self.readers[value].append((node, i))
            for before in self._before(node):
                self.followers[before].append(node)
        self.seeing = cache(self._seeing)
        for node in with_checkpoints(nodes):
            if node.op.name == "ReadVariableOp" and node.op.domain == TENSORFLOW:
                self._follow(node)

    @staticmethod
    def _before(node: Node, but: Value | None = None) -> Iterator[Node]:
        """The nodes that ``node`` waits for, not counting for input ``but``."""
        yield from node.control_inputs
        for value in node.inputs:
            if value is not None and value is not but and value.producer is not None:
                yield value.producer

    def _seeing(self, variable: Value) -> set[Node]:
        """The nodes that depend on an assignment to a variable whose shape stays."""
        stack = list(self.assignments.get(variable, ()))
        if any(node.attrs.get("validate_shape") is False for node in stack):
            return set()  # a value of another shape has a buffer of its own
        seen: set[Node] = set()
        while stack:
            for node in self.followers[stack.pop()]:
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
        return seen

    def _follow(self, read: Node) -> None:
        """Let the nodes that see later assignments read what ``read`` has read."""
        handle, value = read.inputs[0], read.outputs[0]
        if handle is None or value is None:
            return
        seeing = self.seeing(_variable(handle))
        self.handles[value] = self._identity(handle, read)
        stack = [value] if seeing else []
        while stack:
            value = stack.pop()
            for node, i in self.readers[value]:
                if node in seeing and node.op.role not in PRIMITIVES and node.inputs[i] is value:
                    self._read_late(node, i, read)
                passes = node.op.role in _PASSING and i == 0
                if passes or node.op.full_name == "Identity":
                    stack += [v for v in node.outputs if v is not None and v not in self.handles]
                    self._pass_on(node, value)

    def _pass_on(self, node: Node, value: Value) -> None:
        """Let the reference to what ``value`` was read from go the way of the value."""
        handle = self.handles[value]
        if node.op.role is None:
            outputs: Sequence[Value | None] = [self._identity(handle, node)]
        else:
            outputs = [None if v is None else Value(f"{v.name}#handle", ANY) for v in node.outputs]
            self._add(node, node.op, [handle, *node.inputs[1:]], outputs)
        for old, new in zip(node.outputs, outputs, strict=True):
            if old is not None and new is not None:
                self.handles[old] = new

    def _identity(self, handle: Value, node: Node) -> Value:
        """The handle as it is behind ``node``, which may wait for what decides whether it runs."""
        if not node.control_inputs:
            return handle
        same = Value(f"{node.name}#handle", ANY)
        self._add(node, standard("Identity"), [handle], [same])
        return same

    def _add(
        self, node: Node, op: Op, inputs: Sequence[Value | None], outputs: Sequence[Value | None]
    ) -> None:
        name, before = f"{node.name}#handle", node.control_inputs
        self.nodes.append(node.derived(inputs, outputs, op=op, name=name, control_inputs=before))

    def _read_late(self, node: Node, index: int, read: Node) -> None:
        """Let ``node`` read the variable itself, after all else that it waits for."""
        replaced, (was,) = node.inputs[index], read.outputs
        assert replaced is not None and was is not None
        value, name = Value(f"{node.name}#late_{index}", was.type), f"{node.name}#late_{index}"
        before = list(dict.fromkeys(self._before(node, replaced)))
        self.nodes.append(
            read.derived([self.handles[replaced]], [value], name=name, control_inputs=before)
        )
        node.inputs[index] = value
