"""Loops and conditions of TensorFlow's frames and dead values as Loop and If.

Frames are raised from the innermost one outwards, each with the conditions in its iterations, and
at last what is in none. A frame, or the root, is raised as a whole or stays as it is; what was
raised inside of it remains. So the graph means the same at any time.

A Loop is one node, which runs if all that enters it lives, where some variables of a frame may live
without the others. And it runs when all has come, where a frame may let go of one variable before
another one enters. Only in the frame around shows whether that makes a difference: then the loop
was raised in vain, and all begins anew without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.analysis.frames import Frame, find_frames
from penstock.errors import InvalidModel
from penstock.ir.graph import Graph, Node, captures, clone, topological
from penstock.ir.op import Role
from penstock.ops.tensorflow.control_flow import is_framed, is_primitive
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.structure.branches import Branches, UnraisedError
from penstock.passes.structure.conditions import ALWAYS, Deadness
from penstock.passes.structure.loops import FrameLoop, hand_on


@dataclass(frozen=True, slots=True)
class Unraised:
    """A primitive that could not be raised, and what is in the way."""

    node: Node
    reason: str


class RaiseControlFlow(Pass):
    """Replace TensorFlow's frames by If and Loop where that is exact (see ``raise_control_flow``).
    Some may stay: only a graph without any (``is_framed``) is fit for the passes behind."""

    name = "raise_control_flow"
    establishes = frozenset({Property.STRUCTURED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if not is_framed(graph):
            return False
        raised, unraised = raise_control_flow(graph)
        context.unraised.extend(unraised)
        graph.inputs, graph.outputs = raised.inputs, raised.outputs
        graph.nodes, graph.targets = raised.nodes, raised.targets
        return True


def raise_control_flow(graph: Graph) -> tuple[Graph, list[Unraised]]:
    """A copy of ``graph``, nested graphs included, with Loop and If for primitives; and what is in
    the way of the others. ``graph`` must be sorted.

    A graph whose frames make no sense (see ``passes/frames.py``) stays as it is.
    """
    kept: dict[tuple[int, str], Unraised] = {}
    for _ in range(_MOST_ATTEMPTS):
        copy = clone(graph)
        stays: list[Unraised] = []
        vain: dict[tuple[int, str], Unraised] = {}
        # The copies have their graphs in the same order each time.
        for number, each in reversed(list(enumerate(list(copy.graphs())))):
            if any(map(is_primitive, each.nodes)):
                own = {name: stay for (at, name), stay in kept.items() if at == number}
                raising = _Raising(each, own)
                raising.run()
                stays += raising.stays
                vain.update(((number, name), stay) for name, stay in raising.vain.items())
        if not vain:
            return copy, stays
        kept.update(vain)
    return clone(graph), list(kept.values())


# Each attempt finds all that it can, so that more than a few are those of no sensible graph.
_MOST_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop with its variables: the Enters of these, the Merge of the first, and what ``frame``
    has become, if it was raised."""

    frame: Frame
    starts: Sequence[Node]
    merge: Node
    node: Node | None


class _Raising:
    """One graph, but for those nested in it. ``kept``: frames that must stay, by name."""

    def __init__(self, graph: Graph, kept: Mapping[str, Unraised]) -> None:
        self.graph = graph
        self.kept = kept
        self.stays: list[Unraised] = []
        # What was raised and should not have been.
        self.vain: dict[str, Unraised] = {}
        # For each frame its nodes, and the loops in it.
        self.nodes: dict[Frame, list[Node]] = {}
        self.loops: dict[Frame, list[_Loop]] = {}
        self.left: list[Node] = []  # of frames that stay

    def run(self) -> None:
        try:
            frames = find_frames(self.graph).of
        except InvalidModel:
            return  # who runs it will say so
        for node, frame in frames.items():
            self.nodes.setdefault(frame, []).append(node)
            self.loops.setdefault(frame, [])
        inside = [frame for frame in self.nodes if frame.parent is not None]
        for frame in sorted(inside, key=lambda frame: -frame.depth):
            assert frame.parent is not None
            self.nodes.setdefault(frame.parent, [])
            self.loops.setdefault(frame.parent, [])
            self.frame(frame, frame.parent)
        (root,) = [frame for frame in self.nodes if frame.parent is None]
        self.root(root)

    def frame(self, frame: Frame, parent: Frame) -> None:
        nodes = self.sorted(frame)
        if nodes is None:
            return
        try:
            if frame.name in self.kept:
                self.stays.append(self.kept[frame.name])
                self.doubt(frame, nodes)
                return
            if not any(node.op.role is Role.NEXT_ITERATION for node in nodes):
                self.dissolve(frame, parent, nodes)
                return
            found = FrameLoop(frame, nodes)
        except UnraisedError as error:
            self.stays.append(Unraised(error.node, error.reason))
            self.doubt(frame, nodes)
            return
        self.check(frame, found.deadness)
        try:
            self.check_fetches(frame, nodes)
            made = found.raised(self.graph.targets)
        except UnraisedError as error:
            self.stays.append(Unraised(error.node, error.reason))
            self.left += nodes
            made = []
        starts = [variable.enter for variable in found.variables.values()]
        merge = next(iter(found.variables))
        self.loops[parent].append(_Loop(frame, starts, merge, made[0] if made else None))
        if not made:
            return
        loops, levels = _nesting(made[0])
        if loops > _MOST_LOOPS or levels > _MOST_LEVELS:
            reason = "more loops and conditions nest in it than a program can have"
            self.vain[frame.name] = Unraised(merge, reason)
        self.nodes[parent] += made
        gone = set(nodes) - set(made)
        targets = [made[0] if node in gone else node for node in self.graph.targets]
        self.graph.targets = list(dict.fromkeys(targets))

    def root(self, root: Frame) -> None:
        nodes = self.sorted(root)
        if nodes is None:
            return
        deadness = Deadness(nodes)
        self.check(root, deadness)
        primitives = [node for node in nodes if is_primitive(node)]
        if all(node.op.role is Role.ENTER for node in primitives):
            self.graph.nodes = nodes + self.left
        else:
            try:
                branches = Branches(deadness, forced=set(self.graph.targets))
                branches.check(())
                made = branches.block(ALWAYS, nodes, self.graph.outputs)
                branches.apply()
                self.graph.nodes, self.graph.outputs = made.nodes, made.outputs
                self.graph.targets = made.effects
            except UnraisedError as error:
                self.stays.append(Unraised(error.node, error.reason))
                self.graph.nodes = nodes + self.left
        if self.left:
            everywhere = [loop for loops in self.loops.values() for loop in loops]
            self.graph.nodes = self.ordered(self.graph.nodes, everywhere) or []

    def dissolve(self, frame: Frame, parent: Frame, nodes: Sequence[Node]) -> None:
        """A frame without a loop only hands on: all in it runs in the frame around as well."""
        enters = set(frame.enters)
        for node in nodes:
            made = [None if v is None else v.producer for v in node.inputs]
            if node.op.role is Role.MERGE and not enters.isdisjoint(made):
                raise UnraisedError(node, "it is dead as soon as an Enter before it is")
        for node in (*nodes, *frame.enters):
            if node in enters or node.op.role is Role.EXIT:
                hand_on(node)
        self.nodes[parent] += nodes
        self.loops[parent] += self.loops[frame]

    def doubt(self, frame: Frame, nodes: Sequence[Node]) -> None:
        """A frame stays of which nobody knows what lives in it."""
        self.check(frame, Deadness(nodes, doubtful=frame.enters))
        self.left += nodes

    def check(self, frame: Frame, deadness: Deadness) -> None:
        """Whether all variables of the loops in a frame live, or none, and all constants if these
        do."""
        for loop in self.loops[frame]:
            first, *others = {deadness.conditions[enter] for enter in loop.starts}
            entered = [deadness.conditions[enter] for enter in loop.frame.enters]
            if others or not all(each <= first for each in entered):
                reason = f"of what enters {loop.frame.name!r} some may live and some be dead"
                self.vain[loop.frame.name] = Unraised(loop.merge, reason)

    def check_fetches(self, frame: Frame, nodes: Sequence[Node]) -> None:
        inside = {node for node in nodes if node.op.role is not Role.EXIT} | set(frame.enters)
        for value in self.graph.outputs:
            if value.producer in inside:
                assert value.producer is not None
                raise UnraisedError(
                    value.producer, f"{value.name!r} is fetched from inside of a loop"
                )

    def sorted(self, frame: Frame) -> list[Node] | None:
        """The nodes that run in a frame."""
        return self.ordered(self.nodes[frame], self.loops[frame])

    def ordered(self, nodes: Sequence[Node], loops: Sequence[_Loop]) -> list[Node] | None:
        """``nodes`` in an order in which they can run; None if some of ``loops``, as one node each,
        wait for themselves."""
        try:
            return topological(Graph([], [], nodes))
        except InvalidModel:
            pass
        readers: dict[Node, list[Node]] = {}
        for node in nodes:
            read = [*node.inputs, *(v for _, inner in node.graphs for v in captures(inner))]
            made = [v.producer for v in read if v is not None and v.producer is not None]
            if node.op.role is Role.MERGE:
                made = [each for each in made if each.op.role is not Role.NEXT_ITERATION]
            for each in (*made, *node.control_inputs):
                readers.setdefault(each, []).append(node)
        for loop in loops:
            if loop.node is not None and loop.node in _behind(loop.node, readers):
                name = loop.frame.name
                reason = f"what enters {name!r} waits for something that leaves it"
                self.vain[name] = Unraised(loop.merge, reason)
        assert self.vain, "the graph was sorted, and only loops as one node can have undone that"
        return None


def _behind(node: Node, readers: Mapping[Node, Sequence[Node]]) -> set[Node]:
    found: set[Node] = set()
    left = [node]
    while left:
        for each in readers.get(left.pop(), ()):
            if each not in found:
                found.add(each)
                left.append(each)
    return found


def _nesting(node: Node) -> tuple[int, int]:
    """How many loops nest in a node, itself included, and how many blocks of a program."""
    inner = [_nesting(each) for _, graph in node.graphs for each in graph.nodes if each.graphs]
    loops, levels = (max((pair[i] for pair in inner), default=0) for i in (0, 1))
    if not node.graphs:
        return 0, 0
    return (loops, levels + 1) if node.op.name == "If" else (loops + 1, levels + 2)


# Python has no more than 20 loops in each other, and 100 levels of indentation.
_MOST_LOOPS = 16
_MOST_LEVELS = 80
