"""The NumPy backend: the kernels registered with the operations, which define their meaning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from penstock.backends.base import HostBackend
from penstock.backends.costs import moved_bytes
from penstock.backends.numpy_rates import RATES
from penstock.core.types import Type
from penstock.ir.graph import Node
from penstock.ir.op import Kernel
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import flops


class NumpyBackend(HostBackend):
    """Every operation of the table, on the host."""

    name = "numpy"

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        return node.op.compile(node, types)

    def seconds(self, node: Node) -> float:
        return sum([self._of_part(part) for part in parts(node)])

    def _of_part(self, node: Node) -> float:
        """The estimate for a node that is not fused."""
        rates = RATES.get(node.op.name) or RATES[""]
        items = node.attrs.get("group", 1) - 1 if rates.item_s else 0
        return rates.seconds(moved_bytes(node), flops(node), items=items)

    @property
    def threads(self) -> int:
        return max((library.num_threads for library in _blas()), default=1)

    def set_threads(self, threads: int) -> None:
        for library in _blas():
            # From threadpoolctl 3.8 on, only the first thread to set OpenBLAS's number can set it,
            # until that thread is forgotten; calls of others are ignored silently.
            forget = getattr(library, "clear_controlling_thread", lambda *, force: None)
            forget(force=True)
            library.set_num_threads(threads)
            forget(force=True)


@cache
def _blas() -> tuple[Any, ...]:
    """The libraries of matrix products that NumPy has loaded: the part of NumPy with threads."""
    from threadpoolctl import ThreadpoolController

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)
