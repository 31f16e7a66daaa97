"""Segment: nodes of a graph with frames that run together, one after another, or are dead together.

It is not in the table of operations, so that no file can use it. The pass ``group_segments`` makes
segments, for the frames executor.
"""

from __future__ import annotations

from penstock.ir.graph import Node
from penstock.ir.op import Op
from penstock.ops.registry import no_kernel, unknown_types

SEGMENT = Op("Segment", "penstock", 1, 1, unknown_types, no_kernel("an executor runs its graph"))
"""Runs the graph that is its attribute ``body``, with one input and output for each of its own."""


def is_segment(node: Node) -> bool:
    """Whether ``node`` stands for several nodes that run together."""
    return node.op is SEGMENT
