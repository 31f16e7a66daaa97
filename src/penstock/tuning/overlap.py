"""Frames that are worth keeping, since nodes or iterations may run at the same time in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from penstock.algorithms.dag import on_cycles
from penstock.backends.base import Backend
from penstock.host.threads import OVERHEADS
from penstock.ir.contract import contract_of
from penstock.ir.graph import Node
from penstock.passes.context import FramePolicy
from penstock.tuning.measure import CostModel, CostSource


class OverlapPolicy(FramePolicy):
    """Raises frames, but for those in which nodes are worth running at the same time, on ``hosts``
    with this many ``workers``. ``long``: nodes, by name, that have taken long in runs."""

    def __init__(
        self, hosts: Sequence[Backend], costs: CostModel, workers: int, long: Collection[str]
    ) -> None:
        super().__init__()
        self._hosts = hosts
        self._costs = costs
        self._workers = workers
        self._long = long

    def must_stay(self, nodes: Sequence[Node], loop: bool) -> Node | None:
        """The node of a frame for which it is worth that iterations overlap, if they may: one that
        does not wait for itself in the iteration before."""
        readers: list[list[int]] = [[] for _ in nodes]
        place = {node: i for i, node in enumerate(nodes)}
        for node, i in place.items():
            sources = [value.producer for value in node.inputs if value is not None]
            for source in (*sources, *node.control_inputs):
                if source in place:
                    readers[place[source]].append(i)
        circular = set(on_cycles(readers)) if loop else place.values()
        return next((n for n in nodes if place[n] not in circular and self._overlaps(n)), None)

    def _overlaps(self, node: Node) -> bool:
        """Whether the kernel of a node is asynchronous, or takes long as measured, or else by its
        backend's estimate. Those of Penstock are not, and share their work among threads where it
        is much."""
        types = [None if value is None else value.type for value in node.inputs]
        for backend in self._hosts:
            if contract_of(node, backend) is None:
                continue
            try:
                kernel = backend.kernel(node, types)
                cost = self._costs.cost(node, backend, 1)
                measured = cost.source is CostSource.MEASURED
                seconds = cost.seconds if measured else backend.seconds(node)
            except Exception:  # the plan raises it, unless the node may never run
                return False
            if kernel is not None:
                solo = self._workers == 1 or backend.threads_of_caller
                long = node.name in self._long or OVERHEADS.long_s <= seconds < inf
                return kernel.begin is not None or (long and not solo)
        return False
