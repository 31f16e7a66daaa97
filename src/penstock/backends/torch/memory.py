"""Tensors of torch: the element types that kernels take, and copies from and to NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.types import FLOAT32

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

WIDTHS = (torch.float32, torch.float16, torch.bfloat16)
"""the types in which a backend may hold float32"""


class TorchMemory:
    """The memory of one torch device, where float32 is held as ``width``. Memories whose values are
    not the same have different names."""

    def __init__(self, device: torch.device, width: torch.dtype = torch.float32) -> None:
        self.device = device
        self.width = width
        held = "" if width is torch.float32 else f" as {_name(width)}"
        self.name = f"torch {device}{held}"

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

    def from_host(self, value: Any, *, blocking: bool = True) -> Any:
        """A copy of a NumPy array (or a list of these) on the device. Unless ``blocking``, the copy
        may still be under way: it has its place on the current stream."""
        if isinstance(value, list):
            return [self.from_host(x, blocking=blocking) for x in value]
        dtype = self.dtype(value.dtype)
        if dtype is None:
            raise TypeError(f"torch's kernels take no elements of type {value.dtype}")
        host = torch.empty(
            value.shape, dtype=TORCH_DTYPES[value.dtype.name], pin_memory=not self.on_host
        )
        np.copyto(array_over(host), value)
        return host.to(self.device, dtype, non_blocking=not blocking)

    def to_host(self, value: Any) -> Any:
        """A tensor (or a list of these) as a new NumPy array; waits until it is there."""
        if isinstance(value, list):
            return list(map(self.to_host, value))
        dtype = torch.float32 if value.dtype is self.width else value.dtype
        host = torch.empty(value.shape, dtype=dtype, pin_memory=not self.on_host)
        host.copy_(value)
        return array_over(host)


def array_over(tensor: torch.Tensor) -> np.ndarray:
    """The NumPy array over the memory of a tensor of the CPU device."""
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
