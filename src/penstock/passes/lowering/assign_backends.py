"""Assignment of a backend to each node, by the caller's cost model."""

from __future__ import annotations

from penstock.ir.graph import Graph
from penstock.passes.context import Pass, PassContext, Property


class AssignBackends(Pass):
    """Get the place of each node from ``context.placing``, and record it there."""

    establishes = frozenset({Property.PLACED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        # Copy: ``chosen`` may return the mapping itself, which is cleared next.
        chosen = dict(context.placing.chosen(graph))
        context.placing.placement.clear()
        context.placing.placement.update(chosen)
        return False
