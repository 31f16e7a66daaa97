"""The facts of a node that kernels are chosen by: its types as torch has them, its constants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.backends.torch.memory import TORCH_DTYPES, TorchMemory
from penstock.core.types import RunValue, RunValues, TensorType, Type
from penstock.ir.graph import Node, Value

HELD = frozenset(TORCH_DTYPES.values())
"""all types of elements that kernels take"""
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""the floating-point types"""
NUMBERS = HELD - {torch.bool}
INTEGERS = NUMBERS - FLOATS
INDICES = frozenset({torch.int32, torch.int64})
"""the types of elements that count others"""
_FLAGS = threading.RLock()
"""held while a flag of torch is not what the process has set"""


class TorchSite:
    """A node whose kernel is asked for, with the types of its inputs. ``tf32``: whether operands of
    products may be rounded to TensorFloat-32."""

    def __init__(
        self, node: Node, types: Sequence[Type | None], memory: TorchMemory, tf32: bool = False
    ) -> None:
        self.node = node
        self.attrs = node.attrs
        self.memory = memory
        self.device = memory.device
        self.tf32 = tf32
        self._types = types

    def given(self, index: int) -> bool:
        """Whether an input is there."""
        return self.node.input(index) is not None

    def type(self, index: int) -> TensorType | None:
        """The type of an input; None if it is left out, or no tensor."""
        type_ = self._types[index] if index < len(self._types) else None
        return type_ if isinstance(type_, TensorType) else None

    def rank(self, index: int) -> int | None:
        """The number of dims of an input, as far as it is known."""
        type_ = self.type(index)
        return None if type_ is None else type_.rank

    def dims(self, index: int) -> tuple[int, ...] | None:
        """The shape of an input, if all of it is known."""
        type_ = self.type(index)
        shape = None if type_ is None else type_.shape
        return _known(shape)

    def dtype(self, index: int) -> torch.dtype | None:
        """The type of the elements of an input as torch holds them; None if it has none for it."""
        type_ = self.type(index)
        return None if type_ is None else self.memory.dtype(type_.dtype)

    def text(self, name: str, default: str = "") -> str:
        """An attribute that is a text, which older files have as bytes."""
        value = self.attrs.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def output(self, index: int = 0) -> Value | None:
        """An output, None if it is left out."""
        outputs = self.node.outputs
        return outputs[index] if index < len(outputs) else None

    def result_dtype(self, index: int = 0) -> torch.dtype | None:
        """The type of the elements of an output."""
        value = self.output(index)
        type_ = None if value is None else value.type
        return self.memory.dtype(type_.dtype) if isinstance(type_, TensorType) else None

    def result_dims(self, index: int = 0) -> tuple[int, ...] | None:
        """The shape of an output, if all of it is known."""
        value = self.output(index)
        type_ = None if value is None else value.type
        return _known(type_.shape) if isinstance(type_, TensorType) else None

    def const(self, index: int) -> np.ndarray | None:
        """The contents of a constant input."""
        return self.node.const(index)

    def ints(self, index: int) -> tuple[int, ...] | None:
        """The elements of a constant input; None if it is left out or no constant."""
        const = self.const(index)
        return None if const is None else tuple(const.reshape(-1).tolist())

    def are_floats(self, *indices: int) -> bool:
        """Whether inputs, those that are given, have elements of one floating-point type."""
        dtypes = {self.dtype(i) for i in indices if self.given(i)}
        return len(dtypes) == 1 and dtypes <= FLOATS

    def tensor(self, array: RunValue, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of an array on the device."""
        tensor: torch.Tensor = self.memory.from_host(np.asarray(array))
        return tensor if dtype is None else tensor.to(dtype)


def with_flag(
    site: TorchSite, function: Callable[..., RunValue], flags: object, name: str, value: object
) -> Callable[..., RunValue]:
    """``function``, with the flag ``name`` of ``flags`` set to ``value`` on a GPU. torch has one
    for the process: it is set for the call, and put back before another thread sets it."""
    if site.memory.on_host:
        return function

    def call(*tensors: RunValue, **options: Any) -> Any:
        with _FLAGS:
            before = getattr(flags, name)
            setattr(flags, name, value)
            try:
                return function(*tensors, **options)
            finally:
                setattr(flags, name, before)

    return call


def _known(shape: RunValues | None) -> tuple[int, ...] | None:
    dims = tuple([dim for dim in shape or () if isinstance(dim, int)])
    return dims if shape is not None and len(dims) == len(shape) else None
