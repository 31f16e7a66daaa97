"""Graphs in parts on the workers of a cluster, beside ONNX Runtime."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.cluster.members import Members
from penstock.cluster.runs import ClusterRun
from penstock.executors.control import NEVER
from tests.support.saved_models import Net
from tests.support.timing import SOON


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


@pytest.mark.costly
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


def test_backend_of_the_program_that_cannot_be_sent_is_refused(cluster):
    backend = NumpyBackend()
    backend.lock = threading.Lock()
    with pytest.raises(ps.Unsupported, match=r"backend 'numpy'.*cannot be sent.*lock"):
        answer(ps.compile(convnet(), cluster=cluster, backends=[backend]), images())


@pytest.mark.full  # Ray starts once more
def test_operations_and_backends_of_the_program_run_on_workers():
    """Of a program that workers could not import: those of its main module travel by value."""
    program = textwrap.dedent("""
        import os

        os.environ["RAY_AUTH_MODE"] = "disabled"
        import numpy as np
        import penstock as ps
        from penstock.build import GraphBuilder
        from penstock.extend import HostBackend, Kernel, operator, same_type

        @operator("Twice", domain="com.example", infer=same_type)
        def twice(node, types):
            return Kernel(lambda x: x + x)

        class Offset(HostBackend):
            name = "offset"
            offset = 0.5

            def kernel(self, node, types):
                is_tanh = node.op.full_name == "Tanh"
                return Kernel(lambda x: np.tanh(x) + np.float32(self.offset)) if is_tanh else None

        b = GraphBuilder()
        x = b.input("x", np.float32, [3])
        with b.device("/job:worker/task:0"):
            h = b.op("Twice", x, domain="com.example")
        with b.device("/job:worker/task:1/device:CPU:1"):
            b.output("y", b.op("Tanh", h))
        model = b.model()
        with ps.Cluster(2) as cluster:
            own = {"backends": ["numpy", Offset()], "place": {"Tanh": "offset"}}
            session = ps.compile(model, cluster=cluster, devices=2, **own)
            print(session.run({"x": np.zeros(3, np.float32)})["y"])
            devices = {"cpu:0": "numpy", "cpu:1": Offset()}
            session = ps.compile(model, cluster=cluster, devices=devices)
            print(session.run({"x": np.zeros(3, np.float32)})["y"])
    """)
    result = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True)
    assert result.stdout.splitlines() == 2 * ["[0.5 0.5 0.5]"], result.stderr


@pytest.mark.parametrize("options", [{"executor": "linear"}, {"devices": ["cuda:0"]}])
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
    with pytest.raises(ps.PenstockError, match="reduce workers= or threads="):
        ps.Cluster(1, threads=1000).start()


def test_cluster_cannot_be_pickled():
    with pytest.raises(TypeError, match="workers of this process"):
        pickle.dumps(ps.Cluster(2))


def test_penstock_does_not_import_ray():
    program = "import sys, penstock; penstock.Cluster(2); print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr
