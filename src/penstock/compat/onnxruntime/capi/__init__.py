"""The package in which ONNX Runtime has its exceptions."""

from penstock.compat.onnxruntime.capi import onnxruntime_pybind11_state

__all__ = ["onnxruntime_pybind11_state"]
