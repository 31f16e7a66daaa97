"""Members of a cluster: workers that die, and are replaced."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import ray

import penstock as ps
from penstock.cluster.members import Members
from tests.cluster.test_cluster import answer, convnet, halves, images, reference
from tests.cluster.test_lost_workers import kill, lost
from tests.support.processes import stop
from tests.support.timing import SOON

sampled = True  # tests/support/sweeps.py: each test starts and ends clusters


@pytest.mark.full
def test_worker_that_dies_before_it_compiles_a_part_is_replaced(ray_started):
    source = convnet(2)
    x = images()
    with ps.Cluster(2) as cluster:
        cluster.start()
        kill(cluster, 1)
        session = ps.compile(source, cluster=cluster, place=halves(source))
        np.testing.assert_allclose(answer(session, x), reference(source, x), rtol=1e-4, atol=1e-4)
        assert len(cluster._graphs) == 1


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), TimeoutError("late")])
def test_worker_that_does_not_reach_another_one_tells_of_a_lost_worker(ray_started, error):
    """Ray may not have noticed yet that the other one is dead; the call is repeated when it has."""
    call = ray.remote(num_cpus=0)(fail).remote(error)
    with pytest.raises(ps.WorkerLost, match="cannot reach another"):
        Members.result(None, call)


def test_worker_that_dies_while_it_compiles_a_part_gets_it_again(ray_started, monkeypatch):
    source = convnet(2)
    x = images()
    with ps.Cluster(2) as cluster:
        register, killed = cluster._register, []

        def killing(handle, registered, worker, timeout):
            if not killed:
                killed.append(cluster.processes[worker])
                stop(killed[0])  # it can never answer
                threading.Timer(0.01, os.kill, (killed[0], signal.SIGKILL)).start()
            register(handle, registered, worker, timeout)

        monkeypatch.setattr(cluster, "_register", killing)
        session = ps.compile(source, cluster=cluster, place=halves(source))
        np.testing.assert_allclose(answer(session, x), reference(source, x), rtol=1e-4, atol=1e-4)
        assert killed[0] not in cluster.processes


@pytest.mark.full
def test_graph_that_no_worker_can_compile_is_forgotten_and_does_not_stop_recovery(
    ray_started, monkeypatch
):
    source = convnet(2)
    with ps.Cluster(2, retries=5) as cluster:
        session = ps.compile(source, cluster=cluster, place=halves(source))
        want = answer(session, images())
        other = ps.compile(convnet(3), cluster=cluster, place=halves(convnet(3)))
        put = ray.put
        broken = np.zeros(64, np.uint8)
        with monkeypatch.context() as patched:
            patched.setattr(ray, "put", lambda value: put(broken))
            with pytest.raises(ps.PenstockError):
                answer(other, images())
        process = cluster.processes[0]
        kill(cluster, 0)
        lost(cluster, process)
        np.testing.assert_array_equal(answer(session, images()), want)
        cluster._forget()
        assert len(cluster._graphs) == 1


@pytest.mark.full
def test_worker_answers_that_it_lives_while_it_compiles_many_parts(ray_started):
    with ps.Cluster(1, worker_timeout=1.0) as cluster:
        cluster.start()
        (member,) = cluster._members.members

        def wait(worker):
            return worker._closed.wait(SOON)

        calls = [member.actor.__ray_call__.remote(wait) for _ in range(8)]
        assert ray.get(member.actor.ping.remote(), timeout=SOON) == 0
        assert not ray.wait(calls, timeout=0)[0]
