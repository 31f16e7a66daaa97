"""Transfer: a value brought from the memory of one backend to that of another.

No file can ask for it: it is not in the table of operations. ``passes/place.py`` puts it where a
node's backend cannot read what another's has made.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import InternalError
from penstock.ir.graph import Node
from penstock.ir.op import Kernel, Op, Types
from penstock.ops.common.shape_rules import same_type

HOST = "host"
"""The memory that NumPy arrays are in. What enters and leaves a graph is there."""


def _made_of_two(node: Node, types: Types) -> Kernel:
    raise InternalError("the kernel of a transfer is made of two backends")


TRANSFER = Op("Transfer", "penstock", 1, 1, same_type, _made_of_two)
"""Attributes: ``source`` and ``target``, names of backends."""


def _reorder(node: Node, types: Types) -> Kernel:
    def into(source: np.ndarray, target: np.ndarray) -> None:
        np.copyto(target, source)

    return Kernel(np.copy, into, dims_order=node.attrs["order"])


REORDER = Op("Reorder", "penstock", 1, 1, same_type, _reorder, moves=True)
"""A copy with dims in another ``order`` in memory, the outermost first; without one, in their own.
Plans put it where a kernel asks for it."""


def is_transfer(node: Node) -> bool:
    """Whether ``node`` brings a value from one backend's memory to another's."""
    return node.op is TRANSFER
