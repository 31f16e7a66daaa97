"""Read the GGUF container: metadata, and the places of tensors.

::

    "GGUF", version, number of tensors, number of metadata
    metadata   key, type, value; an array has a type, a count and its elements
    tensors    name, dims (the last axis first), type, offset
    padding to the alignment; the bytes of tensors, each at its offset from here

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing in a file is trusted: counts and
lengths are compared with the remaining bytes before memory is allocated.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import BinaryIO, TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel, quoted
from penstock.core.records import NamedTuple
from penstock.core.types import dtype_named
from penstock.frontends.common.model_files import open_path
from penstock.frontends.common.weight_file import WeightFile
from penstock.frontends.weights.block_codes import FORMATS
from penstock.frontends.weights.settings import unsupported
from penstock.frontends.weights.tensors import PLAIN, StoredTensor

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMS = 4
_MOST_NAME = 65_535
_MOST_DEPTH = 8  # of arrays of arrays

MetadataValue: TypeAlias = "int | float | bool | str | Sequence[MetadataValue]"
Metadata: TypeAlias = Mapping[str, MetadataValue]

_NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_LENGTH, _AT_ONCE = struct.Struct("<Q"), 1 << 16
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12}
"""the least number of bytes of a value"""

# By number; "" is a type that files no longer have.
_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K"),
    *("Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S"),
    *("IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0"),
    *("TQ2_0", "", "", "", "MXFP4"),
)


class GgufFile(NamedTuple):
    """The contents of a file."""

    metadata: Metadata
    tensors: dict[str, StoredTensor]


class _Reader:
    """Reads numbers and texts of a file from its beginning on. Raises ``ValueError``."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self.position = file, size, 0

    @property
    def left(self) -> int:
        return self._size - self.position

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self.left else b""
        if len(data) != count:
            raise ValueError(
                f"it ends at byte {self._size:,}, but something of {count:,} bytes begins at "
                f"{self.position:,}"
            )
        self.position += count
        return data

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def count(self, least: int, role: str) -> int:
        """Read the number of items that follow, each of ``least`` bytes or more."""
        count = self.number("<Q")
        if count * least > self.left:
            raise ValueError(f"it says that {count:,} {role} follow, with {self.left:,} bytes left")
        return count

    def text(self) -> str:
        return self.take(self.count(1, "letters")).decode("utf-8", "replace")

    def name(self) -> str:
        length = self.count(1, "letters of a name")
        if length > _MOST_NAME:
            raise ValueError(f"a name has {length:,} letters")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> MetadataValue:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < _MOST_DEPTH:
            return self._array(depth)
        if kind not in _NUMBERS:
            raise ValueError(f"its metadata have a value of type {kind}, which does not exist")
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> Sequence[MetadataValue]:
        kind = self.number("<I")
        item = np.dtype(_NUMBERS[kind]).itemsize if kind in _NUMBERS else _LEAST_BYTES.get(kind, 1)
        count = self.count(item, "elements of an array")
        if kind in _NUMBERS:
            return self._numbers(kind, count)
        checkpoint()
        if kind == _STRING:
            return self._texts(count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _texts(self, count: int) -> list[MetadataValue]:
        """Read ``count`` texts. A vocabulary has 100,000, most of them a few letters long."""
        texts: list[MetadataValue] = []
        while len(texts) < count:
            data, at = self._file.read(min(_AT_ONCE, self.left)), 0
            while len(texts) < count and at + _LENGTH.size <= len(data):
                end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
                if end > len(data):
                    break
                texts.append(data[at + _LENGTH.size : end].decode("utf-8", "replace"))
                at = end
            self.position += at
            self._file.seek(self.position)
            if not at:  # the text is longer than the bytes read at once, or than the file
                texts.append(self.text())
        return texts

    def _numbers(self, kind: int, count: int) -> list[MetadataValue]:
        dtype = np.dtype(_NUMBERS[kind])
        elements: list[MetadataValue] = np.frombuffer(
            self.take(count * dtype.itemsize), dtype
        ).tolist()
        return elements


def read_gguf(source: str | bytes, label: str, mapped: bool) -> GgufFile:
    """Return the metadata and tensors of a file, whose name in messages is ``label``. Tensors are
    mapped if ``mapped``. Raises ``InvalidModel`` for a damaged file."""
    try:
        if isinstance(source, bytes):
            weights = WeightFile(source)
            return _contents(_Reader(io.BytesIO(source), len(source)), weights, label)
        weights = WeightFile(partial(open_path, source), mapped)
        with open_path(source) as file:
            return _contents(_Reader(file, weights.size), weights, label)
    except ValueError as error:
        raise InvalidModel(
            f"{label} is a damaged GGUF file: {error}; get the whole file anew"
        ) from error


def _contents(reader: _Reader, weights: WeightFile, label: str) -> GgufFile:
    if reader.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        advice = "versions 2 and 3 of little-endian machines are; convert the model with llama.cpp"
        raise unsupported(f"version {version} of GGUF", advice, label)
    count = reader.count(24, "tensors")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(reader.count(13, "metadata")):
        key = reader.name()
        if key in metadata:
            raise ValueError(f"its metadata have {quoted(key)} twice")
        metadata[key] = reader.value(reader.number("<I"))
    infos = [_info(reader) for _ in range(count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise ValueError(f"its general.alignment is {alignment!r:.40}")
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise ValueError(f"it has two tensors {quoted(info.name)}")
        tensors[info.name] = _stored(info, start, weights, label)
    return GgufFile(metadata, tensors)


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _info(reader: _Reader) -> _Info:
    name, rank = reader.name(), reader.number("<I")
    if rank > _MOST_DIMS:
        raise ValueError(f"tensor {quoted(name)} has {rank} dims")
    dims = [reader.number("<Q") for _ in range(rank)]
    return _Info(name, tuple(reversed(dims)), reader.number("<I"), reader.number("<Q"))


def _stored(info: _Info, start: int, weights: WeightFile, label: str) -> StoredTensor:
    """Return a tensor whose bytes lie in the file. An unsupported type is an error only when the
    tensor is read: its size is taken as 0."""
    form = _TYPES[info.kind] if info.kind < len(_TYPES) else ""
    form = form or f"number {info.kind}"
    count = math.prod(info.shape)
    if form in PLAIN:
        nbytes = count * dtype_named(PLAIN[form]).itemsize
    elif form in FORMATS:
        size, block = FORMATS[form].size, FORMATS[form].block.itemsize
        if not info.shape or info.shape[-1] % size or not count:
            raise ValueError(
                f"rows of tensor {quoted(info.name)}, of shape {list(info.shape)}, are no whole "
                f"blocks of {size}"
            )
        nbytes = count // size * block
    else:
        nbytes = 0
    if start + info.offset + nbytes > weights.size:
        raise ValueError(
            f"tensor {quoted(info.name)} has {nbytes:,} bytes from {start + info.offset:,} on, but "
            f"the file ends at byte {weights.size:,}"
        )
    return StoredTensor(info.name, info.shape, form, label, weights, start + info.offset, nbytes)
