"""One worker of a cluster as a cluster of its own, for sessions all of whose graphs run there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.limits import Limits
from penstock.ir.graph import Graph, GraphPart, Model

if TYPE_CHECKING:
    from penstock.executors.base import Executor
    from penstock.tuning.profile_costs import ProfileCosts
    from penstock.tuning.worker_placement import LinkCost, WorkerPool


class OneWorker:
    """The worker of a ``cluster`` with this ``index``."""

    workers = 1

    def __init__(self, cluster: WorkerPool, index: int) -> None:
        self._cluster = cluster
        self._device = cluster.devices[index]
        # The same name on all workers, so that parts that are the same have the same bytes.
        self.devices = (cluster.devices[0],)
        self.objective = cluster.objective
        self.cores: int | None = None
        self.costs: ProfileCosts | None = cluster.costs

    @property
    def link_cost(self) -> LinkCost:
        return self._cluster.link_cost

    def executor(self, parts: Sequence[GraphPart], graph: Graph, context: Any) -> Executor:
        """Register the one part of a graph."""
        moved = [
            GraphPart(self._device, p.graph, p.inputs, p.outputs, p.paths, p.originals)
            for p in parts
        ]
        return self._cluster.executor(moved, graph, context)

    def variables(self, model: Model, own: dict[Any, Any], limits: Limits) -> Any:
        """The variables of a session."""
        return self._cluster.variables(model, own, limits)
