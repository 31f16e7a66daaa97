"""Group nodes of a graph with frames into segments, each of which runs as one.

The nodes of a segment are in one frame, live under the same condition (``conditions``) and wait for
the same slow nodes, so that no node runs that would be dead, none dies that would run, and none
waits for a slow node, or for a loop, that it did not wait for before. Outside of loops the same
values that are sent depend on them, so that none is sent later for the sake of others::

    merge ──> less ──> cond ──> switch ──F──> exit       segments: {less, cond} and {neg, add}
      ^                  merge ───┘  └───T──> neg ──> add ─┐
      └───────────────────────── next iteration <──────────┘

A segment is convex: nodes have levels, which rise from a node to a reader that is in no segment
with it, so that no two segments wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from penstock.analysis.frames import Frame, Frames
from penstock.core.checkpoints import with_checkpoints
from penstock.ir.graph import Graph, Node, Value, all_reads, captures, clone, sort
from penstock.ir.op import Role
from penstock.ops.internal.segment import SEGMENT, is_frame, is_segment
from penstock.passes.context import FramePolicy, Pass, PassContext
from penstock.passes.structure.branches import UnraisedError
from penstock.passes.structure.conditions import LIVES, Condition, Deadness, is_switch
from penstock.passes.structure.loops import FrameLoop, make_identity

Sources: TypeAlias = Mapping[Node, Sequence[Node]]
SlowNodes: TypeAlias = frozenset[tuple[Node, bool]]
"""slow nodes, each with whether it ran in an earlier iteration"""

# Their tokens come when other frames, devices or calls have sent them.
_SLOW = (Role.EXIT, Role.RECV, Role.CALL, Role.FRAME)

# A node behind more slow nodes than this joins no segment but with those that wait for it.
_MOST_SLOW = 32
# Rounds over a graph until what loops wait for is known; graphs that need more stay as they are.
_MOST_ROUNDS = 16


class GroupSegments(Pass):
    """Group the nodes of a graph, and those of the frames in it that are one node each, into
    segments (see ``group_segments``), as the ``FramePolicy`` says; it gets a node of each."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        whole = [node.attrs["body"] for node in graph.walk() if is_frame(node)]
        bodies = [body for body in whole if not captures(body)]
        # Copies of graphs that were grouped, of functions and branches, have segments already.
        left = [body for body in bodies if not any(map(is_segment, body.nodes))]
        segments = [_grouped(inner, context.frames) for inner in (*left, graph)]
        for replaced in segments:
            context.frames.segments.update(replaced)
        return any(segments)


def _grouped(graph: Graph, policy: FramePolicy) -> dict[Node, Node]:
    """Group the nodes of one graph into segments, as a policy says; returns a node of each. Where
    iterations overlap, long nodes are slow."""
    frames = Frames(graph)
    looping = {frames.of[n] for n in graph.nodes if n.op.role is Role.NEXT_ITERATION}
    overlapping = {frame for frame in looping if frame.parallel_iterations > 1}

    def is_slow(node: Node) -> bool:
        return policy.is_slow(node) or (frames.of[node] in overlapping and policy.is_long(node))

    return group_segments(graph, frames, policy.joins, is_slow)


def group_segments(
    graph: Graph, frames: Frames, joins: Callable[[Node], bool], is_slow: Callable[[Node], bool]
) -> dict[Node, Node]:
    """Replace nodes of ``graph``, which must be sorted, by segments; returns a node of each.
    ``joins``: whether a node may be part of one. ``is_slow``: whether nodes that need not wait for
    it must not; none of these is part of a segment."""
    sources = {node: _sources(node) for node in with_checkpoints(graph.nodes)}
    slow = {
        node for node in with_checkpoints(graph.nodes) if node.op.role in _SLOW or is_slow(node)
    }
    waits = _slow_before(graph.nodes, sources, slow)
    if waits is None:
        return {}
    conditions = _conditions(graph, frames)
    sends = _sends_behind(graph.nodes, sources, frames)
    keys: dict[Node, object] = {
        node: (frames.of[node], conditions[node], waits[node], sends[node])
        if node not in slow and joins(node)
        else node
        for node in with_checkpoints(graph.nodes)
    }
    levels = _levels(graph.nodes, sources, keys)
    groups: dict[object, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        groups[keys[node], levels[node]].append(node)
    # A single node is none the faster for being a segment, and one without outputs computes
    # nothing.
    chosen = [g for g in groups.values() if len(g) > 1 and any(node.outputs for node in g)]
    return _replace(graph, chosen)


def _replace(graph: Graph, groups: Sequence[Sequence[Node]]) -> dict[Node, Node]:
    """Replace each group of nodes by a segment; returns the first node of each segment."""
    first = {node: group[0] for group in groups for node in group}
    read = set(graph.outputs)
    for node in with_checkpoints(graph.nodes):
        own = first.get(node, node)
        for value in all_reads(node):
            producer = value.producer
            if producer is not None and first.get(producer, producer) is not own:
                read.add(value)
    segments = {group[0]: _segment(group, read) for group in groups}
    moved = {node: segments[place] for node, place in first.items()}
    nodes = [segments.get(node, node) for node in graph.nodes if first.get(node, node) is node]
    for node in nodes:
        before = dict.fromkeys(moved.get(source, source) for source in node.control_inputs)
        # Edges between nodes of one segment would make it wait for itself.
        node.control_inputs = [source for source in before if source is not node]
    graph.nodes = nodes
    graph.targets = list(dict.fromkeys(moved.get(node, node) for node in graph.targets))
    # A segment stands where its first node stood, but reads what its others read.
    sort(graph)
    return {segment: node for node, segment in segments.items()}


def _segment(nodes: Sequence[Node], read: set[Value]) -> Node:
    """The segment of ``nodes``; its outputs are those of their values that others have ``read``."""
    own = set(nodes)
    outputs = [value for node in nodes for value in node.outputs if value in read]
    inputs = [
        v for node in with_checkpoints(nodes) for v in all_reads(node) if v.producer not in own
    ]
    inputs = list(dict.fromkeys(inputs))
    first, last = nodes[0], nodes[-1]
    working = [node for node in nodes if node.outputs]
    body = clone(Graph([], [], working, last.name), inputs, [v for v in outputs if v is not None])
    for node in body.nodes:
        # The segment waits, before any of its nodes runs, for what any of them waited for.
        node.control_inputs = []
        if node.op.role is Role.LOOP_COND:
            make_identity(node)
    segment = Node(SEGMENT, inputs, outputs, {"body": body}, name=last.name, device=last.device)
    segment.origin = f"{first.label} to {last.label}"
    segment.control_inputs = [before for node in nodes for before in node.control_inputs]
    return segment


def _sources(node: Node) -> list[Node]:
    """The nodes that ``node`` waits for in its iteration."""
    producers = [v.producer for v in all_reads(node) if v.producer is not None]
    if node.op.role is Role.MERGE:
        # A NextIteration comes before its Merge in the next iteration only; with it, the graph
        # would be a cycle.
        producers = [p for p in producers if p.op.role is not Role.NEXT_ITERATION]
    return list(dict.fromkeys((*producers, *node.control_inputs)))


def _levels(
    nodes: Sequence[Node], sources: Sources, keys: Mapping[Node, object]
) -> dict[Node, int]:
    """Levels that rise along edges between different ``keys`` and never fall; as few of them as
    there can be, and each node as late as its readers allow."""
    levels: dict[Node, int] = {}
    latest: dict[Node, int] = {}
    for node in with_checkpoints(nodes):
        before = [levels[s] + (keys[s] != keys[node]) for s in sources[node]]
        levels[node] = max(before, default=0)
    for node in with_checkpoints(nodes[::-1]):
        if keys[node] is not node:
            levels[node] = latest.get(node, levels[node])
        for source in sources[node]:
            least = levels[node] - (keys[source] != keys[node])
            latest[source] = min(least, latest.get(source, least))
    return levels


def _slow_before(
    nodes: Sequence[Node], sources: Sources, slow: Collection[Node]
) -> dict[Node, SlowNodes] | None:
    """The slow nodes that each node waits for, in its iteration or an earlier one; None if too many
    loops depend on one another."""
    before = dict.fromkeys(nodes, SlowNodes())
    for _ in range(_MOST_ROUNDS):
        changed = False
        for node in with_checkpoints(nodes):
            sets = {before[source] for source in sources[node]}
            sets |= {frozenset({(source, False)}) for source in sources[node] if source in slow}
            if node.op.role is Role.MERGE:
                sets |= {_earlier(v.producer, before) for v in all_reads(node)}
            known = next(iter(sets)) if len(sets) == 1 else SlowNodes().union(*sets)
            if len(known) > _MOST_SLOW:
                known = frozenset({(node, False)})
            changed |= known != before[node]
            before[node] = known
        if not changed:
            return before
    return None


def _sends_behind(
    nodes: Sequence[Node], sources: Sources, frames: Frames
) -> dict[Node, frozenset[Node]]:
    """The sends that wait for each node outside of loops: of more than a few, the first one."""
    behind = dict.fromkeys(nodes, frozenset[Node]())
    for node in with_checkpoints(nodes[::-1]):
        # Sets of all sends would take the square of a graph's size; a set of the node itself keeps
        # it apart from others.
        if len(behind[node]) > _MOST_SLOW:
            behind[node] = frozenset({node})
        own = behind[node] | {node} if node.op.role is Role.SEND else behind[node]
        for source in sources[node]:
            if own and frames.of[source].parent is None:
                behind[source] |= own
    return behind


def _earlier(node: Node | None, before: Mapping[Node, SlowNodes]) -> SlowNodes:
    """Return the slow nodes before a NextIteration, as seen from the next iteration."""
    if node is None or node.op.role is not Role.NEXT_ITERATION:
        return SlowNodes()
    return frozenset((slow, True) for slow, _ in before[node])


class _Presence(Deadness):
    """As ``Deadness``, for graphs in which some tokens may never come: nodes with equal conditions
    get all of their tokens together, dead or live, or not at all."""

    def of(self, value: Value) -> Condition:
        node = value.producer
        if node is None or node.op.role is not Role.SWITCH or is_switch(node):
            return super().of(value)
        return self._of_node(node) | {(node, node.outputs.index(value))}

    def _condition(self, node: Node) -> Condition:
        waits = node.op.role is Role.MERGE and node.control_inputs
        # Their tokens come at a time, or by a rule, that no choice of a Switch says.
        if waits or node.op.role in (Role.CONTROL_TRIGGER, Role.RECV):
            return frozenset({(node, LIVES)})
        return super()._condition(node)


def _conditions(graph: Graph, frames: Frames) -> dict[Node, Condition]:
    """The condition under which each node runs in an iteration of its frame."""
    inside: dict[Frame, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        inside[frames.of[node]].append(node)
    conditions: dict[Node, Condition] = {}
    for frame in sorted(inside, key=lambda frame: len(frame.path)):
        nodes, enters = inside[frame], frame.enters
        loop = _loop(frame, nodes)
        if loop is not None:
            starts = {conditions[variable.enter] for variable in loop.variables.values()}
            if len(starts) == 1:
                # All variables live or die together, in each iteration that there is.
                enters = [enter for enter in enters if conditions[enter] not in starts]
                conditions.update(_Presence(nodes, loop.variables, enters).conditions)
                continue
        conditions.update(_Presence(nodes, doubtful=enters).conditions)
    return conditions


def _loop(frame: Frame, nodes: Sequence[Node]) -> FrameLoop | None:
    """The loop in a frame, if it is one of which each iteration continues or ends as a whole."""
    with suppress(UnraisedError):
        if any(node.op.role is Role.NEXT_ITERATION for node in nodes):
            return FrameLoop(frame, nodes)
    return None
