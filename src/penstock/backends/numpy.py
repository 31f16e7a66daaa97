"""The NumPy backend: the kernels that stand beside the operations. It defines what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir import Node
from penstock.ops.base import Kernel
from penstock.types import Type

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class NumpyBackend:
    """Every operation of the table, on the host."""

    name = "numpy"
    workers = 1

    def supports(self, node: Node, types: Sequence[Type | None]) -> bool:
        return True

    def compile(self, node: Node, types: Sequence[Type | None]) -> Kernel:
        return node.op.compile(node, types)

    def allocate(self, nbytes: int) -> np.ndarray:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]
