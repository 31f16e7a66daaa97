"""Raise TensorFlow's frames and dead values to Loop and If.

Frames are raised from the innermost one outwards, each with the conditions in its iterations, and
finally the root frame. A frame is raised as a whole or not at all; raised inner frames remain
raised. Each step preserves the semantics of the graph.

A Loop is one node: it runs only if all of its inputs are live, while some variables of a frame may
be live without the others; and only when all inputs have arrived, while one variable may exit a
frame before another one enters. Whether that makes a difference shows only in the parent frame:
then the loop is retracted, and raising starts again without it, on a new copy. It cannot be checked
earlier, because the conditions under which values enter a loop depend on which of its sibling loops
are raised, which depends on their contents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.analysis.frames import Frame, Frames
from penstock.core.errors import InvalidModel
from penstock.core.limits import DEFAULT_LIMITS
from penstock.core.records import dataclass
from penstock.ir.graph import Graph, Node, Value, circular, dependencies, is_framed, ordered
from penstock.ir.op import FRAMED, Role
from penstock.passes.context import FramePolicy, Pass, PassContext, Property, Unraised
from penstock.passes.structure.branches import Branches, UnraisedError
from penstock.passes.structure.conditions import ALWAYS, Choice, Deadness, is_switch
from penstock.passes.structure.loops import FrameLoop, make_identity


class RaiseControlFlow(Pass):
    """Replace TensorFlow's frames by If and Loop where that is exact (see ``raise_control_flow``).
    Some may stay: later passes require a graph without frames (``is_framed``)."""

    requires = frozenset()
    establishes = frozenset({Property.STRUCTURED})
    invalidates = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        policy = context.frames
        if not is_framed(graph) or policy.in_parts(graph):
            return False
        raised, unraised = raise_control_flow(graph, policy)
        policy.unraised.extend(unraised)
        graph.inputs, graph.outputs = raised.inputs, raised.outputs
        graph.nodes, graph.targets = raised.nodes, raised.targets
        return True


def raise_control_flow(
    graph: Graph, policy: FramePolicy | None = None
) -> tuple[Graph, list[Unraised]]:
    """Return a copy of ``graph``, nested graphs included, with Loop and If instead of primitives;
    and the reasons for primitives that stay. ``graph`` must be sorted. A graph with invalid frames
    (``analysis.frames``) is left unchanged. By default, the ``policy`` is to raise all frames; an
    unraised loop becomes one node (``FRAME``) if all of its nodes ``may_be_whole``."""
    policy = policy or FramePolicy()
    retracted_before: dict[tuple[int, str], Unraised] = {}
    for _ in range(_MAX_ATTEMPTS):
        attempt = policy.copy(graph)
        unraised: list[Unraised] = []
        retracted: dict[tuple[int, str], Unraised] = {}
        # Copies have their graphs in the same order each time. Nested graphs first: the depth of a
        # loop includes their raised form.
        for number, inner in reversed(list(enumerate(attempt.graphs()))):
            if any(node.op.role in FRAMED for node in inner.nodes):
                own = {name: r for (at, name), r in retracted_before.items() if at == number}
                raising = _Raising(inner, own, policy)
                raising.run()
                unraised += raising.unraised
                retracted.update(((number, name), r) for name, r in raising.retracted.items())
        if not retracted:
            return attempt, unraised
        retracted_before.update(retracted)
    return policy.copy(graph), list(retracted_before.values())


# Each attempt retracts all loops found to be inexact, so that sensible graphs need few attempts.
_MAX_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop: the Enters that its predicate depends on, the Merge of its first variable, and the
    Loop that replaces ``frame``, if raised."""

    frame: Frame
    deciding: Sequence[Node]
    merge: Node
    node: Node | None


class _Raising:
    """Raises one graph, without those nested in it. ``retracted_before``: frames that must stay, by
    name. ``nodes`` and ``loops`` are those of each frame, ``remaining`` the nodes of frames that
    stay. ``retracted``: frames that were raised and must not be. ``around``: conditions of frames
    before the frames in them were raised."""

    def __init__(
        self, graph: Graph, retracted_before: Mapping[str, Unraised], policy: FramePolicy
    ) -> None:
        self.graph = graph
        self.policy = policy
        self.retracted_before = retracted_before
        self.unraised: list[Unraised] = []
        self.retracted: dict[str, Unraised] = {}
        self.nodes: dict[Frame, list[Node]] = defaultdict(list)
        self.loops: dict[Frame, list[_Loop]] = defaultdict(list)
        self.remaining: list[Node] = []
        self.around: dict[Frame, Deadness] = {}

    def run(self) -> None:
        try:
            frames = Frames(self.graph).of
        except InvalidModel:
            return  # the executor reports the error
        for node, frame in frames.items():
            self.nodes[frame].append(node)
        inside = [frame for frame in self.nodes if frame.parent is not None]
        # Deepest first: a frame is raised with the raised forms of inner frames.
        for frame in sorted(inside, key=lambda frame: -len(frame.path)):
            assert frame.parent is not None
            self.frame(frame, frame.parent)
        (root,) = [frame for frame in self.nodes if frame.parent is None]
        self.root(root)

    def frame(self, frame: Frame, parent: Frame) -> None:
        nodes = self.sorted(frame)
        if nodes is None:
            return
        try:
            if frame.name in self.retracted_before:
                before = self.retracted_before[frame.name]
                raise UnraisedError(before.node, before.reason)
            if not any(node.op.role is Role.NEXT_ITERATION for node in nodes):
                self.check_overlap(nodes, frame.parallel_iterations > 1)
                self.inline_frame(frame, parent, nodes)
                return
            loop = FrameLoop(frame, nodes, self.known_predicates(frame, parent, nodes))
        except UnraisedError as error:
            # The frame stays, and the deadness of its entering values is unknown.
            self.unraised.append(error.unraised)
            self.check_loops(frame, Deadness(nodes, doubtful=frame.enters))
            self.remaining += nodes
            return
        self.check_loops(frame, loop.deadness)
        deciding = loop.deciding_enters()
        try:
            self.check_fetches(frame, nodes)
            raised = self.as_node(loop)
        except UnraisedError as error:
            self.unraised.append(error.unraised)
            self.remaining += nodes
            raised = []
        merge = next(iter(loop.variables))
        as_loop = _Loop(frame, deciding, merge, raised[0] if raised else None)
        self.loops[parent].append(as_loop)
        if not raised:
            return
        if _depth(raised[0]) > DEFAULT_LIMITS.max_depth:
            self.retract(as_loop, "more loops and conditions nest in it than a graph may have")
        self.nodes[parent] += raised
        replaced = set(nodes) - set(raised)
        targets = [raised[0] if node in replaced else node for node in self.graph.targets]
        self.graph.targets = list(dict.fromkeys(targets))

    def as_node(self, loop: FrameLoop) -> list[Node]:
        """Return a loop as a Loop, or as one node if it cannot be raised."""
        try:
            self.check_overlap(loop.nodes, loop.frame.parallel_iterations > 1)
            return loop.raised(self.graph.targets)
        except UnraisedError:
            if all(map(self.policy.may_be_whole, loop.nodes)):
                return loop.whole()
            raise

    def root(self, root: Frame) -> None:
        nodes = self.sorted(root)
        if nodes is None:
            return
        deadness = Deadness(nodes)
        self.check_loops(root, deadness)
        primitives = [node for node in nodes if node.op.role in FRAMED]
        if all(node.op.role is Role.ENTER for node in primitives):
            self.graph.nodes = nodes + self.remaining
        else:
            try:
                branches = Branches(deadness, forced=set(self.graph.targets))
                branches.check(())
                self.check_overlap(nodes, False)
                block = branches.block(ALWAYS, nodes, self.graph.outputs)
                branches.apply()
                self.graph.nodes, self.graph.outputs = block.nodes, block.outputs
                self.graph.targets = block.effects
            except UnraisedError as error:
                self.unraised.append(error.unraised)
                self.graph.nodes = nodes + self.remaining
        # Nodes of unraised frames may read those of the root frame, and vice versa.
        if self.remaining:
            everywhere = [loop for loops in self.loops.values() for loop in loops]
            self.graph.nodes = self.ordered(self.graph.nodes, everywhere) or []

    def inline_frame(self, frame: Frame, parent: Frame, nodes: Sequence[Node]) -> None:
        """Move the nodes of a frame without a loop to its parent frame, which is equivalent."""
        enters = set(frame.enters)
        for node in nodes:
            sources = [None if v is None else v.producer for v in node.inputs]
            if node.op.role is Role.MERGE and not enters.isdisjoint(sources):
                raise UnraisedError(node, "it is dead as soon as an Enter before it is")
        for node in (*nodes, *frame.enters):
            if node in enters or node.op.role is Role.EXIT:
                make_identity(node)
        self.nodes[parent] += nodes
        self.loops[parent] += self.loops[frame]

    def known_predicates(
        self, frame: Frame, parent: Frame, nodes: Sequence[Node]
    ) -> dict[Value, int]:
        """Return predicates that enter a frame, with the values implied by outer Switches if all
        entering values are live, as they are if the frame is raised (``check_loops``).

        A loop in a branch has an inner Switch of this kind for each stack of its gradient.
        """
        constant = {e.outputs[0]: e for e in frame.enters if e.attrs.get("is_constant", False)}
        if not any(is_switch(node) and node.inputs[1] in constant for node in nodes):
            return {}
        if parent not in self.around:
            self.around[parent] = Deadness(self.nodes[parent])
        around, known = self.around[parent], dict[Value, int]()
        sides = around.choices_of(frame.enters)
        for inside, enter in constant.items():
            outside = enter.inputs[0]
            if inside is not None and outside is not None and around.origin(outside) in sides:
                known[inside] = sides[around.origin(outside)]
        return known

    def check_loops(self, frame: Frame, deadness: Deadness) -> None:
        """Retract loops with entering values that may be dead while the predicate is live. Values
        that are live more often than the predicate are harmless: nothing exits without it."""
        for loop in self.loops[frame]:
            deciding = frozenset[Choice]().union(*(deadness.conditions[n] for n in loop.deciding))
            if not all(deadness.conditions[enter] <= deciding for enter in loop.frame.enters):
                self.retract(loop, "some values that enter {!r} may be live while others are dead")

    def retract(self, loop: _Loop, reason: str) -> None:
        self.retracted[loop.frame.name] = Unraised(loop.merge, reason.format(loop.frame.name))

    def check_fetches(self, frame: Frame, nodes: Sequence[Node]) -> None:
        inside = {node for node in nodes if node.op.role is not Role.EXIT} | set(frame.enters)
        for value in self.graph.outputs:
            if (node := value.producer) is not None and node in inside:
                raise UnraisedError(node, f"{value.name!r} is fetched from inside a loop")

    def check_overlap(self, nodes: Sequence[Node], iterations: bool) -> None:
        """Raise ``UnraisedError`` if other nodes, or ``iterations``, may run concurrently with
        ``nodes``."""
        node = self.policy.must_stay(nodes, iterations)
        if node is not None:
            raise UnraisedError(node, "other nodes may run at the same time")

    def sorted(self, frame: Frame) -> list[Node] | None:
        """Return the nodes that run in a frame, sorted; None as for ``ordered``."""
        return self.ordered(self.nodes[frame], self.loops[frame])

    def ordered(self, nodes: Sequence[Node], loops: Sequence[_Loop]) -> list[Node] | None:
        """Return ``nodes`` in topological order; None if some of ``loops``, each of which is one
        node now, depend on themselves and are retracted."""
        graph = Graph([], [], nodes)
        *_, (_, edges) = dependencies(graph)
        with suppress(InvalidModel):
            return ordered(graph, edges)
        on_cycles = circular(graph, edges)
        for loop in loops:
            if loop.node in on_cycles:
                self.retract(loop, "a value that enters {!r} depends on one that leaves it")
        assert self.retracted, "the graph was sorted, and only a loop as one node can be a cycle"
        return None


def _depth(node: Node) -> int:
    """Return the nesting depth of loops and conditions in a node, itself included."""
    return 1 + max((_depth(n) for _, g in node.graphs for n in g.nodes if n.graphs), default=0)
