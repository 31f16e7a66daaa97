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
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from weakref import WeakValueDictionary, ref

import numpy as np

from penstock.artifact import MAGIC, VERSION
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel
from penstock.core.limits import Limits
from penstock.core.origins import Origin, origin_of
from penstock.core.records import NamedTuple
from penstock.core.types import STRING, TensorType, dtype_name, dtype_named
from penstock.host.crc32c import crc32c
from penstock.ir.layout import unbroadcast
from penstock.ops.common.constant_cache import Reordered, origin_of_constant, sources_after_release

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.ir.graph import Value

HEADER = struct.Struct("<8sIIQQ")
_ALIGNMENT = 64
_PIECE = 16 << 20  # bytes that are written or checked between two looks at the control
# Checksums are computed at 5 to 10 GB/s: over all weights that can take longer than all else.
_LARGE = 64 << 10  # bytes of an array from which on it is not checked if it is mapped

_OF_REFERENCE = 4  # the entries of an array that is in a file of the model
_WITH_SHAPE = 4  # those of the section and the shape of an array that is broadcast

_MAPPED: WeakValueDictionary[tuple[int, ...], mmap.mmap] = WeakValueDictionary()
"""Files that are mapped now, by device, inode, bytes and time of the last change."""


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
        file.write(bytes(_ALIGNMENT))
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
    file.write(bytes(-file.tell() % _ALIGNMENT))
    offset, checksum = file.tell(), 0
    for begin in range(0, len(content), _PIECE):
        checkpoint()
        piece = content[begin : begin + _PIECE]
        checksum = crc32c(piece, checksum)
        file.write(piece)
    return [offset, len(content), checksum]


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
        if len(self._content) < _ALIGNMENT:
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
            # True is an int, but no dim.
            fit = [dim.__class__ is int and 0 <= dim < 2**62 for dim in (*shape, *whole)]
            if False in fit or len(fit) > 128:
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
                array = np.frombuffer(content, dtype.newbyteorder("<")).reshape(shape)
                if whole:
                    array = np.broadcast_to(array, whole)
                if sys.byteorder == "big":
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
        if not isinstance(section, list) or [x.__class__ for x in section] != [int, int, int]:
            raise self.damaged(f"{what} has no place")
        if min(section) < 0 or max(section) >= 2**62:
            raise self.damaged(f"{what} has no place")
        offset, count, expected = section
        if offset % _ALIGNMENT or offset + count > len(self._content):
            raise self.damaged(f"{what} is not inside of the file")
        content = memoryview(self._content)[offset : offset + count]
        if (may_skip and count > _LARGE) or (offset, count, expected) in self._checked:
            return content
        checksum = 0
        for begin in range(0, count, _PIECE):
            checkpoint()
            checksum = crc32c(content[begin : begin + _PIECE], checksum)
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
    array = np.empty(count + _ALIGNMENT, np.uint8)
    start = -array.ctypes.data % _ALIGNMENT
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
