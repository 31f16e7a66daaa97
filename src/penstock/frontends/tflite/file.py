"""Files of TFLite and Circle: their tables, and the bytes of their weights.

Tables are read where they are needed, a few kilobytes at a time, and weights each into an array of
its own: a file is never held as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.errors import InvalidModel
from penstock.frontends.common.model_files import open_path
from penstock.frontends.common.weight_file import WeightFile
from penstock.frontends.tflite.flatbuffer import FlatBuffer, FlatTable

IDENTIFIERS = {b"TFL3": "TFLite", b"CIR0": "Circle"}
SUFFIXES = (".tflite", ".circle", ".lite")
_HEAD = 8  # bytes: the offset of the model, and the identifier


class FileBytes(Protocol):
    """The bytes of a file. Raises ``ValueError`` with a reason."""

    size: int

    def read(self, offset: int, size: int) -> np.ndarray:
        """``size`` bytes from ``offset``, which lie within the file; read-only."""


class _Given:
    """A file whose bytes were given."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = np.frombuffer(data, np.uint8)

    def read(self, offset: int, size: int) -> np.ndarray:
        return self._data[offset : offset + size]


@contextmanager
def opened_model(
    source: Path | bytes, map_weights: bool = False
) -> Iterator[tuple[FlatTable, FileBytes]]:
    """The ``Model`` table of a file, whose fields can be read while the context is open, and its
    weights. Raises ``InvalidModel``."""
    if isinstance(source, bytes):
        data = memoryview(source)
        yield _model("the bytes given", len(data), lambda at, n: data[at : at + n]), _Given(source)
        return
    with open_path(source) as file:
        weights = WeightFile(partial(open_path, source), map_weights)

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        yield _model(source.name, weights.size, read), weights


def _model(name: str, size: int, read: object) -> FlatTable:
    assert callable(read)
    identifier = bytes(read(4, 4)) if size >= _HEAD else b""
    if identifier not in IDENTIFIERS:
        raise InvalidModel(
            f"{name} is no TFLite or Circle file: its bytes 4 to 8 are {identifier!r}, not one of "
            f"{', '.join(map(repr, IDENTIFIERS))}; it is cut short, damaged or of another format"
        )
    return FlatBuffer(name, size, read).root("Model")
