"""The backend of each node, as the cost model of the caller chooses it."""

from __future__ import annotations

from penstock.ir.graph import Graph
from penstock.passes.context import Pass, PassContext, Property


class AssignBackends(Pass):
    """Ask ``context.choose_places`` where each node runs, and keep the answer."""

    name = "assign_backends"
    requires = frozenset({Property.TYPED})
    establishes = frozenset({Property.PLACED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.choose_places is not None:
            context.placement.clear()
            context.placement.update(context.choose_places(graph))
        return False
