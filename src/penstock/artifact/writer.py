"""Writing the file of an artifact, whose form stands in ``artifact.container``."""

from __future__ import annotations

import json
import os
import sys
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from penstock.artifact import MAGIC, VERSION
from penstock.artifact.container import ALIGNMENT, HEADER, PIECE, ArtifactFile
from penstock.core.checkpoints import checkpoint
from penstock.core.origins import Origin, origin_of
from penstock.core.records import NamedTuple
from penstock.core.types import STRING, TensorType, dtype_name
from penstock.host.crc32c import crc32c
from penstock.ir.layout import unbroadcast
from penstock.ops.common.constant_cache import origin_of_constant

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.ir.graph import Value


class _Reference(NamedTuple):
    """An array whose contents are in a file of the model."""

    dtype: np.dtype
    shape: tuple[int, ...]
    origin: Origin


class ArtifactWriter:
    """Collects the documents and arrays of an artifact. An array is written once, however often it
    is added. Of arrays that are in a file of the model below ``base`` it has only where they are.
    ``most``: how many bytes it should have at most, and ``most_plans`` how many plans."""

    def __init__(
        self, base: str | None = None, most: int | None = None, most_plans: int | None = None
    ) -> None:
        self.documents: dict[str, bytes] = {}
        self.stores: dict[Any, int] = {}
        """stores of variables of the model, in the order of their document"""
        self._base = base
        self._most = most
        self.most_plans = most_plans
        self._arrays: list[np.ndarray | _Reference] = []
        self._index: dict[object, int] = {}

    def fits(self, more: int = 0) -> bool:
        """Whether it has at most as many bytes as it should have, with ``more``."""
        held = sum(unbroadcast(x).nbytes for x in self._arrays if isinstance(x, np.ndarray))
        held += sum(map(len, self.documents.values()))
        return self._most is None or held + more <= self._most

    def array(self, array: np.ndarray) -> int:
        """The index of an array."""
        origin = None if self._base is None else origin_of(array)
        if origin is not None:
            return self._refer(origin, array.dtype, array.shape)
        # By identity: contents would take long to compare. ``_arrays`` keeps each array alive, so
        # that no other gets its id.
        return self._add(id(array), array)

    def constant(self, value: Value) -> int:
        """The index of the contents of a constant, which are not given back to refer to them."""
        origin = None if self._base is None else origin_of_constant(value)
        if origin is None or not isinstance(value.type, TensorType) or value.type.dtype is None:
            return self.array(cast(np.ndarray, value.const))
        return self._refer(origin, value.type.dtype, value.type.dims)

    def _refer(self, origin: Origin, dtype: np.dtype, shape: tuple[int, ...]) -> int:
        reference = _Reference(dtype, shape, origin)
        return self._add(reference, reference)

    def _add(self, key: object, array: np.ndarray | _Reference) -> int:
        index = self._index.setdefault(key, len(self._arrays))
        if index == len(self._arrays):
            self._arrays.append(array)
        return index

    def document(self, name: str, content: object) -> None:
        """Add a document, which refers to arrays that were added."""
        self.documents[name] = json.dumps(content, separators=(",", ":")).encode()

    def extend(self, file: ArtifactFile) -> None:
        """Add all that another file has to an empty writer; arrays keep their indices."""
        for index, reference in enumerate(file.references()):
            if reference is None:
                same = self.array(file.array(index)) == index
            else:
                path, offset, dtype, shape = reference
                origin = Origin(os.path.join(cast(str, self._base), path), offset)
                same = self._refer(origin, dtype, shape) == index
            if not same:
                raise file.damaged("it has an array twice")
        self.documents = file.contents()

    def save(self, path: Path) -> None:
        """Write the file, in the place of what is there."""
        from penstock.host.replace_file import replacing  # which opening does without

        with replacing(path) as file:
            self._write(file)

    def to_bytes(self) -> bytes:
        """The contents of the file."""
        with BytesIO() as file:
            self._write(file)
            return file.getvalue()

    def _write(self, file: BinaryIO) -> None:
        # Room for the header, which is written when all offsets are known.
        file.write(bytes(ALIGNMENT))
        table: dict[str, Any] = {"documents": {}, "arrays": []}
        for array in self._arrays:
            head = [dtype_name(array.dtype), list(array.shape)]
            if isinstance(array, _Reference):
                path = os.path.relpath(array.origin.path, self._base)
                table["arrays"].append([*head, path, array.origin.offset])
            elif array.dtype == STRING:
                table["arrays"].append([*head, [str(x) for x in array.ravel()]])
            else:
                stored = unbroadcast(array)
                section = _write_section(file, _bytes_of(stored))
                whole = [head[1]] if stored.shape != array.shape else []
                table["arrays"].append([head[0], list(stored.shape), *section, *whole])
        for name, content in self.documents.items():
            table["documents"][name] = _write_section(file, memoryview(content))
        end = json.dumps(table, separators=(",", ":")).encode()
        offset, count, checksum = _write_section(file, memoryview(end))
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, checksum, offset, count))


def _bytes_of(array: np.ndarray) -> memoryview:
    """The elements of an array in their own order, little-endian."""
    dense = np.ascontiguousarray(array)
    if sys.byteorder == "big":
        dense = dense.byteswap()
    return dense.reshape(-1).view(np.uint8).data


def _write_section(file: BinaryIO, content: memoryview) -> list[int]:
    """Write a section; returns its offset, its bytes and their checksum."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    offset, checksum = file.tell(), 0
    for begin in range(0, len(content), PIECE):
        checkpoint()
        piece = content[begin : begin + PIECE]
        checksum = crc32c(piece, checksum)
        file.write(piece)
    return [offset, len(content), checksum]
