"""Clusters whose workers die while they start or compile, that are closed, or whose Ray ends; what
they leave behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import ray

import penstock as ps
from penstock.cluster.doorbell import BellAddress, Doorbell, connect
from penstock.cluster.links import Link
from penstock.cluster.members import Members
from penstock.cluster.runs import ClusterRun, Runs, listen
from penstock.executors.control import begin_run
from tests.cluster.test_cluster import answer, convnet, halves, images, reference
from tests.cluster.test_lost_workers import kill, lost, on_workers
from tests.executors.frames.test_partitioned import endless
from tests.support.processes import stop
from tests.support.sweeps import sweep
from tests.support.timing import SOON, wait_until


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
    with pytest.raises(ps.WorkerLost, match="does not reach another"):
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


def test_worker_answers_that_it_lives_while_it_compiles_many_parts(ray_started):
    with ps.Cluster(1, worker_timeout=1.0) as cluster:
        cluster.start()
        (member,) = cluster._members.members

        def wait(worker):
            return worker._closed.wait(SOON)

        calls = [member.actor.__ray_call__.remote(wait) for _ in range(8)]
        assert ray.get(member.actor.ping.remote(), timeout=SOON) == 0
        assert not ray.wait(calls, timeout=0)[0]


FAMILIES = [socket.AF_INET, *([socket.AF_UNIX] if sys.platform == "linux" else [])]


def address_of(bell: Doorbell, family: socket.AddressFamily) -> BellAddress:
    """The address of a doorbell as a writer has it that connects by sockets of a family."""
    there = bell.address._replace(name=b"of another machine")
    return bell.address if family is not socket.AF_INET else there


@pytest.mark.parametrize("family", FAMILIES)
def test_connection_of_a_writer_that_died_is_not_taken_for_the_next_one(family):
    bell = Doorbell("127.0.0.1")
    connect(address_of(bell, family), 1).close()
    writer = connect(address_of(bell, family), 2)
    reader = bell.accept(2)
    assert writer.family is reader.family is family
    writer.sendall(b"!")
    assert reader.recv(1) == b"!"
    for connection in (writer, reader):
        connection.close()
    bell.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_strangers_are_turned_away_from_doorbells(family):
    bell = Doorbell("127.0.0.1")
    stranger = connect(address_of(bell, family)._replace(token=bytes(16)), 1)
    writer = connect(address_of(bell, family), 1)
    reader = bell.accept(1)
    assert stranger.recv(1) == b""
    writer.sendall(b"!")
    assert reader.recv(1) == b"!"
    for connection in (stranger, writer, reader):
        connection.close()
    bell.close()


def test_doorbell_takes_connections_of_links_in_any_order_on_many_threads():
    bell = Doorbell("127.0.0.1")
    addresses = [address_of(bell, family) for family in FAMILIES]
    writers = [connect(addresses[i % len(addresses)], i) for i in range(8)]
    taken: dict[int, socket.socket] = {}
    threads = [
        threading.Thread(target=lambda i=i: taken.update({i: bell.accept(i)})) for i in range(8)
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(SOON)
    for i, writer in enumerate(writers):
        writer.sendall(bytes([i]))
        assert taken[i].recv(1) == bytes([i])
    for connection in (*writers, *taken.values()):
        connection.close()
    bell.close()


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
        ("127.0.0.1:{port}", "no Ray answers at '127.0.0.1:"),
        ("nowhere.invalid:6379", "no Ray answers at 'nowhere.invalid:6379'"),
        ("ray://127.0.0.1:{port}", "host:port"),
        ("nothing", "host:port"),
    ],
)
@pytest.mark.parametrize("way", ["address", "RAY_ADDRESS"])
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


def test_address_of_another_ray_than_the_one_in_use_is_refused(ray_started):
    own = ray.get_runtime_context().gcs_address
    with ps.Cluster(1, address=own) as cluster:
        cluster.start()
    with pytest.raises(ps.PenstockError, match=r"uses the Ray at .* already"):
        ps.Cluster(1, address="127.0.0.1:1").start()


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
