"""Threads, deadlines and cancellation: what the process shares, and what a fork leaves of it."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import penstock as ps
from penstock.executors.control import WATCHDOG
from penstock.host import threads
from penstock.host.threads import OVERHEADS, Workers, pool
from tests.support.futures import run_on
from tests.support.long_loop import feeds, loop
from tests.support.processes import end_of, in_child
from tests.support.timing import SOON, slow, wait_until

# The core budget.


def test_core_budget_is_least_of_affinity_quota_and_openmp(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "_quota", lambda: None)

    def budget(openmp: str | None, quota: int | None = None) -> int:
        monkeypatch.setattr(threads, "_quota", lambda: quota)
        if openmp is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", openmp)
        threads.usable_cores.cache_clear()
        return threads.core_budget.__wrapped__()

    assert budget(None) == 8
    assert budget("3") == 3
    assert budget("5,2") == 5
    assert budget("16") == 8
    assert budget("") == budget("many") == budget("0") == 8
    assert budget("6", quota=2) == 2
    assert budget(None, quota=0) == 1
    # What others may use is no matter of OpenMP.
    assert budget("1", quota=3) == 1
    assert threads.usable_cores() == 3
    threads.usable_cores.cache_clear()


# Workers.


@pytest.fixture
def workers() -> Iterator[Workers]:
    created = Workers("test", 2)
    yield created
    created.close()


@pytest.fixture
def closed() -> Iterator[threading.Event]:
    """What ``busy`` jobs wait for; set at the end in any case, so that a failed test ends too."""
    gate = threading.Event()
    yield gate
    gate.set()


def busy(workers: Workers, gate: threading.Event, n: int = 1) -> None:
    """Let ``n`` jobs run until the gate is opened."""
    begun = threading.Semaphore(0)

    def job() -> None:
        begun.release()
        assert gate.wait(60)

    for _ in range(n):
        workers.submit(job)
    for _ in range(n):
        assert begun.acquire(timeout=60)


def finished(workers: Workers) -> None:
    """Return when all jobs are done and all threads idle."""
    wait_until(lambda: workers._free == workers.threads)


def failing_silently(monkeypatch) -> list[type[BaseException]]:
    """Where ``threading.excepthook`` puts the types of what it is called with."""
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    return reported


def test_jobs_run_in_order_of_submission():
    workers, order = Workers("test", 1), []
    for i in range(1000):
        workers.submit(partial(order.append, i))
    workers.close()
    assert order == list(range(1000))


def test_pool_starts_thread_when_none_is_idle(workers, closed):
    assert workers.threads == 0
    for _ in range(3):
        workers.submit(lambda: None)
        finished(workers)
        assert workers.threads == 1
    busy(workers, closed, 2)
    assert workers.threads == 2


def test_pool_never_exceeds_its_size(workers, closed):
    busy(workers, closed, 2)
    done = threading.Semaphore(0)
    for _ in range(100):
        workers.submit(done.release)
    assert workers.threads == 2
    assert not done.acquire(blocking=False)
    closed.set()
    for _ in range(100):
        assert done.acquire(timeout=60)
    assert workers.threads == 2


def test_offer_to_busy_pool_is_refused(workers, closed):
    done = threading.Semaphore(0)
    busy(workers, closed, 1)
    assert workers.offer(done.release)  # by a second thread
    assert done.acquire(timeout=60)
    finished_one = threading.Event()
    wait_until(lambda: workers.offer(finished_one.set))
    assert finished_one.wait(60)
    assert workers.threads == 2
    wait_until(lambda: workers.offer(lambda: closed.wait(60)))
    assert not workers.offer(done.release)
    closed.set()
    finished(workers)
    assert workers.offer(done.release)
    assert done.acquire(timeout=60)
    assert not done.acquire(blocking=False), "what was refused never runs"


def test_offer_is_refused_while_jobs_are_queued(workers, closed):
    busy(workers, closed, 2)
    queued = threading.Event()
    workers.submit(queued.set)
    assert not workers.offer(lambda: None)
    closed.set()
    assert queued.wait(60)


def finishing_until(closed: threading.Event, workers: Workers) -> None:
    """Let a worker run a job that has said that it is about to return."""
    said = threading.Event()

    def job() -> None:
        workers.finishing()
        said.set()
        assert closed.wait(60)

    workers.submit(job)
    assert said.wait(60)


def test_offer_is_taken_while_a_job_that_has_said_so_returns(closed):
    workers, ran = Workers("test", 1), threading.Event()
    finishing_until(closed, workers)
    assert workers.offer(ran.set)
    assert not workers.offer(ran.clear)  # for which there is no worker
    closed.set()
    assert ran.wait(60)
    wait_until(lambda: workers._free == 1)  # each worker counts once
    workers.close()
    assert not any(thread.is_alive() for thread in workers._threads)


def test_pool_that_is_closed_while_a_job_returns_ends_its_threads(closed):
    workers = Workers("test", 2)
    finishing_until(closed, workers)
    closing = threading.Thread(target=workers.close)
    closing.start()
    wait_until(lambda: workers._closing)
    closed.set()
    closing.join(60)
    assert not any(thread.is_alive() for thread in workers._threads)


def test_concurrent_offers_are_taken_once_per_worker(closed):
    workers, taken = Workers("test", 3), threading.Semaphore(0)

    def job() -> None:
        taken.release()
        assert closed.wait(60)

    with ThreadPoolExecutor(8) as others:
        accepted = list(others.map(lambda _: workers.offer(job), range(200)))
    assert sum(accepted) == 3 == workers.threads
    closed.set()
    workers.close()
    assert [taken.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]


def test_jobs_submitted_by_many_threads_all_run():
    workers, done = Workers("test", 4), []
    with ThreadPoolExecutor(8) as others:
        for i in range(8):
            others.submit(
                lambda i=i: [workers.submit(partial(done.append, (i, k))) for k in range(500)]
            )
    workers.close()
    assert sorted(done) == [(i, k) for i in range(8) for k in range(500)]
    assert workers.threads <= 4


def test_jobs_can_submit_and_offer_jobs(workers):
    done = threading.Semaphore(0)

    def job(depth: int) -> None:
        done.release()
        if depth and not workers.offer(partial(job, depth - 1)):
            workers.submit(partial(job, depth - 1))

    job(1000)
    for _ in range(1001):
        assert done.acquire(timeout=60)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_failing_job_does_not_end_its_worker(workers, monkeypatch, error):
    reported = failing_silently(monkeypatch)

    def job() -> None:
        raise error

    for _ in range(5):
        workers.submit(job)
        finished(workers)
    assert reported == [error] * 5
    assert workers.threads == 1


def test_failing_excepthook_does_not_end_worker(workers, monkeypatch):
    def fail(*arguments: object) -> None:
        raise ValueError

    monkeypatch.setattr(threading, "excepthook", fail)
    workers.submit(fail)
    finished(workers)
    assert workers.threads == 1
    assert workers.offer(lambda: None)


def test_idle_worker_keeps_no_reference_to_its_last_job(workers):
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)
    workers.submit(partial(id, large))
    del large
    finished(workers)
    assert gone() is None


def test_idle_workers_use_no_processor_time():
    workers = Workers("test", 4)
    everybody = threading.Barrier(5)
    for _ in range(4):
        workers.submit(lambda: everybody.wait(60))
    everybody.wait(60)
    finished(workers)
    before = time.process_time()
    slow(0.3)  # which the workers must spend blocked
    assert time.process_time() - before < 0.05
    workers.close()


def test_pool_without_threads_is_refused():
    with pytest.raises(ValueError, match="a pool of 0 threads"):
        Workers("test", 0)


def test_growing_pool_starts_queued_jobs(closed):
    workers, done = Workers("test", 1), threading.Event()
    busy(workers, closed)
    workers.submit(done.set)
    assert not workers.offer(done.set)
    workers.grow(1)
    assert not done.is_set()
    workers.grow(3)
    assert done.wait(60)
    assert (workers.size, workers.threads) == (3, 2)
    workers.grow(2)
    assert workers.size == 3
    closed.set()
    workers.close()


def test_jobs_wait_when_no_thread_can_be_started(workers, closed, monkeypatch):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        assert not workers.offer(lambda: None)
        with pytest.raises(RuntimeError, match="no thread for the pool 'test'"):
            workers.submit(lambda: None)
    busy(workers, closed)
    done = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        assert not workers.offer(lambda: None)
        workers.submit(done.set)
    assert workers.threads == 1
    closed.set()
    assert done.wait(60)


def test_closed_pool_finishes_jobs_and_refuses_others(closed):
    workers, order, refused = Workers("test", 1), [], []
    closing = threading.Event()

    def job() -> None:
        assert closing.wait(60)
        order.append(workers.offer(lambda: None))  # this is the only thread
        workers.submit(lambda: order.append("last"))

    busy(workers, closed)
    workers.submit(job)
    closer = threading.Thread(target=workers.close)
    closer.start()
    wait_until(lambda: workers._closing)
    closing.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the pool 'test' is closed"):
            workers.submit(partial(refused.append, True))
        assert not workers.offer(partial(refused.append, True))
        closed.set()
        closer.join(60)
    assert order == [False, "last"]
    assert not refused
    workers.close()


def test_pool_that_started_no_thread_can_be_closed():
    workers = Workers("test", 1)
    workers.close()
    assert not workers.offer(lambda: None)


# The pools of the process.


def test_pools_of_one_name_are_one(monkeypatch):
    monkeypatch.setattr(threads, "_POOLS", {})
    assert pool() is pool("host")
    assert pool().size == threads.core_budget()
    device = pool("device", 3)
    assert pool("device", 2) is pool("device") is device is not pool()
    assert device.size == max(3, threads.core_budget())
    assert pool("device", 99).size == 99
    assert device.threads == 0


def test_concurrent_requests_get_the_same_pool(monkeypatch):
    monkeypatch.setattr(threads, "_POOLS", {})
    together = threading.Barrier(8)

    def ask(_: int) -> Workers:
        together.wait(60)
        return pool("device", 2)

    with ThreadPoolExecutor(8) as others:
        assert len(set(others.map(ask, range(8)))) == 1


def test_host_pool_has_as_many_threads_as_the_budget():
    # Runs of a higher priority have started more, perhaps, which stay.
    most = max(pool().threads, threads.core_budget())
    session = loop()
    futures = [session.submit(feeds(3)) for _ in range(50)]
    assert all(future.result()["y"][0] == 8 for future in futures)
    named = [thread for thread in threading.enumerate() if thread.name.startswith("penstock-host")]
    assert len(named) == pool().threads <= most


# Futures.


def test_a_future_has_the_result(workers):
    assert run_on(workers, divmod, 7, 3).result(60) == (2, 1)
    assert run_on(workers, dict, a=1).result(60) == {"a": 1}


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_future_has_the_error(workers, monkeypatch, error):
    reported = failing_silently(monkeypatch)

    def fail() -> None:
        raise error

    assert run_on(workers, fail).exception(60) is error
    assert not reported


def test_a_future_that_is_cancelled_never_runs(workers, closed):
    busy(workers, closed, 2)
    ran: list[int] = []
    future = run_on(workers, ran.append, 1)
    assert future.cancel()
    closed.set()
    finished(workers)
    assert future.cancelled()
    assert not ran


def test_a_future_that_runs_cannot_be_cancelled(workers, closed):
    begun = threading.Event()
    future = run_on(workers, lambda: (begun.set(), closed.wait(60)))
    assert begun.wait(60)
    assert future.running()
    assert not future.cancel()
    closed.set()
    assert future.result(60) == (None, True)


def test_error_of_future_forms_no_reference_cycle(workers):
    def fail() -> None:
        raise ValueError

    gc.disable()
    try:
        future = run_on(workers, fail)
        assert isinstance(future.exception(60), ValueError)
        finished(workers)
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()


# The end of the process.


def test_ending_process_finishes_submitted_jobs():
    # The first job runs, the others are queued, when the main thread is done.
    program = """
import atexit, sys, threading
from penstock.host.threads import Workers, pool
from tests.support.futures import run_on
write = sys.stdout.write  # one call for all: those of threads at once do not mix
gate = threading.Event()
atexit.register(gate.set)  # what was registered last is called first
workers = Workers("test", 1)
workers.submit(lambda: gate.wait(60))
for i in range(5):
    workers.submit(lambda i=i: write(f"{i} "))
future = run_on(pool(), lambda: (gate.wait(60), write("future ")))
"""
    assert sorted(end_of(program).split()) == ["0", "1", "2", "3", "4", "future"]


def test_jobs_can_use_backend_pools_while_process_ends():
    program = """
import atexit, threading
from penstock.host.threads import pool
from tests.support.futures import run_on
device = pool("device", 1)
device.submit(lambda: None)
gate = threading.Event()
def job():
    gate.wait(60)
    print(run_on(device, lambda: "done").result(60))
pool().submit(job)
atexit.register(gate.set)
"""
    assert end_of(program).split() == ["done"]


def test_ended_process_refuses_jobs():
    program = """
import atexit
def late():
    try:
        pool().submit(print)
    except RuntimeError as error:
        print(error)
    print(pool().offer(print))
atexit.register(late)  # what was registered first is called last
from penstock.host.threads import pool
pool().submit(lambda: None)
"""
    assert end_of(program).splitlines() == [
        "the pool 'host' is closed and takes no more jobs",
        "False",
    ]


def test_idle_workers_do_not_keep_process_alive():
    program = "from penstock.host.threads import pool; pool().submit(print); pool('device', 2)"
    assert end_of(program) == "\n"


# Forks.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_runs_with_its_own_threads():
    session = loop()
    session.submit(feeds(1)).result()
    session.run(feeds(1), timeout=60)
    token = ps.CancelToken()
    endless = session.submit(feeds(2**62), cancel=token, timeout=120)

    def job() -> None:
        assert session.submit(feeds(1)).result(60)["y"][0] == 2
        with pytest.raises(ps.DeadlineExceeded):
            session.run(feeds(2**62), timeout=0.05)
        assert not WATCHDOG.runs

    assert in_child(job)
    token.cancel()
    with pytest.raises(ps.Cancelled):
        endless.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_pools_without_threads_and_jobs(closed):
    workers, ran = Workers("test", 1), []
    busy(workers, closed)
    workers.submit(lambda: ran.append("queued"))

    def job() -> None:
        assert workers.threads == 0
        done = threading.Event()
        assert workers.offer(done.set)
        assert done.wait(60)
        assert pool().offer(lambda: None)
        workers.close()
        assert not ran
        assert not workers.offer(lambda: None)

    assert in_child(job)
    assert workers.threads == 1
    closed.set()
    workers.close()
    assert ran == ["queued"]


@pytest.mark.costly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_during_submit_is_safe(closed):
    """Whatever the parent's threads held at that moment, the child does not wait for it."""
    workers = Workers("test", 2)

    def submit() -> None:
        while not closed.is_set():
            workers.offer(lambda: None)

    def job() -> None:
        assert run_on(workers, lambda: 1).result(60) == 1

    others = [threading.Thread(target=submit) for _ in range(2)]
    for other in others:
        other.start()
    assert all(in_child(job) for _ in range(20))
    closed.set()
    for other in others:
        other.join()
    workers.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_job_can_fork(workers):
    ran: list[str] = []
    queued = threading.Event()

    def job() -> bool:
        assert queued.wait(60)
        return in_child(lambda: run_on(pool(), ran.append, "child").result(60))

    future = run_on(workers, job)
    workers.submit(lambda: ran.append("parent"))
    queued.set()
    assert future.result(60)
    finished(workers)
    assert ran == ["parent"]


def test_overheads_are_in_order_of_their_size():
    assert 0 < OVERHEADS.python_s < OVERHEADS.dispatch_s < OVERHEADS.hand_over_s
    assert OVERHEADS.hand_over_s < OVERHEADS.worth_s < OVERHEADS.long_s


# Lines by priority.


def test_job_that_waits_for_the_program_gives_its_place_to_another(workers):
    gates, inside, begun = [threading.Event() for _ in range(6)], [], threading.Semaphore(0)

    def job(gate: threading.Event) -> None:
        with threads.waiting_for_program():
            begun.release()
            assert gate.wait(60)
        inside.append(workers.threads)

    for gate in gates:
        workers.submit(partial(job, gate))
    for _ in gates:
        assert begun.acquire(timeout=60)
    assert run_on(workers, lambda: 7).result(60) == 7
    for gate in gates:
        gate.set()
    wait_until(lambda: len(inside) == len(gates) and workers.threads == workers.size)
    finished(workers)
    # As before: of three jobs, two run.
    closed = threading.Event()
    busy(workers, closed, 2)
    assert not workers.offer(lambda: None)
    closed.set()


def test_pool_is_closed_while_jobs_wait_for_the_program():
    workers, gate, waits = Workers("waits", 1), threading.Event(), threading.Semaphore(0)

    def job() -> None:
        with threads.waiting_for_program():
            waits.release()
            assert gate.wait(60)

    for _ in range(3):
        workers.submit(job)
    for _ in range(3):
        assert waits.acquire(timeout=60)
    workers.close(wait=False)
    gate.set()
    workers.close()
    assert not any(thread.is_alive() for thread in workers._threads)


def test_line_serves_higher_priorities_first_and_then_in_order():
    line = threads.Line[str]()
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)):
        line.append(name, priority)
    line.append("f", 0, front=True)
    assert len(line) == 6 and line.first == "b"
    assert list(line) == ["b", "d", "f", "a", "c", "e"]
    line.remove("a")
    with pytest.raises(ValueError, match="does not wait"):
        line.remove("a")
    assert [line.popleft() for _ in range(5)] == ["b", "d", "f", "c", "e"]
    with pytest.raises(IndexError):
        line.popleft()
    with pytest.raises(IndexError):
        line.first  # noqa: B018


def test_line_serves_lower_priorities_one_time_in_eight():
    line = threads.Line[int]()
    for i in range(100):
        line.append(i, 1)
        line.append(1000 + i, 0)
    taken = [line.popleft() for _ in range(40)]
    assert [i for i, item in enumerate(taken) if item >= 1000] == [7, 15, 23, 31, 39]
    assert [item for item in taken if item >= 1000] == [1000, 1001, 1002, 1003, 1004]


def test_line_serves_each_of_several_priorities():
    line = threads.Line[int]()
    for _ in range(100):
        for priority in (0, 3, 5):
            line.append(priority, priority)
    taken = [line.popleft() for _ in range(90)]
    assert taken[:10] == [5] * 7 + [3, 0, 5]
    assert [taken.count(priority) for priority in (5, 3, 0)] == [70, 10, 10]
    for _ in range(100):
        line.append(7, 7)
    assert line.popleft() == 7


def test_job_of_a_higher_priority_starts_beside_those_of_a_lower(workers):
    held, started = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        started.release()
        held.wait(SOON)

    for _ in range(workers.size):
        workers.submit(hold)
    for _ in range(workers.size):
        assert started.acquire(timeout=SOON)
    order: list[str] = []
    workers.submit(lambda: order.append("low"))
    done = threading.Event()
    workers.submit(done.set, priority=1)
    assert done.wait(SOON)
    assert workers.threads <= 2 * workers.size
    held.set()
    wait_until(lambda: order == ["low"])
