"""A single worker of a cluster as a cluster, for sessions whose graphs all run on it."""

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
    """The worker with this ``index`` of a ``cluster``, as a cluster of one worker."""

    workers = 1

    def __init__(self, cluster: WorkerPool, index: int) -> None:
        self._cluster = cluster
        self._device = cluster.devices[index]
        # The same name for all workers, so that equal parts have equal bytes.
        self.devices = (cluster.devices[0],)
        self.objective = cluster.objective
        self.cores: int | None = None
        self.costs: ProfileCosts | None = cluster.costs

    @property
    def link_cost(self) -> LinkCost:
        return self._cluster.link_cost

    def executor(self, parts: Sequence[GraphPart], graph: Graph, context: Any) -> Executor:
        """Register the single part of a graph with the worker, and return the executor."""
        moved = [
            GraphPart(self._device, p.graph, p.inputs, p.outputs, p.paths, p.originals)
            for p in parts
        ]
        return self._cluster.executor(moved, graph, context)

    def variables(self, model: Model, own: dict[Any, Any], limits: Limits) -> Any:
        """Return the variables of a session."""
        return self._cluster.variables(model, own, limits)
