"""Graphs in parts on the workers of a cluster, beside ONNX Runtime."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import onnxruntime
import pytest
import ray

import penstock as ps
from penstock.cluster.members import Members
from penstock.cluster.runs import ClusterRun
from penstock.cluster.worker import _MOST_OVER, Worker
from penstock.executors.control import NEVER
from tests.support.onnx_text import model_from_text
from tests.support.saved_models import Net
from tests.support.tf_graphs import Flow, Shape, Type
from tests.support.timing import SOON, wait_until


def convnet(layers: int = 6) -> bytes:
    net, x = Net(), "x"
    for i in range(layers):
        x = net.add("Relu", net.conv(x, 8 if i else 3, 8))
    return net.model(3, x).SerializeToString()


def halves(source: bytes) -> dict[str, str]:
    """``place=`` with the first half of the nodes on one worker, the others on another."""
    nodes = ps.load(source).graph.nodes
    half = len(nodes) // 2
    return {f"node:{n.name}": f"/job:worker/task:{int(i >= half)}" for i, n in enumerate(nodes)}


def images(batch: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, 3, 16, 16)).astype(np.float32)


def reference(source: bytes, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def answer(session: ps.Session, x: np.ndarray) -> np.ndarray:
    (y,) = session.run({"x": x}, timeout=SOON).values()
    return y


@pytest.fixture(scope="module")
def session(cluster):
    source = convnet()
    return ps.compile(source, cluster=cluster, place=halves(source))


def messages(cluster: ps.Cluster, monkeypatch) -> Counter:
    """Counts the kinds of messages that workers send to the driver, the bytes of arrays, too."""
    counts: Counter = Counter()
    take = cluster._runs.take

    def counting(worker, message):
        counts[message[0]] += 1
        if message[0] == "done":
            counts["bytes"] += sum(output.nbytes for output in message[2] or ())
        take(worker, message)

    monkeypatch.setattr(cluster._runs, "take", counting)
    return counts


# Answers.


@pytest.mark.parametrize("batch", [1, 3])
def test_halves_of_a_convnet_equal_onnxruntime(session, batch):
    x = images(batch)
    np.testing.assert_allclose(answer(session, x), reference(convnet(), x), rtol=1e-4, atol=1e-4)
    assert [part.worker for part in session.inspect.executor.parts] == [0, 1]


def test_costs_place_nodes_on_all_workers_where_that_pays_off(ray_started):
    source = convnet()
    with ps.Cluster(2, bandwidth=1e15, latency=1e-12) as cluster:
        session = ps.compile(source, cluster=cluster)
        x = images()
        np.testing.assert_allclose(answer(session, x), reference(source, x), rtol=1e-4, atol=1e-4)
        assert len(session.inspect.executor.parts) == 2
    with ps.Cluster(2, bandwidth=1.0, latency=1.0) as cluster:
        session = ps.compile(source, cluster=cluster)
        answer(session, x)
        assert len(session.inspect.executor.parts) == 1


def test_many_runs_in_flight_get_their_own_answers(session):
    feeds = [images(1, seed) for seed in range(40)]
    futures = [session.submit({"x": x}) for x in feeds]
    for x, future in zip(feeds, futures, strict=True):
        (y,) = future.result(SOON).values()
        np.testing.assert_allclose(y, reference(convnet(), x), rtol=1e-4, atol=1e-4)


def test_arun_and_run_async_answer(session):
    x = images(1)
    want = answer(session, x)
    (y,) = asyncio.run(session.arun({"x": x})).values()
    np.testing.assert_array_equal(y, want)
    ended = threading.Event()
    session.run_async(lambda outputs, error: ended.set() if error is None else None, {"x": x})
    assert ended.wait(SOON)


def test_outputs_are_the_callers_own(session):
    x = images(1)
    want = answer(session, x)
    answer(session, x).fill(0)
    np.testing.assert_array_equal(answer(session, x), want)


def test_values_larger_than_the_buffers_of_links_arrive(cluster):
    net = Net()
    source = net.model_of(["n"], net.add("Neg", net.add("Exp", "x"))).SerializeToString()
    session = ps.compile(source, cluster=cluster, place=halves(source))
    for n in (10, 1_000_000, 100):
        x = np.linspace(0, 1, n, dtype=np.float32)
        np.testing.assert_allclose(answer(session, x), -np.exp(x), rtol=1e-6)


# What is sent.


def test_graph_is_sent_once(cluster, session):
    x = images(1)
    answer(session, x)
    before = cluster.sent_graph_bytes
    for _ in range(30):
        answer(session, x)
    assert cluster.sent_graph_bytes == before > 0


def test_values_between_parts_do_not_pass_the_driver(cluster, session, monkeypatch):
    x = images(4)
    y = answer(session, x)
    counts = messages(cluster, monkeypatch)
    for _ in range(10):
        answer(session, x)
    assert counts["done"] == 10
    assert counts["bytes"] == 10 * y.nbytes


def test_worker_forgets_the_parts_of_a_session_that_is_gone(cluster):
    source = convnet(2)
    session = ps.compile(source, cluster=cluster, place=halves(source))
    answer(session, images())
    handle = session.inspect.executor._handle
    actor = cluster._members.members[1].actor

    def known() -> bool:
        return ray.get(actor.__ray_call__.remote(lambda worker, h: h in worker._parts, handle))

    assert known()
    session.close()
    del session
    gc.collect()
    wait_until(lambda: not known())


# Errors, and runs that are stopped.


def test_error_of_a_kernel_names_the_node(cluster):
    g = Flow()
    a, b = g.placeholder("a", "int32"), g.placeholder("b", "int32")
    g.node("FloorDiv", a, b, name="quotient", T=Type("int32"))
    for node in g.proto.node:
        node.device = f"/job:worker/task:{int(node.op == 'FloorDiv')}"
    session = ps.compile(g.bytes(), cluster=cluster)
    feeds = {"a": np.int32(7), "b": np.int32(0)}
    for _ in range(3):
        with pytest.raises(ps.RunError, match="quotient"):
            session.run(feeds, ["quotient:0"], timeout=SOON)
    assert session.run({**feeds, "b": np.int32(2)}, ["quotient:0"])["quotient:0"] == 3


def test_unknown_handle_is_an_error(cluster, session):
    answer(session, images())
    ended = threading.Event()
    errors = []

    def done(outputs, error):
        errors.append(error)
        ended.set()

    parts = session.inspect.executor.parts
    cluster._runs.begin(ClusterRun(10**6, parts, [images()], NEVER, done, 0))
    assert ended.wait(SOON)
    assert "no part with handle 1000000" in str(errors[0])


def test_observers_are_refused(session):
    with pytest.raises(ps.Unsupported, match="without cluster="):
        session.run({"x": images()}, trace=ps.Trace())


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ({"Conv": "/job:worker/task:7"}, "no such worker"),
        ({"node:nowhere": "/job:worker/task:1"}, "no such node"),
        ({"Sqrt": "/job:worker/task:1"}, "no such operation"),
    ],
)
def test_place_that_names_what_there_is_not_is_refused(cluster, place, match):
    with pytest.raises(ps.InvalidInput, match=match):
        ps.compile(convnet(), cluster=cluster, place=place)


def test_backends_of_this_process_alone_are_refused(cluster):
    from penstock.backends.numpy import NumpyBackend

    with pytest.raises(ps.Unsupported, match="object of this process"):
        answer(ps.compile(convnet(), cluster=cluster, backends=[NumpyBackend()]), images())


@pytest.mark.parametrize("options", [{"executor": "linear"}, {"devices": 2}])
def test_options_that_a_cluster_does_not_go_with_are_refused(cluster, options):
    with pytest.raises(ValueError, match="cluster="):
        ps.compile(convnet(), cluster=cluster, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"threads": 0},
        {"retries": -1},
        {"worker_timeout": 0},
        {"objective": "speed"},
        {"bandwidth": -1.0},
    ],
)
def test_wrong_options_of_a_cluster_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ps.Cluster(**options)


def test_closed_cluster_refuses_runs_and_graphs(ray_started):
    source = convnet(2)
    with ps.Cluster(1) as cluster:
        session = ps.compile(source, cluster=cluster)
        answer(session, images())
    with pytest.raises(ps.WorkerLost, match="closed"):
        answer(session, images())
    with pytest.raises(ps.PenstockError, match="closed"):
        answer(ps.compile(source, cluster=cluster), images())


def test_more_workers_than_ray_has_cpus_for_are_refused(ray_started, monkeypatch):
    monkeypatch.setattr(Members.result, "__defaults__", (0.1,))
    with pytest.raises(ps.PenstockError, match="fewer workers or threads"):
        ps.Cluster(1, threads=1000).start()


def test_cluster_cannot_be_pickled():
    with pytest.raises(TypeError, match="workers of this process"):
        pickle.dumps(ps.Cluster(2))


def test_penstock_does_not_import_ray():
    program = "import sys, penstock; penstock.Cluster(2); print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr


# Variables.


def counter(read_on: int) -> bytes:
    """A variable that each run of ``add`` adds to, on worker 0, and is read on ``read_on``."""
    g = Flow()
    v = g.node("VarHandleOp", name="v", dtype=Type("float32"), shape=Shape([]), shared_name="v")
    g.node("AssignVariableOp", v, g.const(np.float32(1)), name="init", dtype=Type("float32"))
    g.node("AssignAddVariableOp", v, g.const(np.float32(2)), name="add", dtype=Type("float32"))
    w = g.node("VarHandleOp", name="w", dtype=Type("float32"), shape=Shape([]), shared_name="v")
    g.node("ReadVariableOp", w, name="read", dtype=Type("float32"))
    for node in g.proto.node:
        node.device = f"/job:worker/task:{read_on if node.name in ('w', 'read') else 0}"
    return g.bytes()


def test_variable_is_shared_by_the_signatures_of_a_session(cluster):
    session, other = [ps.compile(counter(0), cluster=cluster) for _ in range(2)]
    session.run(targets=["init"], fetches=[], timeout=SOON)
    for _ in range(2):
        session.run(targets=["add"], fetches=[], timeout=SOON)
    assert session.run(fetches=["read:0"], timeout=SOON)["read:0"] == 5
    with pytest.raises(ps.RunError, match="before anything was assigned"):
        other.run(fetches=["read:0"], timeout=SOON)


def test_variable_on_two_workers_is_refused(cluster):
    session = ps.compile(counter(1), cluster=cluster)
    session.run(targets=["init"], fetches=[], timeout=SOON)
    with pytest.raises(ps.InvalidModel, match=r"'v' is used on .*task:0.* and on .*task:1"):
        session.run(fetches=["read:0"], timeout=SOON)


def test_session_does_not_see_the_variables_of_another_after_one_is_gone(cluster):
    """Workers know stores by numbers, which must not be given twice."""

    def value(session: ps.Session) -> float:
        return session.run(fetches=["read:0"], timeout=SOON)["read:0"]

    first, second = [ps.compile(counter(0), cluster=cluster) for _ in range(2)]
    first.variables["v"] = 4
    second.variables["v"] = 40
    assert (value(first), value(second)) == (4, 40)
    del first
    gc.collect()
    third = ps.compile(counter(0), cluster=cluster)
    third.variables["v"] = 400
    assert (value(second), value(third)) == (40, 400)


def test_workers_keep_no_variables_of_sessions_that_are_gone(cluster):
    actors = [member.actor for member in cluster._members.members]

    def stores() -> int:
        cluster._forget()
        calls = [actor.__ray_call__.remote(lambda worker: len(worker._stores)) for actor in actors]
        return sum(ray.get(calls))

    gc.collect()
    wait_until(lambda: stores() == 0)
    sessions = [ps.compile(counter(0), cluster=cluster) for _ in range(3)]
    for session in sessions:
        session.run(targets=["init"], fetches=[], timeout=SOON)
    assert stores() == len(cluster._homes) == 3
    del sessions, session
    gc.collect()
    wait_until(lambda: stores() == 0)
    assert not cluster._homes


def test_steps_that_have_ended_are_gone_through_seldom_while_an_old_one_goes_on():
    """10,000 steps are remembered; all of them, and later ones, while one of before goes on."""
    looks = 0

    class Counting(set):
        def __iter__(self):
            nonlocal looks
            looks += 1
            return super().__iter__()

    worker = Worker.__new__(Worker)
    worker._lock = threading.Lock()
    worker._steps, worker._parts, worker._oldest = {}, {}, 0
    worker._over, worker._most_over = Counting(), _MOST_OVER
    worker._step = lambda number: None  # all that matters is what is remembered
    for number in range(4 * _MOST_OVER):
        worker._over.add(number)
        worker._run(1, number, 0, (), None)
        if not isinstance(worker._over, Counting):
            assert worker._over == {*range(number + 1)}
            worker._over = Counting(worker._over)
    assert looks <= 3
    before = len(worker._over)
    for later in range(number + 1, number + 2 + before):
        worker._over.add(later)
        worker._run(1, later, later, (), None)
    assert len(worker._over) < before  # since the old one has ended


MODELS = {
    "strings": (
        "g (string[N] x) => (string[N] y) { a = Identity(x) b = StringConcat(a, x) "
        "y = StringConcat(b, a) }",
        np.array(["a", "bé", ""] * 9000, object),
    ),
    "sequence": (
        "g (float[N] x) => (float[M] y) { s = SequenceConstruct(x, x) t = SequenceInsert(s, x) "
        "y = ConcatFromSequence<axis=0>(t) }",
        np.ones(3, np.float32),
    ),
    "optional": (
        "g (float[N] x) => (float[N] y, bool b) { o = Optional(x) b = OptionalHasElement(o) "
        "y = OptionalGetElement(o) }",
        np.ones(3, np.float32),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_that_are_no_tensors_of_numbers_go_between_workers(name, cluster):
    text, x = MODELS[name]
    source = model_from_text(text).SerializeToString()
    alone = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    wanted = alone.run(None, {"x": x})
    session = ps.compile(source, cluster=cluster, place=halves(source))
    got = session.run({"x": x}, timeout=SOON)
    assert len(cluster._graphs[max(cluster._graphs)].parts) == 2
    for y, want in zip(got.values(), wanted, strict=True):
        np.testing.assert_array_equal(y, want)
