"""Options of a ``CompiledModel``. Those of devices and of LiteRT's own kernels have no effect, and
``CompiledModel`` warns of them."""

from __future__ import annotations

import enum

from penstock.compat.ai_edge_litert.hardware_accelerator import HardwareAccelerator
from penstock.core.records import dataclass


class CpuKernelMode(enum.IntEnum):
    """The kernels that LiteRT uses; here all are Penstock's."""

    DELEGATE = 0
    REFERENCE = 1
    BUILTIN = 2


@dataclass
class CpuOptions:
    """Options of the processor: ``num_threads`` cores that a run may keep busy, 0 for all of the
    process. The others have no effect."""

    num_threads: int = 0
    kernel_mode: CpuKernelMode | None = None
    enable_ynnpack: bool = False
    xnnpack_flags: int | None = None
    xnnpack_weight_cache_path: str = ""


class Options:
    """Options of one model.

    Args:
        hardware_accelerators: Devices that it may run on; they must include the processor.
        cpu_options: Of the processor.
        gpu_options: Without effect.
        qualcomm_options: Without effect.
        intel_openvino_options: Without effect.
    """

    def __init__(
        self,
        hardware_accelerators: HardwareAccelerator = HardwareAccelerator.CPU,
        cpu_options: CpuOptions | None = None,
        gpu_options: object = None,
        qualcomm_options: object = None,
        intel_openvino_options: object = None,
    ) -> None:
        self.hardware_accelerators = hardware_accelerators
        self.cpu_options = cpu_options or CpuOptions()
        self._of_devices = {
            "gpu_options": gpu_options,
            "qualcomm_options": qualcomm_options,
            "intel_openvino_options": intel_openvino_options,
        }

    @classmethod
    def create(cls) -> Options:
        """New options, those by default."""
        return cls()


def without_effect(options: Options) -> list[str]:
    """The options that are given and change nothing."""
    own, default = vars(options.cpu_options), vars(CpuOptions())
    names = [name for name, x in own.items() if name != "num_threads" and x != default[name]]
    devices = getattr(options, "_of_devices", {})
    return names + [name for name, x in devices.items() if x is not None]
