"""ONNX Runtime's interface on top of Penstock: ``import penstock.compat.onnxruntime as ort``."""

from __future__ import annotations

from penstock.compat.onnxruntime import capi
from penstock.compat.onnxruntime.binding import IOBinding
from penstock.compat.onnxruntime.options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from penstock.compat.onnxruntime.session import (
    InferenceSession,
    get_all_providers,
    get_available_providers,
    get_device,
)
from penstock.compat.onnxruntime.values import ModelMetadata, NodeArg, OrtDevice, OrtValue

__version__ = "1.31.1"
"""the version of ONNX Runtime whose interface this is"""

SessionIOBinding = IOBinding

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "OrtDevice",
    "OrtValue",
    "RunOptions",
    "SessionIOBinding",
    "SessionOptions",
    "capi",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "get_version_string",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
]


def get_version_string() -> str:
    """The version of ONNX Runtime whose interface this is."""
    return __version__


def set_default_logger_severity(level: int, /) -> None:
    """Penstock logs through ``logging.getLogger("penstock")``; nothing is set here.

    Args:
        level: Not looked at.
    """


set_default_logger_verbosity = set_default_logger_severity


def disable_telemetry_events() -> None:
    """Penstock reports nothing anywhere."""


enable_telemetry_events = disable_telemetry_events
