"""Types and tensors of ONNX models: dense and sparse ones, and external data in files beside the
model.

The file is not trusted: a tensor's shape is compared with the number of bytes before anything is
allocated. Contents are, where possible, views of the bytes that protobuf returns or that were read
from a file. All arrays are read-only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.analysis.schemas import DTYPE_NAMES
from penstock.core.errors import InvalidModel
from penstock.core.records import dataclass, field
from penstock.core.shared_arrays import held_once
from penstock.core.types import (
    ANY,
    STRING,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtype_named,
)
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import array_from_bytes, decode_text, vector_of
from penstock.frontends.common.model_files import open_beside
from penstock.frontends.common.weight_file import ConstantBudget
from penstock.frontends.onnx.file import Apart
from penstock.frontends.onnx.messages import (
    SparseTensorProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
)
from penstock.ops.common.dtypes import SUB_BYTE, is_float

if TYPE_CHECKING:
    from penstock.frontends.common.weight_file import WeightFile

MAX_DENSE_BYTES = 2**30
"""bytes that a sparse tensor may take in dense form, unless ``Limits`` have another bound"""

PACKED_BITS = {code: SUB_BYTE[name] for code, name in DTYPE_NAMES.items() if name in SUB_BYTE}
"""bits of the types that are packed in files; in NumPy an element takes a byte"""

# The typed fields of elements, by kind and bytes, and their types there; others: "int32_data".
_TYPED: Mapping[str, tuple[str, type]] = {
    **dict.fromkeys(("f4", "c8"), ("float_data", np.float32)),
    **dict.fromkeys(("f8", "c16"), ("double_data", np.float64)),
    **dict.fromkeys(("u4", "u8"), ("uint64_data", np.uint64)),
    "i8": ("int64_data", np.int64),
    "O": ("string_data", object),
}

_DAMAGED = "the file is damaged, or its weights were left out: export it again"


@cache
def dtype_of_code(code: int) -> np.dtype:
    """Return the NumPy dtype of a ``TensorProto.DataType``; small types are from ml_dtypes."""
    name = DTYPE_NAMES.get(code)
    if name is None:
        raise InvalidModel(f"element type {code} is not one of those that ONNX has")
    return dtype_named(name)


MAX_NESTING = 32
"""the depth to which sequences, optionals and maps may nest in one type"""


def value_type(proto: TypeProto, *, entry: bool = False) -> Type:
    """Return the type that a ``TypeProto`` declares. For an ``entry``, which callers feed, dims of
    0 are unknown: exporters write 0 for open dims, and an input that must be empty has no use.
    Raises ``InvalidModel``."""
    wrappers: list[Callable[[Type], Type]] = []
    form = proto.WhichOneof("value")
    while form in ("sequence_type", "optional_type", "map_type"):
        if len(wrappers) == MAX_NESTING:
            raise InvalidModel(
                f"its type nests more than {MAX_NESTING} types; declare a simpler one"
            )
        if form == "map_type":
            key = dtype_of_code(proto.map_type.key_type)
            wrappers.append(lambda inner, key=key: MapType(key, inner))  # type: ignore[misc]
            proto = proto.map_type.value_type
        else:
            wrappers.append(SequenceType if form == "sequence_type" else OptionalType)
            proto = getattr(proto, form).elem_type
        form = proto.WhichOneof("value")
    type_: Type = ANY
    if form in ("tensor_type", "sparse_tensor_type"):  # sparse tensors are converted to dense
        tensor = getattr(proto, form)
        dims = [_dim(dim, entry) for dim in tensor.shape.dim]
        dtype = dtype_of_code(tensor.elem_type) if tensor.elem_type else None
        type_ = TensorType(dtype, tuple(dims) if tensor.HasField("shape") else None)
    for wrapper in reversed(wrappers):
        type_ = wrapper(type_)
    return type_


def _dim(proto: TensorShapeProto.Dimension, entry: bool) -> Dim:
    """Return a size, a name, or ``None`` for an unknown dim: negative, unnamed, or named "?"."""
    form = proto.WhichOneof("value")
    if form == "dim_value":
        size = proto.dim_value
        return None if size < 0 or (entry and size == 0) else size
    if form == "dim_param":
        name = decode_text(proto.dim_param)
        return None if name in ("", "?") else name
    return None


@dataclass(eq=False)
class TensorReader(ConstantBudget):
    """Reads the tensors of one model. External data are only read from the folder of the file
    ``model``, or mapped if ``map_weights``; the latest stay open until ``opened`` is closed."""

    model: str | None
    map_weights: bool = False
    opened: ExitStack = field(default_factory=ExitStack)
    files: dict[str, WeightFile] = field(default_factory=dict)

    def read(self, tensor: TensorProto | Apart) -> np.ndarray:
        """Return the contents of ``tensor``. Raises ``TensorError`` for the first fault, and
        ``InvalidModel`` for an unknown element type."""
        proto, data = tensor if isinstance(tensor, Apart) else (tensor, None)
        code = proto.data_type
        dtype = dtype_of_code(code)
        dims = tuple(proto.dims)
        count = self.count(dims, dtype)
        if proto.HasField("segment"):
            raise TensorError("it is stored in segments; store it whole")
        self.spend(count * dtype.itemsize)  # before anything of this size is allocated
        try:
            if proto.data_location == TensorProto.EXTERNAL:
                array = self.external(proto, code, dtype, count)
            elif dtype == STRING:
                array = _strings(proto, count)
            elif data is not None or proto.HasField("raw_data"):
                array = _raw(proto, data, code, dtype, count)
            else:
                array = _typed(proto, code, dtype, count)
        except TensorError as fault:
            raise TensorError(f"{TensorType(dtype, dims)} {fault}") from fault
        array = array.reshape(dims)
        array.flags.writeable = False
        return held_once(array)

    def read_sparse(self, proto: SparseTensorProto) -> np.ndarray:
        """Return the dense form of a sparse tensor, zero (or "") where nothing is stored."""
        values = self.read(proto.values)
        indices = self.read(proto.indices)
        dims = tuple(proto.dims)
        dtype = values.dtype
        count = self.count(dims, dtype)
        if values.ndim != 1 or indices.dtype != np.int64:
            raise TensorError("a sparse tensor needs values of rank 1 and indices of type int64")
        if indices.shape not in ((values.size,), (values.size, len(dims))):
            raise TensorError(
                f"indices of shape {list(indices.shape)} fit neither {values.size} values nor "
                f"their coordinates in {len(dims)} dims"
            )
        most = self.limits.max_constant_bytes or MAX_DENSE_BYTES
        if count * dtype.itemsize > most:
            raise TensorError(
                f"it takes {count * dtype.itemsize} bytes in dense form, more than {most}; "
                "raise Limits.max_constant_bytes if you trust the model"
            )
        # ONNX gives places as indices into the flat tensor, or as rows of coordinates.
        bounds = np.array([count] if indices.ndim == 1 else dims, np.int64)
        table = indices.reshape(values.size, bounds.size)
        if np.any((table < 0) | (table >= bounds)):
            raise TensorError(f"it has indices outside its dims {list(dims)}")
        if indices.ndim > 1:
            strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
            indices = table @ np.array(strides, np.int64)
        dense = np.full(count, "", object) if dtype == STRING else np.zeros(count, dtype)
        dense[indices] = values
        self.spend(dense.nbytes)
        dense = dense.reshape(dims)
        dense.flags.writeable = False
        return dense

    def external(self, proto: TensorProto, code: int, dtype: np.dtype, count: int) -> np.ndarray:
        """Return the contents of external data."""
        if dtype == STRING:
            raise TensorError("cannot be external data; store strings in the model")
        entries = {decode_text(x.key): decode_text(x.value) for x in proto.external_data}
        location = entries.get("location", "")
        offset = _natural(entries, "offset", 0)
        needed = _stored_bytes(code, dtype, count)
        length = _natural(entries, "length", needed)
        if length != needed:
            raise TensorError(f"has {length} bytes of external data, but its shape takes {needed}")
        if self.model is None:
            raise TensorError(
                f"is external data in {location!r}; load the model from its path, so that the file "
                "can be found"
            )
        # Few models have external data; the others do not import this.
        from penstock.frontends.common.weight_file import WeightFile

        try:
            file = self.files.get(location)
            if file is None:
                file = self.files[location] = WeightFile(
                    partial(open_beside, self.model, location), self.map_weights
                )
                file.hold(self.opened)
            data = file.read(offset, needed) if offset + needed <= file.size else None
        except ValueError as error:
            raise TensorError(
                f"has external data in {location!r}: {error}; external data must be regular files "
                "inside the model's folder"
            ) from error
        if data is None:
            raise TensorError(
                f"needs bytes {offset} to {offset + needed} of {location!r}, which has "
                f"{file.size}: the file was cut short, or belongs to another model"
            )
        return _decoded(data, code, dtype, count)


def _natural(entries: Mapping[str, str], key: str, default: int) -> int:
    """Return a non-negative number among the entries that describe external data."""
    value = entries.get(key)
    if value is None:
        return default
    # 19 digits hold all of int64; int() of a long text would take much time.
    if not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise TensorError(f"has {value[:40]!r} as the {key} of its external data, not a number")
    return int(value)


def _stored_bytes(code: int, dtype: np.dtype, count: int) -> int:
    """Return the bytes of ``count`` elements in a file."""
    bits = PACKED_BITS.get(code)
    return count * dtype.itemsize if bits is None else -(-count * bits // 8)


def _strings(proto: TensorProto, count: int) -> np.ndarray:
    if proto.HasField("raw_data"):
        raise TensorError("cannot be raw data; store strings as string_data")
    if len(proto.string_data) != count:
        raise TensorError(f"has {len(proto.string_data)} strings for {count} elements; {_DAMAGED}")
    return vector_of([decode_text(item) for item in proto.string_data], STRING)


def _raw(
    proto: TensorProto, apart: np.ndarray | None, code: int, dtype: np.dtype, count: int
) -> np.ndarray:
    data = proto.raw_data if apart is None else apart
    needed = _stored_bytes(code, dtype, count) if code in PACKED_BITS else count * dtype.itemsize
    if len(data) != needed:
        # An empty field that exporters set by mistake.
        if not len(data) and getattr(proto, _field(dtype)[0]):
            typed = type(proto)()
            typed.CopyFrom(proto)
            typed.ClearField("raw_data")
            return _typed(typed, code, dtype, count)
        raise TensorError(f"has {len(data)} bytes of data, but takes {needed}; {_DAMAGED}")
    return _decoded(data, code, dtype, count)


def _field(dtype: np.dtype) -> tuple[str, type]:
    """Return the typed field for elements of a dtype, and their type in that field."""
    return _TYPED.get(dtype.str[1:], ("int32_data", np.int32))


def _typed(proto: TensorProto, code: int, dtype: np.dtype, count: int) -> np.ndarray:
    """Read a typed field's elements: pairs for complex numbers, bit patterns for small types."""
    field, stored = _field(dtype)
    elements = getattr(proto, field)
    needed = count * 2 if dtype.kind == "c" else count
    if PACKED_BITS.get(code) in (2, 4):  # several per entry; 6-bit elements have an entry each
        needed = _stored_bytes(code, dtype, count)
    if len(elements) != needed:
        raise TensorError(f"has {len(elements)} entries in {field}, but takes {needed}; {_DAMAGED}")
    array: np.ndarray = np.array(elements, stored)
    if dtype == np.bool_:
        return array != 0
    if dtype.kind == "c":
        return array.view(dtype)
    bits = PACKED_BITS.get(code)
    if bits is not None:
        codes = array.astype(np.uint8)
        return (codes & 0x3F if bits == 6 else _unpacked(codes, bits, count)).view(dtype)
    # float16 and smaller types are stored as their bits, not as their numbers.
    if field == "int32_data" and is_float(dtype):
        return array.astype(f"u{dtype.itemsize}").view(dtype)
    return array.astype(dtype, copy=False)


def _decoded(data: bytes | np.ndarray, code: int, dtype: np.dtype, count: int) -> np.ndarray:
    """Return the elements of little-endian bytes, as a view wherever possible."""
    bits = PACKED_BITS.get(code)
    if bits is not None:
        return _unpacked(np.frombuffer(data, np.uint8), bits, count).view(dtype)
    return array_from_bytes(data, dtype)


def _unpacked(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return ``count`` elements of ``bits`` bits, the first in the lowest bits, as bytes."""
    if bits == 6:  # the one width that does not divide a byte
        stream = np.unpackbits(data, count=count * 6, bitorder="little")
        return np.packbits(stream.reshape(count, 6), axis=1, bitorder="little").reshape(count)
    per_byte = 8 // bits
    unpacked = np.empty((data.size, per_byte), np.uint8)
    for i in range(per_byte):
        np.right_shift(data, i * bits, unpacked[:, i])
    unpacked &= (1 << bits) - 1
    return unpacked.reshape(-1)[:count]
