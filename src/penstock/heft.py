"""Where and when nodes run: placement on backends that have several workers each, and simulation.

``place`` decides, ``simulate`` tells what a decision takes when the costs turn out otherwise, or
what n workers would take, and ``bound`` what no decision can beat.

Times are in seconds, or in any other unit that costs and transfers share. A node runs on one worker
of one backend from start to finish, and a worker runs one node at a time. Workers of one backend
are alike. A transfer delays the node that waits for it, keeps no worker busy, and is made per edge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import fsum, inf, sqrt

from penstock.dag import Dag
from penstock.order import critical_path, topological_order

# cost[i][b]: what node i takes on backend b; None where b does not support it.
Costs = Sequence[Sequence[float | None]]
# transfer(i, j, b1, b2): what the edge i -> j takes, when i is placed on b1 and j on b2.
Transfer = Callable[[int, int, int, int], float]

# When ``place`` ends its rounds: this close to the bound, after gaining no more than this in one,
# or at a count. A round costs two passes over the graph; few graphs gain from a second one.
_CLOSE = 1e-3
_ROUNDS = 4

# Idle times of a worker that stand in one block; see _Idle.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Node i runs on ``worker[i]`` of ``backend[i]`` from ``start[i]`` to ``finish[i]``.

    Workers are counted within their backend, from 0. Times count from the start of the run;
    ``makespan`` is the last finish, 0.0 for an empty graph.
    """

    backend: tuple[int, ...]
    worker: tuple[int, ...]
    start: tuple[float, ...]
    finish: tuple[float, ...]
    makespan: float


def place(
    dag: Dag,
    cost: Costs,
    transfer: Transfer | None = None,
    workers: Sequence[int] | None = None,
) -> Placement:
    """A backend, a worker and times for every node, such that the makespan is low; deterministic.

    ``cost[i][b]`` is what node i takes on backend b, or None if b does not support it, which then
    never gets it. ``transfer(i, j, b1, b2)`` is what the edge i -> j takes from backend b1 to
    another backend b2; within one backend it is free, and without ``transfer`` always.
    ``workers[b]`` is the number of workers of backend b, 1 each if not given.

    The placement is the best of those that ``heft`` makes from the whole table of costs, from each
    backend that supports all nodes, from the cheapest backend of each node, and from that of
    ``place_serial``, and so is never worse than running everything on one backend, or one node at a
    time as ``place_serial`` does. Each is improved: by counting nodes whose backends differ as more
    urgent (the rank of onert, the runtime of Samsung's ONE), by list scheduling where there is only
    one backend, and by scheduling backward and forward again (Li and Willis 1992, "An iterative
    scheduling technique for resource-constrained project scheduling").

    The problem is NP-hard. On random graphs of at least 200 nodes, one backend with 2, 4 or 8
    workers and random costs, the makespan is 1.02 times ``bound`` in the mean. The exceptions are
    graphs that join all their branches again and again, with hardly more branches than workers:
    there, what no placement can beat is itself up to 1.5 times the bound.

    Nearly linear in nodes and edges, times the number of workers.

    Raises:
        ValueError: no backend supports a node; ``cost`` does not have one row per node, with one
            entry per backend; a cost or transfer is negative or not finite; a backend has less
            than one worker.
    """
    problem = _problem(dag, cost, transfer, workers)
    best: Placement | None = None
    for variant in _variants(problem):
        # What one that cannot win would come to does not matter.
        lowest = _bound(dag, variant)
        if best is None or lowest < best.makespan:
            placement = _improved(dag, variant, lowest)
            if best is None or placement.makespan < best.makespan:
                best = placement
    assert best is not None
    return best


def heft(
    dag: Dag,
    cost: Costs,
    transfer: Transfer | None = None,
    workers: Sequence[int] | None = None,
) -> Placement:
    """Heterogeneous Earliest Finish Time as published: one pass, no comparison; deterministic.

    Nodes by descending ``upward_ranks``, each to the backend and worker where it finishes first,
    if possible in an idle time between nodes placed before. Of workers on which it finishes at the
    same time it takes the one that has been idle for the shortest time, of these the first.

    Topcuoglu, Hariri and Wu 2002, "Performance-effective and low-complexity task scheduling for
    heterogeneous computing". Arguments and errors as for ``place``.
    """
    problem = _problem(dag, cost, transfer, workers)
    return _insert(problem, topological_order(dag, _ranks(problem))).placement(problem)


def upward_ranks(
    dag: Dag, cost: Costs, transfer: Transfer | None = None, spread: float = 0.0
) -> list[float]:
    """For each node the mean cost of the longest chain that begins with it, transfers included.

    The mean of a node is over the backends that support it, that of a transfer over the pairs of
    different backends that support its ends. ``spread`` times the standard deviation of a node's
    costs is added to their mean: what a node loses on the wrong backend makes it urgent.

    Arguments and errors as for ``place``.
    """
    return _ranks(_problem(dag, cost, transfer, None), spread)


def place_serial(dag: Dag, cost: Costs, transfer: Transfer | None = None) -> Placement:
    """A backend for every node, for one run of one node at a time; deterministic.

    Times are those of such a run: a node starts when the one before it, and then all transfers that
    it waits for, one after the other, are done. Each backend has one worker.

    The problem is a minimum cut with many terminals, NP-hard from three backends on. This takes the
    backend that is the cheapest for each node together with the transfers to its neighbours, until
    no node gains by another (iterated conditional modes, Besag 1986), from several starts.

    Arguments and errors as for ``place``.
    """
    problem = _problem(dag, cost, transfer, None)
    backend = _serial_backends(problem)
    start, finish = [0.0] * dag.n, [0.0] * dag.n
    now = 0.0
    for j in problem.order:
        start[j] = now + fsum(t[backend[i]][backend[j]] for i, t in problem.arrivals(j))
        now = finish[j] = start[j] + dict(problem.options[j])[backend[j]]
    return Placement(tuple(backend), (0,) * dag.n, tuple(start), tuple(finish), now)


def simulate(
    dag: Dag, cost: Costs, schedule: Placement | int, transfer: Transfer | None = None
) -> float:
    """The makespan of ``schedule`` with these costs.

    A placement is replayed: each worker runs its nodes in the order of their starts, each as soon
    as the nodes and transfers that it waits for are done. With the costs and transfers that it was
    placed with, that takes ``schedule.makespan``; with lower ones never more, with others, such as
    measured ones, whatever it takes. Only the costs of the chosen backends are read.

    A number stands for that many workers which are all alike, each as good as the best backend at
    every node. They run what is ready, that with the longest chain of nodes to follow first (list
    scheduling, Graham 1966); transfers are not asked for.

    Raises:
        ValueError: as for ``place``; the placement is not one of this graph, uses a backend that
            does not support the node, or has starts that contradict the graph, so that the run
            would wait for ever; the number of workers is less than one.
    """
    if isinstance(schedule, int):
        _expect_workers([schedule])
        return _list_schedule(_uniform(dag, cheapest(dag, cost), schedule)).makespan
    lines = timelines(dag, schedule)
    options = []
    for i, row in enumerate(_expect_rows(dag, cost)):
        b = schedule.backend[i]
        if not 0 <= b < len(row) or row[b] is None:
            raise ValueError(f"node {i} is placed on backend {b}, which does not support it")
        options.append([option for option in _options(i, row) if option[0] == b])
    n_backends = max(schedule.backend, default=-1) + 1
    problem = _problem_of(dag, options, [1] * n_backends, transfer)
    return _replay(problem, schedule.backend, lines.values())[2]


def bound(dag: Dag, cost: Costs, workers: int | Sequence[int] = 1) -> float:
    """What no placement can beat: the critical path, or an equal share of the work if that is more.

    Each node counts with what it costs on its best backend, transfers are left out, and ``workers``
    counts those of all backends. Up to rounding. Errors as for ``place``.
    """
    counts = [workers] if isinstance(workers, int) else workers
    _expect_workers(counts)
    return _bound_of(dag, cheapest(dag, cost), sum(counts))


def cheapest(dag: Dag, cost: Costs) -> list[float]:
    """What each node costs on its best backend. Errors as for ``place``."""
    return [min(c for _, c in _options(i, row)) for i, row in enumerate(_expect_rows(dag, cost))]


def timelines(dag: Dag, placement: Placement) -> dict[tuple[int, int], list[int]]:
    """What each worker, named as (backend, worker), runs, in the order in which it does.

    Nodes that take no time come before a longer one that starts with them, and in topological
    order. Workers that run nothing are left out.

    Raises:
        ValueError: the placement is not one of this graph.
    """
    if {dag.n} != {len(placement.backend), len(placement.worker), len(placement.start)}:
        raise ValueError(f"a placement of {len(placement.backend)} nodes for {dag.n} nodes")
    schedule = _Schedule(placement.backend, placement.worker, placement.start, placement.finish)
    return schedule.timelines(topological_order(dag))


# Problems


# A node's backends, each with what it costs there; never empty.
_Options = list[tuple[int, float]]
# What an edge costs from the first backend to the second.
_Table = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is to be placed. Mirrored, the same with time running backward."""

    succ: Sequence[Sequence[int]]
    pred: Sequence[Sequence[int]]
    order: list[int]  # a topological one
    options: list[_Options]
    workers: Sequence[int]
    # Tables parallel to pred and succ; None where all transfers are free.
    arriving: list[list[_Table]] | None
    leaving: list[list[_Table]] | None
