"""From a file, or its bytes, to protobuf messages.

Protobuf copies what it parses, and copies weights once more when they are asked for. So the large
initializers of a large file are left out of the message that is parsed, and are read on their own
when their turn comes, their contents straight into the memory that they stay in.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, TensorProto

from penstock.errors import InvalidModel

Source: TypeAlias = str | os.PathLike[str] | bytes | ModelProto
Message = TypeVar("Message", ModelProto, TensorProto)

LARGE_FILE = 2**20
LARGE_TENSOR = 2**16
MAX_MESSAGE = 2**31 - 1
"""The most bytes that protobuf reads as one message."""

_GRAPH = ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_BYTES = 2  # the wire type of strings, bytes and messages: a length, then that many bytes


class Apart(NamedTuple):
    """An initializer whose raw data, ``data``, are not in its message."""

    proto: TensorProto
    data: np.ndarray

    @property
    def name(self) -> str:
        return str(self.proto.name)


Weights = Iterable[TensorProto | Apart]


@contextmanager
def opened(source: Source) -> Iterator[tuple[ModelProto, Weights]]:
    """The model of ``source``, and those of its initializers that are not in the model.

    Large files are read piece by piece, the initializers one at a time, as long as the context
    lasts.
    """
    if isinstance(source, ModelProto):
        yield source, ()
    elif isinstance(source, bytes):
        yield _parsed(ModelProto, source, "the bytes given"), ()
    else:
        path = Path(source)
        try:
            file = path.open("rb")
        except OSError as error:
            raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
        with file:
            yield _read(file, path)


def _read(file: BinaryIO, path: Path) -> tuple[ModelProto, Weights]:
    name = str(path)
    size = os.fstat(file.fileno()).st_size
    if size >= LARGE_FILE:
        try:
            kept, spans = _split(file, size)
        except ValueError:
            pass  # not what protobuf writes; protobuf will say so
        else:
            proto = _parsed(ModelProto, b"".join(kept), name)
            return proto, (_initializer(file, *span, name) for span in spans)
    file.seek(0)
    if size > MAX_MESSAGE:
        raise InvalidModel(f"{name} has {size} bytes, and is no ONNX model; export it again")
    return _parsed(ModelProto, file.read(), name), ()


def _parsed(kind: type[Message], data: bytes, name: str) -> Message:
    if len(data) > MAX_MESSAGE:
        raise InvalidModel(
            f"{name} has a part of more than 2 GB, which protobuf cannot read: save the model with "
            "its weights as external data"
        )
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidModel(
            f"{name}: protobuf cannot read this as an ONNX model ({error}); the file is cut short, "
            "damaged, of another format, or nests graphs some thirty levels deep: compare its size "
            "with the original's, or export it again"
        ) from error
    return message


def _initializer(file: BinaryIO, start: int, end: int, name: str) -> TensorProto | Apart:
    """The initializer from ``start`` to ``end``, its raw data apart if it has them once."""
    try:
        raw = [field for field in _fields(file, start, end) if field[0] == _RAW_DATA]
    except ValueError:
        raw = []  # protobuf will say so
    if len(raw) != 1 or raw[0][2] is None:
        return _parsed(TensorProto, _piece(file, start, end), name)
    _, first, contents, last = raw[0]
    assert contents is not None
    rest = _piece(file, start, first) + _piece(file, last, end)
    proto = _parsed(TensorProto, rest, name)
    data = np.empty(last - contents, np.uint8)
    file.seek(contents)
    if file.readinto(data) != data.size:  # type: ignore[attr-defined]
        raise InvalidModel(f"{name} was cut short while it was read")
    return Apart(proto, data)


def _split(file: BinaryIO, size: int) -> tuple[list[bytes], list[tuple[int, int]]]:
    """The bytes of a model without its large initializers, and where those begin and end.

    Raises ``ValueError`` where the file is no sequence of protobuf fields.
    """
    kept: list[bytes] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for number, start, payload, end in _fields(file, 0, size):
        if number != _GRAPH or payload is None:
            continue
        parts: list[bytes] = []
        inside = payload
        for inner, first, contents, last in _fields(file, payload, end):
            if inner == _INITIALIZER and contents is not None and last - contents >= LARGE_TENSOR:
                parts.append(_piece(file, inside, first))
                spans.append((contents, last))
                inside = last
        parts.append(_piece(file, inside, end))
        length = _encoded(sum(len(part) for part in parts))
        kept += [_piece(file, done, start), _encoded(_GRAPH << 3 | _BYTES), length, *parts]
        done = end
    return [*kept, _piece(file, done, size)], spans


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
    """The fields of a message: number, where it begins, where its contents do, and where it ends;
    ``None`` instead of contents for numbers.
    """
    while start < end:
        file.seek(start)
        head = file.read(24)
        tag, used = _varint(head, 0)
        kind = tag & 7
        payload = None
        if kind == _BYTES:
            length, used = _varint(head, used)
            payload = start + used
            used += length
        elif kind == 0:
            _, used = _varint(head, used)
        elif kind in (1, 5):
            used += 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if start + used > end:
            raise ValueError("a field ends after its message")
        yield tag >> 3, start, payload, start + used
        start += used


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and where it ends."""
    value = shift = 0
    for byte in data[position : position + 10]:
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number that does not end")


def _encoded(value: int) -> bytes:
    """The inverse of ``_varint``."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _piece(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
