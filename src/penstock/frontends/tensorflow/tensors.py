"""TensorFlow's element types, shapes and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import array_from_bytes, decode_text
from penstock.frontends.tensorflow.proto.graphdef_pb2 import TensorProto, TensorShapeProto
from penstock.limits import Limits
from penstock.types import ANY, STRING, Dim, Shape, TensorType, Type, dtypes

_DTYPES: Mapping[int, np.dtype] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    4: np.dtype(np.uint8),
    5: np.dtype(np.int16),
    6: np.dtype(np.int8),
    7: STRING,
    8: np.dtype(np.complex64),
    9: np.dtype(np.int64),
    10: np.dtype(np.bool_),
    # Quantised types are the integers in which they are stored.
    11: np.dtype(np.int8),
    12: np.dtype(np.uint8),
    13: np.dtype(np.int32),
    14: np.dtype(ml_dtypes.bfloat16),
    15: np.dtype(np.int16),
    16: np.dtype(np.uint16),
    17: np.dtype(np.uint16),
    18: np.dtype(np.complex128),
    19: np.dtype(np.float16),
    22: np.dtype(np.uint32),
    23: np.dtype(np.uint64),
    24: np.dtype(ml_dtypes.float8_e5m2),
    25: np.dtype(ml_dtypes.float8_e4m3fn),
    29: np.dtype(ml_dtypes.int4),
    30: np.dtype(ml_dtypes.uint4),
}
_OPAQUE = {20: "resource", 21: "variant"}
_REFERENCE = 100  # is added to the number of a type for a reference to a variable of it


def type_name(number: int) -> str:
    """The name of the element type with this number, as attributes have it."""
    number = number - _REFERENCE if number > _REFERENCE else number
    if number in _OPAQUE:
        return _OPAQUE[number]
    dtype = _DTYPES.get(number)
    if dtype is None:
        raise TensorError(f"element type {number} is not one of TensorFlow's")
    return "string" if dtype == STRING else dtype.name


def numpy_dtype(number: int) -> np.dtype:
    """The dtype of a tensor of the element type with this number."""
    dtype = _DTYPES.get(number - _REFERENCE if number > _REFERENCE else number)
    if dtype is None:
        raise TensorError(
            f"tensors of element type {number} are not supported; use numbers or strings"
        )
    return dtype


def declared_type(name: str | None, shape: Shape | None = None) -> Type:
    """The type of a tensor with an element type of this name; anything else, such as a resource,
    can be any type."""
    if not isinstance(name, str) or name not in dtypes():
        return ANY
    return TensorType(dtypes()[name], shape)


def decode_shape(proto: TensorShapeProto, limits: Limits) -> Shape | None:
    """Dims, with ``None`` for unknown ones, or ``None`` for an unknown rank. Raises
    ``TensorError``."""
    if proto.unknown_rank:
        return None
    if len(proto.dim) > limits.max_dims:
        raise TensorError(
            f"has {len(proto.dim)} dims, more than Limits.max_dims = {limits.max_dims}"
        )
    dims: list[Dim] = []
    for dim in proto.dim:
        if dim.size < -1:
            raise TensorError(f"has a negative dim {dim.size}")
        dims.append(None if dim.size < 0 else dim.size)
    if math.prod(dim or 1 for dim in dims if isinstance(dim, int)) > limits.max_elements:
        raise TensorError(f"has dims {dims}, which multiply to more than Limits.max_elements")
    return tuple(dims)


def decode_tensor(proto: TensorProto, limits: Limits) -> np.ndarray:
    """The elements of a tensor. If one element stands for all, they share memory. Raises
    ``TensorError``."""
    dtype = numpy_dtype(proto.dtype)
    dims = decode_shape(proto.tensor_shape, limits)
    if dims is None or any(dim is None for dim in dims):
        raise TensorError("has unknown dims; a constant needs a definite shape")
    shape: tuple[int, ...] = dims  # type: ignore[assignment]
    count = math.prod(shape)
    if proto.tensor_content:
        return _decoded(proto.tensor_content, dtype, count).reshape(shape)
    elements = _elements(proto, dtype)
    if elements.size > count:
        raise TensorError(f"has {elements.size} elements, but its shape {list(shape)} has {count}")
    if elements.size == count:
        return elements.reshape(shape)
    # Elements that the file leaves out equal the last one; they are 0 if there is none.
    if elements.size <= 1:
        one = elements.reshape(()) if elements.size else _zero(dtype)
        return np.broadcast_to(one, shape)
    if count * dtype.itemsize > max(limits.max_folded_bytes, 2**20) * 64:
        raise TensorError(f"repeats its last element to {count} elements; store them all")
    full = np.empty(count, dtype)
    full[: elements.size] = elements
    full[elements.size :] = elements[-1]
    return full.reshape(shape)


def _zero(dtype: np.dtype) -> np.ndarray:
    return np.array("", STRING) if dtype == STRING else np.zeros((), dtype)


def _elements(proto: TensorProto, dtype: np.dtype) -> np.ndarray:
    """The elements in the field of their type."""
    if dtype == STRING:
        array = np.empty(len(proto.string_val), STRING)
        array[:] = [decode_text(element) for element in proto.string_val]
        return array
    if dtype.kind == "c":
        parts: Any = proto.scomplex_val if dtype.itemsize == 8 else proto.dcomplex_val
        if len(parts) % 2:
            raise TensorError("has half a complex number; export the model again")
        return np.array(parts, np.float32 if dtype.itemsize == 8 else np.float64).view(dtype)
    if dtype == np.float32:
        return np.array(proto.float_val, np.float32)
    if dtype == np.float64:
        return np.array(proto.double_val, np.float64)
    if dtype == np.bool_:
        return np.array(proto.bool_val, np.bool_)
    if dtype == np.int64:
        return np.array(proto.int64_val, np.int64)
    if dtype == np.uint32:
        return np.array(proto.uint32_val, np.uint32)
    if dtype == np.uint64:
        return np.array(proto.uint64_val, np.uint64)
    if dtype.kind in "iu":
        return np.array(proto.int_val, np.int64).astype(dtype)
    if dtype.itemsize == 2:  # bit patterns of bfloat16 and float16
        return np.array(proto.half_val, np.int64).astype(np.uint16).view(dtype)
    if dtype.name.startswith("float8"):
        return np.frombuffer(proto.float8_val, np.uint8).view(dtype)
    return np.array(proto.int_val, np.int64).astype(np.int8).astype(dtype)


def _decoded(data: bytes, dtype: np.dtype, count: int) -> np.ndarray:
    """Elements of little-endian bytes: a view where they are aligned."""
    if dtype == STRING:
        raise TensorError("has strings as tensor_content, a form that is not defined")
    if len(data) != count * dtype.itemsize:
        raise TensorError(
            f"has {len(data)} bytes, but takes {count * dtype.itemsize}; export the model again"
        )
    return array_from_bytes(data, dtype)
