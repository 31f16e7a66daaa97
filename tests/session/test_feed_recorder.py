"""Recording of feeds of some runs of a session: how many, of which runs, and at what cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.options import RunOptions
from penstock.executors.control import begin_run, end_run
from penstock.session import feed_recorder
from penstock.session.environment import TRACE
from penstock.session.feed_recorder import SHARE, FeedRecorder
from tests.support.onnx_text import compile_text

TEXT = "g (float[N] x) => (float[N] y) { a = Sin(x) y = Neg(a) }"
X = {"x": np.arange(4, dtype=np.float32)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recording:
    """A recorder of a session, whose runs take ``run`` seconds and whose copies ``copy``."""

    def __init__(self, session: ps.Session, runs: int, most: int, run: float = 1e-3) -> None:
        self.process, self.thread, self.seconds = Clock(), Clock(), run
        self.ended_after: int | None = None
        subgraphs = session._subgraphs
        self.recorder = FeedRecorder(runs, most, subgraphs, self._end, self.process, self.thread)
        record, self.copy = self.recorder._record, 0.0

        def slowly(options: RunOptions) -> None:
            self.thread.now += self.copy
            self.process.now += self.copy
            record(options)

        self.recorder._record = slowly  # type: ignore[method-assign]
        self.runs = 0

    def _end(self) -> None:
        self.ended_after = self.ended_after or self.runs

    def run(self, count: int, feeds: Callable[[int], Any] = lambda _: X) -> None:
        for _ in range(count):
            if self.ended_after is not None:
                return
            self.runs += 1
            if self.recorder.due():
                self.recorder.take(RunOptions(feeds(self.runs)))
            self.process.now += self.seconds


@pytest.fixture
def session() -> ps.Session:
    return compile_text(TEXT, backends=["numpy"])


def test_recording_takes_a_hundredth_of_the_time(session: ps.Session) -> None:
    recording = Recording(session, 10_000, 1000)
    recording.copy = 5e-4  # half of the time of a run
    recording.run(9_999)
    recorder = recording.recorder
    assert recorder.spent <= SHARE * recording.process.now
    # And not much less: each copy takes as long as 1 % of 50 runs.
    assert 100 <= len(recorder.kept.feeds) <= 200


def test_runs_that_take_longer_are_recorded_at_the_interval(session: ps.Session) -> None:
    recording = Recording(session, 1000, 100, run=1.0)
    recording.run(2000)
    feeds = [*recording.recorder.kept.feeds]
    assert 70 <= len(feeds) <= 100
    assert recording.ended_after == 1000
    # A run that was chosen before the end, and arrives after it.
    recording.recorder._sample(RunOptions(X))
    assert recording.recorder.kept.feeds == feeds


def test_recording_goes_on_until_there_are_a_few_feeds(session: ps.Session) -> None:
    recording = Recording(session, 10, 100, run=1e-5)
    recording.copy = 5e-5
    recording.run(100_000)
    assert len(recording.recorder.kept.feeds) == feed_recorder.FEWEST
    assert recording.ended_after is not None and recording.ended_after > 1000


def test_every_run_has_the_same_chance(session: ps.Session) -> None:
    kept = np.zeros(200)
    for seed in range(60):
        recording = Recording(session, 200, 20, run=1.0)
        recording.recorder._random.seed(seed)
        recording.recorder.kept._random.seed(seed)
        recording.run(199, lambda i: {"x": np.full(1, i - 1, np.float32)})
        for feeds in recording.recorder.kept.feeds:
            kept[int(feeds["x"][0])] += 1
    quarters = kept.reshape(4, 50).sum(axis=1) / kept.sum()
    np.testing.assert_allclose(quarters, 0.25, atol=0.05)


def test_bytes_are_bounded(session: ps.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_recorder, "MOST_BYTES", 1000)
    recording = Recording(session, 100, 100, run=1.0)
    sizes = iter(np.random.default_rng(0).integers(1, 40, 1000))
    recording.run(1000, lambda _: {"x": np.zeros(next(sizes), np.float32)})
    recorder = recording.recorder
    assert recorder.kept.nbytes == sum(feeds["x"].nbytes for feeds in recorder.kept.feeds) <= 1000
    assert recording.ended_after == 100


def test_feeds_are_copies(session: ps.Session) -> None:
    recording = Recording(session, 100, 100, run=1.0)
    x = np.arange(4, dtype=np.float32)
    recording.run(20, lambda _: {"x": x})
    x[:] = 7
    np.testing.assert_array_equal(recording.recorder.kept.feeds[0]["x"], X["x"])


def test_lists_are_recorded_as_arrays_and_wrong_feeds_not_at_all(session: ps.Session) -> None:
    recording = Recording(session, 100, 100, run=1.0)
    wrong = [{}, None, {"z": [1.0]}, {"x": "text"}, {"a": X["x"]}, 3]
    recording.run(50, lambda i: wrong[i % 6])
    assert recording.recorder.kept.feeds == []
    recording.run(20, lambda _: {"x": [0.0, 1.0, 2.0, 3.0]})
    np.testing.assert_array_equal(recording.recorder.kept.feeds[0]["x"], X["x"])
    assert recording.recorder.kept.feeds[0]["x"].dtype == np.float32


def _under_control(session: ps.Session) -> None:
    control = begin_run(60.0, None)
    session._run_under(control, X)
    end_run(control)


WAYS: dict[str, Callable[[ps.Session], object]] = {
    "run": lambda session: session.run(X),
    "call": lambda session: session(X["x"]),
    "run with options": lambda session: session.run(X, timeout=60.0),
    "submit": lambda session: session.submit(X).result(),
    "server": _under_control,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("profiled", [False, True])
def test_all_ways_to_run_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, way: str, profiled: bool
) -> None:
    monkeypatch.setattr(feed_recorder, "SHARE", float("inf"))
    if profiled:
        monkeypatch.setenv(TRACE, f"{tmp_path}/profile.json@1/10")
    with compile_text(TEXT) as session:
        quantization = session.quantize_after(runs=50, samples=50)
        for _ in range(25):
            WAYS[way](session)
        assert quantization._recorder is not None
        feeds = quantization._recorder.kept.feeds
        assert quantization.state == "recording" and len(feeds) >= 12
        for own in feeds:
            np.testing.assert_array_equal(own["x"], X["x"])
        quantization.cancel()
        for _ in range(10):
            WAYS[way](session)
        assert quantization._recorder is None and len(feeds) <= 26
    assert (tmp_path / "profile.json").exists() == profiled
