"""Files of TensorFlow to protobuf messages, from the binary or the text form."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from google.protobuf import text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from penstock.errors import InvalidModel
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef, SavedModel

Proto = TypeVar("Proto", bound=Message)


def read_graph(source: bytes | Path) -> GraphDef:
    """The graph in bytes, or in a ``.pb`` or ``.pbtxt`` file. Raises ``InvalidModel``."""
    return _read(source, GraphDef())


def read_saved_model(folder: Path) -> SavedModel:
    """The ``saved_model.pb`` or ``saved_model.pbtxt`` of a folder. Raises ``InvalidModel``."""
    for name in ("saved_model.pb", "saved_model.pbtxt"):
        if (folder / name).is_file():
            return _read(folder / name, SavedModel())
    raise InvalidModel(f"there is no saved_model.pb in {str(folder)!r}; it is no SavedModel")


def parsed(data: bytes, message: Proto, where: str) -> Proto:
    """Parse ``data`` into ``message``. Raises ``InvalidModel``, which names ``where``."""
    try:
        message.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        raise InvalidModel(
            f"{where} is no {message.DESCRIPTOR.name}, or is damaged ({error}); export it again"
        ) from error
    return message


def _read(source: bytes | Path, message: Proto) -> Proto:
    if isinstance(source, bytes):
        return parsed(source, message, "the model")
    try:
        data = source.read_bytes()
    except OSError as error:
        raise InvalidModel(f"{str(source)!r} cannot be read: {error.strerror}") from error
    if source.suffix not in (".pbtxt", ".prototxt"):
        return parsed(data, message, source.name)
    try:
        # Nothing here depends on fields that graphdef.proto does not declare.
        text_format.Parse(data.decode(), message, allow_unknown_field=True)
    except (text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModel(f"{source.name} is no {message.DESCRIPTOR.name}: {error}") from error
    return message
