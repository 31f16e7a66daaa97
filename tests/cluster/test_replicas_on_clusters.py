"""Replicas that are workers of a cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest
import ray

import penstock as ps
from penstock.executors.control import CancelToken
from tests.cluster.test_cluster import convnet, images, reference
from tests.serving.test_protocol import check_every_datatype
from tests.serving.test_replicas import ROWS
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON, wait_until

sampled = True  # tests/support/sweeps.py: each test starts and ends clusters

LOOP = """g (float[N, 3] x, int64 most) => (float[N, 3] y) <bool go = {1}> {
    y = Loop(most, go, x) <body = b (int64 i, bool c, float[N, 3] h) => (bool d, float[N, 3] k)
        { d = Identity(c) k = Neg(h) }>
}"""


def row(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 3), value, np.float32)}


def turns(most: int) -> dict[str, np.ndarray]:
    return {**row(), "most": np.array(most)}


ENDLESS = turns(10**12)


def runs_of(cluster: ps.Cluster, monkeypatch) -> Counter:
    """Counts the answers of each worker."""
    counts: Counter = Counter()
    cluster.start()
    take = cluster._runs.take

    def counting(worker, message):
        if message[0] == "done":
            counts[worker] += 1
        take(worker, message)

    monkeypatch.setattr(cluster._runs, "take", counting)
    return counts


def test_replicas_on_workers_equal_onnxruntime_and_share_requests(cluster, monkeypatch):
    source = convnet()
    puts = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    with ps.Replicas(source, cluster=cluster) as replicas:
        counts = runs_of(cluster, monkeypatch)
        feeds = [images(1, seed) for seed in range(24)]
        futures = [replicas.submit({"x": x}) for x in feeds]
        for x, future in zip(feeds, futures, strict=True):
            (y,) = future.result(SOON).values()
            np.testing.assert_allclose(y, reference(source, x), rtol=1e-4, atol=1e-4)
        assert replicas.counts.succeeded == 24
    assert set(counts) == {0, 1}
    assert sum(counts.values()) == 24
    assert len(puts) == 1  # both workers read the same part


def test_server_on_workers_takes_and_gives_every_datatype(cluster, tmp_path):
    check_every_datatype(tmp_path, partial(ps.Replicas, cluster=cluster))


def test_requests_are_joined_on_workers(cluster, monkeypatch):
    with ps.Replicas(model_from_text(ROWS), cluster=cluster, max_batch=8, max_delay=60) as replicas:
        counts = runs_of(cluster, monkeypatch)
        futures = [replicas.submit(row(k)) for k in range(16)]
        for k, future in enumerate(futures):
            np.testing.assert_allclose(future.result(SOON)["y"], np.sin(row(k)["x"]), rtol=1e-6)
        assert replicas.counts.batches == 2
        assert sum(counts.values()) == 2


def test_full_queue_and_cancellation_reach_replicas_on_workers(cluster):
    token = CancelToken()
    with ps.Replicas(model_from_text(LOOP), cluster=cluster, queue=1) as replicas:
        futures = [replicas.submit(ENDLESS, cancel=token) for _ in range(4)]
        wait_until(lambda: replicas.counts.running == 4)
        late = replicas.submit(ENDLESS, timeout=0.05)
        with pytest.raises(ps.QueueFull, match="1 requests wait"):
            replicas.submit(ENDLESS)
        with pytest.raises(ps.DeadlineExceeded):
            late.result(SOON)
        token.cancel()
        for future in futures:
            with pytest.raises(ps.Cancelled):
                future.result(SOON)
        # Of the runs that a worker had, one had not begun when it was stopped: it never does.
        for _ in range(4):
            assert replicas.run(turns(3), timeout=SOON)["y"].tolist() == [[-1, -1, -1]]


def test_replicas_that_do_not_fit_the_cluster_are_refused(cluster):
    model = model_from_text(ROWS)
    with pytest.raises(ValueError, match="n=3 must be the number of workers, 2"):
        ps.Replicas(model, 3, cluster=cluster)
    with pytest.raises(TypeError, match=r"penstock\.Cluster"):
        ps.Replicas(model, cluster=3)
    with (
        ps.compile(model) as session,
        pytest.raises(TypeError, match="a session is already compiled"),
    ):
        ps.Replicas(session, cluster=cluster)


def test_replica_that_dies_is_replaced_and_the_others_go_on(ray_started):
    model = model_from_text(ROWS)
    with ps.Cluster(2, retries=5) as cluster, ps.Replicas(model, cluster=cluster) as replicas:
        answers: Counter = Counter()
        stop = threading.Event()

        def client(number: int) -> None:
            while not stop.is_set():
                y = replicas.submit(row(number)).result(SOON)["y"]
                np.testing.assert_allclose(y, np.sin(row(number)["x"]), rtol=1e-6)
                answers[number] += 1

        threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) == 8)
        old = cluster.processes
        os.kill(old[0], signal.SIGKILL)
        before = sum(answers.values())
        wait_until(lambda: cluster.processes[0] != old[0])
        wait_until(lambda: sum(answers.values()) > before + 100)
        stop.set()
        for thread in threads:
            thread.join(SOON)
        counts = replicas.counts
    assert cluster.processes[1] == old[1]
    assert counts.failed == 0
    assert counts.succeeded == sum(answers.values())


@pytest.mark.full
def test_requests_of_a_replica_that_dies_fail_without_retries(ray_started):
    token = CancelToken()
    with ps.Cluster(2) as cluster, ps.Replicas(model_from_text(LOOP), cluster=cluster) as many:
        for future in [many.submit(turns(1)) for _ in range(2)]:  # both get their parts
            future.result(SOON)
        futures = [many.submit(ENDLESS, cancel=token) for _ in range(2)]
        os.kill(cluster.processes[0], signal.SIGKILL)
        try:
            wait_until(lambda: any(future.done() for future in futures))
        finally:
            token.cancel()
        errors = {type(error): str(error) for error in [f.exception(SOON) for f in futures]}
    assert errors.keys() == {ps.WorkerLost, ps.Cancelled}
    assert "worker 0" in errors[ps.WorkerLost]
