"""Placements replayed with other costs: the reference for what a placement takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum

from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import Costs, Delivery, Transfer, WorkerSchedule
from penstock.algorithms.ordering import topological_order


def timelines(dag: Dag, placement: WorkerSchedule) -> dict[tuple[int, int], list[int]]:
    """The nodes of each worker, named as (backend, worker), in the order in which it runs them.

    Nodes that take no time come before others that start with them, and in topological order.
    """
    start, finish = placement.start, placement.finish
    lines: dict[tuple[int, int], list[int]] = {}
    for i in sorted(topological_order(dag), key=lambda i: (finish[i], start[i])):
        lines.setdefault((placement.backend[i], placement.worker[i]), []).append(i)
    return lines


def replay_makespan(
    dag: Dag, cost: Costs, placement: WorkerSchedule, transfer: Transfer | None = None
) -> float:
    """The makespan of ``placement`` with these costs and transfers.

    Each worker runs its nodes in their order, each as soon as the nodes and transfers that it waits
    for are done.
    """
    backend = placement.backend
    follows = {j: i for line in timelines(dag, placement).values() for i, j in pairwise(line)}
    edges = [*dag.edges, *((i, j) for j, i in follows.items())]
    finish = [0.0] * dag.n
    for j in topological_order(Dag(dag.n, edges)):
        arrivals = [
            finish[i]
            + (
                transfer(i, j, backend[i], backend[j])
                if transfer and backend[i] != backend[j]
                else 0.0
            )
            for i in dag.pred[j]
        ]
        if j in follows:
            arrivals.append(finish[follows[j]])
        own = cost[j][backend[j]]
        assert own is not None
        finish[j] = max(arrivals, default=0.0) + own
    return max(finish, default=0.0)


def serial_time(
    dag: Dag, cost: Costs, backend: Sequence[int], transfer: Delivery | None = None
) -> float:
    """The time to run one node at a time: all costs, and all transfers, each of which copies the
    results of a node to another backend for all its successors there."""
    times = []
    for i, a in enumerate(backend):
        own = cost[i][a]
        assert own is not None
        times.append(own)
        others = {b for j in dag.succ[i] if (b := backend[j]) != a}
        times += [transfer(i, a, b) for b in others] if transfer else []
    return fsum(times)
