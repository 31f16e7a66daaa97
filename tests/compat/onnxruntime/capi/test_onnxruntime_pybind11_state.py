"""Exceptions are where programs import those of ONNX Runtime from."""

from __future__ import annotations

import onnxruntime.capi.onnxruntime_pybind11_state as theirs

from penstock.compat.onnxruntime import errors
from penstock.compat.onnxruntime.capi import onnxruntime_pybind11_state as state

# Of a device that the driver has reset, which is no error of the runtimes that Penstock stands for.
LACKING = {"DeviceReset"}


def test_exceptions_are_ours_under_all_names_of_onnxruntime():
    wanted = {
        n for n, x in vars(theirs).items() if isinstance(x, type) and issubclass(x, Exception)
    }
    assert wanted - LACKING <= {*state.__all__}
    for name in state.__all__:
        assert getattr(state, name) is getattr(errors, name)
        assert issubclass(getattr(state, name), Exception)
