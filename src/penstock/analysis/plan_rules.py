"""The rules for the graph of a saved plan, whose nodes have passed no importer's checks.

A kernel trusts its node to have the inputs of its operation, and values of types that the operation
allows. Passes create only such nodes, but a file may contain others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.analysis.schemas import check_schemas
from penstock.analysis.type_constraints import check_types
from penstock.core.errors import InvalidModel
from penstock.ir.graph import Graph, Node
from penstock.ops.internal.fused import FUSED


def check_nodes(nodes: Sequence[Node]) -> Graph:
    """Raise ``InvalidModel`` unless each node of verified graphs, or of their fused nodes, has the
    inputs, outputs and attributes of its operation. Return a graph of the nodes in fused
    nodes."""
    regions = [node.attrs["region"] for node in nodes if node.op is FUSED]
    parts = [node for region in regions for node in region.nodes]
    for node in parts:  # ``verify`` has checked the other nodes
        arity = node.op.arity
        if arity is not None and (None in node.inputs or arity[0] not in (None, len(node.inputs))):
            raise InvalidModel(
                f"{node.label}: {node.op.name} has {len(node.inputs)} inputs, not {arity[0]}"
            )
    check_schemas([*nodes, *parts])
    return Graph([], [], parts)


def check_node_types(graphs: Iterable[Graph]) -> None:
    """Raise ``InvalidModel`` unless all values have types that the operations of their nodes
    allow. The types must be inferred."""
    for graph in graphs:
        check_types(graph, {})
