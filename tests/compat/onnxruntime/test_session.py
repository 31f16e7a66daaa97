"""Sessions run as those of ONNX Runtime do."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
import penstock.compat.onnxruntime as ort
from tests.compat.test_onnxruntime import BOTH, TEXT, I, X, model
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON


def described(ports: list) -> list[tuple]:
    return [(port.name, port.type, port.shape) for port in ports]


@BOTH
def test_session_describes_its_model(runtime):
    session = runtime.InferenceSession(model(), providers=["CPUExecutionProvider"])
    assert described(session.get_inputs()) == [
        ("x", "tensor(float)", ["N", 3]),
        ("i", "tensor(int64)", [3]),
    ]
    assert described(session.get_outputs())[0] == ("y", "tensor(float)", ["N", 3])
    meta = session.get_modelmeta()
    assert dict(meta.custom_metadata_map) == {"names": "a, b"}
    found = (meta.producer_name, meta.version, meta.description, meta.graph_description)
    assert found == ("maker", 3, "about", "of the graph")
    assert meta.graph_name == "g" and meta.domain == ""
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert runtime.get_device() == "CPU"
    assert "CPUExecutionProvider" in runtime.get_available_providers()


@BOTH
def test_run_returns_a_list_in_the_order_asked_for(runtime):
    session = runtime.InferenceSession(model())
    feeds = {"x": X, "i": I}
    for names in (None, [], ["y", "j"]):
        y, j = session.run(names, feeds)
        np.testing.assert_array_equal(y, -X)
        np.testing.assert_array_equal(j, 2 * I)
    j, y = session.run(["j", "y"], {"x": X.tolist(), "i": I})
    assert y.dtype == np.float32 and j.dtype == np.int64


@BOTH
@pytest.mark.parametrize("ir_version", [3, 9])
def test_initializers_that_are_inputs_are_overridable_since_version_4(runtime, ir_version):
    proto = model_from_text(
        "g (float[N] x, float[K] w, float[2] unread) => (float[N] y) "
        "<float[2] w = {1, 2}, float[2] unread = {1, 2}> { y = Add(x, w) }"
    )
    proto.ir_version = ir_version
    session = runtime.InferenceSession(proto.SerializeToString())
    x = np.ones(2, np.float32)
    assert [port.name for port in session.get_inputs()] == ["x"]
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], [2, 3])
    if ir_version < 4:
        assert session.get_overridable_initializers() == []
        with pytest.raises(Exception, match="Invalid input name"):
            session.run(None, {"x": x, "w": x})
        return
    assert described(session.get_overridable_initializers()) == [
        ("w", "tensor(float)", ["K"]),
        ("unread", "tensor(float)", [2]),
    ]
    np.testing.assert_array_equal(session.run(None, {"x": x, "w": x})[0], [2, 2])
    np.testing.assert_array_equal(session.run(None, {"x": x, "unread": x})[0], [2, 3])


def test_overridable_initializers_are_known_in_a_saved_session(tmp_path):
    proto = model_from_text(
        "g (float[N] x, float[2] w) => (float[N] y) <float[2] w = {1, 2}> { y = Add(x, w) }"
    )
    path = str(tmp_path / "model.penstock")
    ps.compile(proto, cache=False).save(path)
    session = ort.InferenceSession(path)
    assert described(session.get_overridable_initializers()) == [("w", "tensor(float)", [2])]
    x = np.ones(2, np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "w": x})[0], [2, 2])


NAMED_TWICE = """g (float[n, 4] a, float[n, 4] b, float[n, 4] c) => (float[n, 4] y, float[m, 4] z) {
    y = Relu(a) z = Add(b, c) }"""


@BOTH
@pytest.mark.filterwarnings("ignore:dims of inputs")
def test_dims_of_one_name_may_have_several_sizes(runtime):
    session = runtime.InferenceSession(model_from_text(NAMED_TWICE).SerializeToString())
    a, b, c = (np.ones((n, 4), np.float32) for n in (2, 3, 3))
    results = [session.run(None, {"a": a, "b": b, "c": c})]
    ended = threading.Event()

    def done(outputs, data, error):
        results.append(outputs)
        ended.set()

    session.run_async(None, {"a": b, "b": a, "c": a}, done, None)
    assert ended.wait(SOON)
    assert [[y.shape for y in ys] for ys in results] == [[(2, 4), (3, 4)], [(3, 4), (2, 4)]]
    np.testing.assert_array_equal(results[0][1], 2 * b)
    assert [port.shape for port in session.get_inputs()] == [["n", 4]] * 3
    with pytest.raises(Exception, match="Add"):  # which cannot broadcast them
        session.run(None, {"a": a, "b": a, "c": b})


def test_several_sizes_of_dims_of_one_name_are_warned_of_once():
    session = ort.InferenceSession(model_from_text(NAMED_TWICE).SerializeToString())
    feeds = {name: np.ones((n, 4), np.float32) for name, n in (("a", 2), ("b", 3), ("c", 3))}
    with pytest.warns(UserWarning, match=r"\{'n': \[2, 3\]\}"):
        session.run(None, feeds)
    session.run(None, feeds)


@BOTH
def test_run_async_calls_back_with_outputs_or_an_error(runtime):
    session = runtime.InferenceSession(model())
    ended, found = threading.Event(), []

    def done(results, data, error):
        found.append((results, data, error))
        ended.set()

    session.run_async(["j"], {"x": X, "i": I}, done, "data")
    assert ended.wait(SOON)
    ((results, data, error),) = found
    np.testing.assert_array_equal(results[0], 2 * I)
    assert (data, error) == ("data", "")


def test_run_async_that_fails_calls_back_with_the_text():
    text = "g (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }"
    ended, found = threading.Event(), []
    session = ort.InferenceSession(model(text))
    feeds = {"x": X[0], "i": np.array([5])}
    session.run_async(None, feeds, lambda *told: (found.append(told), ended.set()), None)
    assert ended.wait(SOON)
    assert found[0][0] == [] and "Gather" in found[0][2]


def test_profiling_writes_a_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ort.SessionOptions()
    options.enable_profiling = True
    session = ort.InferenceSession(model(), options)
    session.run(None, {"x": X, "i": I})
    path = session.end_profiling()
    assert json.loads(Path(path).read_text())
    assert ort.InferenceSession(model()).end_profiling() == ""


@BOTH
def test_profiles_are_lists_of_events_with_the_operations_of_nodes(runtime, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = runtime.SessionOptions()
    options.enable_profiling = True
    session = runtime.InferenceSession(model(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": X, "i": I})
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event for event in events if event.get("cat") == "Node"]
    assert {event["args"]["op_name"] for event in nodes} == {"Neg", "Add"}
    assert {event["args"]["provider"] for event in nodes} == {"CPUExecutionProvider"}
    assert all(event["dur"] >= 0 and event["ph"] == "X" for event in nodes)


@BOTH
def test_model_without_a_version_has_the_largest(runtime):
    proto = model_from_text(TEXT)
    proto.ir_version = 9
    session = runtime.InferenceSession(proto.SerializeToString())
    assert session.get_modelmeta().version == 2**63 - 1
    assert str(session.get_inputs()[1]) == "NodeArg(name='i', type='tensor(int64)', shape=[3])"


@BOTH
def test_sessions_are_imported_from_where_they_are_defined(runtime):
    name = f"{runtime.__name__}.capi.onnxruntime_inference_collection"
    assert importlib.import_module(name).InferenceSession is runtime.InferenceSession
