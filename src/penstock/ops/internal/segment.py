"""Segment: nodes of a graph with frames that run together, one after another, or are dead together.

And Frame: a frame that runs as one node. Neither is in the table of operations, so that no file can
use them. Passes make them for the frames executor: ``group_segments``, and ``raise_control_flow``.
"""

from __future__ import annotations

from penstock.ir.graph import Node
from penstock.ir.op import Op, Role
from penstock.ops.registry import no_kernel, unknown_types

SEGMENT = Op("Segment", "penstock", 1, 1, unknown_types, no_kernel("an executor runs its graph"))
"""Runs the graph that is its attribute ``body``, with one input and output for each of its own."""

_WHOLE = no_kernel("the frames executor runs its graph")
FRAME = Op("Frame", "penstock", 1, 1, unknown_types, _WHOLE, role=Role.FRAME)
"""As ``SEGMENT``, for a graph of Enters, the nodes of the loop in their frame, and Exits."""


def is_frame(node: Node) -> bool:
    """Whether ``node`` stands for a frame."""
    return node.op is FRAME


def is_segment(node: Node) -> bool:
    """Whether ``node`` stands for several nodes that run together."""
    return node.op is SEGMENT
