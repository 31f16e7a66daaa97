"""Values moved between places: Transfer, Stack and Reorder of backends, Send and Recv of devices.

They are not in the table of operations, so that no file can use them. Passes insert them:
``insert_transfers`` where a node's backend cannot read its input, ``partition`` where a value
crosses from one device to another.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.core.records import NamedTuple
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, LayoutHints
from penstock.ir.op import Op, Role, Types
from penstock.ops.common.shape_rules import same_type
from penstock.ops.registry import no_kernel, unknown_types

HOST = "host"
"""The memory of NumPy arrays, and so of the inputs and outputs of a graph."""


class Place(NamedTuple):
    """The backend of a node, and the memory (with its layout) of the node's values."""

    backend: str
    memory: str


class OtherPlaces(NamedTuple):
    """The places of those inputs and outputs of a node, by number, that its kernel has elsewhere
    than in the memory of its backend: on the host, or on the members of a group."""

    inputs: Mapping[int, Place]
    outputs: Mapping[int, Place]


NO_OTHER_PLACES = OtherPlaces({}, {})


class Ports(NamedTuple):
    """The places of inputs and outputs of a graph, if not all are in the host's memory: those
    of inputs by number, and whether outputs stay where they are computed."""

    fed: Mapping[int, Place]
    stay: bool


TRANSFER = Op("Transfer", "penstock", 1, 1, same_type, no_kernel("two backends provide it"))
"""Copies a value from the memory of one backend to that of another. Attributes: ``source`` and
``target``, names of backends."""


def _reorder(node: Node, types: Types) -> Kernel:
    def into(source: np.ndarray, target: np.ndarray) -> None:
        np.copyto(target, source)

    return Kernel(np.copy, into, layout=LayoutHints(dims_order=node.attrs["order"]))


REORDER = Op("Reorder", "penstock", 1, 1, same_type, _reorder, moves=True)
"""A copy with its dims in another ``order`` in memory, outermost first. Plans insert it where a
kernel requires it."""

STACK = Op("Stack", "penstock", 1, 1, same_type, no_kernel("a backend provides it"))
"""Rows that a loop has collected in the memory of a backend, joined there to the output of the loop
that they are. Attributes: ``axis``, and ``backward`` if the last row comes first."""

_BY_EXECUTOR = no_kernel("the frames executor runs it"), False

SEND = Op("_Send", "penstock", 1, 1, unknown_types, *_BY_EXECUTOR, Role.SEND)
"""Sends its input, dead or live; without an input, the token that its control inputs have run."""


RECV = Op(
    *("_Recv", "penstock", 1, 1),
    lambda types, attrs, consts: (attrs["type"],) if "type" in attrs else (),
    *_BY_EXECUTOR,
    Role.RECV,
)
"""Its output is the token that a Send has sent in the same frame and iteration, dead or live. It
receives even if its control inputs are dead.

Attributes of both: ``send_device`` and ``recv_device``, the devices at the ends; ``tensor_name``,
the name of the value. Of a Recv: ``type``, that of the value, if one is sent; ``loop_cond``,
whether that is the output of a LoopCond."""


def is_transfer(node: Node) -> bool:
    """Whether ``node`` copies a value from one backend's memory to another's."""
    return node.op is TRANSFER
