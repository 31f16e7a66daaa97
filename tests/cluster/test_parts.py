"""Graphs in parts on workers: as named, or by costs."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.cluster.parts import PartOptions, compile_part, encode_part
from penstock.cluster.simulated import SimulatedCluster
from penstock.compiler.cluster import WorkerPolicy, devices_of_workers
from penstock.core.errors import OptionError
from penstock.core.limits import DEFAULT_LIMITS
from penstock.executors.control import Control
from penstock.ir.graph import GraphPart
from tests.cluster.test_cluster import answer, convnet, halves, images, reference
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON


@pytest.fixture(scope="module")
def session(cluster):
    source = convnet()
    return ps.compile(source, cluster=cluster, place=halves(source))


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


def on_devices(*names: str) -> ps.Model:
    """A chain of long products, on these devices in turn."""
    b = GraphBuilder()
    x = b.input("x", np.float32, [600, 600])
    for name in names:
        with b.device(name):
            x = b.op("Tanh", x @ np.eye(600, dtype=np.float32))
    b.output("y", x)
    return b.model()


W0, W1 = "/job:worker/replica:0/task:0/device:CPU:", "/job:worker/replica:0/task:1/device:CPU:"


def test_part_of_a_worker_has_a_part_for_each_of_its_devices():
    graph = on_devices(W1 + "0", W1 + "1", W1 + "0").graph
    for node in graph.nodes:
        node.device = node.device or W1 + "0"
    content, _ = encode_part(GraphPart(W1 + "0", graph, (0,), (0,), {}), {})
    devices = {W0 + "0": None, W0 + "1": None, W1 + "0": None, W1 + "1": None}
    options = PartOptions(("numpy",), "float32", "best", {}, DEFAULT_LIMITS, devices)
    executor = compile_part(memoryview(content), options, 1, [], {})
    assert [part.device for part in executor.parts] == [W1 + "0", W1 + "1"]
    x = np.ones((600, 600), np.float32)
    (y,) = executor.run([x], Control())
    np.testing.assert_allclose(y, np.tanh(np.tanh(np.tanh(x))), rtol=1e-5)


def test_values_go_between_devices_of_workers_and_between_workers(cluster):
    names = [W0 + "1", W0 + "0", W1 + "1", W1 + "0", W0 + "1", W1 + "1"]
    session = ps.compile(on_devices(*names), cluster=cluster, devices=2, backends=["numpy"])
    x = np.random.default_rng(0).random((600, 600), np.float32)
    want = ps.compile(on_devices(*names), backends=["numpy"]).run({"x": x})["y"]
    for _ in range(3):
        np.testing.assert_array_equal(session.run({"x": x}, timeout=SOON)["y"], want)
    assert session.effective.devices == (W0 + "0", W0 + "1", W1 + "0", W1 + "1")


def test_device_that_names_no_worker_is_kept_where_costs_choose_one():
    policy = WorkerPolicy(SimulatedCluster(2, bandwidth=1.0, latency=1.0), [
        {W0 + "0": None, W0 + "1": None}, {W1 + "0": None, W1 + "1": None},
    ])  # fmt: skip
    assert policy.moved(W0 + "1", 1) == W1 + "1"
    assert policy.moved(W0 + "1", 0) == W0 + "1"


def test_devices_that_say_their_worker_are_of_that_worker_alone():
    own = devices_of_workers({"cpu:0": "numpy", "/task:1/cpu:1": "native"}, [W0 + "0", W1 + "0"])
    assert own == [{W0 + "0": "numpy"}, {W1 + "0": "numpy", W1 + "1": "native"}]
    assert devices_of_workers(["/task:0/cpu:3"], [W0 + "0", W1 + "0"]) == [
        {W0 + "3": None},
        {W1 + "0": None},
    ]


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (["/task:7/cpu:0"], "the cluster has no such worker"),
        (["cpu"], "say its number"),
        (["nonsense:1"], "which is not a device"),
        (["cpu:0", "cpu:0"], "one device twice"),
        (["cuda:0"], "devices of their own"),
        (0, "devices"),
        ([], "devices"),
    ],
)
def test_devices_that_workers_cannot_have_are_refused(cluster, devices, match):
    with pytest.raises(OptionError, match=match):
        ps.compile(convnet(), cluster=cluster, devices=devices)


def test_node_on_a_device_that_no_worker_has_is_refused(cluster):
    with pytest.raises(ps.InvalidModel, match="CPU:7"):
        ps.compile(on_devices(W0 + "7"), cluster=cluster, devices=2).run(
            {"x": np.ones((600, 600), np.float32)}
        )
