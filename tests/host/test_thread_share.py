"""The threads of kernels, divided among concurrent runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.host import thread_share
from penstock.host.native import library
from penstock.host.thread_share import ThreadShare
from penstock.ir.kernel import Binder, Kernel
from tests.support.onnx_text import compile_text
from tests.support.processes import in_child
from tests.support.timing import SOON


class Counting(NumpyBackend):
    """A backend that remembers how many threads it was set to."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__()
        self.name = name
        self._now = threads
        self.sets: list[int] = []

    @property
    def threads(self):
        return self._now

    def set_threads(self, threads):
        self._now = threads
        self.sets.append(threads)


class OfCaller(Counting):
    """One whose number of threads is a setting of each thread."""

    threads_of_caller = True

    def __init__(self, name: str = "own") -> None:
        super().__init__(name, 8)
        self.here = threading.local()

    def set_threads(self, threads):
        self.here.threads = threads
        self.sets.append(threads)


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(thread_share._process, "settings", {})
    assert not thread_share._process.running
    yield
    assert not thread_share._process.running


def test_thread_share_of_sequential_runs_is_all_threads():
    backend = Counting("counting", 4)
    with ThreadShare([backend]):
        assert backend.threads == 4
    assert not backend.sets


def test_thread_share_of_a_parallel_run_is_one_thread_per_kernel():
    backend = Counting("counting", 4)
    with ThreadShare([backend], 4):
        assert backend.threads == 1
        with ThreadShare([backend], 100):
            assert backend.threads == 1
        assert backend.threads == 1
    assert backend.threads == 4
    assert backend.sets == [1, 4]


def test_thread_share_divides_threads_among_concurrent_runs():
    backend = Counting("counting", 8)
    seen = []
    with ThreadShare([backend], 2):
        seen.append(backend.threads)
        with ThreadShare([backend]):
            seen.append(backend.threads)
            with ThreadShare([backend], 2):
                seen.append(backend.threads)
        seen.append(backend.threads)
    assert seen == [4, 2, 1, 4]
    assert backend.threads == 8


def test_thread_share_entered_first_may_be_left_first():
    backend = Counting("counting", 4)
    first, second = ThreadShare([backend], 4), ThreadShare([backend], 2)
    first.enter()
    second.enter()
    first.leave()
    assert backend.threads == 2
    second.leave()
    assert backend.threads == 4


def test_thread_share_may_be_entered_again():
    backend = Counting("counting", 4)
    share = ThreadShare([backend], 2)
    with share:
        with share:
            assert backend.threads == 1
        assert backend.threads == 2
    assert backend.threads == 4


def test_threads_set_between_runs_count_for_the_next_run():
    backend = Counting("counting", 4)
    with ThreadShare([backend], 2):
        pass
    backend.set_threads(6)
    with ThreadShare([backend], 2):
        assert backend.threads == 3
    assert backend.threads == 6


def test_threads_of_numpys_products_are_set_per_thread():
    """Runs of clients are on threads of their own, and not on that which has set them first."""
    backend = NumpyBackend()
    before = backend.threads
    seen: list[int] = []

    def use() -> None:
        for threads in (1, 2):
            backend.set_threads(threads)
            seen.append(backend.threads)

    try:
        backend.set_threads(2)
        other = threading.Thread(target=use)
        other.start()
        other.join(SOON)
        use()
        assert seen == [1, 2, 1, 2]
    finally:
        backend.set_threads(before)


def test_thread_share_is_common_to_two_sessions_of_one_library():
    # each session has objects of its own for the one library that goes by a name
    first, second = Counting("counting", 4), Counting("counting", 4)
    with ThreadShare([first], 2):
        assert first.threads == 2
        with ThreadShare([second], 2):
            assert (first.sets + second.sets)[-1] == 1


def test_thread_share_restores_the_threads_of_each_backend():
    backends = [Counting("a", 4), Counting("b", 1), Counting("c", 2)]
    with ThreadShare(backends, 2):
        assert [backend.threads for backend in backends] == [2, 1, 1]
        with ThreadShare(backends[1:], 2):
            assert [backend.threads for backend in backends] == [2, 1, 1]
    assert [backend.threads for backend in backends] == [4, 1, 2]
    assert not backends[1].sets  # what has one thread anyway is left alone


def test_thread_share_restores_threads_after_an_error():
    backend = Counting("counting", 4)
    with pytest.raises(ps.RunError), ThreadShare([backend], 2):
        raise ps.RunError("no")
    assert backend.threads == 4
    with ThreadShare([backend], 2):
        assert backend.threads == 2
    assert backend.threads == 4


def test_thread_share_entered_by_many_threads_restores_threads():
    backend = Counting("counting", 4)
    begin = threading.Barrier(8)
    wrong: list[int] = []

    def use(streams: int) -> None:
        begin.wait(SOON)
        for _ in range(300):
            with ThreadShare([backend], streams):
                if backend.threads > 4 // streams:
                    wrong.append(backend.threads)

    threads = [threading.Thread(target=use, args=(1 + i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not wrong
    assert backend.threads == 4


class Failing(Counting):
    def set_threads(self, threads):
        raise OSError("no such library")


@pytest.mark.parametrize("executor", ["linear", "dataflow"])
def test_run_that_cannot_enter_its_thread_share_leaves_no_other(executor, monkeypatch):
    text = "g (float[64, 64] x) => (float[64, 64] y) { y = MatMul(x, x) }"
    session = compile_text(text, executor=executor, backends=["numpy"])
    x = np.eye(64, dtype=np.float32)
    session.run({"x": x})
    backend = Counting("numpy", 4)
    with ThreadShare([backend], 3), monkeypatch.context() as patch:
        assert len(thread_share._process.running) == 3

        def divide(setting: Any, streams: int, most: int | None) -> None:
            if streams > 3:
                raise OSError("no such library")

        patch.setattr(thread_share._ThreadSetting, "divide", divide)
        with pytest.raises(ps.PenstockError):
            session.run({"x": x})
        assert len(thread_share._process.running) == 3


def test_a_backend_that_cannot_be_set_leaves_the_others_as_they_were():
    good = Counting("good", 4)
    with pytest.raises(OSError, match="library"):
        ThreadShare([good, Failing("bad", 4)], 4).enter()
    assert good.threads == 4


def test_thread_share_left_without_being_entered_changes_nothing():
    backend = Counting("counting", 4)
    ThreadShare([backend], 2).leave()
    assert not backend.sets
    with ThreadShare([backend], 2):
        assert backend.threads == 2
    assert backend.threads == 4


# How many threads each kernel may use.


def test_thread_share_numbers_of_threads_are_halved():
    #  4 for each of 2 streams, 2 for 3 or 4, one for more
    with ThreadShare([], 2, 8) as two:
        with (
            ThreadShare([], 1, 8) as three,
            ThreadShare([], 1, 8) as four,
            ThreadShare([], 1, 8) as five,
        ):
            pass
        with ThreadShare([], 2, 8) as again:
            pass
    assert (two, three, four, five, again) == (4, 2, 2, 1, 2)
    assert [ThreadShare([], n, 6).__enter__() for n in (1, 1)] == [6, 3]
    thread_share._process.running.clear()


def test_thread_share_never_exceeds_the_cores():
    for most in range(1, 20):
        for streams in range(1, 20):
            with ThreadShare([], streams, most) as threads:
                assert threads == 1 or threads * streams <= most


def test_a_run_of_small_kernels_has_one_thread_and_takes_none_from_others():
    with ThreadShare([OfCaller()], 0, 8) as small, ThreadShare([OfCaller()], 2, 8) as large:
        assert len(thread_share._process.running) == 2
    assert (small, large) == (1, 4)


@pytest.mark.skipif(library() is None, reason="needs compiled kernels")
@pytest.mark.parametrize(
    ("dims", "y", "threads"),
    [(1 << 18, "Concat <axis = 0> (x, x)", 2), (1 << 19, "Identity(x)", 1), (9, "Neg(x)", 1)],
)
def test_copies_of_many_elements_have_several_threads_and_views_one(dims, y, threads):
    text = f"g (float[{dims}] x) => (y) {{ y = {y} }}"
    session = compile_text(text, executor="linear", threads=2)
    with session.inspect.executor._share as chosen:
        assert chosen == threads


@pytest.mark.skipif(library() is None, reason="needs compiled kernels")
@pytest.mark.parametrize(("dims", "running"), [(1 << 16, 0), (1 << 23, 1)])
def test_a_run_of_one_thread_is_counted_beside_others_unless_it_is_short(dims, running):
    text = f"g (float[{dims}] x) => (y) {{ t = Add(x, x) y = Concat <axis = 0> (t, x) }}"
    session = compile_text(text, executor="linear", threads=1)
    with session.inspect.executor._share as chosen:
        assert (chosen, len(thread_share._process.running)) == (1, running)


def test_a_setting_of_each_thread_is_set_for_those_that_run_kernels():
    backend = OfCaller()
    share = ThreadShare([backend], 2, 8)
    seen: list[object] = []

    def worker(adopts: bool) -> None:
        if adopts:
            share.adopt(4)
        seen.append(getattr(backend.here, "threads", None))

    with share as threads:
        assert threads == backend.here.threads == 4
        for adopts in (False, True):
            thread = threading.Thread(target=worker, args=(adopts,))
            thread.start()
            thread.join()
    assert seen == [None, 4]
    assert backend.sets == [4, 4]  # leaving sets nothing


def test_thread_share_gives_process_wide_threads_one_beside_the_callers():
    #  each would wait, spinning, on the cores of the other
    own, shared = OfCaller(), Counting("shared", 4)
    with ThreadShare([own, shared], 1, 8) as threads:
        assert threads == own.here.threads == 8
        assert shared.threads == 1
    assert shared.threads == 4
    with ThreadShare([shared], 1):
        assert shared.threads == 4


def test_a_session_may_allow_a_library_fewer_threads_than_it_is_set_to():
    backend = Counting("counting", 8)
    with ThreadShare([backend], 1, 2) as threads:
        assert threads == backend.threads == 2
    assert backend.threads == 8


def test_thread_share_of_a_run_alone_is_the_fastest_number():
    share = ThreadShare([OfCaller()], 1, 8)
    assert share.tuner is not None
    assert share.enter() == 8
    share.leave()
    for _ in range(22):  # which end between two trials
        threads = share.tuner.threads()
        share.tuner.took(threads, threads * 1e-3)
    assert not share.tuner.undecided
    with share as alone:
        assert alone == 1
        with share as beside:
            assert beside == 4
    # Several streams are not compared with one.
    assert ThreadShare([OfCaller()], 2, 8).tuner is None
    assert ThreadShare([OfCaller()], 1, 1).tuner is None


def test_thread_share_that_follows_another_takes_part_in_no_trial():
    share, other = ThreadShare([OfCaller()], 1, 8), ThreadShare([OfCaller()], 1, 8)
    other.follow(share)
    assert share.tuner is other.tuner is not None
    for _ in range(4):
        share.tuner.took(share.tuner.threads(), 1.0)
    with share as trial:
        assert trial == 1
    with other as threads:
        assert threads == 8
    for _ in range(3):
        share.tuner.took(1, 0.1)
        share.tuner.took(8, 1.0)
    with other as threads:
        assert threads == 1


def test_thread_share_that_is_not_tuned_has_all_threads():
    share = ThreadShare([OfCaller()], 1, 8, tuned=False)
    assert share.tuner is None
    with share as alone, share as beside:
        assert (alone, beside) == (8, 4)


def test_interrupt_as_a_run_enters_leaves_no_thread_share(monkeypatch):
    share = ThreadShare([OfCaller()], 1, 8)

    def interrupt(threads: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(share, "adopt", interrupt)
    with pytest.raises(KeyboardInterrupt):
        share.enter()
    assert not thread_share._process.running


class Seeing(OfCaller):
    """Its kernels remember how many threads they were bound and called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.meet: Callable[[], object] = lambda: None

    def kernel(self, node, types):
        created = super().kernel(node, types)

        backend = self

        class Bound(Binder):
            def bind(self, inputs, outputs, workspace):
                function, arguments = created.bind(inputs, outputs, workspace)
                threads = backend.here.threads

                def call(*arguments):
                    backend.meet()
                    backend.seen.append((threads, backend.here.threads))
                    function(*arguments)

                return call, arguments

        return Kernel(created.function, created.into, Bound())


HEAVY = "g (float[64, 64] x) => (float[64, 64] y) { a = MatMul(x, x) y = Neg(a) }"
EYE = np.eye(64, dtype=np.float32)


def test_runs_at_once_are_bound_for_fewer_threads():
    backend = Seeing()
    session = compile_text(HEAVY, executor="linear", backends=[backend], threads=2, shapes={})
    (arena,) = session.inspect.executor._arenas.free
    assert arena.keys() == {2}
    session(EYE)
    assert backend.seen == [(2, 2)]
    inside, both = threading.Event(), threading.Barrier(2)
    backend.meet = lambda: (inside.set(), both.wait(SOON))
    threads = [threading.Thread(target=session, args=(EYE,)) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert inside.wait(SOON)
    for thread in threads:
        thread.join(SOON)
    assert sorted(backend.seen[1:]) == [(1, 1), (2, 2)]  # the first did not know of the second
    assert set().union(*session.inspect.executor._arenas.free) == {1, 2}


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
def test_a_session_of_one_thread_binds_for_one_thread(executor):
    backend = Seeing()
    session = compile_text(HEAVY, executor=executor, backends=[backend], threads=1)
    for _ in range(3):
        np.testing.assert_array_equal(session(EYE), -EYE)
    if executor != "dataflow":  # which binds nothing to memory
        assert set(backend.seen) == {(1, 1)}
    assert set(backend.sets) == {1}


def child_of(backend: Counting) -> bool:
    """Whether a forked child has all threads to divide, and as many after that."""

    def child() -> None:
        with ThreadShare([backend], 2):
            assert backend.threads == 2
        assert backend.threads == 4

    return in_child(child)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_the_threads_from_before_the_run():
    backend = Counting("counting", 4)
    with ThreadShare([backend], 4):
        assert child_of(backend)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_forked_before_or_after_a_run_keeps_its_threads():
    backend = Counting("counting", 4)
    assert child_of(backend)
    with ThreadShare([backend], 2):
        pass
    assert child_of(backend)


def test_thread_share_sets_the_threads_of_numpy():
    backend = NumpyBackend()
    before = backend.threads
    with ThreadShare([backend], 1 << 20):
        assert backend.threads == 1
        assert np.ones((8, 8)) @ np.ones(8) == pytest.approx(8)
    assert backend.threads == before


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("(double[64, 60] x, double[60, 60] w) => (double[64, 60] y) { y = MatMul(x, w) }", False),
        ("(double[64, 80] x, double[80, 80] w) => (double[64, 80] y) { y = MatMul(x, w) }", True),
        ("(double[1, 99] x, double[99, 99] w) => (double[1, 99] y) { y = MatMul(x, w) }", True),
        ("(int64[99, 99] x, int64[99, 99] w) => (int64[99, 99] y) { y = MatMul(x, w) }", False),
        ("(double[300, 300] x, double[1] w) => (double[300, 300] y) { y = Add(x, w) }", False),
    ],
)
def test_threads_of_numpy_are_shared_where_a_product_may_use_several(text, shares):
    session = compile_text(f"g {text}", backends=["numpy"])
    assert session.inspect.executor._share.idle != shares
