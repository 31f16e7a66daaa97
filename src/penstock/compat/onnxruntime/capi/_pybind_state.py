"""Another place from which programs import ONNX Runtime's exceptions."""

from penstock.compat.onnxruntime.capi.onnxruntime_pybind11_state import *  # noqa: F403
