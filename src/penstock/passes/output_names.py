"""Restoration of output names, as passes replace outputs by values with other names."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.graph import Graph, Node, Value
from penstock.ops.registry import standard


def name_outputs(graph: Graph, names: Sequence[str]) -> None:
    """Give the outputs of a graph these names. An Identity is added for an output that is an input,
    a constant or another output, since that keeps its own name."""
    for i, name in enumerate(names):
        value = graph.outputs[i]
        shared = value in graph.outputs[:i] or value in graph.inputs
        if shared or value.producer is None or value.producer not in graph.nodes:
            copy = Value(name, value.type)
            graph.nodes.append(Node(standard("Identity"), [value], [copy], name=f"{name}/output"))
            graph.outputs[i] = copy
        else:
            value.name = name
