"""Raise a frame with a loop to a Loop.

A loop variable is a Merge of an Enter and a NextIteration. One predicate decides whether all
variables continue or exit: nodes that run in every iteration, including the last one, are the
condition, and nodes that run only if the predicate holds are the body::

    enter ──> merge ──> switch ──F──> exit           p = condition(v)
                ^         └──T──> body ─┐            while p:
                └── next iteration <────┘                v = body(v);  p = condition(v)

The condition is computed once before the Loop, where the frame was entered, and at the end of each
iteration for the next one. Values of the condition that the body reads become loop-carried, like
the variables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from penstock.analysis.frames import Frame
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass
from penstock.core.types import BOOL, INT64, TensorType
from penstock.ir.graph import Graph, Node, Value, captures, embed
from penstock.ir.op import Role
from penstock.ops.internal.segment import FRAME
from penstock.ops.registry import standard
from penstock.passes.structure.branches import Branches, RaisedBlock, UnraisedError, substitute
from penstock.passes.structure.conditions import ALWAYS, LIVES, Deadness, is_switch


@dataclass(frozen=True, slots=True, eq=False)
class LoopVariable:
    """A loop variable: its Enter, and its values in the first iteration (``start``), in the current
    one (``merged``) and in the next one. ``inside`` is its input of the body."""

    enter: Node
    start: Value
    merged: Value
    next: Value
    inside: Value


class FrameLoop:
    """The loop in a frame with the sorted ``nodes``: its variables by their Merges, the conditions
    of its nodes, and the ``predicate`` that decides, by its truth (``side`` 1) or its falsity (0),
    whether it continues. ``known`` has the values of predicates that enter the frame, assuming that
    all entering values are live, which the caller must check.

    Raises ``UnraisedError`` if the frame is no such loop: in some iterations, some variables could
    be live and others dead, or values could exit before the last iteration.
    """

    def __init__(
        self, frame: Frame, nodes: Sequence[Node], known: Mapping[Value, int] = MappingProxyType({})
    ) -> None:
        self.frame = frame
        self.nodes = nodes
        self.exits = [node for node in nodes if node.op.role is Role.EXIT]
        self.next_iterations = [node for node in nodes if node.op.role is Role.NEXT_ITERATION]
        self.variables = self._variables()
        self._check_enters()
        self.deadness = Deadness(nodes, self.variables, known=known)
        self.predicate, self.side = self._predicate()
        for node in self.exits:
            if self.deadness.conditions[node] != {(self.predicate, 1 - self.side)}:
                raise UnraisedError(node, "it does not exit the loop exactly when the loop ends")

    def _variables(self) -> dict[Node, LoopVariable]:
        enters, next_iterations = set(self.frame.enters), set(self.next_iterations)
        variables: dict[Node, LoopVariable] = {}
        for node in with_checkpoints(self.nodes):
            if node.op.role is not Role.MERGE:
                continue
            sources = [v.producer for v in node.inputs if v is not None and v.producer is not None]
            entered = [source for source in sources if source in enters]
            back = [source for source in sources if source in next_iterations]
            if not entered and not back:
                continue
            # A Loop carries one initial and one next value for each variable.
            if len(node.inputs) != 2 or not entered or not back:
                raise UnraisedError(node, "it does not merge one Enter and one NextIteration")
            if node.control_inputs:
                raise UnraisedError(node, "it is a loop variable and waits for other nodes")
            start, merged, next_ = entered[0].outputs[0], node.outputs[0], back[0].inputs[0]
            assert start is not None and merged is not None and next_ is not None
            inside = Value(merged.name, merged.type)
            variables[node] = LoopVariable(entered[0], start, merged, next_, inside)
        if not variables:
            raise UnraisedError(self.frame.enters[0], "it enters a frame without loop variables")
        return variables

    def _check_enters(self) -> None:
        """Check that values of the first iteration alone are read only by loop variables."""
        once = {n for n in self.frame.enters if not n.attrs.get("is_constant", False)}
        for variable in self.variables.values():
            if variable.enter not in once:
                raise UnraisedError(variable.enter, "it is constant, and starts a loop variable")
        next_iterations = set(self.next_iterations)
        for node in with_checkpoints(self.nodes):
            if node in self.variables:
                continue
            sources = [None if v is None else v.producer for v in node.inputs]
            if not once.isdisjoint((*sources, *node.control_inputs)):
                raise UnraisedError(
                    node, "it needs a value that is live in the first iteration only"
                )
            if not next_iterations.isdisjoint((*sources, *node.control_inputs)):
                raise UnraisedError(node, "it needs a value of the previous iteration")

    def _predicate(self) -> tuple[Value, int]:
        """Return the predicate by which the loop continues, and its value if it does."""
        conditions = self.deadness.conditions
        first = conditions[self.next_iterations[0]]
        for node in self.next_iterations:
            if len(first) != 1 or conditions[node] != first:
                raise UnraisedError(
                    node, "no single predicate decides whether the whole loop continues"
                )
        ((predicate, side),) = first
        if not isinstance(predicate, Value):
            raise UnraisedError(
                self.next_iterations[0], "no predicate decides whether its loop continues"
            )
        return predicate, side

    def deciding_enters(self) -> list[Node]:
        """Return the Enters that the predicate depends on in the first iteration: without them, no
        node of the body and no Exit runs."""
        seen = set[Node]()
        stack = [self.predicate.producer]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.variables:
                stack.append(self.variables[node].enter)
            elif node in self.deadness.reads:
                stack += [value.producer for value in self.deadness.reads[node]]
                stack += node.control_inputs
        return [enter for enter in self.frame.enters if enter in seen]

    def _check(self) -> None:
        """Raise ``UnraisedError`` for uses that a Loop cannot represent."""
        read = {value for node in self.nodes for value in node.inputs}
        variables = {variable.merged for variable in self.variables.values()}
        source = Branches(self.deadness).source
        if self.side != 1:
            raise UnraisedError(
                self.next_iterations[0], "its loop does not continue where a predicate holds"
            )
        for node in self.variables:
            # The second output of a Merge is the index of its live input, for which a Loop has no
            # value.
            if not read.isdisjoint(node.outputs[1:]):
                raise UnraisedError(node, "a node reads whether this is its first iteration")
        for node in self.exits:
            if node.inputs[0] is None or source(node.inputs[0]) not in variables:
                raise UnraisedError(node, "the value that leaves the loop is not a loop variable")

    def raised(self, targets: Collection[Node]) -> list[Node]:
        """Return the nodes that replace the frame in its parent frame, a Loop first. The frame's
        Enters and Exits become Identities. ``targets`` are nodes that must run. Raises
        ``UnraisedError`` without changes if the nodes of the frame do not fit into a Loop."""
        self._check()
        conditions = self.deadness.conditions
        edge = {*self.variables, *self.exits, *self.next_iterations}
        continues, ends = (self.predicate, 1), (self.predicate, 0)
        variables = list(self.variables.values())
        condition = Branches(self.deadness, {v.merged: v.inside for v in variables}, targets)
        condition.check(edge)
        always: list[Node] = []
        body_nodes: list[Node] = []
        for node in with_checkpoints(self.nodes):
            if node in edge:
                continue
            if continues in conditions[node]:
                body_nodes.append(node)
            elif ends not in conditions[node]:
                # Nodes of the condition run before the Loop and again in its body: once more than
                # the number of iterations.
                always.append(node)
                if self.deadness.has_side_effects(node):
                    raise UnraisedError(node, "it has a side effect in the condition of a loop")
            elif condition.must_run(node):
                raise UnraisedError(node, "it must run when its loop ends")
        before = condition.block(ALWAYS, always, [self.predicate])
        if before.waits:
            raise UnraisedError(next(iter(before.waits)), "the condition of its loop waits for it")
        carried = {
            value: Value(f"{value.name}#carried", value.type)
            for node in before.nodes
            for value in node.outputs
            if value is not None
        }
        substitutes = {old: carried.get(new, new) for old, new in condition.values.items()}
        body = Branches(self.deadness, {**carried, **substitutes}, targets)
        updates = [variable.next for variable in variables]
        turn = body.block(frozenset({continues}), body_nodes, updates, (ALWAYS,))
        # Everything fits: from here on, nodes are changed.
        condition.apply()
        body.apply()
        return self._loop(variables, before, turn, carried)

    def whole(self) -> list[Node]:
        """As ``raised``, with a single node that runs the unraised frame."""
        frame, leaving = self.frame, {*self.exits}
        for node, condition in self.deadness.conditions.items():
            if (node, LIVES) in condition and node.op.role is not Role.MERGE:
                raise UnraisedError(node, "it runs under too many conditions")
        for node in filter(is_switch, self.nodes):
            # Forwarded predicates are one value, whichever segments the nodes in between are in.
            predicate, passed = self.deadness.predicate(node), node.inputs[1]
            if passed is not None and passed is not predicate and passed.producer is not None:
                node.control_inputs.append(passed.producer)
                node.inputs[1] = predicate
        body = Graph([], [], [n for n in self.nodes if n not in leaving], f"{frame.name}/frame")
        outside: list[Value] = []
        inside: dict[Node, Node] = {}
        for enter in frame.enters:
            (entered,) = enter.outputs
            assert entered is not None
            outer = Value(entered.name, entered.type)
            inner = Value(f"{entered.name}/input", entered.type)
            body.inputs.append(inner)
            inside[enter] = enter.derived([inner], [entered])
            enter.outputs, outer.producer = [outer], enter
            outside.append(outer)
        for node in self.exits:
            body.outputs.append(Value(node.name))
            before = node.control_inputs
            left = node.derived(node.inputs, body.outputs[-1:], control_inputs=before)
            body.nodes.append(left)
        for node in body.nodes:
            node.control_inputs = [inside.get(source, source) for source in node.control_inputs]
        body.nodes = [*inside.values(), *body.nodes]
        results = [Value(f"{frame.name}:{i}") for i in range(len(self.exits))]
        first, attrs = next(iter(self.variables)), {"body": body}
        whole = first.derived(outside, results, attrs, op=FRAME, name=frame.name)
        self._leave(results)
        return [whole, *self.exits]

    def _leave(self, values: Sequence[Value]) -> None:
        """Turn Enters and Exits into Identities; the latter forward these values."""
        for node, value in zip(self.exits, values, strict=True):
            make_identity(node)
            node.inputs, node.control_inputs = [value], []
        for node in self.frame.enters:
            make_identity(node)

    def _loop(
        self,
        variables: Sequence[LoopVariable],
        before: RaisedBlock,
        turn: RaisedBlock,
        carried: dict[Value, Value],
    ) -> list[Node]:
        body = turn.graph(f"{self.frame.name}/body")
        read = set(captures(body))
        also = [value for value, inside in carried.items() if inside in read]
        inside = [v.inside for v in variables]
        condition = Graph(inside, [*before.outputs, *also], before.nodes)
        nodes, outputs = embed(condition, turn.outputs, "#next")
        number = Value(f"{self.frame.name}#iteration", TensorType(INT64, ()))
        proceed = Value(f"{self.frame.name}#going", TensorType(BOOL, ()))
        body.inputs = [number, proceed, *inside, *(carried[v] for v in also)]
        body.nodes += nodes
        body.outputs = [outputs[0], *turn.outputs, *outputs[1:]]

        start = {v.inside: v.start for v in variables}
        substitute(before.nodes, start)
        starts = set(start.values())
        for node in before.nodes:
            # It runs if and only if the loop does.
            if starts.isdisjoint(node.inputs):
                node.control_inputs.append(variables[0].enter)
        entered = [start.get(v, v) for v in (*before.outputs, *inside, *also)]
        results = [Value(f"{self.frame.name}:{i}", v.type) for i, v in enumerate(entered[1:])]
        first = next(iter(self.variables))
        op, name = standard("Loop"), self.frame.name
        loop = first.derived([None, *entered], results, {"body": body}, op=op, name=name)
        source = Branches(self.deadness).source
        # The results of variables are followed by those that are values of the condition.
        result = {v.merged: value for v, value in zip(variables, results, strict=False)}
        left = [result[source(node.inputs[0])] for node in self.exits]  # type: ignore[arg-type]
        self._leave(left)
        return [loop, *before.nodes, *self.exits]


def make_identity(node: Node) -> None:
    """Turn an Enter or Exit into an Identity."""
    node.op = standard("Identity")
    node.attrs = {}
