"""Types for the values of a graph that has none yet, or that a pass has changed."""

from __future__ import annotations

from penstock.analysis import type_inference
from penstock.ir.graph import Graph, is_framed
from penstock.passes.context import Pass, PassContext, Property


class InferTypes(Pass):
    """Infer the types of all values from those of the graph's inputs. In a graph with frames values
    may be dead: a node that cannot run is no error there, and the types of its outputs stay
    unknown."""

    name = "infer_types"
    establishes = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        type_inference.infer_types(graph, certain=not (context.framed or is_framed(graph)))
        return False
