"""Group nodes of a graph with frames into segments, each of which runs as one node.

The nodes of a segment are in one frame, are live under the same condition (``conditions``) and
depend on the same slow nodes, so that grouping changes no node's deadness and adds no wait for a
slow node or a loop. Outside of loops, the same sends depend on them, so that no send is delayed for
the sake of others::

    merge ──> less ──> cond ──> switch ──F──> exit       segments: {less, cond} and {neg, add}
      ^                  merge ───┘  └───T──> neg ──> add ─┐
      └───────────────────────── next iteration <──────────┘

A segment is convex: nodes have levels, which rise from a node to a reader outside of its segment,
so that no two segments depend on each other.
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

# Their tokens arrive from other frames, devices or calls.
_SLOW = (Role.EXIT, Role.RECV, Role.CALL, Role.FRAME)

# A node that depends on more slow nodes is grouped only with nodes that depend on it.
_MOST_SLOW = 32
# Rounds of the fixpoint over slow nodes of loops; graphs that need more are left unchanged.
_MOST_ROUNDS = 16


class GroupSegments(Pass):
    """Group the nodes of a graph, and those in the bodies of its frame nodes, into segments (see
    ``group_segments``), following the ``FramePolicy``, which records a node of each."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        whole = [node.attrs["body"] for node in graph.walk() if is_frame(node)]
        bodies = [body for body in whole if not captures(body)]
        # Copies of grouped graphs, of functions and branches, already have segments.
        left = [body for body in bodies if not any(map(is_segment, body.nodes))]
        segments = [_grouped(inner, context.frames) for inner in (*left, graph)]
        for replaced in segments:
            context.frames.segments.update(replaced)
        return any(segments)


def _grouped(graph: Graph, policy: FramePolicy) -> dict[Node, Node]:
    """Group the nodes of one graph into segments, following a policy; return a node of each. Where
    iterations overlap, long nodes count as slow."""
    frames = Frames(graph)
    looping = {frames.of[n] for n in graph.nodes if n.op.role is Role.NEXT_ITERATION}
    overlapping = {frame for frame in looping if frame.parallel_iterations > 1}

    def is_slow(node: Node) -> bool:
        return policy.is_slow(node) or (frames.of[node] in overlapping and policy.is_long(node))

    return group_segments(graph, frames, policy.joins, is_slow)


def group_segments(
    graph: Graph, frames: Frames, joins: Callable[[Node], bool], is_slow: Callable[[Node], bool]
) -> dict[Node, Node]:
    """Replace nodes of ``graph``, which must be sorted, by segments; return a node of each.
    ``joins``: whether a node may be in a segment. ``is_slow``: whether independent nodes must not
    wait for it; slow nodes are in no segment."""
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
    # A segment of a single node gains nothing, and one without outputs computes nothing that others
    # read.
    chosen = [g for g in groups.values() if len(g) > 1 and any(node.outputs for node in g)]
    return _replace(graph, chosen)


def _replace(graph: Graph, groups: Sequence[Sequence[Node]]) -> dict[Node, Node]:
    """Replace each group of nodes by a segment; return the first node of each segment."""
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
    # A segment is at the position of its first node, but reads inputs of later ones.
    sort(graph)
    return {segment: node for node, segment in segments.items()}


def _segment(nodes: Sequence[Node], read: set[Value]) -> Node:
    """Return the segment of ``nodes``; its outputs are their values that others ``read``."""
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
        # The segment as a whole takes over the control inputs of all of its nodes.
        node.control_inputs = []
        if node.op.role is Role.LOOP_COND:
            make_identity(node)
    segment = Node(SEGMENT, inputs, outputs, {"body": body}, name=last.name, device=last.device)
    segment.origin = f"{first.label} to {last.label}"
    segment.control_inputs = [before for node in nodes for before in node.control_inputs]
    return segment


def _sources(node: Node) -> list[Node]:
    """Return the nodes that ``node`` depends on within an iteration."""
    producers = [v.producer for v in all_reads(node) if v.producer is not None]
    if node.op.role is Role.MERGE:
        # A NextIteration precedes its Merge in the next iteration only: counting it would make the
        # graph cyclic.
        producers = [p for p in producers if p.op.role is not Role.NEXT_ITERATION]
    return list(dict.fromkeys((*producers, *node.control_inputs)))


def _levels(
    nodes: Sequence[Node], sources: Sources, keys: Mapping[Node, object]
) -> dict[Node, int]:
    """Return levels that rise along edges between different ``keys`` and never fall: as few as
    possible, and each node as late as its readers allow."""
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
    """Return the slow nodes that each node depends on, in its iteration or an earlier one; None if
    too many loops depend on each other."""
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
    """Return the sends that depend on each node outside of loops: the first one if too many."""
    behind = dict.fromkeys(nodes, frozenset[Node]())
    for node in with_checkpoints(nodes[::-1]):
        # Sets of all sends would take quadratic space; a set of the node itself keeps it apart from
        # others.
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
    """As ``Deadness``, for graphs in which some tokens may never arrive: nodes with equal
    conditions get all of their tokens, dead or live, or none."""

    def of(self, value: Value) -> Condition:
        node = value.producer
        if node is None or node.op.role is not Role.SWITCH or is_switch(node):
            return super().of(value)
        return self._of_node(node) | {(node, node.outputs.index(value))}

    def _condition(self, node: Node) -> Condition:
        waits = node.op.role is Role.MERGE and node.control_inputs
        # Their tokens depend on something other than the choices of Switches.
        if waits or node.op.role in (Role.CONTROL_TRIGGER, Role.RECV):
            return frozenset({(node, LIVES)})
        return super()._condition(node)


def _conditions(graph: Graph, frames: Frames) -> dict[Node, Condition]:
    """Return the condition under which each node runs in an iteration of its frame."""
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
                # All loop variables are live or dead together in each iteration.
                enters = [enter for enter in enters if conditions[enter] not in starts]
                conditions.update(_Presence(nodes, loop.variables, enters).conditions)
                continue
        conditions.update(_Presence(nodes, doubtful=enters).conditions)
    return conditions


def _loop(frame: Frame, nodes: Sequence[Node]) -> FrameLoop | None:
    """Return the loop in a frame, if each of its iterations continues or ends as a whole."""
    with suppress(UnraisedError):
        if any(node.op.role is Role.NEXT_ITERATION for node in nodes):
            return FrameLoop(frame, nodes)
    return None
