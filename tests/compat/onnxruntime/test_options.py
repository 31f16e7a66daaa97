"""Options of sessions and runs, beside ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import penstock.compat.onnxruntime as ort
from penstock.compat.onnxruntime.capi import onnxruntime_pybind11_state as errors
from tests.compat.test_onnxruntime import BOTH, I, X, model
from tests.support.onnx_text import model_from_text


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
@pytest.mark.filterwarnings("ignore:options without effect")
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


# What has no effect.


IGNORED = {
    "graph_optimization_level": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "execution_order": ort.ExecutionOrder.PRIORITY_BASED,
    "enable_cpu_mem_arena": False,
    "enable_mem_pattern": False,
    "enable_mem_reuse": False,
    "use_deterministic_compute": True,
    "use_per_session_threads": False,
}


@pytest.mark.parametrize("name", IGNORED)
def test_option_without_effect_is_warned_of(name):
    options = ort.SessionOptions()
    setattr(options, name, IGNORED[name])
    with pytest.warns(UserWarning, match=f"options without effect on Penstock: {name}$") as caught:
        ort.InferenceSession(model(), options)
    assert caught[0].filename == __file__


def test_settings_of_providers_and_entries_without_effect_are_warned_of():
    options, run = ort.SessionOptions(), ort.RunOptions()
    options.add_session_config_entry("session.load_model_format", "ORT")
    options.set_provider_selection_policy(ort.OrtExecutionProviderDevicePolicy.PREFER_NPU)
    given = {"providers": [("CPUExecutionProvider", {"arena": "1"})], "disabled_optimizers": ["a"]}
    with pytest.warns(UserWarning) as caught:
        session = ort.InferenceSession(model(), options, **given)
    names = "set_provider_selection_policy, session.load_model_format, provider_options, disabled_optimizers"
    assert str(caught[0].message) == f"options without effect on Penstock: {names}"
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with pytest.warns(UserWarning, match="memory.enable_memory_arena_shrinkage"):
        session.run(None, {"x": X, "i": I}, run)


def test_options_that_penstock_satisfies_are_not_warned_of():
    options = ort.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_provider_for_devices(ort.get_ep_devices(), {})
    options.log_severity_level = 3
    ort.InferenceSession(model(), options, providers=[("CPUExecutionProvider", {})])
    assert options.has_providers()


@pytest.mark.parametrize("source", ["bytes", "path"])
def test_optimized_model_is_the_model_as_it_was_and_a_warning_says_so(source, tmp_path):
    path, target = tmp_path / "m.onnx", tmp_path / "out" / "optimized.onnx"
    path.write_bytes(model())
    target.parent.mkdir()
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(target)
    with pytest.warns(UserWarning, match=r"optimized\.onnx is the model as it was"):
        ort.InferenceSession(path if source == "path" else model(), options)
    assert target.read_bytes() == model()


def test_optimized_model_with_external_data_is_not_written_elsewhere(tmp_path):
    path, target = tmp_path / "m.onnx", tmp_path / "out" / "optimized.onnx"
    target.parent.mkdir()
    proto = model_from_text("g (float[1, 64] x) => (float[1, 64] y) { y = MatMul(x, w) }")
    w = np.ones((64, 64), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(proto, path, save_as_external_data=True, location="data", size_threshold=0)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(target)
    with pytest.warns(UserWarning, match="was not written"):
        ort.InferenceSession(path, options)
    assert not target.exists()
