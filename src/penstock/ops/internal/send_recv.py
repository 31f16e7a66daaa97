"""Send and Recv: a value is moved from one part of a graph to another by a rendezvous.

They are not in the table of operations, so that no file can use them.
``passes.lowering.partition`` inserts them where a value crosses from one device to another. Only
the frames executor runs them.
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
"""Sends its input, dead or live; without an input, the token that its control inputs have run."""

RECV = Op("_Recv", "penstock", 1, 1, _nothing, _without, pure=False, role=Role.RECV)
"""Its output is the token that a Send has sent in the same frame and iteration, dead or live. It
receives even if its control inputs are dead.

Attributes of both: ``send_device`` and ``recv_device``, the devices at the ends; ``tensor_name``,
the name of the value. ``loop_cond`` of a Recv: whether the value is the output of a LoopCond."""
