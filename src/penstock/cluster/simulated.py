"""``penstock.SimulatedCluster``: a cluster of any size without processes, for forecasts of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.core.errors import Unsupported, check_choice, check_count, wrong_type
from penstock.core.limits import Limits
from penstock.ir.graph import Graph, GraphPart, Model
from penstock.tuning.profile_costs import ProfileCosts
from penstock.tuning.worker_placement import OBJECTIVES, LinkCost

MOST_WORKERS = 10_000


class SimulatedCluster:
    """Simulated workers: ``penstock.compile(model, cluster=SimulatedCluster(1000,
    bandwidth=10e9, latency=50e-6)).forecast_on_cluster()`` predicts the times of runs on them.

    Nodes are placed as on ``penstock.Cluster``. Raises ``InvalidInput`` for a file that is not a
    profile.

    Args:
        workers: The number of workers, each with one thread.
        bandwidth: Bytes per second of a message between two workers.
        latency: Seconds that a message takes in addition.
        objective: What placements minimize, "throughput" or "latency", as for ``Cluster``.
        profile: A file with the seconds of nodes, from ``penstock profile --json`` or
            ``Profile.save``; by default the cost table.
        cores: The number of cores that all workers share, on one machine; by default each has its
            own.
    """

    def __init__(
        self,
        workers: int,
        *,
        bandwidth: float,
        latency: float,
        objective: str = "throughput",
        profile: str | Path | None = None,
        cores: int | None = None,
    ) -> None:
        check_workers(workers, cores)
        check_rates(objective, bandwidth=bandwidth, latency=latency)
        self.workers = workers
        self.objective = objective
        self.cores = cores
        self.link_cost = LinkCost(bandwidth, latency)
        self.devices = worker_devices(workers)
        self.costs = None if profile is None else ProfileCosts.read(profile)

    def executor(self, parts: Sequence[GraphPart], graph: Graph, context: Any) -> NoReturn:
        """Raises ``Unsupported``."""
        raise _no_workers()

    def variables(self, model: Model, own: dict[Any, Any], limits: Limits) -> NoReturn:
        """Raises ``Unsupported``."""
        raise _no_workers()


def _no_workers() -> Unsupported:
    reason = "no workers can run it; forecast_on_cluster() predicts the times of runs"
    return Unsupported.of([("a simulated cluster", reason, "cluster=")])


def worker_devices(workers: int) -> tuple[str, ...]:
    """Return the full names of the devices of workers."""
    return tuple([f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(workers)])


def check_workers(workers: int, cores: int | None) -> None:
    """Raise ``ValueError`` or ``TypeError`` for invalid numbers of workers or cores."""
    check_count("workers", workers, MOST_WORKERS)
    if cores is not None:
        check_count("cores", cores)


def check_rates(objective: str, **rates: float | None) -> None:
    """Raise ``ValueError`` for an unknown objective, and for rates that are not above 0;
    ``TypeError`` for values of other types."""
    check_choice("objective", objective, OBJECTIVES)
    for name, value in rates.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise wrong_type(name, value, "a number")
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r}: a number above 0 is needed")
