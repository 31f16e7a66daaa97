"""Where nodes and values are, as the kernels of a compilation say."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backends.base import Backend
from penstock.backends.kernels import KernelTable, other_places, placed_kernels
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.transfer import OtherPlaces, Place, Ports
from penstock.passes.context import Placing


class KernelPlacing(Placing):
    """The ``placement`` of nodes on ``backends``, whose ``kernels`` say where values are, and in
    which layouts."""

    plans_layouts = True

    def __init__(
        self,
        backends: Sequence[Backend],
        kernels: KernelTable,
        placement: dict[Node, Place] | None = None,
        ports: Ports | None = None,
    ) -> None:
        super().__init__(placement, ports)
        self._compiled = placed_kernels(kernels, backends, self.placement)
        self._other_places = other_places(kernels, backends, self.placement)

    def compiled(self, node: Node) -> tuple[Place, Kernel] | None:
        return self._compiled(node)

    def other_places(self, node: Node) -> OtherPlaces:
        return self._other_places(node)
