"""The NumPy backend: the kernels that stand beside the operations. It defines what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.ir import Node
from penstock.ops.base import Kernel
from penstock.ops.transfer import HOST
from penstock.threads import core_budget
from penstock.types import Type

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class NumpyBackend:
    """Every operation of the table, on the host."""

    name = "numpy"
    memory = HOST

    @property
    def workers(self) -> int:
        return core_budget()

    @property
    def threads(self) -> int:
        return max((library.num_threads for library in _blas()), default=1)

    def set_threads(self, threads: int) -> None:
        for library in _blas():
            library.set_num_threads(threads)

    def supports(self, node: Node, types: Sequence[Type | None]) -> bool:
        return True

    def compile(self, node: Node, types: Sequence[Type | None]) -> Kernel:
        return node.op.compile(node, types)

    def allocate(self, nbytes: int) -> np.ndarray:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]

    def to_host(self, value: Any) -> Any:
        return value

    def from_host(self, value: Any) -> Any:
        return value


@cache
def _blas() -> tuple[Any, ...]:
    """The libraries of matrix products that NumPy has loaded: what in NumPy has threads."""
    from threadpoolctl import ThreadpoolController

    controllers = ThreadpoolController().select(user_api="blas").lib_controllers
    return tuple(controllers)
