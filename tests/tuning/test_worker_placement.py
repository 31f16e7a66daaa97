"""Placement on workers, by given costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.analysis.type_inference import infer_types
from penstock.ir.graph import Graph
from penstock.textual.parser import parse_graph
from penstock.tuning.worker_placement import DRIVER, ClusterForecast, LinkCost, WorkerPlacement

CHAIN = """graph g(x: float32[250]) -> (d) {
  a = Exp(x)
  b = Neg(a)
  c = Abs(b)
  d = Sqrt(c)
}"""
BRANCHES = """graph g(x: float32[250]) -> (d) {
  a = Exp(x)
  b = Neg(x)
  d = Add(a, b)
}"""


def graph_of(text: str) -> Graph:
    graph = parse_graph(text)
    infer_types(graph)
    return graph


def placement(text: str, workers: int = 2, seconds: float = 1.0, **other) -> WorkerPlacement:
    graph = graph_of(text)
    link = other.get("link", LinkCost(bandwidth=1e9, latency=0.01))
    names = other.get("pins", {})
    pins = {node: names[node.op.name] for node in graph.nodes if node.op.name in names}
    return WorkerPlacement(graph, workers, lambda node: seconds, link, pins, other.get("cores"))


def by_name(placed: WorkerPlacement, objective: str) -> dict[str, int]:
    chosen = placed.best(objective)
    return {node.op.name: i for node, i in zip(placed.graph.nodes, chosen, strict=True)}


def test_chain_becomes_a_pipeline_for_throughput():
    chosen = by_name(placement(CHAIN), "throughput")
    assert chosen == {"Exp": 0, "Neg": 0, "Abs": 1, "Sqrt": 1}


def test_chain_stays_on_one_worker_for_latency():
    assert set(by_name(placement(CHAIN), "latency").values()) == {0}


def test_branches_run_on_two_workers_for_latency():
    chosen = by_name(placement(BRANCHES), "latency")
    assert chosen["Exp"] != chosen["Neg"]


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_slow_links_keep_all_nodes_together(objective):
    slow = LinkCost(bandwidth=1.0, latency=100.0)
    for text in (CHAIN, BRANCHES):
        assert len(set(by_name(placement(text, link=slow), objective).values())) == 1


def test_pinned_nodes_stay_where_they_are():
    chosen = by_name(placement(CHAIN, pins={"Exp": 1, "Sqrt": 0}), "throughput")
    assert chosen["Exp"] == 1
    assert chosen["Sqrt"] == 0


def test_simulated_run_counts_loads_traffic_and_makespan():
    link = LinkCost(bandwidth=1000.0, latency=0.5)
    simulated = placement(CHAIN, link=link).simulated([0, 0, 1, 1])
    # A value of 250 floats takes 0.5 s and 1 s: the feed, what lies between, and the output.
    traffic = {(DRIVER, 0): 1000, (0, 1): 1000, (1, DRIVER): 1000}
    assert simulated == ClusterForecast(8.5, (5.0, 5.0), (2.0, 2.0), (2, 2), traffic, 3.0)
    assert simulated.interval == 5.0
    assert simulated.utilization == 1.0
    assert simulated.bottleneck == 0
    assert simulated.used == 2


def test_simulated_branches_overlap():
    link = LinkCost(bandwidth=1000.0, latency=0.0)
    one, two = (placement(BRANCHES, link=link).simulated(w) for w in ([0, 0, 0], [0, 1, 0]))
    # Fed for 1 s, then three nodes; or two beside each other, and 1 s between them.
    assert (one.makespan, two.makespan) == (5.0, 5.0)
    assert (one.loads, two.loads) == ((5.0, 0.0), (5.0, 3.0))
    assert (one.utilization, two.utilization) == (1.0, 0.8)


def test_value_goes_once_to_each_worker_that_reads_it():
    text = """graph g(x: float32[250]) -> (c) {
      a = Exp(x)
      b = Neg(a)
      c = Add(a, b)
    }"""
    assert placement(text).simulated([0, 1, 1]).traffic[0, 1] == 1000


def second_by_second(
    seconds: list[int], reads: list[list[int]], workers: list[int], hop: int
) -> tuple[int, list[int]]:
    """The makespan and the loads of a run of nodes that pass one value each, by a clock that ticks:
    each tick, a worker that is idle takes its first node whose values are there. Node 0 is fed; the
    last one gives the output."""
    n = len(seconds)
    ends: dict[int, int] = {}
    loads = [0] * (max(workers) + 1)

    def there(i: int, worker: int) -> int:
        """When the value of a node is on a worker; never before it has begun."""
        return ends.get(i, 10**9) + (hop if workers[i] != worker else 0)

    free = [0] * len(loads)
    now = 0
    while len(ends) < n:
        for worker in range(len(loads)):
            waiting = [i for i in range(n) if workers[i] == worker and i not in ends]
            for i in waiting if free[worker] <= now else ():
                if max([there(j, worker) for j in reads[i]], default=hop) <= now:
                    ends[i] = free[worker] = now + seconds[i]
                    break
        now += 1
    loads[workers[0]] += hop
    loads[workers[-1]] += hop
    for i, worker in enumerate(workers):
        loads[worker] += seconds[i]
        for target in {workers[j] for j in range(n) if i in reads[j]} - {worker}:
            loads[worker] += hop
            loads[target] += hop
    return max(max(ends.values()), ends[n - 1] + hop), loads


@given(st.data())
def test_simulated_run_equals_a_simulation_by_a_clock(data):
    n = data.draw(st.integers(1, 12))
    workers = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    costs = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    reads = [[]] + [
        sorted(data.draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2)))
        for i in range(1, n)
    ]
    lines = [
        f"v{i} = {'Add' if len(before) == 2 else 'Neg'}({', '.join([f'v{j}' for j in before]) or 'x'})"
        for i, before in enumerate(reads)
    ]
    body = "\n  ".join(lines)
    graph = graph_of(f"graph g(x: float32[250]) -> (v{n - 1}) {{\n  {body}\n}}")
    seconds = dict(zip(graph.nodes, map(float, costs), strict=True))
    link = LinkCost(bandwidth=1000.0, latency=1.0)
    simulated = WorkerPlacement(graph, 4, seconds.__getitem__, link, {}).simulated(workers)
    makespan, loads = second_by_second(costs, reads, workers, 2)
    assert simulated.makespan == makespan
    assert [load for load in simulated.loads if load] == [load for load in loads if load]
    assert sum(simulated.computing) == sum(costs)


def test_workers_beyond_those_that_can_be_busy_are_left_idle():
    for objective in ("latency", "throughput"):
        chosen = placement(BRANCHES, workers=1000).best(objective)
        assert max(chosen) < 6


def test_runs_take_the_work_of_all_workers_over_the_cores_that_they_share():
    link = LinkCost(bandwidth=1000.0, latency=1.0)  # 2 s for each value of 1,000 bytes
    apart = placement(BRANCHES, workers=3, seconds=4.0, link=link).simulated([0, 1, 2])
    together = placement(BRANCHES, workers=3, seconds=4.0, link=link, cores=2)
    shared = together.simulated([0, 1, 2])
    assert shared.loads == apart.loads == (8.0, 8.0, 10.0)
    assert shared.driving == 6.0
    assert apart.interval == 10.0
    assert shared.interval == (8.0 + 8.0 + 10.0 + 6.0) / 2


def test_run_waits_for_a_core_that_another_worker_has():
    link = LinkCost(bandwidth=1e9, latency=1.0)
    for cores, makespan in ((None, 1 + 4 + 1 + 4 + 1), (2, 11), (1, 15)):
        run = placement(BRANCHES, workers=3, seconds=4.0, link=link, cores=cores)
        assert run.simulated([0, 1, 2]).makespan == pytest.approx(makespan, rel=1e-5)


def test_workers_beyond_the_cores_that_they_share_are_left_idle():
    link = LinkCost(bandwidth=1e9, latency=0.1)
    alone = placement(CHAIN, workers=4, link=link)
    assert len(set(alone.best("throughput"))) == 4
    shared = placement(CHAIN, workers=4, link=link, cores=2)
    assert len(set(shared.best("throughput"))) == 2
