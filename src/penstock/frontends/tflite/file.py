"""Files of TFLite and Circle: their tables, and the bytes of their weights.

Tables are read where they are needed, those of a large file a few kilobytes at a time, and each
weight into an array of its own: a large file is never held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO

from penstock.core.errors import InvalidModel
from penstock.frontends.common.weight_file import WeightFile
from penstock.frontends.tflite.flatbuffer import FlatBuffer, FlatTable, Read

IDENTIFIERS = {b"TFL3": "tflite", b"CIR0": "circle"}
OpenFile = Callable[[], BinaryIO]
_HEAD = 8  # bytes: the offset of the model, and the identifier


@contextmanager
def opened_model(
    source: OpenFile | bytes, name: str, map_weights: bool = False, wanted: str | None = None
) -> Iterator[tuple[FlatTable, WeightFile]]:
    """Return the ``Model`` table of a file, whose fields can be read while the context is open, and
    its weights. Raises ``InvalidModel``, also if the file is not of the ``wanted`` format, and the
    errors of opening it."""
    opened: Any = nullcontext() if isinstance(source, bytes) else source()
    with opened as file:
        given = source if isinstance(source, bytes) else lambda: nullcontext(file)
        weights = WeightFile(given, map_weights)
        whole = weights.whole

        def read(offset: int, size: int) -> bytes | memoryview:
            if whole is not None:
                return whole[offset : offset + size]
            file.seek(offset)
            return file.read(size)

        yield _model(name, weights.size, read, wanted), weights


def _model(name: str, size: int, read: Read, wanted: str | None) -> FlatTable:
    identifier = bytes(read(4, 4)) if size >= _HEAD else b""
    if identifier not in IDENTIFIERS:
        raise InvalidModel(
            f"{name} is no TFLite or Circle file: its bytes 4 to 8 are {identifier!r}, not one of "
            f"{', '.join(map(repr, IDENTIFIERS))}; it is cut short, damaged or of another "
            "format: get the whole file, or give it the suffix of its format"
        )
    if wanted not in (None, IDENTIFIERS[identifier]):
        raise InvalidModel(f"{name} is a {IDENTIFIERS[identifier]} file, not a {wanted} file")
    return FlatBuffer(name, size, read, IDENTIFIERS[identifier] == "tflite").root("Model")
