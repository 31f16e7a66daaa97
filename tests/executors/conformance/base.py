"""The common base of the parts of the conformance class."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import HealthCheck

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.backends.base import Backend
from penstock.ir.graph import Graph, Model, clone
from penstock.observers.base import Observer
from tests.support.expert import with_expert
from tests.support.graphs import interpret
from tests.support.random_graphs import feeds_for

# The classes of several executors inherit one property test, about which Hypothesis would complain.
INHERITED = (HealthCheck.differing_executors,)

ENDLESS = """endless (float[4] x, int64 n) => (float[4] y) {
    y = Loop (n, , x) <body = body (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
        d = Identity (c)
        w = Add (v, v)
    }>
}"""


def leaves(value) -> Iterator[np.ndarray]:
    """Return the arrays in a value."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list):
        for element in value:
            yield from leaves(element)


def assert_equal(got, want) -> None:
    """Assert equality to the last bit; any NaN equals any other."""
    assert type(got) is type(want)
    if isinstance(got, dict):
        assert list(got) == list(want)
        for name in got:
            assert_equal(got[name], want[name])
    elif isinstance(got, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)
    elif isinstance(got, np.ndarray):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)
        if got.dtype.kind == "f":
            numbers = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])
    else:
        assert got == want


class Recorder(Observer):
    """Counts steps by the names of their nodes, and keeps their latest results."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.made: dict[str, list] = {}
        self.runs: list[BaseException | None] = []
        self.executor = ""
        self.live = self.most = 0
        self.lock = threading.Lock()

    def run_begin(self, run):
        self.executor = run.executor

    def run_end(self, run, error):
        self.runs.append(error)

    def step_begin(self, run, step, inputs):
        if step.node.op.name == "Transfer":
            return
        with self.lock:
            assert len(inputs) == len(step.inputs)
            self.begun[step.node.name] += 1

    def step_end(self, run, step, outputs):
        if step.node.op.name == "Transfer":
            return
        with self.lock:
            assert len(outputs) == len(step.outputs)
            self.ended[step.node.name] += 1
            self.made[step.node.name] = [
                x.copy() if isinstance(x, np.ndarray) else getattr(x, "array", x) for x in outputs
            ]

    def allocation(self, run, nbytes):
        with self.lock:
            self.live += nbytes
            self.most = max(self.live, self.most)


class ExecutorTests:
    """Compiles models for one executor, and compares values.

    A test class sets ``executor`` to its name, ``backends`` to those it compiles with, and
    ``leaves_threads`` if a run that waits for a backend gives its thread to the next run.
    """

    executor = "auto"
    backends: Sequence[str | Backend] = ("numpy",)
    leaves_threads = False

    def compile(self, source, **options) -> ps.Session:
        options.setdefault("backends", self.backends)
        return ps.compile(source, executor=self.executor, **with_expert(options))

    def assert_same(self, got, want) -> None:
        """Assert that a run's results are as expected: by default, to the last bit."""
        assert_equal(got, want)

    def same_as_interpreter(self, graph: Graph, seed: int) -> None:
        given = feeds_for(seed)
        feeds = {value.name: given[value.name] for value in graph.inputs}
        plain = clone(graph)
        infer_types(plain)
        with np.errstate(all="ignore"):
            wanted = interpret(plain, list(feeds.values()))
        session = self.compile(Model({"random": graph}, "random"))
        for _ in range(2):  # the second run must not see what the first left in memory
            outputs = list(session.run(feeds).values())
            self.assert_same(outputs, wanted)
            arrays = list(leaves(outputs))
            for i, array in enumerate(arrays):
                others = [*arrays[:i], *feeds.values()]
                assert not any(np.shares_memory(array, other) for other in others)
        self.assert_same(list(feeds.values()), [feeds_for(seed)[name] for name in feeds])
