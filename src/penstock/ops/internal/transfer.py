"""Transfer: copies a value from the memory of one backend to that of another.

It is not in the table of operations, so that no file can use it.
``passes.lowering.insert_transfers`` inserts it where a node's backend cannot read its input.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import InternalError
from penstock.ir.graph import Node
from penstock.ir.op import Kernel, Op, Types
from penstock.ops.common.shape_rules import same_type

HOST = "host"
"""The memory of NumPy arrays, and so of the inputs and outputs of a graph."""


def _made_of_two(node: Node, types: Types) -> Kernel:
    raise InternalError("the kernel of a transfer is made of two backends")


TRANSFER = Op("Transfer", "penstock", 1, 1, same_type, _made_of_two)
"""Attributes: ``source`` and ``target``, names of backends."""


def _reorder(node: Node, types: Types) -> Kernel:
    def into(source: np.ndarray, target: np.ndarray) -> None:
        np.copyto(target, source)

    return Kernel(np.copy, into, dims_order=node.attrs["order"])


REORDER = Op("Reorder", "penstock", 1, 1, same_type, _reorder, moves=True)
"""A copy with its dims in another ``order`` in memory, outermost first; if empty, in their own.
Plans insert it where a kernel requires it."""


def is_transfer(node: Node) -> bool:
    """Whether ``node`` copies a value from one backend's memory to another's."""
    return node.op is TRANSFER
