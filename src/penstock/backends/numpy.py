"""The NumPy backend: the kernels that stand beside the operations. It defines what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from penstock.backends.base import HostBackend
from penstock.ir import Node
from penstock.ops.base import Kernel
from penstock.types import Type


class NumpyBackend(HostBackend):
    """Every operation of the table, on the host."""

    name = "numpy"

    def supports(self, node: Node, types: Sequence[Type | None]) -> bool:
        return True

    def compile(self, node: Node, types: Sequence[Type | None]) -> Kernel:
        return node.op.compile(node, types)

    @property
    def threads(self) -> int:
        return max((library.num_threads for library in _blas()), default=1)

    def set_threads(self, threads: int) -> None:
        for library in _blas():
            library.set_num_threads(threads)


@cache
def _blas() -> tuple[Any, ...]:
    """The libraries of matrix products that NumPy has loaded: what in NumPy has threads."""
    from threadpoolctl import ThreadpoolController

    controllers = ThreadpoolController().select(user_api="blas").lib_controllers
    return tuple(controllers)
