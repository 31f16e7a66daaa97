"""The torch backend: which family of kernels runs which operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.backends.base import HostBackend
from penstock.backends.torch import (
    arrays,
    attention,
    elementwise,
    normalization,
    products,
    recurrent,
    reduce,
    resize,
    windows,
)
from penstock.backends.torch.device import CapturedCalls, Runtime, TorchDevice, device_of
from penstock.backends.torch.memory import WIDTHS, TorchMemory
from penstock.backends.torch.site import FLOATS, HELD, INDICES, NUMBERS, TorchSite
from penstock.backends.torch.threads import BOUND
from penstock.core.errors import PenstockError
from penstock.core.types import RunValue, RunValues, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.layout import packed_strides
from penstock.ops.work_estimate import Rates, RateTable, Workload, host_workload

Family = Callable[[TorchSite], Kernel | None]

# On the CPU device, roughly; "view": what copies nothing.
RATES: RateTable = {"": Rates(2e-6, 10e9, 100e9), "view": Rates(2e-6)}

# By the elements that the first input must have; families of _UNSEEN look at inputs themselves.
_UNSEEN = frozenset({*HELD, None})
_FAMILIES: Mapping[frozenset[torch.dtype | None], Mapping[tuple[str, ...], Family]] = {
    _UNSEEN: {
        elementwise.UNARY: elementwise.unary,
        reduce.REDUCTIONS: reduce.reduction_kernel,
        ("Attention",): attention.attention,
        ("BatchNormalization",): normalization.batch_normalization,
        ("ConstantOfShape",): arrays.constant_of_shape,
        ("Conv",): windows.convolution,
        ("ConvTranspose",): windows.transposed_convolution,
        ("Einsum",): products.einsum,
        ("GRU", "LSTM", "RNN"): recurrent.recurrent,
        ("Gemm",): products.gemm,
        ("GroupNormalization",): normalization.group_normalization_kernel,
        ("InstanceNormalization",): normalization.instance_normalization,
        ("LayerNormalization",): normalization.layer_normalization_kernel,
        ("MatMul",): products.matmul,
        ("RMSNormalization",): normalization.rms_normalization,
        ("Range",): arrays.range_,
        ("penstock.Attention",): attention.recognized_attention,
        ("penstock.ZeroNaN",): elementwise.unary,
    },
    HELD: {
        elementwise.BINARY: elementwise.binary,
        ("Cast", "CastLike"): elementwise.cast_kernel,
        ("Concat",): arrays.concat,
        ("DepthToSpace", "SpaceToDepth"): arrays.rearrange_blocks,
        ("Dropout", "Identity"): elementwise.identity_kernel,
        ("Expand",): arrays.expand,
        ("Flatten", "Reshape"): arrays.reshape_kernel,
        ("Gather",): arrays.gather,
        ("GatherElements",): arrays.gather_elements,
        ("GatherND",): arrays.gather_nd,
        ("NonZero",): arrays.nonzero,
        ("Pad",): arrays.pad_kernel,
        ("ScatterElements",): arrays.scatter_elements,
        ("ScatterND",): arrays.scatter_nd,
        ("Shape", "Size"): arrays.shape_of,
        ("Slice",): arrays.slice_,
        ("Split",): arrays.split_kernel,
        ("Squeeze",): arrays.squeeze,
        ("Tile",): arrays.tile,
        ("Transpose",): arrays.transpose_kernel,
        ("Trilu",): arrays.triangle,
        ("Unsqueeze",): arrays.unsqueeze,
    },
    NUMBERS: {elementwise.VARIADIC: elementwise.variadic, ("Clip",): elementwise.clip},
    FLOATS: {
        ("AveragePool",): windows.average_pool,
        ("GlobalAveragePool", "GlobalMaxPool"): windows.global_pool,
        ("LRN",): normalization.local_response,
        ("LogSoftmax", "Softmax"): normalization.softmax,
        ("MaxPool",): windows.max_pool,
        ("Resize",): resize.resize_kernel,
    },
    FLOATS | INDICES: {
        ("ArgMax", "ArgMin"): reduce.extreme_place,
        ("CumSum",): reduce.running_sum,
        ("TopK",): reduce.top_k,
    },
    INDICES: {("OneHot",): arrays.one_hot_kernel},
    frozenset({torch.bool}): {("Where",): elementwise.where},
    frozenset({torch.uint8}): {("BitShift",): elementwise.shift},
}
FAMILIES = {
    name: (family, elements)
    for elements, families in _FAMILIES.items()
    for names, family in families.items()
    for name in names
}
"""The families of kernels, by the full name of the operation, with the elements that its first
input must have."""


class TorchBackend(HostBackend):
    """Runs operations with PyTorch, on a device of torch. Values there are tensors; what it has no
    kernel for, the host runs.

    Args:
        device: As torch names it ("cpu", "cuda:1"); by default the current CUDA device if there is
            one, else the CPU.
        dtype: The type in which float32 is held and computed there, a floating type of torch or its
            name; what enters and leaves is float32 nevertheless.
        precision: "tf32" lets products, convolutions and recurrent layers on a GPU round their
            operands to TensorFloat-32.
        name: Of several backends of a session, the name of this one for ``place=``.
        runtime: The streams and events of the device, by default those of CUDA; torch's CPU device
            has none.

    Raises ``PenstockError`` for a device that there is not, ``ValueError`` for another type.
    """

    name = "torch"
    rates = RATES
    fuses = True
    host_backend = "numpy"

    def __init__(
        self,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "float32",
        precision: str = "float32",
        name: str = "torch",
        runtime: Runtime | None = None,
    ) -> None:
        self.name = name
        self.torch_device = device_of(device)
        if runtime is None and self.torch_device.type == "cuda":
            runtime = Runtime()
        self._streams = None if runtime is None else TorchDevice(self.torch_device, runtime)
        self.device = self._streams
        self.tf32 = precision == "tf32"
        place = self.torch_device if name == "torch" else f"{self.torch_device} of {name}"
        self._memory = TorchMemory(self.torch_device, _width_of(dtype), self._streams, str(place))

    @property
    def memory(self) -> str:  # type: ignore[override]
        return self._memory.name

    def work(self, node: Node) -> Workload | None:
        if node.op.full_name not in FAMILIES:
            return None
        return Workload("view") if node.op.view else host_workload(node)

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        entry = FAMILIES.get(node.op.full_name)
        if entry is None or not self._holds_results(node):
            return None
        family, elements = entry
        site = TorchSite(node, types, self._memory, self.tf32)
        return family(site) if site.dtype(0) in elements else None

    def _holds_results(self, node: Node) -> bool:
        """Whether all outputs are known to be tensors of elements that torch has."""
        for value in node.outputs:
            type_ = None if value is None else value.type
            if value is not None and not isinstance(type_, TensorType):
                return False
            if isinstance(type_, TensorType) and self._memory.dtype(type_.dtype) is None:
                return False
        return True

    def from_host(self, value: RunValue) -> RunValue:
        return self._memory.from_host(value)

    def to_host(self, value: RunValue) -> RunValue:
        return self._memory.to_host(value)

    gives = "torch"

    def copy_from(self, source: RunValue) -> Callable[[Any], Any] | None:
        """The function that copies values from another backend of torch, from device to device."""
        if not isinstance(source, TorchBackend):
            return None
        own, other = self._memory, source._memory

        def copy(value: torch.Tensor) -> torch.Tensor:
            if source._streams is not None and value.device.type != "cpu":
                source._streams.keep_for_copy(value)
            # The two may hold float32 in different types.
            dtype = own.width if value.dtype is other.width else value.dtype
            return value.to(own.device, dtype, non_blocking=True, copy=True)

        return copy

    def leaving(self, value: RunValue) -> RunValue:
        """A result as arrays that are there when the current stream has come so far."""
        return self._memory.leaving(value)

    def adopt(self, value: RunValue) -> RunValue:
        return self._memory.adopt(value)

    def give(self, value: RunValue) -> RunValue:
        return self._memory.give(value)

    def arena(self, nbytes: int) -> torch.Tensor:
        """Memory of the device, from torch's caching allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def view(
        self,
        arena: torch.Tensor,
        start: int,
        offset: int,
        type_: TensorType,
        strides: Sequence[int] | None,
    ) -> torch.Tensor:
        """The tensor of a type in an arena, in the value that begins at ``start``, ``offset`` bytes
        behind that, with ``strides``: both are those of NumPy's elements, which may be wider."""
        dtype, size = self._memory.dtype(type_.dtype), type_.dtype.itemsize if type_.dtype else 1
        assert dtype is not None
        if not type_.elements:
            return torch.empty(type_.dims, dtype=dtype, device=self.torch_device)
        dims = type_.dims
        # Counted in elements: those of the device may have fewer bytes than NumPy's.
        steps = [s // size for s in (packed_strides(dims, size) if strides is None else strides)]
        elements = 1 + sum([(d - 1) * step for d, step in zip(dims, steps, strict=True)])
        first = start + offset // size * dtype.itemsize
        part = arena[first : first + elements * dtype.itemsize]
        return part.view(dtype).as_strided(dims, steps)

    @property
    def captured(self) -> Callable[..., RunValue] | None:
        """The class that captures a function into a graph; None on a device without streams."""
        streams = self._streams
        return None if streams is None else partial(CapturedCalls, device=streams)

    @staticmethod
    def in_runs(function: Callable[..., RunValue]) -> Callable[..., RunValue]:
        """``function`` as runs call it: torch keeps no track of what they compute."""
        # `torch.inference_mode` enters and leaves this in Python: a KeyboardInterrupt there would
        # leave the thread in the mode for good.
        enter = torch._C._InferenceMode

        def call(*arguments: object) -> Any:
            with enter(True):
                return function(*arguments)

        return call

    @property
    def bounded(self) -> Callable[..., RunValue] | None:
        """The function that bounds the threads of another; None where kernels run on a GPU."""
        return BOUND.bounded if self._memory.on_host else None

    def stack(self, values: RunValues, axis: int) -> RunValue:
        """Rows that a loop has collected, joined along a new axis."""
        return torch.stack(list(values), axis)

    def allocate(self, nbytes: int) -> np.ndarray:
        raise PenstockError("arenas of the host are allocated by backends in its memory")

    @property
    def workers(self) -> int:
        return 1


def _width_of(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in WIDTHS:
        names = ", ".join(str(width).removeprefix("torch.") for width in WIDTHS)
        raise ValueError(f"dtype={dtype!r} is not one of {names}")
    assert isinstance(found, torch.dtype)
    return found
