"""ONNX Runtime's interface on top of Penstock, compared with ONNX Runtime itself."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

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
def test_every_event_of_a_profile_has_a_category(runtime, tmp_path):
    options = runtime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = runtime.InferenceSession(model(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": X, "i": I})
    events = json.loads(Path(session.end_profiling()).read_text())
    assert {"Session", "Node"} <= {event["cat"] for event in events}
