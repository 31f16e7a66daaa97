"""The backend of each node, as the cost model of the caller chooses it."""

from __future__ import annotations

from penstock.ir.graph import Graph
from penstock.passes.context import Pass, PassContext, Property


class AssignBackends(Pass):
    """Ask ``context.placing`` where each node runs, and keep the answer there."""

    establishes = frozenset({Property.PLACED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        # A copy, since what is asked may answer with the very mapping that is cleared next.
        chosen = dict(context.placing.chosen(graph))
        context.placing.placement.clear()
        context.placing.placement.update(chosen)
        return False
