"""Threads that compile, run and query at the same time get the answers that each would get alone.

A free-threaded build of Python runs them at once; other builds switch between them, here as often as
they can.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.compiler import varying_shapes
from penstock.host.native import FREE_THREADED
from tests.support.onnx_text import model_from_text
from tests.support.processes import end_of
from tests.support.tf_graphs import Builder, Shape, Type

THREADS = 6
EXECUTORS = pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
MODEL = """g (float[N, 24] x, int64 n) => (float[N, 24] y, float[N, 24] z) <float[24, 24] w = {%s}> {
    a = MatMul(x, w) b = Tanh(a) c = Sin(x) d = Add(b, c)
    y = Loop (n, , d) <body = l (int64 k, bool c0, float[N, 24] v) => (bool e, float[N, 24] u)
        { e = Identity(c0) p = Mul(v, b) u = Add(p, c) }>
    f = Exp(c) g0 = MatMul(f, w) z = Softmax(g0)
}"""
WEIGHTS = np.random.default_rng(0).standard_normal((24, 24)).astype(np.float32) / 5


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*jobs: Callable[[], object]) -> None:
    """Run each job on a thread of its own, all starting at the same moment."""
    barrier = threading.Barrier(len(jobs))

    def begin(job: Callable[[], object]) -> object:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(begin, job) for job in jobs]:
            future.result()


def wanted(x: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """The outputs of MODEL in float64."""
    x, w = x.astype(np.float64), WEIGHTS.astype(np.float64)
    b, c = np.tanh(x @ w), np.sin(x)
    y = b + c
    for _ in range(n):
        y = y * b + c
    e = np.exp(np.exp(c) @ w)
    return {"y": y, "z": e / e.sum(-1, keepdims=True)}


@pytest.mark.costly
@EXECUTORS
def test_threads_on_a_shared_session_and_their_own_get_the_answers_of_one(executor, monkeypatch):
    """Each thread compiles a session while others run, feeds shapes so that plans of the shared one
    are added and dropped, and queries what changes."""
    # If plans were dropped faster than they are found, one with open dims would begin on NumPy's
    # kernels, whose last bits differ.
    monkeypatch.setattr(varying_shapes, "CHANGED", sys.maxsize)
    model = model_from_text(MODEL % ", ".join(map(str, WEIGHTS.ravel().tolist())))
    alone = ps.compile(model, executor=executor)
    feeds = [
        {"x": np.random.default_rng(rows).standard_normal((rows, 24)).astype(np.float32), "n": n}
        for rows, n in zip(range(1, 9), [0, 1, 2, 3] * 2, strict=True)
    ]
    feeds = [{"x": feed["x"], "n": np.array(feed["n"])} for feed in feeds]
    answers = [alone.run(feed) for feed in feeds]
    for feed, answer in zip(feeds, answers, strict=True):
        for name, value in wanted(feed["x"], int(feed["n"])).items():
            np.testing.assert_allclose(answer[name], value, rtol=1e-4, atol=1e-5)
    limits = ps.Limits(max_plans_bytes=200_000)
    shared = ps.compile(model, executor=executor, limits=limits)

    def job(seed: int) -> None:
        rng, own = np.random.default_rng(seed), None
        for i in range(24):
            which = int(rng.integers(len(feeds)))
            fetches = [None, ["z"], ["y"]][int(rng.integers(3))]
            if i % 8 == seed % 8:
                own = ps.compile(model, executor=executor)
            session = own if own is not None and i % 3 == 0 else shared
            if i % 4 == 1:
                outputs = session.submit(feeds[which], fetches).result()
            else:
                outputs = session.run(feeds[which], fetches)
            for name, value in outputs.items():
                np.testing.assert_array_equal(value, answers[which][name])
            if i % 6 == 5:
                assert session.explain()
                assert session.memory.arenas >= 0
                assert session.stats.runs > 0
                shared.trim()

    at_once(*[lambda seed=seed: job(seed) for seed in range(THREADS)])
    assert shared.stats.runs == THREADS * 24 - own_runs()


def own_runs() -> int:
    """The runs of threads on sessions of their own."""
    return sum(i % 3 == 0 and i >= seed % 8 for seed in range(THREADS) for i in range(24))


@EXECUTORS
def test_variable_that_threads_assign_is_never_read_in_part(executor):
    g, number = Builder(), {"dtype": Type("float32")}
    g.node("VarHandleOp", name="v", shared_name="v", shape=Shape([4096]), **number)
    g.placeholder("x", "float32", 4096)
    g.node("AssignVariableOp", "v", "x", name="set", **number)
    g.node("ReadVariableOp", "v", name="read", **number)
    g.node("Identity", "read", name="y", T=Type("float32"))
    session = ps.compile(g.bytes(), executor=executor)
    session.run({"x": np.zeros(4096, np.float32)}, [], ["set"])

    def write(value: int) -> None:
        x = np.full(4096, value, np.float32)
        for _ in range(60):
            session.run({"x": x}, [], ["set"])

    def read() -> None:
        for i in range(60):
            y = session.variables["v"] if i % 2 else session.run({}, ["y"])["y"]
            assert y[0] in range(3)
            assert (y == y[0]).all()

    at_once(read, lambda: write(1), read, lambda: write(2), read)


@EXECUTORS
def test_additions_of_threads_to_a_variable_are_all_counted(executor):
    g, number = Builder(), {"dtype": Type("int64")}
    g.node("VarHandleOp", name="v", shared_name="v", shape=Shape([]), **number)
    g.node("AssignVariableOp", "v", g.const(np.int64(0)), name="init", **number)
    g.node("AssignAddVariableOp", "v", g.const(np.int64(1)), name="add", **number)
    session = ps.compile(g.bytes(), executor=executor)
    session.run({}, [], ["init"])
    at_once(*[lambda: [session.run({}, [], ["add"]) for _ in range(50)]] * THREADS)
    assert session.variables["v"] == 50 * THREADS


def test_feeds_that_another_thread_changes_are_refused_or_answered():
    session = ps.compile(model_from_text("g (float[2048] x) => (float[2048] y) { y = Neg(x) }"))
    feeds, ended = {"x": np.zeros(2048, np.float32)}, threading.Event()

    def change() -> None:
        for i in range(3000):
            feeds["x"] = np.full(2048, i, np.float32)
            if i % 16 == 0:
                del feeds["x"]
        feeds["x"] = np.zeros(2048, np.float32)
        ended.set()

    def run() -> None:
        while not ended.is_set():
            try:
                y = session.run(feeds)["y"]
            except ps.InvalidInput:
                continue
            assert (y == y[0]).all()

    at_once(change, run, run)


class Changed(dict):
    """Feeds that another thread changes as soon as their names have been read."""

    def __iter__(self):
        names = [*super().__iter__()]
        self["x"] = np.zeros(3, np.float32)
        return iter(names)


def test_names_of_feeds_that_another_thread_changes_are_read_once():
    session = ps.compile(model_from_text("g (float[3] x) => (float[3] y) { y = Neg(x) }"))
    with pytest.raises(ps.InvalidInput, match="x"):
        session.run(Changed())
    with pytest.raises(ps.InvalidInput, match="x"):
        session.run({})


FIRST = """
import sys, threading
import numpy as np, penstock as ps
from tests.support.onnx_text import model_from_text

TEXTS = [
    "y = Softmax(x)", "y = Sigmoid(x)", "a = Exp(x) y = ReduceSum(a)", "y = Tanh(x)",
    "a = MatMul(x, x) y = Relu(a)", "y = CumSum(x, i)", "y = LayerNormalization(x, s)",
    "a = Transpose(x) y = Concat<axis = 0>(a, x)", "y = Gemm(x, x, x)", "y = Pad(x, p)",
]
HEAD = "g (float[8, 8] x) => (float[M, N] y) <int64 i = {0}, float[8] s = {1, 1, 1, 1, 1, 1, 1, 1}, int64[4] p = {1, 1, 1, 1}>"
models = [model_from_text(HEAD + " { " + text + " }") for text in TEXTS]
x, barrier, outputs = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), threading.Barrier(len(TEXTS)), {}
errors = []

def job(i):
    barrier.wait()
    try:
        session = ps.compile(models[i])
        outputs[i] = session.run({"x": x})["y"], session.explain()
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=job, args=(i,)) for i in range(len(TEXTS))]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
for i, model in enumerate(models):
    session = ps.compile(model)
    y, backends = session.run({"x": x})["y"], session.explain()
    assert np.array_equal(outputs[i][0], y), TEXTS[i]
    assert outputs[i][1] == backends, (TEXTS[i], outputs[i][1], backends)
print(getattr(sys, "_is_gil_enabled", lambda: True)())
"""


@pytest.mark.costly
@pytest.mark.parametrize("attempt", range(3))
def test_first_models_of_a_process_may_be_compiled_by_threads_at_once(attempt):
    """Operations and kernels are imported when they are first looked up: here by all threads."""
    assert end_of(FIRST).strip() == str(not FREE_THREADED)
