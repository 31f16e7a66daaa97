"""Drop control edges to nodes without side effects, preserving the order of side effects.

TensorFlow adds control edges, for example to tie a constant to a branch, or to run a check first.
Where every node of a graph runs exactly once, only side effects make the order observable. Nodes
without control inputs can be folded, merged and fused::

    Assert ──> NoOp ──> Const      becomes      Assert ──> Const
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from penstock.core.checkpoints import with_checkpoints
from penstock.ir.graph import Graph, Node, all_reads, is_framed
from penstock.ir.op import Role
from penstock.ops.registry import TENSORFLOW
from penstock.passes.context import Pass, PassContext, Property


class RelaxControlEdges(Pass):
    """Drop control edges to nodes without side effects (see ``relax_control_edges``)."""

    requires = frozenset({Property.STRUCTURED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        return not is_framed(graph) and relax_control_edges(graph)


def relax_control_edges(graph: Graph) -> bool:
    """Replace control inputs by the nearest preceding nodes with side effects, and add those
    implied by data edges, in nested graphs too. ``graph`` must be sorted. Return whether it
    changed."""
    changed = False
    # Side effects of ONNX and TFLite follow node order (``order_effects``).
    ordered = True in [not op.pure and op.domain == TENSORFLOW for op in graph.ops]
    for inner in graph.graphs():
        if ordered or True in [bool(node.control_inputs) for node in inner.nodes]:
            order, own = EffectOrder(), set(inner.nodes)
            for node in with_checkpoints(inner.nodes):
                # Captures of a nested graph are computed before it runs.
                reads = all_reads(node) if node.nests else node.inputs
                producers = [p for v in reads if v is not None and (p := v.producer) in own]
                effects = order.add(node, producers)
                changed |= effects != node.control_inputs
                node.control_inputs = effects
    return changed


class EffectOrder:
    """The nearest preceding nodes with side effects of each node."""

    def __init__(self) -> None:
        # The node itself if it has side effects, else the nearest preceding ones.
        self._nearest: dict[Node, dict[Node, None]] = {}
        self.has_side_effects = cache(has_side_effects)  # slow for nodes with large nested graphs

    def add(self, node: Node, producers: Sequence[Node], waits: Iterable[Node] = ()) -> list[Node]:
        """The nodes with side effects that ``node``, whose predecessors were added before, must
        wait for because of its control inputs; those of ``waits``, which it inherits; and, if it
        has side effects, those before the ``producers`` of its inputs: passes may replace such a
        value, such as the last count of a loop, by one without producers."""
        effects: dict[Node, None] = {}
        for source in node.control_inputs:
            effects.update(self._of(source))
        effects.update(dict.fromkeys(waits))
        before = dict(effects)
        for source in producers:
            before.update(self._of(source))
        if not self.has_side_effects(node):
            self._nearest[node] = before
            return list(effects)
        self._nearest[node] = {node: None}
        near = {source for source in producers if not source.nests}
        return [effect for effect in before if effect in effects or effect not in near]

    def _of(self, source: Node) -> dict[Node, None]:
        known = self._nearest.get(source)
        return {source: None} if known is None and self.has_side_effects(source) else known or {}


def has_side_effects(node: Node) -> bool:
    """Whether it can be observed when, or whether, ``node`` runs."""
    # These are not pure, since something may wait for them, but nothing can tell when they ran.
    if node.op.full_name == f"{TENSORFLOW}.NoOp" or node.op.role is Role.CONTROL_TRIGGER:
        return False
    return not node.op.pure or (node.nests and not all(each.op.pure for each in node.inner))
