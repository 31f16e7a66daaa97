"""A frame with a loop as a Loop.

A loop variable is a Merge of an Enter and a NextIteration. One predicate says of all of them if
they go round again or leave: what runs in each iteration, the last one included, is the condition,
and what runs only if the predicate holds is the body. The Loop computes the condition once before
it, where the frame was entered, and again at the end of each turn, for the next one. What the body
reads of the condition is carried from one turn to the next, as the variables are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.analysis.frames import Frame
from penstock.ir.graph import Graph, Node, Value, captures, embed
from penstock.ir.op import Op, Role
from penstock.ops.registry import find
from penstock.passes.structure.branches import Block, Branches, UnraisedError, substitute
from penstock.passes.structure.conditions import ALWAYS, Deadness
from penstock.types import BOOL, INT64, TensorType


class Variable:
    """A variable of a loop: where it is entered, merged, and comes back."""

    __slots__ = ("again", "enter", "inside", "made")

    def __init__(self, merge: Node, enter: Node, again: Node) -> None:
        self.enter = enter
        self.again = again
        made = merge.outputs[0]
        assert made is not None
        self.made = made
        self.inside = Value(made.name, made.type)

    @property
    def start(self) -> Value:
        """What it is before the first turn."""
        value = self.enter.outputs[0]
        assert value is not None
        return value

    @property
    def next(self) -> Value:
        """What it is in the next turn."""
        value = self.again.inputs[0]
        assert value is not None
        return value

    def __repr__(self) -> str:
        return f"Variable({self.made.name!r})"


class FrameLoop:
    """The loop in a frame whose ``nodes`` are given, sorted: its variables by their Merges, when
    its nodes run, and the predicate by which it goes on.

    Raises ``UnraisedError`` where the frame is no such loop: in some iterations some of its
    variables may be live and others dead.
    """

    def __init__(self, frame: Frame, nodes: Sequence[Node]) -> None:
        self.frame = frame
        self.nodes = nodes
        self.exits = [node for node in nodes if node.op.role is Role.EXIT]
        self.again = [node for node in nodes if node.op.role is Role.NEXT_ITERATION]
        self.variables = self._variables()
        self._check_enters()
        self.deadness = Deadness(nodes, self.variables)
        self.predicate = self._predicate()
        self._check_exits()

    def _variables(self) -> dict[Node, Variable]:
        enters, again = set(self.frame.enters), set(self.again)
        read = {value for node in self.nodes for value in node.inputs}
        found: dict[Node, Variable] = {}
        for node in self.nodes:
            if node.op.role is not Role.MERGE:
                continue
            made = [v.producer for v in node.inputs if v is not None and v.producer is not None]
            entered = [each for each in made if each in enters]
            back = [each for each in made if each in again]
            if not entered and not back:
                continue
            if len(node.inputs) != 2 or not entered or not back:
                raise UnraisedError(node, "it does not merge one Enter and one NextIteration")
            if node.control_inputs:
                raise UnraisedError(node, "it is a loop variable and waits for other nodes")
            if not read.isdisjoint(node.outputs[1:]):
                raise UnraisedError(node, "somebody asks whether this is its first iteration")
            found[node] = Variable(node, entered[0], back[0])
        if not found:
            raise UnraisedError(
                self.frame.enters[0], "the frame that it enters has no loop variable"
            )
        return found

    def _check_enters(self) -> None:
        """What enters once is read in the first iteration, and by loop variables only."""
        once = {n for n in self.frame.enters if not n.attrs.get("is_constant", False)}
        for variable in self.variables.values():
            if variable.enter not in once:
                raise UnraisedError(variable.enter, "it is constant, and begins a loop variable")
        again = set(self.again)
        for node in self.nodes:
            if node in self.variables:
                continue
            made = [None if v is None else v.producer for v in node.inputs]
            if not once.isdisjoint((*made, *node.control_inputs)):
                raise UnraisedError(node, "it needs what is there in the first iteration only")
            if not again.isdisjoint((*made, *node.control_inputs)):
                raise UnraisedError(node, "it needs what the iteration before has made")

    def _predicate(self) -> Value:
        """What holds as long as the loop goes on."""
        conditions = self.deadness.conditions
        first = conditions[self.again[0]]
        for node in self.again:
            if len(first) != 1 or conditions[node] != first:
                raise UnraisedError(
                    node, "no one predicate says for the whole loop whether it goes on"
                )
        ((predicate, side),) = first
        if side != 1 or not isinstance(predicate, Value):
            raise UnraisedError(self.again[0], "its loop does not go on where a predicate holds")
        return predicate

    def _check_exits(self) -> None:
        variables = {each.made for each in self.variables.values()}
        source = Branches(self.deadness).source
        for node in self.exits:
            value = node.inputs[0]
            if value is None or source(value) not in variables:
                raise UnraisedError(node, "what leaves the loop is none of its variables")
            if self.deadness.conditions[node] != {(self.predicate, 0)}:
                raise UnraisedError(node, "it does not leave the loop when that ends")

    def raised(self, targets: Collection[Node]) -> list[Node]:
        """What runs in the frame around instead, a Loop first. The frame's Enters and Exits have
        become Identities.

        ``targets`` are nodes that must run. Raises ``UnraisedError``, with nothing changed, where
        the nodes of the frame cannot be put into a Loop.
        """
        conditions = self.deadness.conditions
        edge = {*self.variables, *self.exits, *self.again}
        goes_on, ends = (self.predicate, 1), (self.predicate, 0)
        variables = list(self.variables.values())
        condition = Branches(self.deadness, {v.made: v.inside for v in variables}, targets)
        condition.check(edge)
        always: list[Node] = []
        going: list[Node] = []
        for node in self.nodes:
            if node in edge:
                continue
            if goes_on in conditions[node]:
                going.append(node)
            elif ends not in conditions[node]:
                always.append(node)
                if self.deadness.effective(node):
                    raise UnraisedError(node, "it has an effect in the condition of a loop")
            elif condition.must_run(node):
                raise UnraisedError(node, "it has to run when its loop ends")
        before = condition.block(ALWAYS, always, [self.predicate])
        if before.waits:
            raise UnraisedError(next(iter(before.waits)), "the condition of its loop waits for it")
        carried = {
            value: Value(f"{value.name}#carried", value.type)
            for node in before.nodes
            for value in node.outputs
            if value is not None
        }
        known = {old: carried.get(new, new) for old, new in condition.values.items()}
        body = Branches(self.deadness, {**carried, **known}, targets)
        around = (ALWAYS,)
        turn = body.block(frozenset({goes_on}), going, [v.next for v in variables], around)
        # All of it fits: from here on things change.
        condition.apply()
        body.apply()
        return self._loop(variables, before, turn, carried)

    def _loop(
        self,
        variables: Sequence[Variable],
        before: Block,
        turn: Block,
        carried: dict[Value, Value],
    ) -> list[Node]:
        body = turn.graph(f"{self.frame.name}/body")
        read = set(captures(body))
        also = [value for value, inside in carried.items() if inside in read]
        inside = [v.inside for v in variables]
        condition = Graph(inside, [*before.outputs, *also], before.nodes)
        nodes, made = embed(condition, turn.outputs, "#next")
        number = Value(f"{self.frame.name}#iteration", TensorType(INT64, ()))
        going = Value(f"{self.frame.name}#going", TensorType(BOOL, ()))
        body.inputs = [number, going, *inside, *(carried[v] for v in also)]
        body.nodes += nodes
        body.outputs = [made[0], *turn.outputs, *made[1:]]

        start = {v.inside: v.start for v in variables}
        substitute(before.nodes, start)
        starts = set(start.values())
        for node in before.nodes:
            # It runs if the loop does, and not without it.
            if starts.isdisjoint(node.inputs):
                node.control_inputs.append(variables[0].enter)
        entered = [start.get(v, v) for v in (*before.outputs, *inside, *also)]
        results = [Value(f"{self.frame.name}:{i}", v.type) for i, v in enumerate(entered[1:])]
        first = next(iter(self.variables))
        loop = Node(
            _op("Loop"),
            [None, *entered],
            results,
            {"body": body},
            name=self.frame.name,
            device=first.device,
            origin=first.origin,
        )
        source = Branches(self.deadness).source
        result = {v.made: value for v, value in zip(variables, results, strict=False)}
        left = [result[source(node.inputs[0])] for node in self.exits]  # type: ignore[arg-type]
        for node, value in zip(self.exits, left, strict=True):
            hand_on(node)
            node.inputs, node.control_inputs = [value], []
        for node in self.frame.enters:
            hand_on(node)
        return [loop, *before.nodes, *self.exits]


def hand_on(node: Node) -> None:
    """Let an Enter or Exit only hand on what it reads."""
    node.op = _op("Identity")
    node.attrs = {}


def _op(name: str) -> Op:
    found = find(name)
    assert found is not None
    return found
