"""Types and values as ONNX Runtime writes and takes them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock.compat.onnxruntime as ort
from tests.compat.test_onnxruntime import BOTH, X, model


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
def test_strings_in_arrays_of_any_kind_are_taken(runtime):
    session = runtime.InferenceSession(
        model("g (string[N] x) => (string[N] y) { y = Identity(x) }")
    )
    (y,) = session.run(None, {"x": np.array(["a", "bc"])})
    assert y.tolist() == ["a", "bc"]


def test_devices_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="no device 'cuda'"):
        ort.OrtValue.ortvalue_from_numpy(X, "cuda")
