"""The module in which ONNX Runtime defines its sessions, from which programs import them, too."""

from penstock.compat.onnxruntime.binding import IOBinding
from penstock.compat.onnxruntime.session import InferenceSession
from penstock.compat.onnxruntime.values import OrtDevice, OrtValue

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue"]
