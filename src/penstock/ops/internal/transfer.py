"""Transfer, Stack and Reorder between backends, Send and Recv between devices.

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
"""the memory of NumPy arrays, and of the inputs and outputs of a graph by default"""


class Place(NamedTuple):
    """The backend of a node, and the memory (with layout) of its values."""

    backend: str
    memory: str


class OtherPlaces(NamedTuple):
    """The places of inputs and outputs of a node, by index, that are not in the memory of its
    backend but on the host, or on members of a device group."""

    inputs: Mapping[int, Place]
    outputs: Mapping[int, Place]


NO_OTHER_PLACES = OtherPlaces({}, {})


class Ports(NamedTuple):
    """The places of inputs and outputs of a graph that are not in host memory: those of inputs by
    index, and whether outputs stay where they are computed."""

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
"""Copies a value to another memory ``order`` of its dims, outermost first. Plans insert it where a
kernel requires it."""

STACK = Op("Stack", "penstock", 1, 1, same_type, no_kernel("a backend provides it"))
"""Stacks the rows that a loop has collected in the memory of a backend into an output of the loop.
Attributes: ``axis``, and ``backward`` if the last row comes first."""

_BY_EXECUTOR = no_kernel("the frames executor runs it"), False

SEND = Op("_Send", "penstock", 1, 1, unknown_types, *_BY_EXECUTOR, Role.SEND)
"""Sends its input, dead or live; without an input, a token that signals its control inputs."""


RECV = Op(
    *("_Recv", "penstock", 1, 1),
    lambda types, attrs, consts: (attrs["type"],) if "type" in attrs else (),
    *_BY_EXECUTOR,
    Role.RECV,
)
"""Receives the token that a Send sends in the same frame and iteration, dead or live, even if its
own control inputs are dead.

Attributes of both: ``send_device`` and ``recv_device``; ``tensor_name``, the name of the value.
Attributes of a Recv: ``type``, the type of the value, if one is sent; ``loop_cond``, whether the
value is the output of a LoopCond."""


def is_transfer(node: Node) -> bool:
    """Whether ``node`` copies a value from one backend's memory to another's."""
    return node.op is TRANSFER
