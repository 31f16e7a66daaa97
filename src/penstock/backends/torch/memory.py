"""Tensors of torch: the element types that kernels take, and copies from and to NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from penstock.backends.torch.device import TorchDevice
from penstock.core.types import FLOAT32, RunValue, TensorType, dtype_named

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""by the name of the NumPy dtype: torch has few kernels for other integers"""

_NAMES: Mapping[torch.dtype, str] = {held: name for name, held in TORCH_DTYPES.items()}

DLPACK_CPU = 1
"""the number of the host's memory in DLPack (``DLDeviceType``)"""

WIDTHS = (torch.float32, torch.float16, torch.bfloat16)
"""the types in which a backend may hold float32"""


class TorchMemory:
    """The memory of one torch device, where float32 is held as ``width``. Memories whose values are
    not the same have different names. ``streams``: the streams of the device, if it has any;
    ``place``: what its name says, by default the device."""

    def __init__(
        self,
        device: torch.device,
        width: torch.dtype = torch.float32,
        streams: TorchDevice | None = None,
        place: str = "",
    ) -> None:
        self.device = device
        self.width = width
        self._streams = streams
        held = "" if width is torch.float32 else f" as {str(width).removeprefix('torch.')}"
        self.name = f"torch {place or device}{held}"

    @property
    def on_host(self) -> bool:
        """Whether the device is torch's CPU device."""
        return self.device.type == "cpu"

    def dtype(self, dtype: np.dtype | None) -> torch.dtype | None:
        """The type in which elements of a NumPy dtype are held; None if no kernel takes them."""
        if dtype is None:
            return None
        if dtype == FLOAT32:
            return self.width
        held = TORCH_DTYPES.get(dtype.name)
        return None if held is self.width else held  # to_host takes these for float32

    def from_host(self, value: RunValue) -> RunValue:
        """A copy of a NumPy array (or a list of these) on the device. In a call of a stream it has
        its place there, and may still be under way."""
        if isinstance(value, list):
            return [self.from_host(x) for x in value]
        dtype = self.dtype(value.dtype)
        if dtype is None:
            raise TypeError(f"torch's kernels take no elements of type {value.dtype}")
        streams = self._streams
        queued = streams is not None and streams.in_call
        # In a call of a stream, what reads the copy is put behind it; elsewhere any stream may read
        # at once.
        return self._pinned(value).to(self.device, dtype, non_blocking=queued)

    def to_host(self, value: RunValue) -> RunValue:
        """A tensor (or a list of these) as a new NumPy array; waits until it is there."""
        array = self.leaving(value)
        if self._streams is not None:
            self._streams.settle()
        return array

    def leaving(self, value: RunValue) -> RunValue:
        """``to_host``, without waiting: the array is there when the current stream has come so
        far. What is on the host stays as it is."""
        if isinstance(value, list):
            return list(map(self.leaving, value))
        if not isinstance(value, torch.Tensor):
            return value
        dtype = torch.float32 if value.dtype is self.width else value.dtype
        # Pinned: from other memory the copy would wait for the device.
        host = torch.empty(value.shape, dtype=dtype, pin_memory=not self.on_host)
        host.copy_(value, non_blocking=True)
        return array_over(host)

    def adopt(self, value: RunValue) -> tuple[torch.Tensor, TensorType] | None:
        """A tensor of callers, or what another library exports by DLPack, as kernels take it: as it
        is if it is on the device, else as a copy there; and its type. None for elements that no
        kernel takes, and for what DLPack has on another device."""
        if not isinstance(value, torch.Tensor):
            kind = value.__dlpack_device__()[0] if hasattr(value, "__dlpack_device__") else None
            if kind is None or (kind == DLPACK_CPU) != self.on_host:
                return None
            try:
                value = torch.from_dlpack(value)
            except (BufferError, RuntimeError, TypeError):  # such as strings, or read-only memory
                return None
        name = _NAMES.get(value.dtype)
        # Kernels take no sparse tensors.
        if name is None or value.layout is not torch.strided:
            return None
        dtype = dtype_named(name)
        held = self.dtype(dtype)
        if held is None:
            return None
        type_ = TensorType(dtype, tuple(value.shape))
        # Without the history of gradients, which would be kept with the value.
        return value.detach().to(self.device, held), type_

    def give(self, value: RunValue) -> RunValue:
        """A result for callers: a tensor of the device with the elements that the model says. Of
        arrays of the host a copy; what torch cannot hold stays as it is."""
        if isinstance(value, torch.Tensor):
            return value.to(torch.float32) if value.dtype is self.width else value
        if isinstance(value, list):
            return [self.give(x) for x in value]
        if isinstance(value, np.ndarray) and value.dtype.name in TORCH_DTYPES:
            return self._pinned(value).to(self.device)
        return value

    def _pinned(self, value: np.ndarray) -> torch.Tensor:
        """A copy of an array in memory of the host from which devices copy without the processor's
        help."""
        host = torch.empty(
            value.shape, dtype=TORCH_DTYPES[value.dtype.name], pin_memory=not self.on_host
        )
        np.copyto(array_over(host), value)
        return host


def array_over(tensor: torch.Tensor) -> np.ndarray:
    """The NumPy array over the memory of a tensor of the CPU device."""
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        # torch gives no NumPy array of bfloat16, which NumPy has only by ml_dtypes.
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
