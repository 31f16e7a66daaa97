"""Segment: nodes of a graph with frames that run in sequence as one node, or are all dead.

And Frame: a frame that runs as one node. Neither is in the table of operations, so that no file can
use them. The passes ``group_segments`` and ``raise_control_flow`` create them for the frames
executor.
"""

from __future__ import annotations

from penstock.ir.graph import Node
from penstock.ir.op import Op, Role
from penstock.ops.registry import no_kernel, unknown_types

SEGMENT = Op("Segment", "penstock", 1, 1, unknown_types, no_kernel("an executor runs its graph"))
"""Runs the graph in the attribute ``body``, with the inputs and outputs of the node."""

_WHOLE = no_kernel("the frames executor runs its graph")
FRAME = Op("Frame", "penstock", 1, 1, unknown_types, _WHOLE, role=Role.FRAME)
"""Like ``SEGMENT``, for a graph of Enters, the nodes of a loop in its frame, and Exits."""


def is_frame(node: Node) -> bool:
    """Whether ``node`` is a ``FRAME``."""
    return node.op is FRAME


def is_segment(node: Node) -> bool:
    """Whether ``node`` is a ``SEGMENT``."""
    return node.op is SEGMENT
