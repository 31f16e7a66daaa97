"""Timeouts and tokens hold for reading and compiling, not only for running."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.compiler.options import EXECUTORS
from tests.support.onnx_text import compile_text, model_from_text

X = np.ones(4, np.float32)


FEEDS = {"x": X}


SMALL = "g (float[N] x) => (float[N] y) { a = Neg(x) b = Relu(a) y = Sub(b, x) }"


NODES = 2000


def chain(nodes: int = NODES) -> onnx.ModelProto:
    """A chain of operations that neither fuse nor fold into one another."""
    names = ["x", *[f"v{i}" for i in range(1, nodes)], "y"]
    ops = ("Neg", "Exp", "Sin", "Relu")
    body = " ".join(f"{b} = {ops[i % 4]}({a})" for i, (a, b) in enumerate(pairwise(names)))
    return model_from_text(f"g (float[N] x) => (float[N] y) {{ {body} }}")


class CountingToken(ps.CancelToken):
    """Is cancelled when it has been asked ``most`` times; ``calls`` are the most calls of functions
    on its thread between two questions."""

    def __init__(self, most: int = sys.maxsize) -> None:
        super().__init__()
        self.looks = self.calls = self.now = 0
        self.most = most

    @property
    def cancelled(self) -> bool:
        self.looks += 1
        self.calls, self.now = max(self.calls, self.now), 0
        return self.looks > self.most

    def __call__(self, frame: object, event: str, argument: object) -> None:
        self.now += event in ("call", "c_call")

    def counting(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        sys.setprofile(self)
        try:
            return function(*arguments, cancel=self, **options)
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_run_stopped_while_compiling_leaves_the_session_usable(executor: str) -> None:
    session = ps.compile(chain(300), executor=executor, backends=["numpy"])
    expected = ps.compile(chain(300), executor="linear", backends=["numpy"]).run(FEEDS)["y"]
    most = 1
    while True:
        token = CountingToken(most)
        try:
            output = session.run(FEEDS, cancel=token)["y"]
        except ps.Cancelled:
            assert token.looks > most
            assert session.memory.count == 0  # no plan was made
            most *= 3
            continue
        break
    assert most > 1
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(session.run(FEEDS)["y"], expected)


def submitted(session: ps.Session, token: ps.CancelToken) -> Future[Any]:
    return session.submit(FEEDS, cancel=token)


def streamed(session: ps.Session, token: ps.CancelToken) -> Future[Any]:
    return ps.Stream().run(session, FEEDS, cancel=token)


@pytest.mark.parametrize("start", [submitted, streamed])
def test_compile_on_the_pool_is_stopped(
    start: Callable[[ps.Session, ps.CancelToken], Future[Any]],
) -> None:
    session = compile_text(SMALL)
    with pytest.raises(ps.Cancelled):
        start(session, CountingToken(3)).result(timeout=60)
    assert session.memory.count == 0
    assert start(session, CountingToken()).result(timeout=60)["y"].tolist() == [-1.0] * 4


def test_compile_of_an_asynchronous_run_is_stopped() -> None:
    session = compile_text(SMALL)
    with pytest.raises(ps.Cancelled):
        asyncio.run(session.arun(FEEDS, cancel=CountingToken(3)))
    assert session.memory.count == 0


def test_run_whose_deadline_has_passed_compiles_nothing() -> None:
    session = compile_text(SMALL)
    with pytest.raises(ps.DeadlineExceeded, match="did not end within its timeout"):
        session.run(FEEDS, timeout=1e-9)
    assert session.memory.count == 0
    assert session.run(FEEDS, timeout=60)["y"].tolist() == [-1.0] * 4


def test_ended_compile_detaches_its_run_from_the_token() -> None:
    token = ps.CancelToken()
    session = compile_text("g (float[N] x, float[M] z) => (float[N] y) { y = Add(x, z) }")
    with pytest.raises(ps.InvalidInput):
        session.run({"x": X, "z": np.ones(3, np.float32)}, cancel=token)
    assert not token._controls


class PausedCompile:
    """A session whose first plan is being compiled by another thread."""

    def __init__(self, pool: ThreadPoolExecutor, token: ps.CancelToken | None) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.armed = False
        self.session = compile_text(SMALL, after_pass=self.after_pass)
        self.armed = True
        self.first = pool.submit(self.session.run, FEEDS, cancel=token)
        assert self.begun.wait(60)

    def after_pass(self, *_: object) -> None:
        if self.armed and not self.begun.is_set():
            self.begun.set()
            assert self.go_on.wait(60)


def test_thread_that_waits_for_the_plan_of_another_meets_its_own_deadline() -> None:
    with ThreadPoolExecutor(1) as pool:
        paused = PausedCompile(pool, None)
        try:
            with pytest.raises(ps.DeadlineExceeded):
                paused.session.run(FEEDS, timeout=0.05)
        finally:
            paused.go_on.set()
        assert paused.first.result(60)["y"].tolist() == [-1.0] * 4


def test_thread_that_waits_for_a_plan_whose_compile_is_stopped_makes_it_itself() -> None:
    token = ps.CancelToken()
    with ThreadPoolExecutor(2) as pool:
        paused = PausedCompile(pool, token)
        waiting = pool.submit(paused.session.run, FEEDS)
        token.cancel()
        paused.go_on.set()
        with pytest.raises(ps.Cancelled):
            paused.first.result(60)
        assert waiting.result(60)["y"].tolist() == [-1.0] * 4


@pytest.mark.parametrize("read", [ps.load, ps.compile])
def test_load_and_compile_take_a_timeout_and_a_token(read: Callable[..., Any]) -> None:
    model = model_from_text(SMALL)
    read(model, timeout=60, cancel=ps.CancelToken())
    with pytest.raises(ps.DeadlineExceeded, match="did not end within its timeout"):
        read(model, timeout=0)
    token = ps.CancelToken()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        read(model, cancel=token)


def test_timeout_of_compile_does_not_hold_for_runs(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model_from_text(SMALL), path)
    session = ps.compile(path, timeout=60, cancel=ps.CancelToken())
    assert (session.options.timeout, session.options.cancel) == (None, None)
    copy = pickle.loads(pickle.dumps(session))
    assert copy.run(FEEDS)["y"].tolist() == [-1.0] * 4
