"""Where nodes and values are, as the kernels of a compilation say."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backends.base import Backend
from penstock.backends.kernels import KernelTable
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.transfer import (
    HOST,
    NO_OTHER_PLACES,
    REORDER,
    TRANSFER,
    OtherPlaces,
    Place,
    Ports,
)
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
        self.backends, self.kernels = backends, kernels
        self._of_name = {backend.name: (backend,) for backend in backends}

    def compiled(self, node: Node) -> tuple[Place, Kernel] | None:
        """As ``Placing.compiled``; for a copy between layouts without a place, the kernel of the
        backend in the host's memory that should be the fastest."""
        place, among = self.placement.get(node), self.backends
        if node.op is TRANSFER:
            return None
        if place is not None:
            among = self._of_name.get(place.backend, ())
        elif node.op is REORDER:
            hosts = [backend for backend in among if backend.memory == HOST]
            among = sorted(hosts, key=lambda backend: backend.seconds(node))
        for backend in among:
            kernel, error = self.kernels.answer(backend, node)
            if error is not None:  # the plan raises it, unless the node may never run
                return None
            if kernel is not None:
                return place or Place(backend.name, backend.memory), kernel
        return None

    def other_places(self, node: Node) -> OtherPlaces:
        """As ``Placing.other_places``, by ``DeviceWork`` of the kernel of a node."""
        place = self.placement.get(node)
        answer = None if place is None or place.memory == HOST else self.compiled(node)
        if answer is None:
            return NO_OTHER_PLACES
        work, count = answer[1].device, len(node.outputs)
        if work.backends_of_values:
            of_members = [Place(member.name, member.memory) for member in work.backends_of_values]
            inputs = dict(enumerate(of_members[: len(node.inputs)]))
            return OtherPlaces(inputs, dict(enumerate(of_members)))
        hosts = [backend.name for backend in self.backends if backend.memory == HOST]
        home = Place((*hosts, HOST)[0], HOST)
        results = dict.fromkeys(range(count if work.host_outputs else 0), home)
        return OtherPlaces(dict.fromkeys(work.host_inputs, home), results)
