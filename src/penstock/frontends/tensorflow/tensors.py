"""TensorFlow's element types, shapes, tensors and other attributes of nodes, as Python values.

Element types become their names ("float32", "resource"), shapes tuples with ``None`` for unknown
dims (``None`` for an unknown rank), strings ``str``, functions ``FunctionReference``. Tensors among
attributes remain ``TensorProto``, and are decoded when their elements are needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.limits import Limits
from penstock.core.records import dataclass, field
from penstock.core.types import ANY, STRING, Shape, TensorType, Type, find_dtype
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import array_from_bytes, decode_text, vector_of
from penstock.frontends.tensorflow.proto.graphdef_pb2 import (
    AttrValue,
    TensorProto,
    TensorShapeProto,
)
from penstock.ir.op import Attrs

# Names of element types by number. Quantized types are represented by their integer types.
_BY_NUMBER = (
    *("", "float32", "float64", "int32", "uint8", "int16", "int8", "string", "complex64", "int64"),
    *("bool", "int8", "uint8", "int32", "bfloat16", "int16", "uint16", "uint16", "complex128"),
    *("float16", "resource", "variant", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn"),
    *("", "", "", "int4", "uint4"),
)
TYPE_NAMES = frozenset(_BY_NUMBER) - {""}
"""names of element types"""
_REFERENCE = 100  # is added to the number of a type for a reference to a variable of it

# Fields of TensorProto that store the elements of a type unchanged.
_FIELDS = {
    "float32": "float_val",
    "float64": "double_val",
    "bool": "bool_val",
    "int64": "int64_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
}


def type_name(number: int) -> str:
    """Return the name of the element type with this number, as attributes have it. Raises
    ``TensorError``."""
    index = number - _REFERENCE if number > _REFERENCE else number
    if not 0 <= index < len(_BY_NUMBER) or not _BY_NUMBER[index]:
        raise TensorError(f"element type {number} is not one of TensorFlow's")
    return _BY_NUMBER[index]


def numpy_dtype(number: int) -> np.dtype:
    """Return the dtype of tensors of the element type with this number. ``TensorError``: none."""
    dtype = find_dtype(type_name(number))
    if dtype is None:
        raise TensorError(
            f"tensors of element type {number} are not supported; use numbers or strings"
        )
    return dtype


def declared_type(name: str | None, shape: Shape | None = None) -> Type:
    """Return the type of a tensor with an element type of this name; other names, such as resource,
    allow any type."""
    dtype = find_dtype(name or "")
    return ANY if dtype is None else TensorType(dtype, shape)


def decode_shape(proto: TensorShapeProto, limits: Limits) -> Shape | None:
    """Return dims, with ``None`` for unknown ones, or ``None`` for an unknown rank. Raises
    ``TensorError``."""
    if proto.unknown_rank:
        return None
    if len(proto.dim) > limits.max_dims:
        raise TensorError(
            f"has {len(proto.dim)} dims, more than Limits.max_dims = {limits.max_dims}"
        )
    sizes = [dim.size for dim in proto.dim]
    if min(sizes, default=0) < -1:
        raise TensorError(f"has a negative dim {min(sizes)}")
    if math.prod(size for size in sizes if size > 0) > limits.max_elements:
        raise TensorError(f"has dims {sizes}, which multiply to more than Limits.max_elements")
    return tuple([None if size < 0 else size for size in sizes])


class ConstantReader:
    """Decodes the constants of one model, each once, since graphs and calls of functions share
    them. The bytes that repeated elements take are bounded over all of them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._arrays: dict[tuple[str, str], np.ndarray] = {}
        self._room = max(limits.max_folded_bytes, 2**20) * 64

    def read(self, where: str, name: str, attribute: AttrValue, tensor: TensorProto) -> np.ndarray:
        """Return the value of a Const ``name`` in ``where``. It is not cached if ``attribute`` only
        refers to ``tensor``, an attribute of a function call. Raises ``TensorError``."""
        array = self._arrays.get((where, name))
        if array is None:
            array = decode_tensor(tensor, self.limits, self._room)
            array.flags.writeable = False  # a run may return it
            if any(array.strides):
                self._room -= max(array.nbytes - 16 * tensor.ByteSize(), 0)
            if attribute.HasField("tensor"):
                self._arrays[where, name] = array
        return array


def decode_tensor(proto: TensorProto, limits: Limits, room: int = 2**26) -> np.ndarray:
    """Return the elements of a tensor. If one element stands for all, they share memory; otherwise
    those that the file leaves out may take up to ``room`` bytes. Raises ``TensorError``."""
    dtype = numpy_dtype(proto.dtype)
    dims = decode_shape(proto.tensor_shape, limits)
    if dims is None or any(dim is None for dim in dims):
        raise TensorError("has unknown dims; a constant needs a definite shape")
    shape: tuple[int, ...] = dims  # type: ignore[assignment]
    count = math.prod(shape)
    if proto.tensor_content:
        if dtype == STRING:
            raise TensorError("has strings as tensor_content, a form that is not defined")
        size, needed = len(proto.tensor_content), count * dtype.itemsize
        if size != needed:
            raise TensorError(f"has {size} bytes, but takes {needed}; export the model again")
        return array_from_bytes(proto.tensor_content, dtype).reshape(shape)
    elements = _elements(proto, dtype)
    if elements.size > count:
        raise TensorError(f"has {elements.size} elements, but its shape {list(shape)} has {count}")
    if elements.size == count:
        return elements.reshape(shape)
    # Elements that the file leaves out equal the last one; they are 0 if there is none.
    if limits.max_bytes is not None and count * dtype.itemsize > limits.max_bytes:
        raise TensorError(
            f"repeats an element to {count * dtype.itemsize} bytes, more than Limits.max_bytes = "
            f"{limits.max_bytes}"
        )
    if elements.size <= 1:  # with strides of 0, however many elements the shape has
        zero = np.array("", STRING) if dtype == STRING else np.zeros((), dtype)
        return np.broadcast_to(elements.reshape(()) if elements.size else zero, shape)
    if count * dtype.itemsize > room:
        raise TensorError(f"repeats its last element to {count} elements; store them all")
    full = np.empty(count, dtype)
    full[: elements.size] = elements
    full[elements.size :] = elements[-1]
    return full.reshape(shape)


def _elements(proto: TensorProto, dtype: np.dtype) -> np.ndarray:
    """Return the elements in the field of their type."""
    if dtype == STRING:
        return vector_of([decode_text(element) for element in proto.string_val], STRING)
    if dtype.kind == "c":
        parts: Any = proto.scomplex_val if dtype.itemsize == 8 else proto.dcomplex_val
        if len(parts) % 2:
            raise TensorError("has half a complex number; export the model again")
        return np.array(parts, np.float32 if dtype.itemsize == 8 else np.float64).view(dtype)
    if dtype.name in _FIELDS:
        return np.array(getattr(proto, _FIELDS[dtype.name]), dtype)
    if dtype.kind in "iu":
        return np.array(proto.int_val, np.int64).astype(dtype)
    if dtype.itemsize == 2:  # bit patterns of bfloat16 and float16
        return np.array(proto.half_val, np.int64).astype(np.uint16).view(dtype)
    if dtype.name.startswith("float8"):
        return np.frombuffer(proto.float8_val, np.uint8).view(dtype)
    return np.array(proto.int_val, np.int64).astype(np.int8).astype(dtype)


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A function of the library by name, with the attributes that its body refers to."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict, hash=False)


def decode_attribute(proto: AttrValue, bound: Attrs, limits: Limits) -> Any:
    """Return the value of an attribute. ``bound`` has those of a function, by the names that its
    body uses for them. Raises ``TensorError``."""
    field_name = proto.WhichOneof("value")
    if field_name == "list":
        for descriptor, elements in proto.list.ListFields():
            return [_decoded(descriptor.name, element, bound, limits) for element in elements]
        return []
    if field_name == "placeholder":
        if proto.placeholder not in bound:
            raise TensorError(f"stands for {proto.placeholder!r}, which has no value here")
        return bound[proto.placeholder]
    return field_name and _decoded(field_name, getattr(proto, field_name), bound, limits)


def _decoded(field_name: str, content: Any, bound: Attrs, limits: Limits) -> Any:
    """Return the content of a field of an attribute, or an element of one."""
    if field_name == "s":
        return decode_text(content)
    if field_name == "type":
        return type_name(content)
    if field_name == "shape":
        return decode_shape(content, limits)
    if field_name == "func":
        attrs = {key: decode_attribute(a, bound, limits) for key, a in content.attr.items()}
        return FunctionReference(content.name, attrs)
    return content
