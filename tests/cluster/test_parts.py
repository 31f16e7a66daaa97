"""Graphs in parts on workers: as named, or by costs."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock as ps
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
