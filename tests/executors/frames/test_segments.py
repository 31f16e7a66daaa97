"""Segments: parts of graphs with frames that run as one, on any backend.

In the drawings ``─>`` is a value, T and F are the outputs of a Switch.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.backends.registry import available
from penstock.build import GraphBuilder
from penstock.ir.kernel import Kernel
from tests.support.far_backend import FarBackend
from tests.support.frame_runs import inputs
from tests.support.random_frames import RandomGraph
from tests.support.sweeps import drawn
from tests.support.tf_graphs import Flow, Type

FEEDS = (-3, 0, 4)
ORDERS = (["numpy"], ["native", "numpy"], ["native", "numpy"])
BACKENDS = [names for names in ORDERS if set(names) <= set(available())]


def outcome(session: ps.Session, x: int, fetch: str, **options: Any) -> Any:
    """Return the value of a fetch, or that it is dead."""
    try:
        return session.run({"x": np.int32(x)}, [fetch], timeout=60, **options)[fetch].tolist()
    except ps.DeadTensor:
        return "dead"


@pytest.mark.costly
@pytest.mark.parametrize("seed", drawn(range(500, 512), 2))
def test_segments_compute_the_same_as_single_nodes_on_every_backend(seed: int) -> None:
    graph = RandomGraph(seed)
    for fetch in graph.fetches:
        nodes = ps.compile(graph.b.bytes(), executor="frames", backends=["numpy"])
        for names in BACKENDS:
            session = ps.compile(graph.b.bytes(), executor="frames", backends=names)
            for x in FEEDS:
                expected = outcome(nodes, x, fetch, trace=ps.Trace())
                assert outcome(session, x, fetch) == expected, (names, fetch, x)


def counted(session: ps.Session, x: int, fetch: str, names: Collection[str]) -> Any:
    """Return the value of a fetch, and how often each node of these names ran."""
    trace = ps.Trace()
    value = outcome(session, x, fetch, trace=trace)
    return value, {name: count for name, count in trace.counts.items() if name in names}


@pytest.mark.costly
@pytest.mark.parametrize("seed", drawn(range(700, 712), 2))
def test_counts_are_the_same_on_every_backend_and_on_devices(seed: int) -> None:
    graph = RandomGraph(seed, unraised=bool(seed % 2), uneven=bool(seed % 3))
    source = graph.b.bytes()
    nodes = ps.compile(source, executor="frames", backends=["numpy"])
    others = [ps.compile(source, executor="frames", backends=names) for names in BACKENDS]
    for devices in (2, 3):
        placed, names = graph.placed(devices, seed), BACKENDS[seed % len(BACKENDS)]
        others.append(ps.compile(placed, executor="frames", backends=names, devices=devices))
    for fetch in graph.fetches:
        for x in FEEDS:
            expected = counted(nodes, x, fetch, graph.names)
            for session in others:
                assert counted(session, x, fetch, graph.names) == expected, (fetch, x)
                assert outcome(session, x, fetch) == expected[0], (fetch, x)


def behind_a_switch() -> Flow:
    """
    x ─> switch ─T─> exp ─> product (with w) ─> y
    p ──────┘
    """
    g = Flow()
    g.placeholder("p", "bool")
    g.placeholder("x", "float32", 4, 8)
    g.const(np.ones((8, 8), np.float32), "w")
    taken = g.switch("x", "p", "switch", T="float32") + ":1"
    exp = g.node("Exp", taken, name="exp", T=Type("float32"))
    product = g.node("MatMul", exp, "w", name="product", T=Type("float32"))
    g.node("Neg", product, name="y", T=Type("float32"))
    return g


@pytest.mark.parametrize("names", BACKENDS)
def test_nodes_of_a_branch_with_frames_are_one_segment(names: list[str]) -> None:
    """
    if p: x ─> switch by q ─T─> exp ─> neg ─> sin  else: x
    """
    b = GraphBuilder()
    p, q = b.input("p", np.bool_, []), b.input("q", np.bool_, [])
    x = b.input("x", np.float32, [8])

    def then() -> Any:
        _, value = b.op("Switch", x, q, domain="tensorflow")
        for name in ("Exp", "Neg", "Sin"):
            value = b.op(name, value)
        return value

    b.output("y", b.cond(p, then, lambda: x))
    session = ps.compile(b.model(), executor="frames", backends=names)
    fed = np.linspace(-1, 1, 8, dtype=np.float32)
    for options in ({}, {"trace": ps.Trace()}, {}):
        result = session.run({"p": True, "q": True, "x": fed}, **options)["y"]
        np.testing.assert_allclose(result, np.sin(-np.exp(fed)), rtol=1e-5, atol=1e-6)
        result = session.run({"p": False, "q": False, "x": fed}, **options)["y"]
        np.testing.assert_array_equal(result, fed)
    with pytest.raises(ps.DeadTensor):
        session.run({"p": True, "q": False, "x": fed})
    assert session.source.count("def run") == 1


def test_nodes_of_a_function_that_calls_itself_are_segments() -> None:
    """``f(n) = n if n <= 0 else f(n - 3 + 2) + 2 n``"""
    b = GraphBuilder()

    def double(n: Any) -> Any:
        return b.cond(n > 0, lambda: b.call("f", n - 3 + 2) + (n + n), lambda: n)

    call = b.function("f", double, (np.int64, []))
    b.output("y", call(b.input("n", np.int64, [])))
    model = b.model()
    session = ps.compile(model, executor="frames")
    for n in (-1, 0, 1, 50):
        assert session.run({"n": n})["y"] == (n * (n + 1) if n > 0 else n)
        assert session.run({"n": n}, trace=ps.Trace())["y"] == session.run({"n": n})["y"]
    assert session.source.count("def run") == 3  # "- 3 + 2" is one of these


X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def test_segment_behind_a_switch_is_planned_on_the_backends_of_the_session() -> None:
    """The shapes are known, since a Switch passes them on."""
    session = ps.compile(behind_a_switch().bytes(), executor="frames")
    result = session.run({"p": True, "x": X}, ["y"])["y"]
    np.testing.assert_allclose(result, -(np.exp(X) @ np.ones((8, 8), np.float32)), rtol=1e-5)
    (segment,) = [step for step in session.inspect.plan.steps if step.node.op.name == "Segment"]
    (block,) = segment.blocks
    assert {step.backend for step in block.steps} <= set(available())
    assert "float32[4, 8]" in session.explain()
    with pytest.raises(ps.DeadTensor, match=r"switch .*chose its output 0"):
        session.run({"p": False, "x": X}, ["y"])


class Other(NumpyBackend):
    """NumPy's kernel of Exp, under another name."""

    name = "other"

    def kernel(self, node: Any, types: Any) -> Kernel | None:
        return super().kernel(node, types) if node.op.name == "Exp" else None


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("backend", [Other(), FarBackend("other", ["Exp"])])
def test_place_decides_where_nodes_between_tokens_run(backend: Any, traced: bool) -> None:
    runs_on_other(traced, backends=["numpy", backend], place={"Exp": "other"})


@pytest.mark.parametrize("traced", [False, True])
def test_nodes_between_tokens_run_on_the_backend_that_is_fastest(traced: bool) -> None:
    class Free(Other):
        def seconds(self, node: Any) -> float:
            return 0.0

    runs_on_other(traced, backends=["numpy", Free()])


def runs_on_other(traced: bool, **options: Any) -> None:
    """Exp runs on the backend "other", and all other nodes on NumPy."""
    session = ps.compile(behind_a_switch().bytes(), executor="frames", **options)
    observed = {"trace": ps.Trace()} if traced else {}
    result = session.run({"p": True, "x": X}, ["y"], **observed)["y"]
    np.testing.assert_allclose(result, -(np.exp(X) @ np.ones((8, 8), np.float32)), rtol=1e-5)
    steps = [step for executor in session._plans.executors() for step in executor.table.walk()]
    places = {(step.node.op.name, step.backend) for step in steps}
    assert {backend for name, backend in places if name == "Exp"} == {"other"}
    assert ("MatMul", "numpy") in places


def test_error_in_a_segment_names_its_node() -> None:
    g = inputs(x="int32", p="bool")
    taken = g.switch("x", "p", "switch") + ":1"
    g.op("FloorDiv", g.op("Neg", taken, name="negated"), taken, name="divided")
    g.op("Neg", "divided", name="y")
    session = ps.compile(g.bytes(), executor="frames")
    assert session.run({"x": 3, "p": True}, ["y"])["y"] == 1
    with pytest.raises(ps.RunError, match="divided in the model"):
        session.run({"x": 0, "p": True}, ["y"])


def test_node_that_cannot_run_in_a_dead_branch_is_no_error() -> None:
    """The shapes are known to be wrong, but the branch is not taken."""
    g = behind_a_switch()
    g.const(np.ones((5, 3), np.float32), "wrong")
    never = g.node("MatMul", "exp", "wrong", name="never", T=Type("float32"))
    g.merge(g.node("Neg", never, name="dead", T=Type("float32")), "x", name="z", T="float32")
    session = ps.compile(g.bytes(), executor="frames")
    np.testing.assert_array_equal(session.run({"p": False, "x": X}, ["z"])["z"], X)


def waiting(count: int) -> Flow:
    """``count`` nodes whose results are summed."""
    g = inputs(x="int32")
    g.op("AddN", *[g.op("Neg", "x", name=f"w{i}") for i in range(count)], name="sum", N=count)
    return g


class Meeting(NumpyBackend):
    """Neg waits until ``size`` of its kernels run at the same time, or a second has passed;
    ``most`` is the largest number that did."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.size, self.now, self.most = size, 0, 0

    def kernel(self, node: Any, types: Any) -> Kernel | None:
        return Kernel(self.negative) if node.op.name == "Neg" else super().kernel(node, types)

    def negative(self, x: Any) -> Any:
        with self.changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.size, timeout=0.05)
            self.now -= 1
        return -x


@pytest.mark.parametrize("traced", [False, True])
def test_slow_kernels_of_users_overlap(traced: bool) -> None:
    backend = Meeting(2)
    session = ps.compile(waiting(4).bytes(), executor="frames", backends=[backend], threads=2)
    for _ in range(3):  # the first run shows that they are slow
        observed = {"trace": ps.Trace()} if traced else {}
        assert session.run({"x": 3}, ["sum"], **observed)["sum"] == -12
    assert backend.most == 2


def test_one_thread_runs_one_kernel_at_a_time() -> None:
    backend = Meeting(2)
    session = ps.compile(waiting(4).bytes(), executor="frames", backends=[backend], threads=1)
    for _ in range(3):
        assert session.run({"x": 3}, ["sum"])["sum"] == -12
    assert backend.most == 1


def test_products_of_unknown_shapes_share_the_threads_of_the_session() -> None:
    """With one thread, NumPy's library has one while a product runs, in both forms of the graph."""
    g = behind_a_switch()
    seen: list[int] = []

    class Watching(NumpyBackend):
        """Records how many threads of NumPy's library a product may use."""

        def kernel(self, node: Any, types: Any) -> Kernel | None:
            kernel = super().kernel(node, types)
            if node.op.name != "MatMul":
                return kernel
            assert kernel is not None

            def product(*arguments: Any) -> Any:
                seen.append(self.threads)
                return kernel.function(*arguments)

            return Kernel(product)

    g.loop("while", g.const(np.int32(0), "zero"), g.const(np.int32(2), "two"))

    def step(value: str) -> str:
        return g.node("MatMul", value, value, name="square", T=Type("float32"))

    square = g.const(np.ones((8, 8), np.float32), "square_0")
    left = g.carry("while", "v", square, step, T="float32")
    session = ps.compile(g.bytes(), executor="frames", backends=[Watching()], threads=1)
    for options in ({}, {"trace": ps.Trace()}):
        result = session.run({}, [left], **options)[left]
        np.testing.assert_array_equal(result, np.full((8, 8), 512, np.float32))
    assert seen == [1, 1, 1, 1]


class Products(NumpyBackend):
    """Products, two of which wait for each other; ``seen``: the threads that each could use."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.seen: list[int] = []

    def kernel(self, node: Any, types: Any) -> Kernel | None:
        kernel = super().kernel(node, types)
        return Kernel(self.product) if node.op.name == "MatMul" else kernel

    def product(self, a: Any, b: Any) -> Any:
        try:
            self.barrier.wait(timeout=0.2)
            self.seen.append(self.threads)
            self.barrier.wait(timeout=0.2)
        except threading.BrokenBarrierError:  # the first run, which does not know they are slow
            self.barrier.reset()
        return a @ b


def test_two_products_at_once_share_the_threads_of_the_session() -> None:
    g = Flow()
    g.placeholder("x", "float32", 64, 128)
    w = g.const(np.ones((128, 64), np.float32), "w")
    products = [g.node("MatMul", "x", w, name=f"p{i}", T=Type("float32")) for i in range(2)]
    g.node("AddN", *products, name="sum", T=Type("float32"), N=2)
    backend = Products()
    session = ps.compile(g.bytes(), executor="frames", backends=[backend], threads=2)
    x = np.ones((64, 128), np.float32)
    for _ in range(4):
        np.testing.assert_array_equal(session.run({"x": x}, ["sum"])["sum"], 256)
    assert len(backend.seen) >= 2
    assert set(backend.seen) == {1}
