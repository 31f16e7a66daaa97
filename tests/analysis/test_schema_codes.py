"""The numbers are those of the onnx package."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from penstock.analysis.schemas import DTYPE_NAMES, ELEMENT_TYPES, TYPE_NAMES
from penstock.core.types import dtype_named


def test_kinds_of_attributes_are_those_of_onnx():
    kinds = dict(onnx.AttributeProto.AttributeType.items())
    assert {name: kind for kind, name in TYPE_NAMES.items()} | {"UNDEFINED": 0} == kinds


def test_types_of_elements_are_those_of_onnx():
    assert dict(onnx.TensorProto.DataType.items()) == ELEMENT_TYPES


@pytest.mark.parametrize("code", DTYPE_NAMES)
def test_dtype_of_a_code_is_that_of_onnx(code):
    wanted = onnx.helper.tensor_dtype_to_np_dtype(code)
    own = dtype_named(DTYPE_NAMES[code])
    assert own == wanted or (code == onnx.TensorProto.STRING and wanted == np.object_)
