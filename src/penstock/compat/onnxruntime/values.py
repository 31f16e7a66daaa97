"""Values, and what ONNX Runtime says of inputs, outputs and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.compat.onnxruntime.unavailable import OF_VALUES, lacking
from penstock.core.records import dataclass
from penstock.core.types import (
    STRING,
    MapType,
    OptionalType,
    RunValue,
    SequenceType,
    TensorType,
    Type,
    dtype_name,
    dtype_named,
)
from penstock.session.facts import Port

_OWN_NAMES = {"float32": "float", "float64": "double"}
# By their numbers in ONNX's TensorProto.DataType, from 1 on.
_ELEMENTS = (
    *("float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool"),
    *("float16", "float64", "uint32", "uint64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "uint4", "int4"),
)


def type_text(type_: Type | None) -> str:
    """A type as ONNX Runtime writes it: ``tensor(float)``, ``seq(tensor(int64))``."""
    if isinstance(type_, SequenceType):
        return f"seq({type_text(type_.element)})"
    if isinstance(type_, OptionalType):
        return f"optional({type_text(type_.element)})"
    if isinstance(type_, MapType):
        key, value = (_element(t) for t in (type_.key, type_.value))
        return f"map({key},tensor({value}))"
    if isinstance(type_, TensorType) and type_.dtype is not None:
        return f"tensor({_element(type_.dtype)})"
    return "tensor(undefined)"


def _element(dtype: Any) -> str:
    dtype = dtype.dtype if isinstance(dtype, TensorType) else dtype
    name = dtype_name(dtype)
    return _OWN_NAMES.get(name, name)


def dtype_of(element: Any) -> np.dtype:
    """The dtype of an element type: a number of ONNX's, or anything that NumPy takes for one."""
    if isinstance(element, int) and not isinstance(element, bool):
        if not 0 < element <= len(_ELEMENTS):
            raise ValueError(f"there is no element type {element}")
        return dtype_named(_ELEMENTS[element - 1])
    return np.dtype(element)


def dtype_of_text(text: str) -> np.dtype:
    """The dtype of a type as ONNX Runtime writes it. Raises ``ValueError`` for other types."""
    name = text.removeprefix("tensor(").removesuffix(")")
    own = {theirs: ours for ours, theirs in _OWN_NAMES.items()}
    if not text.startswith("tensor(") or own.get(name, name) not in _ELEMENTS:
        raise ValueError(f"{text} is no type of a tensor")
    return dtype_named(own.get(name, name))


def element_number(dtype: np.dtype) -> int:
    """The number of a dtype among ONNX's element types, 0 if it is none."""
    name = dtype_name(dtype)
    return 1 + _ELEMENTS.index(name) if name in _ELEMENTS else 0


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or an output: its name, its dims, with names or None where they are open, and its
    type as text."""

    name: str
    type: str
    shape: list[int | str | None]


def node_arg(port: Port, declared: Sequence[int | str | None] | None = None) -> NodeArg:
    """An input or output as ONNX Runtime describes it, with the dims ``declared`` where no number
    is known."""
    shape = list(port.shape or declared or ())
    if declared is not None and len(declared) == len(shape):
        shape = [
            dim if isinstance(dim, int) or other is None else other
            for dim, other in zip(shape, declared, strict=True)
        ]
    return NodeArg(port.name, type_text(port.type), shape)


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata of a model's file."""

    custom_metadata_map: Mapping[str, str]
    description: str
    domain: str
    graph_description: str
    graph_name: str
    producer_name: str
    version: int


class OrtDevice:
    """The memory of the host, the one place where values are."""

    def device_id(self) -> int:
        return 0

    def device_type(self) -> str:
        return "cpu"

    def device_vendor_id(self) -> int:
        return 0

    def device_mem_type(self) -> int:
        return 0

    @staticmethod
    def make(name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """The device of this name; raises ``ValueError`` for another than the host."""
        check_device(name)
        return OrtDevice()


def check_device(name: str) -> None:
    """Raise ``ValueError`` for a device that there is not."""
    if name.lower() != "cpu":
        raise ValueError(f"there is no device {name!r} here: values are in the host's memory")


@lacking(OF_VALUES)
class OrtValue:
    """A value that stays where it is: a tensor, or a sequence of tensors, of the host's memory.

    Args:
        value: A tensor, or a list of tensors.
    """

    def __init__(self, value: RunValue) -> None:
        self._value = value

    @staticmethod
    def ortvalue_from_numpy(
        array: RunValue, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """The value of an array, which it shares."""
        check_device(device_type)
        return OrtValue(np.asarray(array))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int],
        element_type: Any = np.float32,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
    ) -> OrtValue:
        """A new tensor, whose contents are undefined."""
        check_device(device_type)
        return OrtValue(np.empty(tuple(shape), dtype_of(element_type)))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: np.ndarray, onnx_element_type: int) -> OrtValue:
        """The value of an array whose bytes are of another type, as those of bfloat16.

        Args:
            data: An array with elements of as many bytes.
            onnx_element_type: The number of the type among ONNX's.
        """
        return OrtValue(np.asarray(data).view(dtype_of(onnx_element_type)))

    @classmethod
    def from_dlpack(cls, data: RunValue, /) -> OrtValue:
        """The value of what another library hands over by DLPack."""
        return cls(np.from_dlpack(data))

    def numpy(self) -> np.ndarray:
        """The tensor. Raises ``RuntimeError`` for another value."""
        if not isinstance(self._value, np.ndarray):
            raise RuntimeError("only tensors are arrays")
        return self._value

    @property
    def value(self) -> RunValue:
        """The tensor, or the list of tensors."""
        return self._value

    def shape(self) -> list[int]:
        return list(self.numpy().shape)

    def data_type(self) -> str:
        value = self._value
        if isinstance(value, list):
            first = value[0].dtype if value else np.dtype(np.float32)
            return f"seq(tensor({_element(first)}))"
        return f"tensor({_element(value.dtype)})"

    def element_type(self) -> int:
        """The number of the element type among ONNX's."""
        return element_number(self.numpy().dtype)

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self.numpy().ctypes.data)

    def device_name(self) -> str:
        return "cpu"

    def tensor_size_in_bytes(self) -> int:
        return int(self.numpy().nbytes)

    def has_value(self) -> bool:
        return self._value is not None

    def is_tensor(self) -> bool:
        return isinstance(self._value, np.ndarray)

    def is_sparse_tensor(self) -> bool:
        return False

    def is_tensor_sequence(self) -> bool:
        return isinstance(self._value, list)

    def update_inplace(self, data: RunValue) -> None:
        """Copy an array into the tensor.

        Args:
            data: An array of the same dims.
        """
        array, new = self.numpy(), np.asarray(data)
        if array.size != new.size:
            raise RuntimeError(
                "The input size of numpy arrays does not match the size of the OrtValue."
            )
        np.copyto(array, new.reshape(array.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.numpy().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()


def plain_value(value: RunValue) -> RunValue:
    """A value that a program hands over as Penstock takes it: strings as an array of str."""
    value = value.value if isinstance(value, OrtValue) else value
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        return value.astype(STRING)
    return value
