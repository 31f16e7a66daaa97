"""The other place of the exceptions of ONNX Runtime."""

from __future__ import annotations

import onnxruntime.capi._pybind_state as theirs

from penstock.compat.onnxruntime.capi import _pybind_state, onnxruntime_pybind11_state


def test_exceptions_are_the_same_at_both_places():
    for name in onnxruntime_pybind11_state.__all__:
        assert getattr(_pybind_state, name) is getattr(onnxruntime_pybind11_state, name)
        assert hasattr(theirs, name)
