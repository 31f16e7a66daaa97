"""Read protobuf messages from files of TensorFlow, in binary or text form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, TypeVar

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from penstock.core.errors import InvalidModel
from penstock.frontends.common.model_files import HEAD_BYTES, open_inside, open_path
from penstock.frontends.common.other_formats import cut_short, no_model_folder, refuse_by_contents
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef, SavedModel
from penstock.frontends.tensorflow.text_format import parse_text

Proto = TypeVar("Proto", bound=Message)


def read_graph(source: bytes | Path) -> GraphDef:
    """Read a graph from bytes, or from a ``.pb`` or ``.pbtxt`` file. Raises ``InvalidModel``."""
    if isinstance(source, bytes):
        return parsed(source, GraphDef(), "the model")
    with open_path(source) as file:
        return _contents(file, source, GraphDef())


def read_saved_model(folder: Path) -> SavedModel:
    """Read ``saved_model.pb`` or ``saved_model.pbtxt`` of a folder. Raises ``InvalidModel``."""
    for name in ("saved_model.pb", "saved_model.pbtxt"):
        if os.path.lexists(folder / name):
            with open_part(folder, name) as file:
                return _contents(file, folder / name, SavedModel())
    raise no_model_folder(str(folder))


def open_part(folder: Path, location: str) -> BinaryIO:
    """Open one of the files of a SavedModel. Raises ``InvalidModel``."""
    try:
        return open_inside(folder, location)
    except ValueError as error:
        raise part_error(folder, location, error) from error


def part_error(folder: Path, location: str, reason: ValueError) -> InvalidModel:
    """Return the error for one of the files of a SavedModel that cannot be read."""
    return InvalidModel(
        f"{location} of {str(folder)!r} cannot be read: {reason}; a SavedModel's files must be "
        "regular files inside its folder"
    )


def parsed(data: bytes, message: Proto, where: str) -> Proto:
    """Parse ``data`` into ``message``. Raises ``InvalidModel``, which names ``where``."""
    try:
        message.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        refuse_by_contents(where, data[:HEAD_BYTES])
        cut = cut_short(data, message.DESCRIPTOR.fields_by_number)
        raise InvalidModel(
            f"{where} is no {message.DESCRIPTOR.name}, or is damaged ({error}); "
            f"{cut or 'export it again'}"
        ) from error
    return message


def _contents(file: BinaryIO, path: Path, message: Proto) -> Proto:
    """Parse a file into ``message``, as text if its name says so."""
    if path.suffix not in (".pbtxt", ".prototxt"):
        return parsed(file.read(), message, path.name)
    try:
        parse_text(file.read().decode(), message)
    except ValueError as error:  # a fault of the text, or of UTF-8
        raise InvalidModel(
            f"{path.name} is no {message.DESCRIPTOR.name}: {error}; correct it, or export it again"
        ) from error
    return message
