"""What a plan would take on a machine with some number of workers, by a simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.algorithms.heft import bound, place
from penstock.algorithms.ordering import critical_path
from penstock.plan.grouping import ClusteredGrouping, Seconds
from penstock.plan.plan import Plan
from penstock.plan.tasks import dependencies


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds: ``serial`` on one worker, ``makespan`` on ``workers``, ``critical_path`` of the
    longest chain of steps; no schedule beats ``bound``, max(critical path, serial / workers). What
    handing over costs, and that cores share memory, is left out."""

    workers: int
    serial: float
    makespan: float
    critical_path: float
    bound: float


def forecast(plan: Plan, seconds: Seconds, workers: int) -> Forecast:
    """Simulate the steps of ``plan``, of which an If or a loop is one, on so many workers.

    ``seconds(step)`` is what a step with a kernel takes. Raises ``ValueError`` for no workers.
    """
    if workers < 1:
        raise ValueError(f"a machine with {workers} workers cannot run anything")
    whole = ClusteredGrouping(plan, seconds, 1)
    dag = dependencies(plan.slots, plan.steps)
    single = [whole.seconds(step) for step in plan.steps]
    cost = [[each] for each in single]
    return Forecast(
        workers,
        sum(single),
        place(dag, cost, workers=[workers]).makespan,
        critical_path(dag, single),
        bound(dag, cost, workers),
    )
