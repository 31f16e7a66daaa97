"""Workers that die or hang: no run is lost, none is answered twice."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Model
from tests.cluster.test_cluster import answer, convnet, halves, images
from tests.cluster.test_variables import counter
from tests.executors.frames.test_partitioned import endless
from tests.support.processes import stop
from tests.support.timing import SOON, wait_until

sampled = True  # tests/support/sweeps.py: each test starts and ends clusters


def kill(cluster: ps.Cluster, worker: int) -> None:
    os.kill(cluster.processes[worker], signal.SIGKILL)


def lost(cluster: ps.Cluster, process: int) -> None:
    """Wait until a process is replaced."""
    wait_until(lambda: process not in cluster.processes)


def on_workers(source: bytes) -> Model:
    model = ps.load(source)
    for node in model.graph.nodes:
        node.device = node.device.replace("/device:CPU:", "/job:worker/task:")
    return model


@pytest.mark.full
def test_runs_of_a_lost_worker_are_tried_again_and_end_once(ray_started):
    clients, each, kills = 20, 15, 3
    source = convnet(4)
    with ps.Cluster(2, retries=2 * kills) as cluster:
        session = ps.compile(source, cluster=cluster, place=halves(source))
        feeds = [images(1, seed) for seed in range(clients)]
        wanted = [answer(session, x) for x in feeds]
        ended: Counter = Counter()
        wrong: list = []

        def client(number: int) -> None:
            for i in range(each):
                told = threading.Event()

                def done(outputs, error, i=i, told=told):
                    ended[number, i] += 1
                    if error is not None:
                        wrong.append(error)
                    elif not np.array_equal(next(iter(outputs.values())), wanted[number]):
                        wrong.append(f"client {number}, run {i}")
                    told.set()

                session.run_async(done, {"x": feeds[number]})
                if not told.wait(SOON):
                    wrong.append("no answer")

        threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for i in range(kills):
            process = cluster.processes[i % 2]
            kill(cluster, i % 2)
            lost(cluster, process)
        for thread in threads:
            thread.join()
        assert wrong == []
        assert ended == {(c, i): 1 for c in range(clients) for i in range(each)}


def test_run_without_retries_names_the_lost_part_and_later_runs_go_on(ray_started):
    source, total = endless()
    with ps.Cluster(2) as cluster:
        model = on_workers(source)
        (negation,) = [node.name for node in model.graph.nodes if node.op.name == "Neg"]
        session = ps.compile(model, cluster=cluster)
        future = session.submit({"n": np.int32(2**31 - 1)}, [total])
        wait_until(lambda: cluster._runs is not None and cluster._runs._steps)
        kill(cluster, 1)
        with pytest.raises(
            ps.WorkerLost, match=rf"worker 1 \(.*task:1.*It ran the part.*{negation}"
        ):
            future.result(SOON)
        assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6


@pytest.mark.full
def test_lost_variables_are_declared_once(ray_started):
    with ps.Cluster(2, retries=5) as cluster:
        session = ps.compile(counter(0), cluster=cluster)
        session.run(targets=["init"], fetches=[], timeout=SOON)
        assert session.run(fetches=["read:0"], timeout=SOON)["read:0"] == 1
        process = cluster.processes[0]
        kill(cluster, 0)
        lost(cluster, process)
        with pytest.raises(ps.WorkerLost, match="variables 'v' are reset to their initial values"):
            session.run(fetches=["read:0"], timeout=SOON)
        session.run(targets=["init"], fetches=[], timeout=SOON)
        assert session.run(fetches=["read:0"], timeout=SOON)["read:0"] == 1


@pytest.mark.full
def test_variables_of_a_lost_worker_are_restored_from_a_checkpoint(ray_started, tmp_path):
    path = tmp_path / "v.safetensors"
    with ps.Cluster(2) as cluster:
        session = ps.compile(counter(0), cluster=cluster)
        session.variables["v"] = 4  # before any worker has it
        assert session.run(fetches=["read:0"], timeout=SOON)["read:0"] == 4
        session.variables["v"] = 40
        assert session.run(fetches=["read:0"], timeout=SOON)["read:0"] == 40
        session.variables.save(path)
        session.run(targets=["init"], fetches=[], timeout=SOON)
        assert session.variables["v"] == 1
        process = cluster.processes[0]
        kill(cluster, 0)
        lost(cluster, process)
        with pytest.raises(ps.WorkerLost, match=r"session\.variables\.restore"):
            session.run(fetches=["read:0"], timeout=SOON)
        session.variables.restore(path)
        assert session.run(fetches=["read:0"], timeout=SOON)["read:0"] == 40
        # Files of sessions without a cluster are the same.
        alone = ps.compile(counter(0))
        alone.variables.restore(path)
        assert alone.run(fetches=["read:0"])["read:0"] == 40


def test_worker_that_hangs_counts_as_dead(ray_started):
    source = convnet(2)
    with ps.Cluster(2, worker_timeout=1.0, retries=1) as cluster:
        session = ps.compile(source, cluster=cluster, place=halves(source))
        want = answer(session, images())
        process = cluster.processes[1]
        stop(process)
        np.testing.assert_array_equal(answer(session, images()), want)
        assert process not in cluster.processes


def test_deadline_ends_a_run_on_a_worker_that_hangs(ray_started):
    source = convnet(2)
    with ps.Cluster(2, worker_timeout=60.0) as cluster:
        session = ps.compile(source, cluster=cluster, place=halves(source))
        answer(session, images())
        process = cluster.processes[1]
        stop(process)
        try:
            for _ in range(5):
                with pytest.raises(ps.DeadlineExceeded):
                    session.run({"x": images()}, timeout=0.05)
        finally:
            os.kill(process, signal.SIGCONT)


@pytest.mark.parametrize("way", ["deadline", "token"])
def test_endless_loop_across_workers_can_be_stopped(cluster, way):
    import ray

    source, total = endless()
    session = ps.compile(on_workers(source), cluster=cluster)
    assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6  # compiled now
    token = ps.CancelToken()
    timeout = 0.05 if way == "deadline" else None
    future = session.submit({"n": np.int32(2**31 - 1)}, [total], timeout=timeout, cancel=token)
    if way == "token":
        wait_until(lambda: cluster._runs._steps)
        token.cancel()
    with pytest.raises(ps.DeadlineExceeded if way == "deadline" else ps.Cancelled):
        future.result(SOON)
    # The workers, too, have nothing to do any more.
    actors = [member.actor for member in cluster._members.members]
    wait_until(lambda: not any(ray.get([actor.ping.remote() for actor in actors])))
    assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6
