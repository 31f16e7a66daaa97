"""Send and Recv: a value brought from one part of a graph to another, by a rendezvous.

No file can ask for them: they are not in the table of operations. ``passes/partition.py`` puts them
where a value crosses from one device to another. Only an executor that knows of frames runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InternalError
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Kernel, Op, Role, Types
from penstock.types import Type


def _nothing(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return ()


def _without(node: Node, types: Types) -> Kernel:
    raise InternalError(f"{node.op.name} has no kernel: it is the executor's own")


SEND = Op("_Send", "penstock", 1, 1, _nothing, _without, pure=False, role=Role.SEND)
"""Sends its input, dead or alive; without an input, the word that what it waits for has run."""

RECV = Op("_Recv", "penstock", 1, 1, _nothing, _without, pure=False, role=Role.RECV)
"""Its output is what a Send has sent in the same frame and iteration, and dead if that was. It runs
even when it is dead itself: what was sent is taken in any case.

Attributes of both: ``send_device`` and ``recv_device``, the devices at the ends; ``tensor_name``,
what is sent. ``loop_cond`` of a Recv: whether that is what a LoopCond says."""
