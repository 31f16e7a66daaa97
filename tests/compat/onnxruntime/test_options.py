"""Options of sessions and runs, beside ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import penstock.compat.onnxruntime as ort
from penstock.compat.onnxruntime.capi import onnxruntime_pybind11_state as errors
from tests.compat.test_onnxruntime import BOTH, I, X, model


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
