"""Read protobuf messages from a file or from its bytes.

Protobuf copies what it parses, and copies weights again on access. So the large initializers of a
large file are left out of the message that is parsed, and read one by one, directly into the arrays
that the model keeps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel
from penstock.core.origins import Origin, note_origin
from penstock.core.records import NamedTuple
from penstock.frontends.common.encoding import read_varint
from penstock.frontends.common.model_files import open_path
from penstock.frontends.onnx.messages import GraphProto, ModelProto, TensorProto
from penstock.host.malloc import new_bytes

Source: TypeAlias = str | os.PathLike[str] | bytes | ModelProto
Message = TypeVar("Message", ModelProto, TensorProto)

LARGE_FILE = 2**20
LARGE_TENSOR = 2**16
FIELD_BYTES = 256
"""the average number of bytes per field from which on large tensors are searched in a file; a file
of many smaller fields is parsed as a whole"""
MAX_MESSAGE = 2**31 - 1
"""bytes of the largest message that protobuf reads"""

_FIELDS = {
    name: {*message.fields_by_name}
    for name, message in ModelProto.DESCRIPTOR.file.message_types_by_name.items()
}
_GRAPH = ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_FEW_FIELDS = 10_000
_WINDOW = 2**16  # bytes that are read at a time
_HEAD = 20  # bytes of the longest tag and length
_BYTES = 2  # the wire type of strings, bytes and messages: a length, then that many bytes


class Apart(NamedTuple):
    """An initializer whose raw data are in ``data`` instead of its message."""

    proto: TensorProto
    data: np.ndarray

    @property
    def name(self) -> str:
        return str(self.proto.name)


Weights = Iterable[TensorProto | Apart]


@contextmanager
def opened(source: Source) -> Iterator[tuple[ModelProto, Weights]]:
    """Return the model of ``source``, and its initializers that are not in the message. Those of a
    large file are read one at a time while the context is open. Raises ``InvalidModel``."""
    if isinstance(source, bytes):
        yield _parsed(ModelProto, source, "the bytes given"), ()
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        with open_path(name) as file:
            yield _read(file, name)
    else:
        yield _current(source), ()


def _current(proto: ModelProto) -> ModelProto:
    """Return a message of the onnx package's own classes as it is, since its fields are read as
    those of our classes; a copy if it lacks fields because the package is older."""
    messages = proto.DESCRIPTOR.file.message_types_by_name
    for name, fields in _FIELDS.items():
        if name not in messages or not fields <= {*messages[name].fields_by_name}:
            return _parsed(ModelProto, proto.SerializeToString(), "the model given")
    return proto


def _read(file: BinaryIO, name: str) -> tuple[ModelProto, Weights]:
    size = os.fstat(file.fileno()).st_size
    if size >= LARGE_FILE:
        try:
            rest, spans = _split(file, size)
        except (ValueError, IndexError):
            pass  # not a sequence of fields, which protobuf reports, or of small fields
        else:
            proto = _parsed(ModelProto, b"".join(rest), name)
            return proto, (_initializer(file, *span, name) for span in spans)
    file.seek(0)
    if size > MAX_MESSAGE:
        raise InvalidModel(f"{name} has {size} bytes, and is not an ONNX model; export it again")
    return _parsed(ModelProto, file.read(), name), ()


def _parsed(message_type: type[Message], data: bytes, name: str) -> Message:
    if len(data) > MAX_MESSAGE:
        raise InvalidModel(
            f"{name} has a part of more than 2 GB, which protobuf cannot read: save the model with "
            "its weights as external data"
        )
    message = message_type()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        from penstock.frontends.common.other_formats import cut_short

        reason = cut_short(data, message.DESCRIPTOR.fields_by_number) or (
            "the file is damaged, of another format, or nests graphs some thirty levels deep: "
            "compare its size with the original's, or export it again"
        )
        raise InvalidModel(
            f"{name}: protobuf cannot read this as an ONNX model ({error}); {reason}"
        ) from error
    return message


def has_external_data(data: bytes) -> bool:
    """Whether initializers of an ONNX file are in other files. Raises ``InvalidModel``."""
    graph = _parsed(ModelProto, data, "the model").graph
    return any(x.data_location == TensorProto.EXTERNAL for x in graph.initializer)


def _initializer(file: BinaryIO, start: int, end: int, name: str) -> TensorProto | Apart:
    """Read the initializer from ``start`` to ``end``, its raw data apart if they occur once."""
    try:
        raw = [field for field in _fields(file, start, end) if field[0] == _RAW_DATA]
    except (ValueError, IndexError):
        raw = []  # protobuf reports the error
    if len(raw) != 1 or raw[0][2] is None:
        return _parsed(TensorProto, _piece(file, start, end), name)
    _, first, contents, last = raw[0]
    assert contents is not None
    rest = _piece(file, start, first) + _piece(file, last, end)
    proto = _parsed(TensorProto, rest, name)
    data = new_bytes(last - contents)
    file.seek(contents)
    if file.readinto(data) != data.size:  # type: ignore[attr-defined]
        raise InvalidModel(f"{name} was cut short while it was read")
    note_origin(data, Origin(os.path.abspath(file.name), contents))
    return Apart(proto, data)


def _split(file: BinaryIO, size: int) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Return the bytes of a model without its large initializers, and their ranges in the file.
    Raises ``ValueError`` if the file is not a sequence of protobuf fields, or most are small."""
    left = _FEW_FIELDS + size // FIELD_BYTES  # reading small fields here costs more than copies
    rest: list[bytes] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for number, start, payload, end in _fields(file, 0, size):
        if (left := left - 1) < 0:
            raise ValueError("small fields")
        if number != _GRAPH or payload is None:
            continue
        parts: list[bytes] = []
        inside = payload
        for inner, first, contents, last in _fields(file, payload, end):
            if (left := left - 1) < 0:
                raise ValueError("small fields")
            if inner == _INITIALIZER and contents is not None and last - contents >= LARGE_TENSOR:
                parts.append(_piece(file, inside, first))
                spans.append((contents, last))
                inside = last
        parts.append(_piece(file, inside, end))
        length = _encoded(sum(len(part) for part in parts))
        rest += [_piece(file, done, start), _encoded(_GRAPH << 3 | _BYTES), length, *parts]
        done = end
    return [*rest, _piece(file, done, size)], spans


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
    """Yield the fields of a message: number, and the positions where the field, its contents and
    the next field begin; for numbers ``None`` instead of contents."""
    window, base = b"", start
    while start < end:
        at = start - base
        if at + _HEAD > len(window) and base + len(window) < end:
            checkpoint()
            window, base, at = _piece(file, start, min(end, start + _WINDOW)), start, 0
        # Inlined for tags of one byte, as those of fields up to 15.
        tag, at = (window[at], at + 1) if window[at] < 0x80 else read_varint(window, at)
        wire_type = tag & 7
        payload = None
        if wire_type == _BYTES:
            length, at = (window[at], at + 1) if window[at] < 0x80 else read_varint(window, at)
            payload = base + at
            at += length
        elif wire_type == 0:
            _, at = read_varint(window, at)
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if base + at > end:  # also true for a length that is far too large
            raise ValueError("a field ends after its message")
        yield tag >> 3, start, payload, base + at
        start = base + at


def _encoded(value: int) -> bytes:
    """Encode a number: the inverse of ``read_varint``."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _piece(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
