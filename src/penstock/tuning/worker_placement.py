"""Placement of the nodes of a graph on workers that have no memory in common.

Two placements are tried, and the better one is taken: that of HEFT, where each worker is a backend
of its own (``algorithms.heft``), and a pipeline of consecutive nodes
(``algorithms.pipeline_cuts``). Which is better is decided by a simulation (``simulated``)::

    load of a worker      its nodes, and what it takes to send and receive values
    throughput            runs per second of many in flight: 1 / the largest load
    latency               the makespan of one run

A value goes once to each worker that reads it, as ``partition`` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import place
from penstock.algorithms.pipeline_cuts import pipeline_cuts
from penstock.algorithms.records import dataclass
from penstock.analysis.frames import GraphPart
from penstock.executors.base import Executor
from penstock.ir.graph import Graph, Node, Value, all_reads, dependencies
from penstock.types import TensorType

# A placement on more workers must be better by this fraction.
_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a message from one worker to another takes: ``latency`` seconds, and its bytes over the
    ``bandwidth`` in bytes per second."""

    bandwidth: float
    latency: float

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


class WorkerPool(Protocol):
    """What compiling needs of a cluster (``penstock.Cluster``)."""

    workers: int
    objective: str
    devices: tuple[str, ...]

    @property
    def link_cost(self) -> LinkCost:
        """What messages between workers take."""

    def executor(self, parts: Sequence[GraphPart], graph: Graph, context: Any) -> Executor:
        """Register the parts of a graph with the workers that they name."""


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """The simulated run of a graph on workers. ``makespan``: seconds of one run; ``loads``: the
    seconds that each worker is busy with one run, the largest of which bounds the throughput;
    ``traffic``: the bytes between each two workers."""

    makespan: float
    loads: tuple[float, ...]
    traffic: Mapping[tuple[int, int], int]

    @property
    def bottleneck(self) -> int:
        """The worker with the largest load."""
        return max(range(len(self.loads)), key=self.loads.__getitem__)

    @property
    def interval(self) -> float:
        """Seconds between the ends of two runs, if many are in flight."""
        return max(self.loads, default=0.0)

    @property
    def utilisation(self) -> float:
        """The part of their time that the workers which are used are busy, if many runs are in
        flight."""
        used = [load for load in self.loads if load]
        return sum(used) / (len(used) * self.interval) if used else 0.0


class WorkerPlacement:
    """Places the nodes of a sorted ``graph`` without frames on as many ``workers``; ``seconds`` is
    the cost of a node, ``link`` that of a message, ``pins`` has the workers that are given."""

    def __init__(
        self,
        graph: Graph,
        workers: int,
        seconds: Callable[[Node], float],
        link: LinkCost,
        pins: Mapping[Node, int],
    ) -> None:
        self._graph = graph
        self._workers = workers
        self._link = link
        self._pins = pins
        self._cost = [seconds(node) for node in graph.nodes]
        *_, (_, edges) = dependencies(graph)
        self._dag = Dag(len(graph.nodes), edges)
        index = {node: i for i, node in enumerate(graph.nodes)}
        # The values that a node reads of another one, by their producers.
        self._reads: list[dict[int, list[Value]]] = [{} for _ in graph.nodes]
        for j, node in enumerate(graph.nodes):
            for value in dict.fromkeys(all_reads(node)):
                if value.producer in index:
                    self._reads[j].setdefault(index[value.producer], []).append(value)

    def best(self, objective: str) -> dict[Node, int]:
        """The worker of each node, for the least ``"latency"`` or the highest ``"throughput"``."""
        chosen: list[int] | None = None
        least: Any = None
        for workers in self._candidates():
            simulated = self.simulated(workers)
            score = simulated.makespan if objective == "latency" else simulated.interval
            if least is None or score < least * (1 - _GAIN):
                chosen, least = workers, score
        assert chosen is not None
        return dict(zip(self._graph.nodes, chosen, strict=True))

    def _candidates(self) -> list[list[int]]:
        """Placements: all on one worker, a pipeline, that of HEFT."""
        nodes, workers = self._graph.nodes, self._workers
        pinned = {self._pins[node] for node in nodes if node in self._pins}
        candidates = []
        if len(pinned) <= 1:
            candidates.append([next(iter(pinned), 0)] * len(nodes))
        if not pinned:
            candidates.append(self._pipeline())
        rows: list[list[float | None]] = []
        for node, cost in zip(nodes, self._cost, strict=True):
            pin = self._pins.get(node)
            rows.append([cost if pin in (None, w) else None for w in range(workers)])
        candidates.append(list(place(self._dag, rows, self._transfer).backend) if nodes else [])
        return candidates

    def _transfer(self, i: int, j: int, source: int, target: int) -> float:
        return self._link.seconds(sum(map(_nbytes, self._reads[j].get(i, ()))))

    def _pipeline(self) -> list[int]:
        """Consecutive nodes on each worker."""
        n = len(self._graph.nodes)
        last = list(range(n))  # the last reader of each node's values
        for i, after in enumerate(self._dag.succ):
            last[i] = max((i, *after))
        crossing = [0.0] * (n + 2)
        read = {value for reads in self._reads for values in reads.values() for value in values}
        for i, node in enumerate(self._graph.nodes):
            values = [v for v in node.outputs if v is not None and v in read]
            seconds = self._link.seconds(sum(map(_nbytes, values))) if values else 0.0
            if last[i] > i:
                crossing[i + 1] += seconds
                crossing[last[i] + 1] -= seconds
        for i in range(1, n):
            crossing[i] += crossing[i - 1]
        cuts = pipeline_cuts(self._cost, crossing[:n], self._workers)
        return _stages(cuts, n)

    def simulated(self, workers: Sequence[int]) -> SimulatedCluster:
        """One run with each node on the worker that is given: nodes of a worker run in the order of
        the graph, each when its values have come."""
        loads = [0.0] * self._workers
        free = [0.0] * self._workers
        arrival: dict[tuple[int, int], float] = {}
        traffic: dict[tuple[int, int], int] = {}
        finish = [0.0] * len(workers)
        targets: list[dict[int, dict[Value, None]]] = [{} for _ in workers]
        for j, reads in enumerate(self._reads):
            for i, values in reads.items():
                if workers[i] != workers[j]:
                    targets[i].setdefault(workers[j], {}).update(dict.fromkeys(values))
        for j, worker in enumerate(workers):
            before = [
                finish[i] if workers[i] == worker else arrival.get((i, worker), finish[i])
                for i in self._dag.pred[j]
            ]
            finish[j] = max([free[worker], *before]) + self._cost[j]
            loads[worker] += self._cost[j]
            free[worker] = finish[j]
            for target, sent in targets[j].items():
                nbytes = sum(map(_nbytes, sent))
                seconds = self._link.seconds(nbytes)
                arrival[j, target] = finish[j] + seconds
                loads[worker] += seconds
                loads[target] += seconds
                traffic[worker, target] = traffic.get((worker, target), 0) + nbytes
        return SimulatedCluster(max(finish, default=0.0), tuple(loads), traffic)


def _stages(cuts: Sequence[int], n: int) -> list[int]:
    """The stage of each of n nodes."""
    stages, stage = [], 0
    for i in range(n):
        if stage < len(cuts) and cuts[stage] == i:
            stage += 1
        stages.append(stage)
    return stages


def _nbytes(value: Value) -> int:
    """The bytes of a value, as far as they are known."""
    type_ = value.type
    return type_.nbytes if isinstance(type_, TensorType) and type_.static else 0
