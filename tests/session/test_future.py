"""Futures of runs whose waiting threads are interrupted."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future, wait

import numpy as np
import pytest

import penstock as ps
from penstock.host.threads import Workers
from penstock.observers.base import Observer
from penstock.session.future import RunFuture
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON

MODEL = "g (float[2] x) => (float[2] y) { y = Neg(x) }"
ROUNDS = 40  # more than a wait has lines
X = np.ones(2, np.float32)


class Waits(Observer):
    """A run that continues when it is told to, or after a while."""

    def __init__(self):
        self.told = threading.Event()

    def step_begin(self, run, step, inputs):
        self.told.wait(0.1)


def interrupted_at(line, interrupt, call):
    """Call a function and, within it, another one before that line, counted in the order of
    execution. Return how many lines it has run, and its result."""
    count, inside = 0, False

    def trace(frame, event, argument):
        nonlocal count, inside
        if event == "line" and not inside:
            count += 1
            if count == line:
                inside = True
                interrupt()
                inside = False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return count, result


@pytest.mark.parametrize("wait", ["result", "exception"])
@pytest.mark.parametrize("submit", ["session", "stream"])
def test_wait_may_be_interrupted_anywhere_by_a_wait_for_another_run(wait, submit):
    """With one worker, which must end the first run before it can begin the second."""
    pool = Workers("one", 1)
    session = ps.compile(model_from_text(MODEL), expert=ps.ExpertOptions(pool=pool))
    stream = ps.Stream()
    for line in range(1, ROUNDS):
        observer = Waits()
        options = {"observers": [observer]}
        if submit == "session":
            future = session.submit({"x": X}, **options)
        else:
            future = stream.run(session, {"x": X}, **options)
        answers = []

        def interrupt(observer=observer, answers=answers):
            observer.told.set()
            answers.append(session.submit({"x": X}).result(timeout=SOON)["y"])

        count, _ = interrupted_at(line, interrupt, getattr(future, wait))
        np.testing.assert_array_equal(future.result()["y"], -X)
        if count < line:
            break
        np.testing.assert_array_equal(answers, [-X])
    assert 3 < line < ROUNDS - 1
    pool.close()


def test_future_ends_as_those_of_the_standard_library_do():
    for make in (Future, RunFuture):
        for late in (0, 0.001, -1):
            with pytest.raises(TimeoutError):
                make().result(timeout=late)
            with pytest.raises(TimeoutError):
                make().exception(timeout=late)
        future = make()
        future.set_result(3)
        assert (future.result(), future.result(timeout=-1), future.exception()) == (3, 3, None)
        future, error = make(), ValueError("no")
        future.set_exception(error)
        assert future.exception() is error
        with pytest.raises(ValueError, match="no"):
            future.result()
        future = make()
        assert future.cancel()
        for method in (future.result, future.exception):
            with pytest.raises(CancelledError):
                method()
    for name in ("result", "exception"):
        own, theirs = (inspect.signature(getattr(kind, name)) for kind in (RunFuture, Future))
        assert list(own.parameters) == list(theirs.parameters)


def test_future_with_an_error_is_freed_without_the_collector():
    gc.disable()
    try:
        future: RunFuture[int] = RunFuture()
        future.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            future.result()
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()


def test_end_of_a_future_wakes_all_who_wait():
    future: RunFuture[int] = RunFuture()
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(future.result(SOON))) for _ in range(4)]
    for thread in threads:
        thread.start()
    future.set_result(7)
    for thread in threads:
        thread.join(SOON)
    assert got == [7] * 4
    assert future in wait([future], timeout=SOON).done
