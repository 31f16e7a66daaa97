"""Types of NumPy, PyTorch and ONNX by ONNX Runtime's names, beside its own helper."""

from __future__ import annotations

import numpy as np
import pytest

import penstock.compat.onnxruntime as ort
from penstock.compat.onnxruntime.transformers.io_binding_helper import TypeHelper
from tests.compat.test_onnxruntime import model

NAMES = [
    "float",
    "double",
    "float16",
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
]
NAMES += ["int64", "uint64", "complex64"]


@pytest.mark.parametrize("name", NAMES)
def test_types_are_those_of_onnxruntime(name: str) -> None:
    pytest.importorskip("torch")
    theirs = pytest.importorskip("onnxruntime.transformers.io_binding_helper").TypeHelper
    text = f"tensor({name})"
    ours = TypeHelper.ort_type_to_numpy_type(text)
    assert np.dtype(ours) == np.dtype(theirs.ort_type_to_numpy_type(text))
    assert TypeHelper.ort_type_to_torch_type(text) == theirs.ort_type_to_torch_type(text)
    if name != "complex64":
        assert TypeHelper.ort_type_to_onnx_type(text) == theirs.ort_type_to_onnx_type(text)


def test_types_of_a_session_are_by_name() -> None:
    session = ort.InferenceSession(model())
    assert TypeHelper.get_input_type(session, "i") == "tensor(int64)"
    assert TypeHelper.get_output_type(session, "y") == "tensor(float)"
    assert TypeHelper.get_io_onnx_type_map(session) == {"x": 1, "i": 7, "y": 1, "j": 7}
    assert len(TypeHelper.get_io_numpy_type_map(session)) == 4
    with pytest.raises(ValueError, match="there is no 'z'"):
        TypeHelper.get_input_type(session, "z")


@pytest.mark.parametrize("text", ["float", "tensor(float3)", "seq(tensor(float))"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no type of a tensor"):
        TypeHelper.ort_type_to_numpy_type(text)
    with pytest.raises(ValueError, match="PyTorch has no"):
        TypeHelper.ort_type_to_torch_type("tensor(string)")
