"""Runs on a user stream of a device."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import penstock as ps
from tests.executors.test_streams_device import X, compiled
from tests.support.device_backend import DelayedBackend, Lane, Moment
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON, wait_until


class Gates:
    """Events of a device complete when the test says; ``order`` has the operations that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        query = Moment.query
        opened = self.opened
        monkeypatch.setattr(Moment, "query", lambda moment: opened.is_set() and query(moment))


def warm(text: str, backend: DelayedBackend, gates: Gates) -> ps.Session:
    """A session that has run and finished its measurements: ``order`` is empty."""
    session = compiled(text, backend)
    gates.opened.set()
    session.run({"x": X})
    gates.opened.clear()
    backend.order.clear()
    return session


SIN_ABS = "g (float[4, 4] x) => (float[4, 4] y) { s = Sin(x) y = Abs(s) }"


def test_next_run_of_a_user_stream_is_put_on_the_device_behind_the_last(monkeypatch):
    gates = Gates(monkeypatch)
    backend = DelayedBackend(operations={"Sin"})
    session = warm(SIN_ABS, backend, gates)
    stream = ps.Stream()
    runs = [stream.run(session, {"x": X + i}) for i in range(6)]
    # The host has seen no event, and two runs are on the device, one after the other.
    wait_until(lambda: len(backend.order) == 2)
    assert not any(run.done() for run in runs)
    assert not stream.query()
    gates.opened.set()
    for i, run in enumerate(runs):
        np.testing.assert_array_equal(run.result(SOON)["y"], np.abs(np.sin(X + i)))
    assert len(backend.order) == 6


def test_run_on_a_device_waits_there_for_the_run_before(monkeypatch):
    gates = Gates(monkeypatch)
    backend = DelayedBackend(operations={"Sin"})
    session = warm(SIN_ABS, backend, gates)
    waited = []
    monkeypatch.setattr(Lane, "wait", lambda lane, event: waited.append(event))
    stream = ps.Stream()
    first, second = stream.run(session, {"x": X}), stream.run(session, {"x": X})
    wait_until(lambda: len(backend.order) == 2)
    assert waited
    gates.opened.set()
    assert [run.result(SOON)["y"].shape for run in (first, second)] == [(4, 4)] * 2


@pytest.mark.parametrize("after", ["call", "signal", "host"])
def test_what_is_no_run_on_a_device_waits_for_the_runs_before(monkeypatch, after):
    gates = Gates(monkeypatch)
    backend = DelayedBackend(operations={"Sin"})
    session = compiled(SIN_ABS, backend)
    host = compile_text(SIN_ABS, executor="linear", backends=["numpy"])
    stream, ended = ps.Stream(), []
    for number in range(3):
        stream.run(session, {"x": X}).add_done_callback(lambda _, n=number: ended.append(n))
    if after == "call":
        stream.call(lambda: ended.append(after))
    elif after == "host":
        stream.run(host, {"x": X}).add_done_callback(lambda _: ended.append(after))
    wait_until(lambda: len(backend.order) == 2)
    assert ended == []
    gates.opened.set()
    assert stream.signal().wait(SOON)
    assert stream.query()
    assert ended == [0, 1, 2] + [after] * (after != "signal")


def test_run_that_cannot_begin_does_not_pass_the_runs_before(monkeypatch):
    gates = Gates(monkeypatch)
    backend = DelayedBackend(operations={"Sin"})
    session = compiled(SIN_ABS, backend)
    stream = ps.Stream()
    first = stream.run(session, {"x": X})
    wrong = stream.run(session, {"z": X})
    with pytest.raises(ps.InvalidInput):
        wrong.result(SOON)
    mark = stream.signal()
    assert not mark.query()
    assert not first.done()
    gates.opened.set()
    assert mark.wait(SOON)
    assert first.done()


def test_runs_with_effects_do_not_overlap_on_a_user_stream(monkeypatch):
    gates = Gates(monkeypatch)
    text = """g (float[4, 4] x) => (float[4, 4] y) {
        s = Sin(x) r = RandomNormalLike(s) y = Add(s, r) }"""
    backend = DelayedBackend(operations={"Sin"})
    session = warm(text, backend, gates)
    stream = ps.Stream()
    runs = [stream.run(session, {"x": X}) for _ in range(3)]
    wait_until(lambda: len(backend.order) == 1)
    assert not stream.query()
    gates.opened.set()
    assert [run.result(SOON)["y"].shape for run in runs] == [(4, 4)] * 3
