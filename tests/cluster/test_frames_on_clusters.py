"""Graphs with frames on the workers of a cluster: TensorFlow's recorded cases."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

import penstock as ps
from penstock.frontends.tensorflow.file import read_graph
from tests.support.sweeps import sweep
from tests.support.tf_cases import Case, cases, follow


def on_workers(case: Case, cluster: ps.Cluster, worker_of) -> ps.Session | None:
    graph = read_graph(case.path)
    for node in graph.node:
        node.device = f"/job:worker/task:{worker_of(node.device)}"
    compile = partial(ps.compile, graph.SerializeToString(), cluster=cluster)
    return follow(case, compile, counted=False, traced=False)


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.startswith("dev_")], ids=lambda case: case.name
)
def test_corpus_with_a_worker_for_each_device_equals_tensorflow(case, cluster):
    session = on_workers(case, cluster, lambda device: int(device.endswith(":1")))
    assert session is not None
    assert max(len(executor.parts) for executor in session._plans.executors()) == 2


@pytest.mark.parametrize("case", sweep(list(cases()), 40), ids=lambda case: case.name)
def test_corpus_on_random_workers_equals_tensorflow(case, cluster):
    random = Random(case.name)
    on_workers(case, cluster, lambda device: random.randrange(2))
