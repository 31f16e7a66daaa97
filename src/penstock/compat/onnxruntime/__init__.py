"""ONNX Runtime's interface on top of Penstock: ``import penstock.compat.onnxruntime as ort``."""

from __future__ import annotations

from penstock.compat.onnxruntime import capi
from penstock.compat.onnxruntime.binding import IOBinding
from penstock.compat.onnxruntime.environment import (
    OrtAllocatorType,
    OrtArenaCfg,
    OrtDeviceMemoryType,
    OrtDeviceVendorId,
    OrtEpDevice,
    OrtExecutionProviderDevicePolicy,
    OrtHardwareDevice,
    OrtHardwareDeviceType,
    OrtMemoryInfo,
    OrtMemoryInfoDeviceType,
    OrtMemType,
    copy_tensors,
    create_and_register_allocator,
    create_and_register_allocator_v2,
    get_build_info,
    get_ep_devices,
    has_collective_ops,
    preload_dlls,
    print_debug_info,
    set_global_thread_pool_sizes,
    set_seed,
)
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
from penstock.compat.onnxruntime.unavailable import UNAVAILABLE
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
    "OrtAllocatorType",
    "OrtArenaCfg",
    "OrtDevice",
    "OrtDeviceMemoryType",
    "OrtDeviceVendorId",
    "OrtEpDevice",
    "OrtExecutionProviderDevicePolicy",
    "OrtHardwareDevice",
    "OrtHardwareDeviceType",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtMemoryInfoDeviceType",
    "OrtValue",
    "RunOptions",
    "SessionIOBinding",
    "SessionOptions",
    "capi",
    "copy_tensors",
    "create_and_register_allocator",
    "create_and_register_allocator_v2",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_ep_devices",
    "get_version_string",
    "has_collective_ops",
    "preload_dlls",
    "print_debug_info",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
    "set_seed",
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


def __getattr__(name: str) -> type:
    """Names that programs import, but of which none can be made."""
    if name in UNAVAILABLE:
        return UNAVAILABLE[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
