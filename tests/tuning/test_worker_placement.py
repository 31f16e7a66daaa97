"""Placement on workers, by given costs."""

from __future__ import annotations

import pytest

from penstock.analysis.type_inference import infer_types
from penstock.ir.graph import Graph
from penstock.textual.parser import parse_graph
from penstock.tuning.worker_placement import LinkCost, SimulatedCluster, WorkerPlacement

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


def placement(text: str, workers: int = 2, seconds: float = 1.0, **given) -> WorkerPlacement:
    graph = graph_of(text)
    link = given.get("link", LinkCost(bandwidth=1e9, latency=0.01))
    names = given.get("pins", {})
    pins = {node: names[node.op.name] for node in graph.nodes if node.op.name in names}
    return WorkerPlacement(graph, workers, lambda node: seconds, link, pins)


def by_name(chosen: dict) -> dict[str, int]:
    return {node.op.name: worker for node, worker in chosen.items()}


def test_chain_becomes_a_pipeline_for_throughput():
    chosen = by_name(placement(CHAIN).best("throughput"))
    assert chosen == {"Exp": 0, "Neg": 0, "Abs": 1, "Sqrt": 1}


def test_chain_stays_on_one_worker_for_latency():
    assert set(by_name(placement(CHAIN).best("latency")).values()) == {0}


def test_branches_run_on_two_workers_for_latency():
    chosen = by_name(placement(BRANCHES).best("latency"))
    assert chosen["Exp"] != chosen["Neg"]


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_slow_links_keep_all_nodes_together(objective):
    slow = LinkCost(bandwidth=1.0, latency=100.0)
    for text in (CHAIN, BRANCHES):
        assert len(set(by_name(placement(text, link=slow).best(objective)).values())) == 1


def test_pinned_nodes_stay_where_they_are():
    chosen = by_name(placement(CHAIN, pins={"Exp": 1, "Sqrt": 0}).best("throughput"))
    assert chosen["Exp"] == 1
    assert chosen["Sqrt"] == 0


def test_simulated_run_counts_loads_traffic_and_makespan():
    simulated = placement(CHAIN, link=LinkCost(bandwidth=1000.0, latency=0.5)).simulated(
        [0, 0, 1, 1]
    )
    # One value of 250 floats takes 0.5 s and 1 s.
    assert simulated == SimulatedCluster(5.5, (3.5, 3.5), {(0, 1): 1000})
    assert simulated.interval == 3.5
    assert simulated.utilisation == 1.0
    assert simulated.bottleneck == 0


def test_value_goes_once_to_each_worker_that_reads_it():
    text = """graph g(x: float32[250]) -> (c) {
      a = Exp(x)
      b = Neg(a)
      c = Add(a, b)
    }"""
    assert placement(text).simulated([0, 1, 1]).traffic == {(0, 1): 1000}
