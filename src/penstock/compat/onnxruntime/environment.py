"""Process-wide settings of ONNX Runtime: devices, allocators, thread pools."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from penstock.compat.onnxruntime.values import OrtValue
from penstock.core import VERSION
from penstock.core.errors import warn
from penstock.core.records import dataclass, field


class OrtHardwareDeviceType(IntEnum):
    """Kinds of devices."""

    CPU = 0
    GPU = 1
    NPU = 2


class OrtDeviceMemoryType(IntEnum):
    """Kinds of memory of a device."""

    DEFAULT = 0
    HOST_ACCESSIBLE = 5


class OrtMemoryInfoDeviceType(IntEnum):
    """Where memory is."""

    CPU = 0
    GPU = 1
    FPGA = 2
    NPU = 3


class OrtAllocatorType(IntEnum):
    """Kinds of allocators; each plan of Penstock's has an arena of its own."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtMemType(IntEnum):
    """Kinds of memory that a provider may use."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    DEFAULT = 0


class OrtDeviceVendorId(IntEnum):
    """Makers of devices, by their numbers on a PCI bus."""

    NONE = 0x0000
    AMD = 0x1002
    NVIDIA = 0x10DE
    ARM = 0x13B5
    MICROSOFT = 0x1414
    HUAWEI = 0x19E5
    QUALCOMM = 0x5143
    INTEL = 0x8086


class OrtExecutionProviderDevicePolicy(IntEnum):
    """Preference among devices, of which there is one."""

    DEFAULT = 0
    PREFER_CPU = 1
    PREFER_NPU = 2
    PREFER_GPU = 3
    MAX_PERFORMANCE = 4
    MAX_EFFICIENCY = 5
    MIN_OVERALL_POWER = 6


@dataclass(frozen=True)
class OrtHardwareDevice:
    """A device of this machine."""

    type: OrtHardwareDeviceType = OrtHardwareDeviceType.CPU
    vendor: str = ""
    vendor_id: int = 0
    device_id: int = 0
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OrtEpDevice:
    """A device, and the provider that runs models on it."""

    ep_name: str = "CPUExecutionProvider"
    ep_vendor: str = "Penstock"
    ep_metadata: dict[str, str] = field(default_factory=dict)
    ep_options: dict[str, str] = field(default_factory=dict)
    device: OrtHardwareDevice = OrtHardwareDevice()


@dataclass(frozen=True)
class OrtMemoryInfo:
    """A description of memory, for ``create_and_register_allocator``."""

    name: str
    allocator_type: OrtAllocatorType
    device_id: int
    mem_type: OrtMemType


HOST_MEMORY = OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_DEVICE_ALLOCATOR, 0, OrtMemType.DEFAULT)


class OrtArenaCfg:
    """The settings of an arena, which are kept; ``create_and_register_allocator`` warns.

    Args:
        settings: As ONNX Runtime takes them.
    """

    def __init__(self, *settings: object) -> None:
        self.settings = settings


def get_ep_devices() -> list[OrtEpDevice]:
    """The devices that models run on: the host's processor alone."""
    return [OrtEpDevice(device=OrtHardwareDevice(vendor=platform.processor()))]


def get_build_info() -> str:
    """Return the name and version of Penstock, and of the interface that it stands in for."""
    return f"Penstock {VERSION}, with the interface of ONNX Runtime"


def has_collective_ops() -> bool:
    """False: a process of its own runs a model."""
    return False


def print_debug_info() -> None:
    """Print the versions and the machine, as ``penstock info`` does with more."""
    print(f"{get_build_info()}; Python {platform.python_version()}, {platform.platform()}")


def preload_dlls(
    cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None
) -> None:
    """Nothing to load: no library of a GPU is used.

    Args:
        cuda: Not looked at.
        cudnn: Not looked at.
        msvc: Not looked at.
        directory: Not looked at.
    """


def copy_tensors(src: Sequence[OrtValue], dst: Sequence[OrtValue], stream: None = None) -> None:
    """Copy tensors into others of the same dims.

    Args:
        src: The tensors.
        dst: Where they are copied, one to one.
        stream: None: values are in the host's memory.
    """
    for one, other in zip(src, dst, strict=True):
        np.copyto(other.numpy(), one.numpy())


def _without_effect(name: str, reason: str) -> None:
    warn(f"{name} has no effect on Penstock: {reason}")


def set_seed(seed: int) -> None:
    """Without effect, of which it warns.

    Args:
        seed: Not looked at.
    """
    _without_effect("set_seed", "random operations have seeds of their own, as attributes")


def set_global_thread_pool_sizes(intra_op_num_threads: int, inter_op_num_threads: int) -> None:
    """Without effect, of which it warns.

    Args:
        intra_op_num_threads: Not looked at.
        inter_op_num_threads: Not looked at.
    """
    _without_effect("set_global_thread_pool_sizes", "all sessions share the cores of the process")


def create_and_register_allocator(mem_info: OrtMemoryInfo, arena_cfg: OrtArenaCfg | None) -> None:
    """Without effect, of which it warns.

    Args:
        mem_info: Not looked at.
        arena_cfg: Not looked at.
    """
    _without_effect("create_and_register_allocator", "each plan has an arena of its own")


def create_and_register_allocator_v2(
    provider_type: str,
    mem_info: OrtMemoryInfo,
    options: dict[str, str],
    arena_cfg: OrtArenaCfg | None,
) -> None:
    """Without effect, of which it warns.

    Args:
        provider_type: Not looked at.
        mem_info: Not looked at.
        options: Not looked at.
        arena_cfg: Not looked at.
    """
    _without_effect("create_and_register_allocator_v2", "each plan has an arena of its own")


class OrtValueVector(list[OrtValue]):
    """A list of values, as ``run_with_ortvaluevector`` takes it."""

    push_back = list.append

    def reserve(self, count: int) -> None:
        """Nothing to do.

        Args:
            count: Not looked at.
        """
