"""Runs on a cluster end once, whoever ends them."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import ray

import penstock as ps
from penstock.cluster.links import Link
from penstock.cluster.parts import RemotePart
from penstock.cluster.runs import ClusterRun, Runs, listen
from penstock.executors.control import NEVER, begin_run
from tests.cluster.test_cluster import answer, convnet, halves, images, reference
from tests.cluster.test_lost_workers import kill, on_workers
from tests.executors.frames.test_partitioned import endless
from tests.support.processes import stop
from tests.support.timing import SOON, wait_until


def test_run_that_is_cancelled_before_it_begins_is_not_sent(cluster):
    source = convnet(2)
    session = ps.compile(source, cluster=cluster, place=halves(source))
    answer(session, images())
    token, errors = ps.CancelToken(), []
    control = begin_run(None, token)
    runs: Runs = cluster._runs
    run = ClusterRun(
        session.inspect.executor._handle,
        session.inspect.executor.parts,
        [images()],
        control,
        lambda outputs, error: errors.append(error),
        0,
    )
    listen(runs, run)
    token.cancel()
    runs.begin(run)
    assert [type(error) for error in errors] == [ps.Cancelled]
    assert run.number == -1
    assert run not in runs._steps.values()


@pytest.mark.parametrize("moment", range(4))
def test_parts_that_end_at_the_same_time_all_give_their_outputs(moment):
    ended = []
    parts = [RemotePart(i, (), (i,), "a part", passive=False, silent=False) for i in range(2)]
    run = ClusterRun(0, parts, (), NEVER, lambda *end: ended.append(end), 0)
    runs = Runs()
    runs._steps[0], run.number = run, 0

    class Lock:
        """Lets the other part end behind one of its releases."""

        left = moment

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            self.left -= 1
            if self.left == -1:
                runs.take(1, ("done", 0, ("of 1",), None, {}, {}))

    lock = runs._lock = Lock()
    runs.take(0, ("done", 0, ("of 0",), None, {}, {}))
    if lock.left >= 0:  # there were fewer releases
        runs.take(1, ("done", 0, ("of 1",), None, {}, {}))
    assert ended == [(("of 0", "of 1"), None)]


def test_feed_that_ray_has_no_memory_for_is_an_error_of_its_run_alone(cluster, monkeypatch):
    source = convnet(2)
    session = ps.compile(source, cluster=cluster, place=halves(source))
    want = answer(session, images())
    with monkeypatch.context() as patched:

        def full(link, nbytes):
            raise MemoryError("no room")

        patched.setattr(Link, "_channel", full)
        futures = [session.submit({"x": images(2000)}) for _ in range(3)]
        for future in futures:
            with pytest.raises(ps.RunError, match=r"feed cannot be sent to worker 0.*no room"):
                future.result(SOON)
    np.testing.assert_array_equal(answer(session, images()), want)


def test_storm_of_deadlines_and_cancellations_leaves_nothing_behind(cluster):
    source, total = endless()
    session = ps.compile(on_workers(source), cluster=cluster)
    most = {"n": np.int32(2**31 - 1)}
    assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6
    errors: list[type] = []

    def client(number: int) -> None:
        for i in range(8):
            token = ps.CancelToken()
            timeout = (1 + number) * 1e-3 if i % 2 else None
            future = session.submit(most, [total], timeout=timeout, cancel=token)
            if timeout is None:
                token.cancel()
            errors.append(type(future.exception(SOON)))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(e.__name__ for e in errors) == ["Cancelled"] * 200 + ["DeadlineExceeded"] * 200

    def idle(worker):
        return not worker._steps and not worker._strand._jobs

    actors = [member.actor for member in cluster._members.members]
    wait_until(lambda: all(ray.get([actor.__ray_call__.remote(idle) for actor in actors])))
    assert not cluster._runs._steps
    assert not cluster._runs._held
    assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6


@pytest.mark.full
def test_cluster_that_many_threads_close_during_runs_ends_each_run_once(ray_started):
    source, total = endless()
    ended: list[type] = []
    with ps.Cluster(2, retries=3) as cluster:
        session = ps.compile(on_workers(source), cluster=cluster)
        assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6
        told = threading.Semaphore(0)

        def done(outputs, error):
            ended.append(type(error))
            told.release()

        for _ in range(10):
            session.run_async(done, {"n": np.int32(2**31 - 1)}, [total])
        kill(cluster, 0)
        threads = [threading.Thread(target=cluster.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert all(told.acquire(timeout=SOON) for _ in range(10))
    assert ended == [ps.WorkerLost] * 10


@pytest.mark.full
def test_deadline_ends_a_run_whose_parts_are_being_registered(ray_started):
    source = convnet(2)
    with ps.Cluster(2, worker_timeout=SOON) as cluster:
        cluster.start()
        session = ps.compile(source, cluster=cluster, place=halves(source))
        process = cluster.processes[1]
        stop(process)
        try:
            with pytest.raises(ps.DeadlineExceeded):
                session.run({"x": images()}, timeout=0.05)
        finally:
            os.kill(process, signal.SIGCONT)
        want = reference(source, images())
        np.testing.assert_allclose(answer(session, images()), want, rtol=1e-4, atol=1e-4)
        actors = [member.actor for member in cluster._members.members]

        def parts() -> list[int]:
            cluster._forget()
            look = [
                actor.__ray_call__.remote(lambda worker: len(worker._parts)) for actor in actors
            ]
            return ray.get(look)

        wait_until(lambda: parts() == [1, 1])  # those of the run that has ended are given up
        assert len(cluster._graphs) == 1
