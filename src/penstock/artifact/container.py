"""The file of an artifact: a header, sections with the contents of arrays, and documents.

::

     0   8 bytes   b"PENSTOCK"
     8   4 bytes   version of this format
    12   4 bytes   CRC-32C of the table
    16   8 bytes   offset of the table
    24   8 bytes   bytes of the table
    64             sections, each aligned to 64 bytes
                   the table, as JSON: documents and arrays with their offsets, bytes and CRC-32C;
                   for an array whose contents are in a file of the model, that file and the offset;
                   for one that is broadcast along some axes, the array without them and the shape

All numbers are little-endian. A document is JSON; graphs refer to arrays by their index. Documents
and arrays are parsed and compared with their checksums on access, except large arrays of a mapped
file, whose pages are not touched before they are needed (``check``). Nothing in a file is trusted:
contents that do not fit raise ``InvalidModel``, and reading allocates no more memory than the file
has bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, BinaryIO
from weakref import WeakValueDictionary, ref

import numpy as np

from penstock.artifact import MAGIC, VERSION
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel
from penstock.core.limits import Limits
from penstock.core.records import cached_property
from penstock.core.types import STRING, TensorType, dtype_named
from penstock.host.crc32c import crc32c
from penstock.ops.common.constant_cache import Reordered, sources_after_release

HEADER = struct.Struct("<8sIIQQ")
ALIGNMENT = 64
PIECE = 16 << 20  # bytes that are written or checked between two looks at the control
# Checksums are computed at 5 to 10 GB/s: over all weights that can take longer than all else.
_LARGE = 64 << 10  # bytes of an array from which on it is not checked if it is mapped

_INTEGERS = frozenset([int])
_OF_REFERENCE = 4  # the entries of an array that is in a file of the model
_WITH_SHAPE = 4  # those of the section and the shape of an array that is broadcast

_MAPPED: WeakValueDictionary[tuple[int, ...], mmap.mmap] = WeakValueDictionary()
"""Files that are mapped now, by device, inode, bytes and time of the last change."""


class ArtifactFile:
    """An artifact that is open: a file, or its contents in memory, whose address is a multiple of
    64. If ``mapped``, the pages of the file are shared by all that map it; else all of it is read.
    Raises ``InvalidModel`` for a file that is damaged."""

    def __init__(
        self, file: BinaryIO | memoryview, name: str, limits: Limits, *, mapped: bool = False
    ) -> None:
        self.name = name
        self._mapped = mapped
        self._content: mmap.mmap | memoryview
        if isinstance(file, memoryview):
            self._content = file
        else:
            status = os.fstat(file.fileno())
            if excess := limits.beyond("max_bytes", status.st_size):
                raise InvalidModel(f"{name} has more bytes {excess}")
            self._content = _contents(file, status, mapped=mapped)
        self._lock = threading.RLock()  # threads may ask for the same array at once
        self._checked: set[tuple[int, int, int]] = set()
        self._made: dict[int, np.ndarray] = {}
        self._referenced: list[int] = []
        self._released: dict[int, ref[np.ndarray] | ref[Reordered]] = {}
        """what has arrays that are not held any more, if anything does"""
        self._read: Callable[[str, int, int], np.ndarray] | None = None
        self.stores: list[Any] | None = None
        """stores of variables of the model, once they were decoded"""
        if len(self._content) < ALIGNMENT:
            raise self.damaged("it ends in its header")
        magic, version, checksum, offset, count = HEADER.unpack_from(self._content)
        if magic != MAGIC:
            raise self.damaged("it does not begin as an artifact does")
        if version != VERSION:
            raise InvalidModel(
                f"{name} is an artifact of format {version}, this version of Penstock reads format "
                f"{VERSION}; save it anew"
            )
        self._table = self._parsed("its table", [offset, count, checksum])
        if not isinstance(self._table, dict):
            raise self.damaged("its table is none")

    @property
    def mapping(self) -> mmap.mmap | None:
        """The file in memory, if its pages are read when they are needed."""
        content = self._content
        return content if self._mapped and isinstance(content, mmap.mmap) else None

    def damaged(self, reason: object) -> InvalidModel:
        """The error of a file that does not hold what it must."""
        return InvalidModel(f"{self.name} is damaged: {reason}; save it anew")

    @property
    def nbytes(self) -> int:
        """The bytes of the file."""
        return len(self._content)

    @property
    def documents(self) -> Sequence[str]:
        """The names of the documents."""
        documents = self._table.get("documents")
        return list(documents) if isinstance(documents, dict) else []

    def contents(self) -> dict[str, bytes]:
        """The documents by name, as they are in the file."""
        sections = self._table.get("documents", {})
        return {name: bytes(self._section(name, sections[name])) for name in self.documents}

    def document(self, name: str) -> Any:
        """A document, parsed."""
        documents = self._table.get("documents")
        if not isinstance(documents, dict) or name not in documents:
            raise self.damaged(f"it has no {name!r}")
        return self._parsed(f"its {name!r}", documents[name])

    @cached_property
    def head(self) -> Any:
        """The document that describes the session, parsed once."""
        return self.document("head")

    def array(self, index: object) -> np.ndarray:
        """An array, which cannot be written to; the same one each time."""
        arrays = self._table.get("arrays")
        if not isinstance(arrays, list) or type(index) is not int or not 0 <= index < len(arrays):
            raise self.damaged(f"it has no array {index!r}")
        with self._lock:
            # Graphs and plans that share an array must go on sharing it.
            array = self._made.get(index)
            if array is None and index in self._released:
                source = self._released[index]()
                array = source.array() if isinstance(source, Reordered) else source
            if array is None:
                array = self._array(index, arrays[index])
                if index in self._released:  # read once more
                    self._released[index] = ref(array)
                else:
                    self._made[index] = array
            return array

    def references(self) -> Iterator[tuple[str, int, np.dtype, tuple[int, ...]] | None]:
        """Yield the path, offset, dtype and shape of each array that is in a file of the model;
        None for other arrays."""
        for entry in self._table.get("arrays", ()):
            if len(entry) == _OF_REFERENCE:
                dtype, shape, path, offset = entry
                yield path, offset, dtype_named(dtype), tuple(shape)
            else:
                yield None

    def read_references(self, read: Callable[[str, int, int], np.ndarray]) -> None:
        """Read the arrays that are in files of the model, and hold them until ``release``. ``read``
        gives a number of bytes at an offset of a file, or raises ``ValueError``."""
        self._read = read
        for index, reference in enumerate(self.references()):
            if reference is not None:
                self._made[index] = self._array(index, self._table["arrays"][index])
                self._referenced.append(index)

    def release(self) -> None:
        """Stop holding the arrays that are in files of the model: other objects do, give them back,
        or they are read again."""
        with self._lock:
            indices, self._referenced = self._referenced, []
            sources = sources_after_release([self._made.pop(index) for index in indices])
            self._released.update(zip(indices, sources, strict=True))

    def reordered(self, index: object) -> tuple[TensorType, Reordered] | None:
        """The type of an array that is held in an order of a kernel alone, and what holds it."""
        source = self._released[index]() if type(index) is int and index in self._released else None
        if not isinstance(source, Reordered) or source.constant() is not None:
            return None
        name, shape, *_ = self._table["arrays"][index]
        return TensorType(dtype_named(name), tuple(shape)), source

    def _array(self, index: int, entry: Any) -> np.ndarray:
        what = f"its array {index}"
        try:
            name, shape, *section = entry
            dtype = dtype_named(name)
            whole = section.pop() if len(section) == _WITH_SHAPE else []
            dims = (*shape, *whole, 0)
            # True is an int, but no dim.
            if not _INTEGERS.issuperset(map(type, dims)) or len(dims) > 129:
                raise ValueError(f"{shape} is no shape")
            if min(dims) < 0 or max(dims) >= 2**62:
                raise ValueError(f"{shape} is no shape")
            if len(entry) == _OF_REFERENCE:
                path, offset = section
                if self._read is None or type(path) is not str or type(offset) is not int:
                    raise ValueError("it is in a file that is not there")
                data = self._read(path, offset, prod(shape) * dtype.itemsize)
                array = data.view(dtype).reshape(shape)
            elif dtype == STRING:
                (texts,) = section
                if len(texts) != prod(shape) or not all(type(text) is str for text in texts):
                    raise ValueError("it has other elements than strings, or not as many")
                array = np.array(texts, object).reshape(shape)
            else:
                content = self._section(what, section, may_skip=self._mapped)
                if len(content) != prod(shape) * dtype.itemsize:
                    raise ValueError(f"{len(content)} bytes for a {name} of shape {shape}")
                is_big = sys.byteorder == "big"
                stored = dtype.newbyteorder("<") if is_big else dtype
                array = np.frombuffer(content, stored).reshape(shape)
                if whole:
                    array = np.broadcast_to(array, whole)
                if is_big:
                    array = array.astype(dtype)
        except (LookupError, TypeError, ValueError) as error:
            raise self.damaged(f"{what}: {error}") from error
        array.flags.writeable = False
        return array

    def _parsed(self, what: str, section: object) -> Any:
        try:
            return json.loads(bytes(self._section(what, section)))
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{what} is no JSON: {error}") from error

    def check(self, *, quick: bool = False) -> None:
        """Compare all checksums; if ``quick``, but those of large arrays, and parse nothing. Raises
        ``InvalidModel``."""
        for name in self.documents:
            if quick:
                self._section(f"its {name!r}", self._table["documents"][name])
            else:
                self.document(name)
        for index, entry in enumerate(self._table.get("arrays", ())):
            if not quick:
                self.array(index)
            if entry[0] != "string" and len(entry) != _OF_REFERENCE:
                self._section(f"its array {index}", entry[2:5], may_skip=quick)

    def _section(self, what: str, section: object, *, may_skip: bool = False) -> memoryview:
        """The bytes of a section, whose checksum was compared, unless it may be skipped."""
        if not isinstance(section, list) or [*map(type, section)] != [int, int, int]:
            raise self.damaged(f"{what} has no place")
        if min(section) < 0 or max(section) >= 2**62:
            raise self.damaged(f"{what} has no place")
        offset, count, expected = section
        if offset % ALIGNMENT or offset + count > len(self._content):
            raise self.damaged(f"{what} is not inside of the file")
        content = memoryview(self._content)[offset : offset + count]
        if (may_skip and count > _LARGE) or (offset, count, expected) in self._checked:
            return content
        checksum = crc32c(content[:PIECE])
        for begin in range(PIECE, count, PIECE):
            checkpoint()
            checksum = crc32c(content[begin : begin + PIECE], checksum)
        if checksum != expected:
            raise self.damaged(f"{what} has another checksum than it was saved with")
        self._checked.add((offset, count, expected))
        return content


def aligned(content: bytes) -> memoryview:
    """A copy of the contents of a file at an address as ``ArtifactFile`` wants it."""
    memory = _aligned_memory(len(content))
    memory[:] = content
    return memory.toreadonly()


def _aligned_memory(count: int) -> memoryview:
    array = np.empty(count + ALIGNMENT, np.uint8)
    start = -array.ctypes.data % ALIGNMENT
    return array[start : start + count].data


def _contents(file: BinaryIO, status: os.stat_result, *, mapped: bool) -> mmap.mmap | memoryview:
    """The bytes of a file: mapped, or read at once."""
    if not mapped or not status.st_size:
        content = _aligned_memory(status.st_size)
        count = file.readinto(content)  # type: ignore[attr-defined]
        return content[:count].toreadonly()
    # A file that was replaced or written to since has another key, and so its own mapping.
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    mapping = _MAPPED.get(key)
    if mapping is None:
        mapping = _MAPPED[key] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return mapping
