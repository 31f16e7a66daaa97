"""The rules for the graph of a saved plan, whose nodes no importer has checked.

A kernel trusts the node that it is made for: that it has the inputs of its operation, and values of
the types that the operation allows. Passes make nodes for which this holds; a file may hold others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.analysis.schemas import check_schemas
from penstock.analysis.type_constraints import check_types
from penstock.core.errors import InvalidModel
from penstock.ir.graph import Graph, Node
from penstock.ops.internal.fused import FUSED


def check_nodes(nodes: Sequence[Node]) -> Graph:
    """Raise ``InvalidModel`` unless each node of verified graphs, those of fused nodes among them,
    has the inputs, the outputs and the attributes of its operation. Returns a graph of the nodes in
    fused ones."""
    regions = [node.attrs["region"] for node in nodes if node.op is FUSED]
    parts = [node for region in regions for node in region.nodes]
    for node in parts:  # of others ``verify`` has
        arity = node.op.arity
        if arity is not None and (None in node.inputs or arity[0] not in (None, len(node.inputs))):
            raise InvalidModel(
                f"{node.label}: {node.op.name} has {len(node.inputs)} inputs, not {arity[0]}"
            )
    check_schemas([*nodes, *parts])
    return Graph([], [], parts)


def check_node_types(graphs: Iterable[Graph]) -> None:
    """Raise ``InvalidModel`` unless values, whose types are known, have types that the operations
    of all nodes allow."""
    for graph in graphs:
        check_types(graph, {})
