"""ONNX Runtime's interface on top of Penstock, compared with ONNX Runtime itself."""

from __future__ import annotations

import gc
import importlib
import json
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock.compat.onnxruntime as ort
from penstock.compat.onnxruntime.capi import onnxruntime_pybind11_state as errors
from tests.support.onnx_text import model_from_text

TEXT = "g (float[N, 3] x, int64[3] i) => (float[N, 3] y, int64[3] j) { y = Neg(x) j = Add(i, i) }"
X = np.arange(6, dtype=np.float32).reshape(2, 3)
I = np.array([1, 2, 3])  # noqa: E741
BOTH = pytest.mark.parametrize("runtime", [ort, onnxruntime], ids=["penstock", "onnxruntime"])


def model(text: str = TEXT) -> bytes:
    proto = model_from_text(text)
    proto.ir_version, proto.producer_name, proto.model_version = 9, "maker", 3
    proto.doc_string, proto.graph.doc_string = "about", "of the graph"
    onnx.helper.set_model_props(proto, {"names": "a, b"})
    return proto.SerializeToString()


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


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("g (seq(float[2]) x) => (int64 y) { y = SequenceLength(x) }", "seq(tensor(float))"),
        ("g (string[N] x) => (string[N] y) { y = Identity(x) }", "tensor(string)"),
        ("g (bool[N] x) => (bool[N] y) { y = Not(x) }", "tensor(bool)"),
        ("g (float16[N] x) => (float16[N] y) { y = Identity(x) }", "tensor(float16)"),
        ("g (double[N] x) => (double[N] y) { y = Neg(x) }", "tensor(double)"),
    ],
)
def test_types_are_written_alike(text, type_):
    for runtime in (ort, onnxruntime):
        (port,) = runtime.InferenceSession(model(text)).get_inputs()
        assert port.type == type_


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
def test_strings_in_arrays_of_any_kind_are_taken(runtime):
    session = runtime.InferenceSession(
        model("g (string[N] x) => (string[N] y) { y = Identity(x) }")
    )
    (y,) = session.run(None, {"x": np.array(["a", "bc"])})
    assert y.tolist() == ["a", "bc"]


def wrong_calls(runtime: ModuleType) -> dict[str, object]:
    session = runtime.InferenceSession(model())
    feeds = {"x": X, "i": I}
    return {
        "missing input": lambda: session.run(None, {"x": X}),
        "unknown input": lambda: session.run(None, {**feeds, "z": X}),
        "unknown output": lambda: session.run(["q"], feeds),
        "dtype": lambda: session.run(None, {**feeds, "x": X.astype(np.float64)}),
        "dims": lambda: session.run(None, {**feeds, "x": X[:, :2]}),
        "missing file": lambda: runtime.InferenceSession("/no/such/file.onnx"),
        "no model": lambda: runtime.InferenceSession(b"\xff\x00garbage" * 10),
        "wrong source": lambda: runtime.InferenceSession(3),
        "session entry": lambda: runtime.SessionOptions().get_session_config_entry("none"),
        "element type": lambda: runtime.OrtValue.ortvalue_from_shape_and_type([1], 999),
    }


@pytest.mark.parametrize("name", wrong_calls(ort))
def test_errors_have_the_same_class_name_and_code(name):
    raised = []
    for runtime in (ort, onnxruntime):
        with pytest.raises(Exception) as caught:
            wrong_calls(runtime)[name]()
        raised.append((type(caught.value).__name__, str(caught.value)[:24]))
        del caught
        gc.collect()
    if name in ("session entry", "element type"):  # their texts are their own
        raised = [entry[:1] for entry in raised] if name == "session entry" else raised[:1] * 2
    if "ONNXRuntimeError" not in raised[1][-1]:
        raised = [entry[:1] for entry in raised]
    assert raised[0] == raised[1]


def test_errors_of_models_have_codes():
    with pytest.raises(errors.NotImplemented, match="Foo"):
        ort.InferenceSession(
            model_from_text(
                "g (float[2] x) => (float[2] y) { y = my.Foo(x) }", domains={"my": 1}
            ).SerializeToString()
        )
    with pytest.raises(errors.InvalidGraph, match="INVALID_GRAPH"):
        ort.InferenceSession(
            model_from_text("g (float[2] x) => (float[2] y) { y = Neg(z) }").SerializeToString()
        )


def test_other_providers_are_warned_of():
    with pytest.warns(UserWarning, match="'CUDAExecutionProvider' is not in available"):
        session = ort.InferenceSession(
            model(), providers=[("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]
        )
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_options_with_a_counterpart_take_effect():
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model(), options)
    assert session._session.options.threads == 1
    options.inter_op_num_threads = 2
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    session = ort.InferenceSession(model(), sess_options=options)
    assert session._session.options.threads == 2
    assert session._session.options.executor == "parallel"


@BOTH
def test_dims_by_name_are_overridden(runtime):
    options = runtime.SessionOptions()
    options.add_free_dimension_override_by_name("N", 2)
    session = runtime.InferenceSession(model(), options)
    assert session.get_inputs()[0].shape == [2, 3]
    session.run(None, {"x": X, "i": I})
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        session.run(None, {"x": X[:1], "i": I})


@BOTH
def test_options_know_the_same_names(runtime):
    options, run = runtime.SessionOptions(), runtime.RunOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_order = runtime.ExecutionOrder.DEFAULT
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    run.add_run_config_entry("own", "entry")
    run.log_severity_level, run.logid = 2, "one"
    session = runtime.InferenceSession(model(), options)
    session.run(None, {"x": X, "i": I}, run)


@BOTH
def test_terminated_options_end_runs(runtime):
    session = runtime.InferenceSession(
        model("""g (int64 n) => (int64 m) {
            m = Loop (n, , n) <body = b (int64 i, bool c, int64 v) => (bool d, int64 w)
                { d = Identity(c) w = Add(v, i) }> }""")
    )
    options = runtime.RunOptions()
    options.terminate = True
    with pytest.raises(Exception, match=r"\[ONNXRuntimeError\]"):
        session.run(None, {"n": np.array(10)}, options)
    options.terminate = False
    (m,) = session.run(None, {"n": np.array(3)}, options)
    assert m == 6


@BOTH
def test_run_async_calls_back_with_outputs_or_an_error(runtime):
    session = runtime.InferenceSession(model())
    ended, found = threading.Event(), []

    def done(results, data, error):
        found.append((results, data, error))
        ended.set()

    session.run_async(["j"], {"x": X, "i": I}, done, "data")
    assert ended.wait(30)
    ((results, data, error),) = found
    np.testing.assert_array_equal(results[0], 2 * I)
    assert (data, error) == ("data", "")


def test_run_async_that_fails_calls_back_with_the_text():
    text = "g (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }"
    ended, found = threading.Event(), []
    session = ort.InferenceSession(model(text))
    feeds = {"x": X[0], "i": np.array([5])}
    session.run_async(None, feeds, lambda *told: (found.append(told), ended.set()), None)
    assert ended.wait(30)
    assert found[0][0] == [] and "Gather" in found[0][2]


@BOTH
def test_values_and_bindings(runtime):
    session = runtime.InferenceSession(model())
    value = runtime.OrtValue.ortvalue_from_numpy(X.copy())
    assert (value.shape(), value.data_type(), value.device_name()) == (
        [2, 3],
        "tensor(float)",
        "cpu",
    )
    assert value.is_tensor() and value.has_value() and value.element_type() == 1
    value.update_inplace(2 * X)
    np.testing.assert_array_equal(value.numpy(), 2 * X)
    outputs = session.run_with_ort_values(
        ["y"], {"x": value, "i": runtime.OrtValue.ortvalue_from_numpy(I)}
    )
    np.testing.assert_array_equal(outputs[0].numpy(), -2 * X)

    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    i, y = I.copy(), np.empty_like(X)
    binding.bind_input("i", "cpu", 0, np.int64, [3], i.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, [2, 3], y.ctypes.data)
    binding.bind_output("j")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, -X)
    first, second = binding.copy_outputs_to_cpu()
    np.testing.assert_array_equal(first, y)
    np.testing.assert_array_equal(second, 2 * I)
    target = runtime.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
    binding.clear_binding_outputs()
    binding.bind_ortvalue_input("x", runtime.OrtValue.ortvalue_from_numpy(-X))
    binding.bind_ortvalue_output("y", target)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(target.numpy(), X)
    assert len(binding.get_outputs()) == 1


def test_profiling_writes_a_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ort.SessionOptions()
    options.enable_profiling = True
    session = ort.InferenceSession(model(), options)
    session.run(None, {"x": X, "i": I})
    path = session.end_profiling()
    assert json.loads(Path(path).read_text())
    assert ort.InferenceSession(model()).end_profiling() == ""


def test_devices_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="no device 'cuda'"):
        ort.OrtValue.ortvalue_from_numpy(X, "cuda")


def test_public_names_are_those_of_onnxruntime():
    ours = {name for name in ort.__all__ if name != "capi"}
    assert not [name for name in sorted(ours) if not hasattr(onnxruntime, name)]
    for name in errors.__all__:
        assert hasattr(onnxruntime.capi.onnxruntime_pybind11_state, name), name
    for name in ("InferenceSession", "IOBinding", "OrtValue", "RunOptions", "SessionOptions"):
        own = {n for n in dir(getattr(ort, name)) if not n.startswith("_")}
        real = {n for n in dir(getattr(onnxruntime, name)) if not n.startswith("_")}
        extra = own - real - {"value", "arguments"}
        assert not extra, (name, extra)


def test_install_refuses_a_package_that_is_imported_already():
    compat = importlib.import_module("penstock.compat")
    with pytest.raises(RuntimeError, match="is imported already"):
        compat.install("onnxruntime")
    with pytest.raises(ValueError, match="there is 'onnxruntime'"):
        compat.install("torch")


def raised(function) -> str:
    """The class of the error that a function raises, "" if it raises none."""
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return ""


@BOTH
def test_bindings_and_runs_fail_with_the_same_errors(runtime):
    session = runtime.InferenceSession(model(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    assert raised(lambda: binding.bind_cpu_input("z", X)) == "RuntimeError"
    assert raised(lambda: session.run_with_iobinding(binding)) == "RuntimeError"
    binding.bind_cpu_input("x", X)
    binding.bind_cpu_input("i", I)
    small = runtime.OrtValue.ortvalue_from_shape_and_type([1, 1], np.float32)
    binding.bind_ortvalue_output("y", small)
    assert raised(lambda: session.run_with_iobinding(binding)) == "RuntimeError"
    assert raised(lambda: small.update_inplace(np.zeros(4, np.float32))) == "RuntimeError"
    options = runtime.RunOptions()
    options.terminate = True
    assert raised(lambda: session.run(None, {"x": X, "i": I}, options)) == "Fail"
    assert raised(lambda: runtime.InferenceSession(b"")) == "InvalidArgument"
    assert hasattr(runtime.capi.onnxruntime_pybind11_state, "Fail")


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


WEIGHTED = """g (float[N, 2] x) => (float[N, 2] y)
    <float[2, 2] w = {1, 0, 0, 1}, float[2] b = {1, 1}> { p = MatMul(x, w) y = Add(p, b) }"""


@BOTH
def test_initializers_are_given_other_values(runtime):
    options = runtime.SessionOptions()
    w, b = np.array([[1, 2], [3, 4]], np.float32), np.array([5, 6], np.float32)
    values = [runtime.OrtValue.ortvalue_from_numpy(x) for x in (w, b)]
    options.add_initializer("w", values[0])
    options.add_initializer("b", values[1])
    providers = ["CPUExecutionProvider"]
    session = runtime.InferenceSession(model(WEIGHTED), options, providers=providers)
    np.testing.assert_allclose(session.run(None, {"x": X[:, :2]})[0], X[:, :2] @ w + b)


def test_initializer_with_another_value_is_folded_with_that():
    """Beyond ONNX Runtime, which folds what the file has."""
    options = ort.SessionOptions()
    options.add_initializer("w", ort.OrtValue.ortvalue_from_numpy(np.array([5, 6], np.float32)))
    text = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { n = Neg(w) y = Add(x, n) }"
    session = ort.InferenceSession(model(text), options)
    assert session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [-4, -5]


@pytest.mark.parametrize(
    ("name", "value"),
    [("nope", np.ones((2, 2), np.float32)), ("w", np.ones(2, np.float32)), ("w", np.ones((2, 2)))],
)
def test_initializer_that_the_model_has_not_is_refused(name, value):
    options = ort.SessionOptions()
    options.add_external_initializers([name], [ort.OrtValue.ortvalue_from_numpy(value)])
    with pytest.raises(errors.InvalidArgument, match=rf"'{name}'"):
        ort.InferenceSession(model(WEIGHTED), options)


@BOTH
def test_every_event_of_a_profile_has_a_category(runtime, tmp_path):
    options = runtime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = runtime.InferenceSession(model(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": X, "i": I})
    events = json.loads(Path(session.end_profiling()).read_text())
    assert {"Session", "Node"} <= {event["cat"] for event in events}


@BOTH
def test_sessions_are_imported_from_where_they_are_defined(runtime):
    name = f"{runtime.__name__}.capi.onnxruntime_inference_collection"
    assert importlib.import_module(name).InferenceSession is runtime.InferenceSession
