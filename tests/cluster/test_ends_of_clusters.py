"""Clusters whose workers die while they start or compile, that are closed, or whose Ray ends; what
they leave behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import ray

import penstock as ps
from tests.cluster.test_cluster import answer, convnet, halves, images
from tests.support.sweeps import sweep
from tests.support.timing import SOON, wait_until

sampled = True  # tests/support/sweeps.py: each test starts and ends clusters


def test_closed_clusters_leave_neither_threads_nor_processes(ray_started):
    source = convnet(2)

    def left() -> set[str]:
        names = [thread.name for thread in threading.enumerate()]
        return {n for n in names if n.startswith(("penstock-cluster", "penstock-link"))}

    before = left()
    with ps.Cluster(2) as cluster:
        session = ps.compile(source, cluster=cluster, place=halves(source))
        for future in [session.submit({"x": images()}) for _ in range(20)]:
            future.result(SOON)
        processes = cluster.processes
        assert left() > before or before
    wait_until(lambda: left() <= before)
    wait_until(lambda: not any(map(_is_alive, processes)))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def program(text: str) -> str:
    """What a program prints that has a session ``s`` of a graph on two workers, fed ``x``."""
    start = """
import os, sys, time
import numpy as np, ray, penstock as ps
from penstock.build import GraphBuilder
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False,
         object_store_memory=100 << 20)
b = GraphBuilder()
h = b.input("x", np.float32, [4])
for i in range(2):
    with b.device(f"/job:worker/task:{i}"):
        h = b.op("Neg", h)
b.output("y", h)
cluster = ps.Cluster(2)
s = ps.compile(b.model(), cluster=cluster)
x = {"x": np.ones(4, np.float32)}
s.run(x)
def tried():
    try:
        print(s.run(x, timeout=60)["y"][0], flush=True)
    except ps.PenstockError as error:
        print(type(error).__name__, error, flush=True)
"""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    run = subprocess.run(
        [sys.executable, "-c", start + text],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.full  # Ray starts twice
def test_ray_that_is_shut_down_ends_runs_and_is_not_started_again():
    printed = program("ray.shutdown(); tried(); cluster.close(); print(ray.is_initialized())")
    assert printed == "WorkerLost Ray was shut down, and all workers with it\nFalse\n"


@pytest.mark.full
def test_ray_that_is_started_anew_is_not_that_of_workers_before():
    printed = program(
        """
from penstock.cluster.links import ray_identity
before = ray_identity()
ray.shutdown()
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
print(before == ray_identity())
tried()
cluster.close()
with ps.Cluster(2) as cluster:
    s = ps.compile(b.model(), cluster=cluster)
    tried()
"""
    )
    assert printed == "False\nWorkerLost Ray was shut down, and all workers with it\n1.0\n"


@pytest.mark.full
def test_forked_child_is_refused_and_leaves_its_parent_the_workers():
    printed = program(
        """
child = os.fork()
if not child:
    tried()
    cluster.close()
    try:
        ps.Cluster(1).start()
    except ps.PenstockError as error:
        print(error, flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
tried()
cluster.close()
"""
    )
    first, second, *rest = printed.splitlines()
    assert "WorkerLost the workers of this cluster belong to the process that forked" in first
    assert "multiprocessing's 'spawn'" in second
    assert rest == ["0", "1.0"]


@pytest.mark.parametrize("end", sweep(["sys.exit(0)", "del cluster, s", "cluster.close()"], 1))
def test_process_ends_with_runs_in_flight_and_takes_its_workers_with_it(end):
    printed = program(f"print(*cluster.processes); fs = [s.submit(x) for _ in range(30)]; {end}")
    processes = [int(process) for process in printed.split()]
    assert len(processes) == 2
    wait_until(lambda: not any(map(_is_alive, processes)))


def test_session_that_is_collected_gives_up_its_parts_from_any_thread(cluster):
    before = len(cluster._graphs)
    source = convnet(2)
    session = ps.compile(source, cluster=cluster, place=halves(source))
    answer(session, images())
    with cluster._lock:  # as a thread does that measures links, and waits for the one that collects
        session.close()
        del session
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join(SOON)
        assert not thread.is_alive()
    wait_until(lambda: len(cluster._graphs) <= before)


ADDRESS = """
import socket, sys
import penstock as ps
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
listener.close()  # nobody answers there
address = sys.argv[1].format(port=port)
try:
    ps.Cluster(1, address=address).start()
except ps.PenstockError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:{port}", "no Ray cluster answers at '127.0.0.1:"),
        ("nowhere.invalid:6379", "no Ray cluster answers at 'nowhere.invalid:6379'"),
        ("ray://127.0.0.1:{port}", "host:port"),
        ("nothing", "host:port"),
    ],
)
@pytest.mark.parametrize("way", sweep(["address", "RAY_ADDRESS"], 1))
def test_address_where_no_ray_is_is_refused(address, said, way):
    code, env = ADDRESS, {**os.environ}
    env.pop("RAY_ADDRESS", None)
    if way == "RAY_ADDRESS":
        code = code.replace(
            "ps.Cluster", "import os; os.environ['RAY_ADDRESS'] = address; ps.Cluster"
        )
        code = code.replace("(1, address=address)", "(1)")
    run = subprocess.run(
        [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=SOON, env=env
    )
    assert run.returncode == 0, run.stderr
    assert said in run.stdout


@pytest.mark.full
def test_address_of_another_ray_than_the_one_in_use_is_refused(ray_started):
    own = ray.get_runtime_context().gcs_address
    with ps.Cluster(1, address=own) as cluster:
        cluster.start()
    with pytest.raises(
        ps.PenstockError, match=r"already uses the Ray cluster at .*, and cannot use another"
    ):
        ps.Cluster(1, address="127.0.0.1:1").start()


@pytest.mark.full
def test_ray_that_is_shut_down_while_a_part_is_registered_ends_the_run():
    printed = program(
        """
import threading
from penstock.cluster import members
from tests.support.processes import stop
other = ps.compile(b.model(), cluster=cluster)
wait_for, waits = members.wait_for, threading.Event()
def waiting(*arguments, **options):
    if threading.current_thread() is thread:
        waits.set()
    return wait_for(*arguments, **options)
members.wait_for = waiting
stop(cluster.processes[0])
error = []
def register():
    try:
        other.run(x)
    except ps.PenstockError as raised:
        error.append(str(raised))
thread = threading.Thread(target=register)
thread.start()
waits.wait(60)  # in a call of Ray, the process would end
assert len(cluster._graphs) == 2
ray.shutdown()
thread.join(60)
print(error, thread.is_alive(), ray.is_initialized())
"""
    )
    assert printed == "['Ray was shut down, and all workers with it'] False False\n"
