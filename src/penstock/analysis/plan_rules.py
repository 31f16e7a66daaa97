"""The rules for the graph of a saved plan, whose nodes no importer has checked.

A kernel trusts the node that it is made for: that it has the inputs of its operation, and values of
the types that the operation allows. Passes make nodes for which this holds; a file may hold others.
"""

from __future__ import annotations

from penstock.analysis.schemas import check_schemas
from penstock.analysis.type_constraints import check_types
from penstock.analysis.verify import verify
from penstock.core.limits import Limits
from penstock.ir.graph import Graph, Model
from penstock.ops.internal.fused import is_fused


def check_nodes(graph: Graph, limits: Limits) -> None:
    """Raise ``InvalidModel`` unless each node of a verified graph, those of fused nodes among them,
    has the inputs, the outputs and the attributes of its operation."""
    regions = _regions(graph)
    if regions:
        verify(Model(regions, "fused 0"), limits, partial=True)
    check_schemas(Model({"": graph, **regions}, ""))


def check_node_types(graph: Graph) -> None:
    """Raise ``InvalidModel`` unless values, whose types are known, have types that the operations
    of all nodes allow."""
    for each in (graph, *_regions(graph).values()):
        check_types(each, {})


def _regions(graph: Graph) -> dict[str, Graph]:
    """The regions of fused nodes, as graphs."""
    regions = [node.attrs["region"] for node in graph.walk() if is_fused(node)]
    inputs = [[value for value in region.inputs if value.const is None] for region in regions]
    return {
        f"fused {i}": Graph(values, [region.output], list(region.nodes))
        for i, (values, region) in enumerate(zip(inputs, regions, strict=True))
    }
