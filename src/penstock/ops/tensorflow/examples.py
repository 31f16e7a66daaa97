"""ParseExample: the features of serialized ``tf.train.Example`` messages, as tensors.

A feature is a list of strings, floats or integers by its key. A dense one has the same shape in
all examples, or differs in its first dim, and then ends with its default. A sparse one gives the
indices, values and shape of a sparse tensor, and a ragged one its values and where each example's
begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import (
    FLOAT32,
    INT64,
    STRING,
    Dim,
    ShapeError,
    TensorType,
    Type,
    find_dtype,
)
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.onnx.text import strings
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.text import decoded, encoded, operator, sparse_layout

_LISTS = {1: STRING, 2: FLOAT32, 3: INT64}
"""the dtype of a feature's list, by its field"""
_NAMES = {STRING: "bytes_list", FLOAT32: "float_list", INT64: "int64_list"}
_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5  # wire types
_WIRES = {STRING: {_LENGTH}, FLOAT32: {_LENGTH, _FOUR}, INT64: {_LENGTH, _VARINT}}

Features: TypeAlias = dict[str, np.ndarray]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place of a message, and the place behind it."""
    number = 0
    for i in range(10):
        byte = data[at + i]
        number |= (byte & 127) << 7 * i
        if byte < 128:
            return number & 2**64 - 1, at + i + 1
    raise IndexError


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The number, wire type and bytes of each field of a message. Raises ``IndexError``."""
    at = 0
    while at < len(data):
        tag, begin = _varint(data, at)
        wire = tag & 7
        if wire == _LENGTH:
            size, begin = _varint(data, begin)
            at = begin + size
        elif wire == _VARINT:
            _, at = _varint(data, begin)
        elif wire in (_FOUR, _EIGHT):
            at = begin + (4 if wire == _FOUR else 8)
        else:
            raise IndexError
        if at > len(data):
            raise IndexError
        yield tag >> 3, wire, data[begin:at]


def _list(data: bytes, dtype: np.dtype) -> np.ndarray:
    """The values of a list, each a field of its own, or numbers packed in one."""
    fields = [(wire, part) for number, wire, part in _fields(data) if number == 1]
    if not {wire for wire, _ in fields} <= _WIRES[dtype]:
        raise IndexError
    parts = [part for _, part in fields]
    if dtype == STRING:
        return strings([decoded(part) for part in parts], (len(parts),))
    packed = b"".join(parts)
    if dtype == FLOAT32:
        if len(packed) % 4:
            raise IndexError
        return np.frombuffer(packed, "<f4").astype(FLOAT32)
    numbers, at = [], 0
    while at < len(packed):
        number, at = _varint(packed, at)
        numbers.append(number)
    return np.array(numbers, np.uint64).view(INT64)


def _messages(data: bytes) -> list[tuple[int, bytes]]:
    """The fields that are messages or strings; others are of no version of the format."""
    return [(number, part) for number, wire, part in _fields(data) if wire == _LENGTH]


def _features(text: str) -> Features:
    """The features of an example by key, but those without a list. Raises ``IndexError``."""
    found: Features = {}
    messages = [part for number, part in _messages(encoded(text)) if number == 1]
    for _, entry in [field for message in messages for field in _messages(message)]:
        parts = dict(_messages(entry))
        lists = _messages(parts.get(2, b""))
        if lists and lists[-1][0] in _LISTS:
            number, values = lists[-1]
            found[decoded(parts.get(1, b""))] = _list(values, _LISTS[number])
    return found


def _examples(serialized: np.ndarray) -> list[Features]:
    """The features of each example. Raises ``ShapeError``."""
    found = []
    for i, text in enumerate(with_checkpoints(serialized.reshape(-1).tolist())):
        try:
            found.append(_features(text))
        except IndexError:
            raise ShapeError(f"string {i} is no serialized tf.train.Example") from None
    return found


def _values(examples: Sequence[Features], key: str, dtype: np.dtype) -> list[np.ndarray | None]:
    """The values of a feature in each example; None where it has none."""
    found = [features.get(key) for features in examples]
    for i, values in enumerate(found):
        if values is not None and values.dtype != dtype:
            kinds = _NAMES[values.dtype], _NAMES[dtype]
            raise ShapeError(f"feature {key!r} of example {i} is a {kinds[0]}, not a {kinds[1]}")
    return found


def _dense(
    rows: Sequence[np.ndarray | None], key: str, dims: Sequence[int], default: np.ndarray
) -> np.ndarray:
    """The values of a dense feature, [examples, *dims]."""
    varies = dims[:1] == [-1]
    size = math.prod(dims[varies:])
    if varies and default.size != 1:
        raise ShapeError(f"feature {key!r} has a length that varies, and no single default")
    count = max([len(row) for row in rows if row is not None], default=0) if varies else size
    reserve(len(rows) * count * default.itemsize)
    result = np.empty((len(rows), count), default.dtype)
    for i, row in enumerate(rows):
        if row is None:
            if not varies and default.size != count:
                raise ShapeError(f"example {i} has no feature {key!r}, which has no default")
            result[i] = default.reshape(-1)
            continue
        rest = len(row) % size if varies and size else len(row) - count * (not varies)
        if rest:
            wanted = f"a multiple of {size}" if varies else f"{size}"
            raise ShapeError(f"feature {key!r} of example {i} has {len(row)} values, not {wanted}")
        result[i, : len(row)] = row
        if varies:
            result[i, len(row) :] = default.reshape(-1)
    return result.reshape(len(rows), *[count // max(size, 1)] * varies, *dims[varies:])


def _joined(
    rows: Sequence[np.ndarray | None], dtype: np.dtype
) -> tuple[np.ndarray, list[np.ndarray]]:
    known = [np.empty(0, dtype) if row is None else row for row in rows]
    return np.concatenate(known) if known else np.empty(0, dtype), known


def _dtypes(attrs: Attrs, name: str) -> list[np.dtype]:
    dtypes = [find_dtype(kind) for kind in attrs[name]]
    if not {*dtypes} <= {*_NAMES, *([INT64, np.dtype(np.int32)] if "split" in name else [])}:
        raise ShapeError(f"{name} is {attrs[name]}: features are strings, float32 or int64")
    return dtypes  # type: ignore[return-value]


def _shapes(attrs: Attrs) -> list[list[int]]:
    dims = iter(attrs["dense_dims"])
    return [[next(dims) for _ in range(rank)] for rank in attrs["dense_ranks"]]


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    batch: tuple[Dim, ...] | None = rules.tensor(types, 0).shape
    rank = None if batch is None else len(batch) + 1
    sparse, ragged = _dtypes(attrs, "sparse_types"), _dtypes(attrs, "ragged_value_types")
    shapes = [[None if d < 0 else d for d in dims] for dims in _shapes(attrs)]
    dense = [
        TensorType(dtype, None if batch is None else (*batch, *dims))
        for dtype, dims in zip(_dtypes(attrs, "Tdense"), shapes, strict=True)
    ]
    return (
        *[TensorType(INT64, (None, rank))] * len(sparse),
        *[TensorType(dtype, (None,)) for dtype in sparse],
        *[TensorType(INT64, (rank,))] * len(sparse),
        *dense,
        *[TensorType(dtype, (None,)) for dtype in ragged],
        *[TensorType(dtype, (None,)) for dtype in _dtypes(attrs, "ragged_split_types")],
    )


@operator("ParseExample", infer=_infer)
def parse_example(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    sparse = [*zip(attrs["sparse_keys"], _dtypes(attrs, "sparse_types"), strict=True)]
    dense = [*zip(attrs["dense_keys"], _dtypes(attrs, "Tdense"), _shapes(attrs), strict=True)]
    split_types = _dtypes(attrs, "ragged_split_types")
    ragged = [*zip(attrs["ragged_keys"], _dtypes(attrs, "ragged_value_types"), strict=True)]

    def run(serialized: np.ndarray, *defaults: np.ndarray) -> common.Outputs:
        if serialized.ndim > 1:
            raise ShapeError(f"examples must be one string or a list, not {serialized.shape}")
        examples, one = _examples(serialized), not serialized.ndim
        indices, values, shapes = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        for key, dtype in sparse:
            joined, rows = _joined(_values(examples, key, dtype), dtype)
            places, shape = sparse_layout(rows)
            indices.append(places[:, one:])
            values.append(joined)
            shapes.append(shape[one:])
        outputs = [*indices, *values, *shapes]
        for (key, dtype, dims), default in zip(dense, defaults, strict=True):
            result = _dense(_values(examples, key, dtype), key, dims, default.astype(dtype))
            outputs.append(result[0] if one else result)
        pairs = [_joined(_values(examples, key, dtype), dtype) for key, dtype in ragged]
        outputs += [joined for joined, _ in pairs]
        for (_, rows), dtype in zip(pairs, split_types, strict=True):
            ends = [] if one else [0, *map(len, rows)]  # a single example has no rows
            outputs.append(np.cumsum(ends).astype(dtype))
        return common.outputs(outputs)

    return Kernel(run)
