"""The frames executor on several devices."""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.build import GraphBuilder
from penstock.executors.frames.executor import FramesExecutor
from penstock.frontends.tensorflow.file import read_graph
from penstock.ir.graph import Model
from tests.executors.frames import test_executor
from tests.executors.frames.test_segments import BACKENDS
from tests.support.far_backend import FarBackend
from tests.support.meeting_backend import MeetingBackend
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.random_frames import RandomGraph
from tests.support.sweeps import drawn
from tests.support.tf_cases import Case, cases, feeds, follow
from tests.support.tf_graphs import Builder, Flow, Func, Type
from tests.support.tf_loops import add, counting
from tests.support.timing import SOON


def place(source: Model, devices: int, seed: int = 0) -> Model:
    """A model with each node on a random device."""
    random = Random(seed)
    for node in source.graph.nodes:
        node.device = f"/device:CPU:{random.randrange(devices)}"
    return source


class Unknown(NumpyBackend):
    """A user-defined backend, whose kernels may wait: devices have parts of their own."""


def parted(session: ps.Session) -> bool:
    """Return whether some of its runs were on several devices."""
    executors = session._plans.executors()
    return any(isinstance(x, FramesExecutor) and len(x.parts) > 1 for x in executors)


def test_outputs_of_several_parts_are_copies() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [4])
    for i in range(2):
        with b.device(f"/device:CPU:{i}"):
            b.output(f"y{i}", b.op("Identity", x))
    session = ps.compile(b.model(), "frames", [Unknown()], devices=2)
    fed = np.ones(4, np.float32)
    outputs = session.run({"x": fed})
    assert parted(session)
    assert not any(np.shares_memory(output, fed) for output in outputs.values())


class TestPartitioned(test_executor.TestFrames):
    sampled = True

    def compile(self, source, **options):
        loaded = source if isinstance(source, Model) else ps.load(source)
        return super().compile(place(loaded, 3), devices=3, **options)


class TestInParts(TestPartitioned):
    """The same with kernels that may wait: loops are lowered, so that limits name primitives."""

    def compile(self, source, **options):
        backends = ["numpy"] if "limits" in options else [Unknown()]
        return super().compile(source, **{"backends": backends, **options})


def on_devices(case: Case, source: bytes, devices: int) -> ps.Session | None:
    untraced = partial(ps.compile, source, "frames", devices=devices)
    follow(case, untraced, counted=False, traced=False)
    return follow(case, lambda: ps.compile(source, "frames", [Unknown()], devices=devices))


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.startswith("dev_")], ids=lambda case: case.name
)
def test_corpus_on_its_own_devices_equals_tensorflow(case):
    session = on_devices(case, case.path.read_bytes(), 2)
    assert session is not None
    assert parted(session)


@pytest.mark.parametrize("case", drawn(cases(), 35), ids=lambda case: case.name)
def test_corpus_on_three_random_devices_equals_tensorflow(case):
    random = Random(case.name)
    for _ in range(2):
        graph = read_graph(case.path)
        for node in graph.node:
            node.device = f"/device:CPU:{random.randrange(3)}"
        on_devices(case, graph.SerializeToString(), 3)


def outcome(session: ps.Session, graph: RandomGraph, x: int) -> tuple[dict, dict]:
    trace = ps.Trace()
    outputs = session.run({"x": np.int32(x)}, graph.fetches, trace=trace, timeout=SOON)
    # A run without observers may use another form.
    assert session.run({"x": np.int32(x)}, graph.fetches, timeout=SOON) == outputs
    return outputs, {n: k for n, k in trace.counts.items() if n in graph.names}


@pytest.mark.costly
@pytest.mark.parametrize("seed", drawn(range(60), 4))
def test_random_graphs_on_several_devices_equal_one_device(seed):
    graph = RandomGraph(seed)
    whole = ps.compile(graph.placed(1, 0), "frames", ["numpy"])
    for devices in (2, 3, 4):
        for backend in ("numpy", Unknown()):
            session = ps.compile(graph.placed(devices, seed), "frames", [backend], devices=devices)
            for x in (seed % 5, -3):
                assert outcome(session, graph, x) == outcome(whole, graph, x)


def test_device_names_without_the_option_are_ignored():
    b = Builder()
    y = add(b, b.placeholder("x", "int32"), b.const(np.int32(1)))
    for node in b.proto.node:
        node.device = "/job:elsewhere/device:GPU:3"
    session = ps.compile(b.bytes(), executor="frames", backends=["numpy"])
    assert session.run({"x": np.int32(4)}, [y])[y] == 5
    assert not parted(session)


def test_devices_of_other_tasks_and_kinds_are_virtual_devices():
    b, devices = Builder(), ["/job:worker/replica:0/task:1/device:CPU:0", "/device:GPU:0"]
    x = b.placeholder("x", "int32")
    first = add(b, x, x)
    last = add(b, first, x)
    for node, device in zip(b.proto.node[1:], devices, strict=True):
        node.device = device
    session = ps.compile(b.bytes(), backends=[Unknown()], devices=devices)
    assert session.run({"x": np.int32(3)}, [last])[last] == 9
    assert len(session.inspect.executor.parts) == 2


@pytest.mark.parametrize(("backend", "parts"), [("numpy", 1), (Unknown(), 2)])
def test_devices_have_parts_only_where_a_kernel_may_take_long(backend, parts):
    """Otherwise each node of each iteration would return only a token."""
    source, total = endless()
    session = ps.compile(source, backends=[backend], devices=2)
    assert session.run({"n": np.int32(6)}, [total], timeout=SOON)[total] == 15
    assert len(session.inspect.executor.parts) == parts
    assert len(session.inspect.executor.observed().parts) == 2
    counts = [len(part.graph.steps) for part in session.inspect.executor.parts]
    assert sum(counts) > 10 if parts == 2 else counts == [1]


@pytest.mark.parametrize("traced", [False, True])
def test_device_that_stands_for_a_backend_runs_its_nodes_there(traced):
    b = Builder()
    x = b.placeholder("x", "float32")
    first = b.node("Exp", x, name="first", T=Type("float32"))
    far = b.node("Exp", first, name="far", T=Type("float32"))
    last = b.node("Neg", far, name="last", T=Type("float32"))
    for node, device in zip(b.proto.node, ("cpu:0", "cpu:0", "gpu:0", "gpu:0"), strict=True):
        node.device = f"/{device}"
    devices = {"/device:CPU:0": "numpy", "/device:GPU:0": FarBackend("far", ["Exp"])}
    session = ps.compile(b.bytes(), backends=["numpy"], devices=devices)
    options = {"trace": ps.Trace()} if traced else {}
    session.run({"x": np.float32(0.5)}, [last], **options)
    devices["/device:GPU:0"].ran.clear()  # measuring may have run it
    result = session.run({"x": np.float32(0.5)}, [last], **options)[last]
    np.testing.assert_allclose(result, -np.exp(np.exp(np.float32(0.5))), rtol=1e-6)
    assert devices["/device:GPU:0"].ran == {"Exp": 1}


def functional() -> Flow:
    """``If(p, then: -x * k, else: x + k)``, followed by ``while i < n: i, v = i + 1, v * k``."""
    g, numbers = Flow(), {"x": "int32", "k": "int32"}
    for name, dtype in {"p": "bool", **numbers, "n": "int32"}.items():
        g.placeholder(name, dtype)
    g.function("Then", numbers, {"out": "int32"}, {"out": "far_product:z:0"})
    g.op("Neg", "x", name="negated")
    g.op("Mul", "negated:y:0", "k", name="far_product")
    g.function("Else", numbers, {"out": "int32"}, {"out": "far_sum:z:0"})
    g.op("AddV2", "x", "k", name="far_sum")
    carried = {"i": "int32", "v": "int32", "k": "int32", "n": "int32"}
    g.function("Go", carried, {"go": "bool"}, {"go": "less:z:0"})
    g.op("Less", "i", "n", name="less")
    results = {f"{name}2": "int32" for name in carried}
    sources = {"i2": "next:z:0", "v2": "far_next:z:0", "k2": "k", "n2": "n"}
    g.function("Turn", carried, results, sources)
    g.const(np.int32(1), "one")
    g.op("AddV2", "i", "one:output:0", name="next")
    g.op("Mul", "v", "k", name="far_next")
    g.main()
    kinds = {"Tin": [Type("int32")] * 2, "Tout": [Type("int32")], "Tcond": Type("bool")}
    chosen = {"then_branch": Func("Then"), "else_branch": Func("Else")}
    g.node("StatelessIf", "p", "x", "k", name="choice", **chosen, **kinds)
    zero = g.const(np.int32(0), "zero")
    loop = {"cond": Func("Go"), "body": Func("Turn"), "T": [Type("int32")] * 4}
    g.node("StatelessWhile", zero, "choice", "k", "n", name="turns", **loop)
    for function in g.proto.library.function:
        for node in function.node_def:
            node.device = "/cpu:1" if node.name.startswith("far") else "/cpu:0"
    for node in g.proto.node:
        node.device = "/cpu:0"
    return g


@pytest.mark.parametrize("p", [True, False])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_nodes_in_functional_bodies_run_on_the_device_that_they_name(p, n):
    session = ps.compile(functional().bytes(), backends=["numpy"], devices=2)
    trace, feeds = ps.Trace(), {"p": p, "x": 2, "k": 3, "n": n}
    expected = (-6 if p else 5) * 3**n
    assert session.run(feeds, ["turns:1"])["turns:1"] == expected
    assert session.run(feeds, ["turns:1"], trace=trace)["turns:1"] == expected
    for part in session.inspect.executor.observed().parts:
        names = {node.node.name.rpartition("/")[2] for node in part.graph.nodes if node.node}
        far = {"far_product", "far_sum", "far_next"}
        assert names & far == (far if part.device.endswith("1") else set())
    counts = {name.rpartition("/")[2]: k for name, k in trace.counts.items()}
    assert counts.get("far_next", 0) == n
    assert counts.get("far_product", 0) == p
    assert counts.get("less", 0) >= 1


@pytest.mark.parametrize("n", [-1, 0, 1, 5])
@pytest.mark.parametrize("ends_early", [False, True])
def test_nodes_in_a_loop_with_a_trip_count_run_on_the_device_that_they_name(n, ends_early):
    """``for i in range(n): v = 2 v + i``, while v is less than 20 if it ``ends_early``."""
    b = GraphBuilder()
    times, x, zero = b.input("n", np.int64, []), b.input("x", np.int64, []), b.constant(0)

    def body(i, v, unused):
        with b.device("cpu:1"):
            doubled = b.op("Mul", v, b.constant(2), name="far_product")
        return doubled + i, unused

    condition = (lambda v, unused: v < 20) if ends_early else None
    v, unused = b.loop(body, x, zero, times=times, condition=condition)
    b.output("v", v)
    b.output("unused", unused)
    session = ps.compile(b.model(), executor="frames", backends=["numpy"], devices=2)
    trace, feeds = ps.Trace(), {"n": n, "x": 3}
    expected, turns = 3, 0
    while turns < n and not (ends_early and expected >= 20):
        expected, turns = 2 * expected + turns, turns + 1
    for options in ({}, {"trace": trace}):
        outputs = session.run(feeds, **options)
        assert (outputs["v"], outputs["unused"]) == (expected, 0)
    counts = {name.rpartition("/")[2]: k for name, k in trace.counts.items()}
    assert counts.get("far_product", 0) == turns
    (far,) = [
        part for part in session.inspect.executor.observed().parts if part.device.endswith("1")
    ]
    assert any("far_product" in node.node.name for node in far.graph.nodes if node.node)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("names", BACKENDS)
def test_what_a_loop_on_devices_carries_may_begin_constant_and_grow(names, traced):
    b = GraphBuilder()
    n = b.input("n", np.int64, [])

    def body(i, count, rows):
        with b.device("cpu:1"):
            return count + 2, b.op("Sin", b.op("Concat", rows, rows, axis=0))

    start = b.constant(0), b.constant([1], np.float32)
    count, rows = b.loop(body, *start, condition=lambda count, rows: count < n)
    b.output("count", count)
    b.output("rows", rows)
    session = ps.compile(b.model(), executor="frames", backends=names, devices=2)
    options = {"trace": ps.Trace()} if traced else {}
    outputs = session.run({"n": 5}, timeout=60, **options)
    assert outputs["count"] == 6
    np.testing.assert_allclose(outputs["rows"], np.full(8, np.sin(np.sin(np.sin(1)))), rtol=1e-5)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("far", [Unknown(), "numpy", FarBackend("far", ["Mul"])])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_nodes_in_a_loop_that_collects_rows_run_on_the_device_that_they_name(n, far, traced):
    """``for i in range(n): v = 2 v + i``; each v, each ``[v, v]``, and each as often as is fed."""
    b = GraphBuilder()
    times, x = b.input("n", np.int64, []), b.input("x", np.int64, [])
    width = b.input("width", np.int64, [1])

    def body(i, v):
        with b.device("cpu:1"):
            doubled = b.op("Mul", v, b.constant(2), name="far_product")
        following = doubled + i
        wide = b.op("Expand", following, width)
        return following, following, b.op("Expand", following, b.constant([2])), wide

    outputs = b.loop(body, x, times=times)
    for name, value in zip(("last", "each", "twice", "wide"), outputs, strict=True):
        b.output(name, value)
    session = ps.compile(b.model(), backends=["numpy"], devices={"cpu:0": "numpy", "cpu:1": far})
    feeds = {"n": n, "x": 3, "width": [3]}
    expected = [3]
    for i in range(n):
        expected.append(2 * expected[-1] + i)
    for _ in range(2):
        if isinstance(far, FarBackend):
            far.ran.clear()  # measuring has run it
        outputs = session.run(feeds, trace=ps.Trace() if traced else None)
    assert outputs["last"] == expected[-1]
    np.testing.assert_array_equal(outputs["each"], expected[1:])
    np.testing.assert_array_equal(outputs["twice"], np.array([expected[1:]] * 2).T)
    wide = np.array([expected[1:]] * 3).T if n else np.empty((0, 0))
    np.testing.assert_array_equal(outputs["wide"], wide)
    if isinstance(far, FarBackend):
        assert far.ran["Mul"] == n
    elif far != "numpy":
        (part,) = [each for each in session.inspect.executor.parts if each.device.endswith("1")]
        assert any("far_product" in node.node.name for node in part.graph.nodes if node.node)


def test_unknown_devices_error_names_all_nodes():
    b = Builder()
    x = b.placeholder("x", "int32")
    y = add(b, add(b, x, x), b.const(np.int32(1)))
    for node, device in zip(b.proto.node[1:], ("/gpu:0", "/cpu:0", "/cpu:7"), strict=True):
        node.device = device
    session = None
    with pytest.raises(ps.InvalidModel, match=r"'/gpu:0', for n1.*'/cpu:7', for n3") as caught:
        session = ps.compile(b.bytes(), executor="frames", backends=["numpy"], devices=2)
        session.run({"x": np.int32(1)}, [y])
    assert "n2" not in str(caught.value)


def test_nodes_without_a_device_run_on_the_first():
    b = Builder()
    y = add(b, b.placeholder("x", "int32"), b.const(np.int32(1)))
    b.proto.node[-1].device = "/job:localhost/cpu:*"
    session = ps.compile(b.bytes(), "frames", ["numpy"], devices=["cpu:3", "cpu:4"])
    assert session.run({"x": np.int32(1)}, [y])[y] == 2
    assert not parted(session)
    trace = ps.Trace()
    session.run({"x": np.int32(1)}, [y], trace=trace)
    (event,) = [each for each in trace.to_dict()["traceEvents"] if each["name"] == y]
    assert event["args"]["device"].endswith("/device:CPU:3")


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
def test_devices_with_another_executor_are_refused(executor):
    with pytest.raises(ValueError, match="frames"):
        compile_text("g (float x) => (float y) { y = Neg(x) }", executor=executor, devices=2)


def test_devices_with_executor_auto_use_frames():
    loaded = ps.load(model_from_text("g (float x) => (float y) { a = Neg(x) y = Abs(a) }"))
    loaded.graph.nodes[1].device = "/cpu:1"
    session = ps.compile(loaded, backends=[Unknown()], devices=2)
    assert session(np.float32(2)) == 2
    assert parted(session)


def test_readers_of_a_handle_run_on_its_device():
    case = next(case for case in cases() if "TensorArrayWriteV3" in case.ops)
    graph = read_graph(case.path)
    for i, node in enumerate(graph.node):
        node.device = f"/device:CPU:{i % 3}"
    session = ps.compile(graph.SerializeToString(), "frames", ["numpy"], devices=3)
    run = case.runs[0]
    trace = ps.Trace()
    session.run(feeds(run), run["fetches"], run["targets"], trace=trace)
    events = [each["args"] for each in trace.to_dict()["traceEvents"] if "args" in each]
    where = {
        each["device"]
        for each in events
        if each.get("operation", "").startswith("tensorflow.Tensor")
    }
    assert len(where) == 1


def endless(body: str = "Neg") -> tuple[bytes, str]:
    """``while True`` with its body on another device."""
    b = Builder()
    n = b.placeholder("n", "int32")
    total = counting(b, n, op=body)
    for node in b.proto.node:
        node.device = f"/device:CPU:{int(node.op == body)}"
    return b.bytes(), total


def test_long_kernels_of_two_devices_run_in_parallel():
    """Each kernel waits until the other has begun, once they are known to be slow."""
    backend = MeetingBackend()
    loaded = ps.load(model_from_text("g (float x) => (float y, float z) { y = Sin(x) z = Cos(x) }"))
    for i, node in enumerate(loaded.graph.nodes):
        node.device = f"/cpu:{i}"
    session = ps.compile(loaded, "frames", [backend], devices=2)
    for _ in range(60):
        session(np.float32(1))
    assert backend.met
