"""Dead code elimination, and extraction of the subgraph that given fetches need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from penstock.core.checkpoints import with_checkpoints
from penstock.ir.graph import Graph, Node, Value, all_reads, captures, clone
from penstock.ir.op import Role
from penstock.ops.onnx.control_flow import CONTROL, loop_carried
from penstock.passes.context import Pass, PassContext


class DeadCode(Pass):
    """Remove the nodes that no output depends on (see ``prune``)."""

    requires = frozenset()

    def run(self, graph: Graph, context: PassContext) -> bool:
        return prune(graph)


def prune(graph: Graph) -> bool:
    """Remove the nodes that no output depends on, in nested graphs too; ``graph`` must be sorted.
    Unread outputs of nested graphs are removed as well, and loop-carried values that only update
    themselves.
    """
    # Over a back edge, a node is needed by an earlier one, which a single backward walk would miss.
    if Role.NEXT_ITERATION in [node.op.role for node in graph.nodes]:
        return _prune_cyclic(graph)
    changed = False
    needed: set[Value | None] = set(graph.outputs)
    controls: set[Node] = set(graph.targets)
    kept: list[Node] = []
    keep, need, is_idle = kept.append, needed.update, needed.isdisjoint  # a hot loop
    for node in with_checkpoints(graph.nodes[::-1]):
        if is_idle(node.outputs) and node not in controls:
            changed = True
            continue
        keep(node)
        if node.nests and node.op.role in CONTROL:
            changed |= _drop_unread(node, needed)
            changed |= node.op.name != "If" and _drop_carried(node, needed)
        if None in node.inputs:  # an omitted optional input
            need([value for value in node.inputs if value is not None])
        else:
            need(node.inputs)
        if node.control_inputs:
            controls.update(node.control_inputs)
        for _, inner in node.graphs if node.nests else ():
            changed |= prune(inner)
            # After pruning, since values that only dead nodes capture are not needed.
            need(captures(inner))
    kept.reverse()
    graph.nodes = kept
    return changed


def _prune_cyclic(graph: Graph) -> bool:
    """``prune`` for graphs with NextIteration, where a node may depend on later nodes."""
    changed = False
    kept: set[Node] = set()
    left = [v.producer for v in graph.outputs if v.producer is not None] + graph.targets
    while left:
        node = left.pop()
        if node in kept:
            continue
        kept.add(node)
        read: list[Value | None] = [*node.inputs]
        for _, inner in node.graphs:
            changed |= prune(inner)
            read += captures(inner)
        left += [v.producer for v in read if v is not None and v.producer is not None]
        left += node.control_inputs
    nodes = [node for node in graph.nodes if node in kept]
    changed |= len(nodes) < len(graph.nodes)
    graph.nodes = nodes
    return changed


def _drop_unread(node: Node, needed: set[Value | None]) -> bool:
    """Remove outputs of ``node`` and of its graphs that are neither needed nor loop-carried."""
    first = 0 if node.op.name == "If" else len(node.inputs[loop_carried(node)[0]])
    read = [i < first or value in needed for i, value in enumerate(node.outputs)]
    if all(read):
        return False
    for _, inner in node.graphs:
        # A Loop's body returns its condition first, which is no output of the Loop.
        before = len(inner.outputs) - len(node.outputs)  # the condition of a Loop
        inner.outputs[before:] = compress(inner.outputs[before:], read)
    # These attributes have one element per scan output, by position.
    for name in ("scan_output_axes", "scan_output_directions"):
        if node.attrs.get(name):
            node.attrs[name] = list(compress(node.attrs[name], read[first:]))
    node.outputs = list(compress(node.outputs, read))
    return True


def _drop_carried(node: Node, needed: set[Value | None]) -> bool:
    """Remove loop-carried values that are read only to update themselves."""
    body: Graph = node.attrs["body"]
    entering, leaving = loop_carried(node)
    inside, updated = body.inputs[entering], body.outputs[leaving]
    finals = node.outputs[: len(inside)]
    if all(value in needed for value in finals):
        return False
    own, updates = set(body.nodes), dict(zip(inside, updated, strict=True))
    # The condition and the scan outputs stay live, whichever values the loop carries.
    left: list[Value | None] = [*body.outputs[: leaving.start], *body.outputs[leaving.stop :]]
    left += [value for value, final in zip(inside, finals, strict=True) if final in needed]
    waiting, seen = list(body.targets), set[Value | Node | None]()
    while left or waiting:
        if left:
            value = left.pop()
            if value is None or value in seen:
                continue
            seen.add(value)
            left.append(updates.get(value))
            waiting += [value.producer] if value.producer in own else []
            continue
        before = waiting.pop()
        if before not in seen:
            seen.add(before)
            # Values captured by nested graphs are not among the node's inputs.
            left += all_reads(before)
            waiting += before.control_inputs
    live = [value in seen for value in inside]
    if all(live):
        return False
    keep_carried(node, live)
    return True


def keep_carried(node: Node, live: Sequence[bool]) -> None:
    """Remove the loop-carried values that are not ``live``."""
    body: Graph = node.attrs["body"]
    entering, leaving = loop_carried(node)
    node.inputs[entering] = compress(node.inputs[entering], live)
    node.outputs[: len(live)] = compress(node.outputs[: len(live)], live)
    body.inputs[entering] = compress(body.inputs[entering], live)
    body.outputs[leaving] = compress(body.outputs[leaving], live)


def cut(
    graph: Graph, feeds: Sequence[Value], fetches: Sequence[Value], targets: Sequence[Node] = ()
) -> Graph:
    """Return a copy of the nodes that ``fetches`` and ``targets`` need when ``feeds`` are given,
    without nodes that only feeds depend on.

    The feeds are the inputs of the copy, and the fetches its outputs. An input of ``graph`` that is
    needed but not fed becomes a capture of the copy (see ``captures``).
    """
    copy = clone(graph, feeds, fetches, targets)
    prune(copy)
    return copy
