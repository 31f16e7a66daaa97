"""Graphs with frames on the workers of a cluster: TensorFlow's recorded cases."""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.tensorflow.file import read_graph
from tests.support.random_frames import RandomGraph
from tests.support.sweeps import drawn
from tests.support.tf_cases import Case, cases, follow
from tests.support.timing import SOON


def on_workers(case: Case, cluster: ps.Cluster, worker_of, **options) -> ps.Session | None:
    """Run a case with each node on the worker, or device of a worker, that its device becomes."""
    graph = read_graph(case.path)
    for node in graph.node:
        node.device = f"/job:worker/task:{worker_of(node.device)}"
    compile = partial(ps.compile, graph.SerializeToString(), cluster=cluster, **options)
    return follow(case, compile, counted=False, traced=False)


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.startswith("dev_")], ids=lambda case: case.name
)
def test_corpus_with_a_worker_for_each_device_equals_tensorflow(case, cluster):
    session = on_workers(case, cluster, lambda device: int(device.endswith(":1")))
    assert session is not None
    assert max(len(executor.parts) for executor in session._plans.executors()) == 2


@pytest.mark.parametrize("case", drawn(list(cases()), 16), ids=lambda case: case.name)
def test_corpus_on_random_workers_equals_tensorflow(case, cluster):
    random = Random(case.name)
    on_workers(case, cluster, lambda device: random.randrange(2))


@pytest.mark.parametrize("seed", drawn(range(40), 4))
def test_random_graphs_on_two_workers_equal_one_device(seed, cluster):
    graph = RandomGraph(seed)
    whole = ps.compile(graph.placed(1, 0), "frames", ["numpy"])
    model = ps.load(graph.placed(2, seed))
    for node in model.graph.nodes:
        node.device = node.device.replace("/device:CPU:", "/job:worker/task:")
    parted = ps.compile(model, cluster=cluster, backends=["numpy"])
    for x in range(3):
        feeds = {"x": np.int32(x)}
        want = whole.run(feeds, graph.fetches, timeout=SOON)
        assert parted.run(feeds, graph.fetches, timeout=SOON) == want


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.startswith("dev_")], ids=lambda case: case.name
)
def test_corpus_with_all_devices_on_one_worker_equals_tensorflow(case, cluster):
    session = on_workers(case, cluster, lambda device: f"1{device[-13:]}", devices=2)
    assert session is not None
    assert max(len(executor.parts) for executor in session._plans.executors()) == 1


@pytest.mark.parametrize("case", drawn(list(cases()), 16), ids=lambda case: case.name)
def test_corpus_on_random_devices_of_workers_equals_tensorflow(case, cluster):
    random = Random(case.name)

    def chosen(_: str) -> str:
        return f"{random.randrange(2)}/device:CPU:{random.randrange(2)}"

    on_workers(case, cluster, chosen, devices=2)


@pytest.mark.parametrize("seed", drawn(range(40), 4))
def test_random_graphs_on_devices_of_two_workers_equal_one_device(seed, cluster):
    graph = RandomGraph(seed)
    whole = ps.compile(graph.placed(1, 0), "frames", ["numpy"])
    model = ps.load(graph.placed(4, seed))
    for node in [each for each in model.graph.nodes if each.device]:
        number = int(node.device[-1])
        node.device = f"/job:worker/task:{number % 2}/device:CPU:{number // 2}"
    backends = {"cpu:0": "numpy", "cpu:1": "native"}
    parted = ps.compile(model, cluster=cluster, devices=backends)
    for x in range(3):
        feeds = {"x": np.int32(x)}
        want = whole.run(feeds, graph.fetches, timeout=SOON)
        assert parted.run(feeds, graph.fetches, timeout=SOON) == want
