"""Code generation for frames that run as one node: a function runs the iterations one by one.

The conditions of ``passes.structure.conditions`` determine which nodes run, so Switches and Merges
become ``if`` statements. ``i = Merge(enter, next)``, ``Switch(i, i < n)`` and ``next = i + 1`` are
compiled to::

    def run(control, v0, v1):
        number = 0
        p5 = False
        v2 = v0
        while True:
            v3, = f0(control, v2, v1)                           # less
            p5 = v3.item()                                      # switch
            if p5:
                v4, = f1(control, v2)                           # add
            if not p5: break
            if number == most: end(name, most)
            number += 1
            if control.stopped or not number % 64: yield
            v2 = v4
        return (v2,)

The function yields to let other tokens of the run proceed, and to let a stopped run end.
"""

from __future__ import annotations

import linecache
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np

from penstock.codegen.steps import printable
from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import PenstockError
from penstock.core.records import dataclass
from penstock.core.types import BOOL, RunValue, TensorType
from penstock.executors.errors import explained_at
from penstock.executors.frames.frame_graph import (
    NodeKernel,
    ValueNumbers,
    all_inputs,
    is_constant,
    is_identity,
)
from penstock.executors.frames.scheduler import end_iterations, switched_to
from penstock.ir.graph import Graph, Node, Value, all_reads
from penstock.ir.kernel import Kernel, array_of
from penstock.ir.op import Role
from penstock.ops.internal.segment import is_frame

# Iterations after which other tokens of the run have a turn.
_MOST_AT_ONCE = 64

_SCALAR = TensorType(BOOL, ())

# Distinguishes functions in tracebacks; it is not part of their text.
_SERIAL = count()


Condition = frozenset[tuple[Value | Node, int]]
"""The condition of a node: predicates with their required value, and Merges that must be live."""
_ALWAYS: Condition = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class FrameForm:
    """A frame whose loop begins with all of its variables, and continues or ends with all of them.

    ``variables``: the Merge of each variable, the Enter before it, and its value in the next
    iteration. ``nodes``: all nodes but these Merges, NextIterations and Exits. ``conditions``: the
    condition of each node; ``lives``: returns the condition under which a value is live.
    ``doubtful``: Merges that may be dead even if their condition holds. ``predicate``: returns the
    predicate of a Switch. ``ends``: the condition under which an iteration is the last.
    """

    body: Graph
    enters: Sequence[Node]
    variables: Sequence[tuple[Node, Node, Value]]
    nodes: Sequence[Node]
    conditions: Mapping[Node, Condition]
    lives: Callable[[Value], Condition]
    doubtful: Collection[Node]
    predicate: Callable[[Node], Value]
    ends: Condition


def write_frame(
    form: FrameForm, kernel: Callable[[Node], NodeKernel], most: int | None
) -> NodeKernel:
    """Return the function of a frame: a generator function that takes the control of a run and the
    frame's inputs, and returns its outputs. ``kernel`` compiles the nodes. ``most``: the maximum
    number of iterations after the first, or None."""
    writer = _FrameWriter(form, kernel)
    writer.write(most)
    return writer.bound()


class _FrameWriter:
    """Writes the function of one frame. ``names`` has the variables of values, ``flags`` those of
    predicates and of Merges whose inputs may all be dead. ``places``: the node that each line runs,
    with its kernel and its arguments."""

    def __init__(self, form: FrameForm, kernel: Callable[[Node], NodeKernel]) -> None:
        self.form = form
        self.kernel = kernel
        self.conditions = form.conditions
        self.names: dict[Value, str] = {}
        self.flags: dict[Value | Node, str] = {}
        self.evaluated: dict[Value, list[Condition]] = defaultdict(list)
        self.namespace: dict[str, Any] = {
            "array_of": array_of,
            "switched_to": switched_to,
            "end": end_iterations,
            "name": form.enters[0].attrs["frame_name"],
            "__builtins__": {"map": map},
            "ndarray": np.ndarray,
        }
        self.lines: list[str] = []
        self.places: dict[int, tuple[Node, NodeKernel | None, list[str]]] = {}
        self.compiled: dict[Node, NodeKernel] = {}
        self.current = _ALWAYS

    def write(self, most: int | None) -> None:
        """Write the function."""
        form, name = self.form, self.name
        arguments = [self.new(value) for value in form.body.inputs]
        for enter in form.enters:
            self.pass_on(enter)
        variables: list[str] = []
        first: list[str] = []
        later: list[Callable[[], str]] = []
        for merge, enter, update in form.variables:
            (start,) = enter.outputs
            value, index = merge.outputs
            if value is not None:
                variables.append(self.new(value))
                first.append(name(start))
                later.append(partial(name, update))
            if index is not None:
                entered = merge.inputs.index(start)
                variables.append(self.new(index))
                first.append(self.index(entered))
                later.append(partial(self.index, 1 - entered))
        for node in self.order():
            self.node(node)
        exited = [value.producer.inputs[0] for value in form.body.outputs if value.producer]
        limit = [] if most is None else [f"        if number == {most}: end(name, {most})"]
        start_lines = [
            f"def run({', '.join(['control', *arguments])}):",
            "    number = 0",
            *[f"    {flag} = False" for flag in self.flags.values()],
            f"    {', '.join(variables)} = {', '.join(first)}",
            "    while True:",
        ]
        # The flags are known only now. Lines were numbered from the beginning of the loop.
        self.places = {i + len(start_lines): place for i, place in self.places.items()}
        self.lines = [
            *start_lines,
            *self.lines,
            f"        if {self.when(form.ends)}: break",
            *limit,
            "        number += 1",
            f"        if control.stopped or not number % {_MOST_AT_ONCE}: yield",
            f"        {', '.join(variables)} = {', '.join(update() for update in later)}",
            f"    return ({''.join(name(value) + ', ' for value in exited)})",
        ]

    def bound(self) -> NodeKernel:
        """Compile the function that was written."""
        source = "\n".join(self.lines) + "\n"
        filename = f"<penstock {printable(self.form.body.name)} {next(_SERIAL)}>"
        exec(compile(source, filename, "exec"), self.namespace)
        run = self.namespace.pop("run")
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        # Tracebacks show the lines of the function as long as it exists.
        weakref.finalize(run, linecache.cache.pop, filename, None).atexit = False
        places, constants = self.places, self.namespace

        def explain(error: Exception) -> PenstockError:
            """Return the run's error for an exception of this function, with the node at fault."""
            trace: TracebackType | None = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != filename:
                trace = trace.tb_next
            place = None if trace is None else places.get(trace.tb_lineno)
            if trace is None or place is None:
                assert isinstance(error, PenstockError)
                return error
            node, compiled, names = place
            if compiled is not None and compiled.explain is not None:
                return compiled.explain(error)
            values = {**constants, **trace.tb_frame.f_locals}
            return explained_at(node, [values.get(name) for name in names], error)

        numbers, body = ValueNumbers(), self.form.body
        steps = [numbers.step(node, self.compiled.get(node)) for node in body.nodes]
        table = numbers.table(body.name, steps, body.inputs, body.outputs, ())
        return NodeKernel(Kernel(run), "", table, explain, source)

    # Nodes.

    def order(self) -> list[Node]:
        """Return the frame's nodes in topological order, grouped by condition where possible."""
        # Consecutive nodes with the same condition share an ``if`` in the text.
        nodes = self.form.nodes
        own = set(nodes)
        pending: dict[Node, int] = {}
        readers: dict[Node, list[Node]] = defaultdict(list)
        ready: dict[Condition, deque[Node]] = defaultdict(deque)
        for node in with_checkpoints(nodes):
            before = {*[v.producer for v in all_reads(node)], *node.control_inputs} & own
            pending[node] = len(before)
            for source in before:
                assert source is not None
                readers[source].append(node)
            if not before:
                ready[self.conditions[node]].append(node)
        ordered: list[Node] = []
        condition = _ALWAYS
        while len(ordered) < len(nodes):
            if not ready[condition]:
                condition = next(c for c, waiting in ready.items() if waiting)
            node = ready[condition].popleft()
            ordered.append(node)
            for reader in readers[node]:
                pending[reader] -= 1
                if not pending[reader]:
                    ready[self.conditions[reader]].append(reader)
        return ordered

    def node(self, node: Node) -> None:
        role = node.op.role
        if role is Role.SWITCH:
            self.switch(node)
        elif role is Role.MERGE:
            self.merge(node)
        elif is_constant(node):
            (value,) = node.outputs
            assert value is not None
            self.names[value] = self.bind("c", self.kernel(node).kernel.function())
        elif role is Role.LOOP_COND or is_identity(node):
            self.pass_on(node)
        elif role is not Role.CONTROL_TRIGGER:
            self.call(node)

    def pass_on(self, node: Node) -> None:
        """Give the outputs of a node the variable of its first input."""
        for value in node.outputs:
            if value is not None:
                self.names[value] = self.name(node.inputs[0])

    def switch(self, node: Node) -> None:
        self.pass_on(node)
        predicate, condition = self.form.predicate(node), self.conditions[node]
        # The flag is already set where the condition of an earlier Switch holds.
        if any(before <= condition for before in self.evaluated[predicate]):
            return
        self.evaluated[predicate].append(condition)
        value = self.name(predicate)
        flag = self.flag(predicate)
        text = f"{value}.item()" if predicate.type == _SCALAR else f"switched_to({value}, 2)"
        self.emit(f"{flag} = {text}", node, None, [self.name(v) for v in node.inputs])

    def merge(self, node: Node) -> None:
        """Write the choice of a Merge's first live input, and of the index of that."""
        conditions = self.conditions
        doubtful = node in self.form.doubtful
        around = _ALWAYS if doubtful else conditions[node]
        value, index = node.outputs
        names = ["_" if output is None else self.new(output) for output in (value, index)]
        word = "if"
        for i, source in enumerate(node.inputs):
            if source is not None:
                lives = self.when(self.form.lives(source) - around)
                flag = "; " + self.flag(node) + " = True" if doubtful else ""
                text = f"{', '.join(names)} = {self.name(source)}, {self.index(i)}{flag}"
                self.emit(f"{word} {lives}: {text}", node, None, [], around)
                word = "elif"
        if doubtful:
            self.emit(f"else: {self.flag(node)} = False", node, None, [], around)

    def call(self, node: Node) -> None:
        compiled = self.compiled[node] = self.kernel(node)
        arguments = [self.name(value) for value in all_inputs(node)]
        function = self.bind("f", compiled.kernel.function)
        outputs = ["_" if value is None else self.new(value) for value in node.outputs]
        nested = ["control"] if compiled.table is not None else []
        call = f"{function}({', '.join([*nested, *arguments])})"
        if is_frame(node):
            call = f"yield from {call}"
        emit = partial(self.emit, node=node, compiled=compiled, arguments=arguments)
        if not outputs:
            emit(call)
        elif nested:
            emit(f"{', '.join(outputs)}, = {call}")
        elif len(outputs) > 1:
            emit(f"{', '.join(outputs)} = map(array_of, {call})")
        else:
            (output,) = outputs
            emit(f"{output} = {call}")
            # Tested inline, since most kernels return arrays, which need no call.
            scalar = f"{output}.__class__ is not ndarray"
            emit(f"if {scalar}: {output} = array_of({output})")

    # Text.

    def emit(
        self,
        text: str,
        node: Node,
        compiled: NodeKernel | None,
        arguments: Sequence[str],
        condition: Condition | None = None,
    ) -> None:
        """Write a line of a node, in the ``if`` of its condition."""
        condition = self.conditions[node] if condition is None else condition
        if condition != self.current and condition != _ALWAYS:
            self.lines.append(f"        if {self.when(condition)}:")
        self.current = condition
        indent = " " * (8 if condition == _ALWAYS else 12)
        self.lines.append(f"{indent}{text:60}  # {printable(node.label)}")
        self.places[len(self.lines)] = node, compiled, [*arguments]

    def when(self, condition: Condition) -> str:
        """Return an expression that is true if ``condition`` holds."""
        choices = [(self.flag(source), side) for source, side in condition]
        words = [flag if side else f"not {flag}" for flag, side in sorted(choices)]
        return " and ".join(words) or "True"

    def flag(self, source: Value | Node) -> str:
        return self.flags.setdefault(source, f"p{len(self.names) + len(self.flags)}")

    def new(self, value: Value) -> str:
        name = self.names[value] = f"v{len(self.names) + len(self.flags)}"
        return name

    def name(self, value: Value | None) -> str:
        if value is None:
            return "None"
        if value not in self.names:
            assert value.const is not None
            self.names[value] = self.bind("c", value.const)
        return self.names[value]

    def index(self, number: int) -> str:
        """Return the constant with the index of an input that a Merge outputs."""
        name = f"i{number}"
        if name not in self.namespace:
            self.namespace[name] = index = np.array(number, np.int32)
            index.flags.writeable = False  # all runs share it
        return name

    def bind(self, letter: str, value: RunValue) -> str:
        name = f"{letter}{len(self.namespace)}"
        self.namespace[name] = value
        return name
