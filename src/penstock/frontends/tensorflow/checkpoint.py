"""TensorFlow's checkpoints (TensorBundle): an index, and shards with one tensor after the other.

The index is a table in LevelDB's format: blocks of entries sorted by key, each key stored without
the prefix that it shares with the previous one; an index of the blocks; a footer. Every block and
every tensor has a CRC-32C, which is checked when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from penstock.core.errors import InvalidModel
from penstock.core.limits import Limits
from penstock.core.types import STRING
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import array_from_bytes, decode_text, read_varint, vector_of
from penstock.frontends.common.model_files import open_inside
from penstock.frontends.common.weight_file import WeightFile
from penstock.frontends.tensorflow.file import open_part, parsed, part_error
from penstock.frontends.tensorflow.proto.graphdef_pb2 import BundleEntryProto, BundleHeaderProto
from penstock.frontends.tensorflow.tensors import decode_shape, numpy_dtype
from penstock.host.crc32c import crc32c

_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER = 5  # bytes: the type of compression, and a checksum
_MAX_SHARDS = 10_000
_INTERVAL = 16  # TensorFlow stores every 16th key in full
_MASK_DELTA = 0xA282EAD8


class Bundle:
    """The tensors of a checkpoint by their keys. ``prefix`` is the prefix of its files' names in
    ``folder``. They are read, or mapped into memory if ``map_weights``; the latest file stays open
    until ``opened`` is closed.

    Raises ``InvalidModel`` for files that are not a checkpoint, or are damaged.
    """

    def __init__(
        self, folder: Path, prefix: str, limits: Limits, map_weights: bool = False
    ) -> None:
        self.folder = folder
        self.prefix = prefix
        self.limits = limits
        self.map_weights = map_weights
        self.opened = ExitStack()
        self._tensors: dict[str, np.ndarray] = {}
        self._unread: dict[int, int] = {}
        self._shards: dict[int, WeightFile] = {}
        index = f"{prefix}.index"
        header = BundleHeaderProto()
        with open_part(folder, index) as file:
            table = file.read()
        try:
            self.entries = {decode_text(key): value for key, value in _items(table)}
        except ValueError as error:
            raise InvalidModel(
                f"{index} is no index of a checkpoint, or damaged: {error}; copy it again, or save "
                "it with TensorFlow"
            ) from error
        parsed(self.entries.pop("", b""), header, index)
        if not 1 <= header.num_shards <= _MAX_SHARDS:
            raise InvalidModel(
                f"{index} is damaged: it has {header.num_shards} as the number of data files; "
                "copy it again"
            )
        if header.endianness != BundleHeaderProto.LITTLE:
            raise InvalidModel(f"{index} is big-endian; save it on a little-endian machine")
        self.count = header.num_shards

    def read(self, key: str) -> np.ndarray:
        """Return the tensor with that key; each is read once. Raises ``InvalidModel``."""
        if key not in self._tensors:
            self._tensors[key] = self._tensor(key)
        return self._tensors[key]

    def _tensor(self, key: str) -> np.ndarray:
        where = f"tensor {key!r} of {self.prefix}"
        if key not in self.entries:
            raise InvalidModel(f"there is no {where}; the checkpoint belongs to another model")
        entry = parsed(self.entries[key], BundleEntryProto(), where)
        if entry.slices:
            raise InvalidModel(f"{where} is stored in slices; save it in one piece")
        try:
            dtype, shape = numpy_dtype(entry.dtype), decode_shape(entry.shape, self.limits)
        except TensorError as error:
            raise InvalidModel(f"{where}: {error}") from error
        if shape is None or any(dim is None for dim in shape):
            raise InvalidModel(f"{where} has unknown dims; save the checkpoint again")
        dims: tuple[int, ...] = shape  # type: ignore[assignment]
        data = self._bytes(entry, where)
        if dtype == STRING:
            return _strings(data.tobytes(), entry.crc32c, where, math.prod(dims)).reshape(dims)
        if data.size != math.prod(dims) * dtype.itemsize:
            raise InvalidModel(f"{where} has {data.size} bytes, which do not fit its shape {dims}")
        _check_sum(data, entry.crc32c, where)
        return array_from_bytes(data, dtype).reshape(dims)

    def _bytes(self, entry: BundleEntryProto, where: str) -> np.ndarray:
        if not 0 <= entry.shard_id < self.count:
            raise InvalidModel(
                f"{where} is in file {entry.shard_id} of {self.count}; copy the index again"
            )
        name = f"{self.prefix}.data-{entry.shard_id:05}-of-{self.count:05}"
        try:
            shard = self._shards.get(entry.shard_id)
            if shard is None:
                shard = WeightFile(partial(open_inside, self.folder, name), self.map_weights)
                self._shards[entry.shard_id] = shard
                self._unread[entry.shard_id] = shard.size
                shard.hold(self.opened)
            if not 0 <= entry.offset <= entry.offset + entry.size <= shard.size:
                raise InvalidModel(f"{where} reaches beyond the end of its file; copy that again")
            # Tensors take no more memory than the files have.
            self._unread[entry.shard_id] -= entry.size
            if self._unread[entry.shard_id] < 0:
                raise InvalidModel(f"{where} overlaps other tensors; save the checkpoint again")
            return shard.read(entry.offset, entry.size)
        except ValueError as error:
            raise part_error(self.folder, name, error) from error


def _check_sum(data: np.ndarray | bytes, stored: int, where: str) -> None:
    if crc32c(data) != _unmasked(stored):
        raise InvalidModel(
            f"{where} is damaged: its checksum does not match its bytes; copy it again"
        )


def _strings(data: bytes, stored: int, where: str, count: int) -> np.ndarray:
    """Return an array of strings: their lengths, a checksum of these, and their bytes. The stored
    checksum is that of the lengths as 32-bit numbers and of what comes after them."""
    lengths, place = [], 0
    try:
        for _ in range(count):
            length, place = read_varint(data, place)
            lengths.append(length)
    except ValueError as error:
        raise InvalidModel(f"{where} is damaged: {error}; copy it again") from error
    if place + 4 + sum(lengths) != len(data) or max(lengths, default=0) >= 2**32:
        raise InvalidModel(f"{where} has {len(data)} bytes, which do not fit its {count} strings")
    _check_sum(np.array(lengths, "<u4").tobytes() + data[place:], stored, where)
    # The checksum of the lengths, which the other one covers, has four bytes.
    ends = np.cumsum([place + 4, *lengths]).tolist()
    return vector_of([decode_text(data[a:b]) for a, b in pairwise(ends)], STRING)


def _unmasked(stored: int) -> int:
    """Return the CRC-32C of a stored checksum, which is rotated and offset so that data with
    embedded checksums keep a strong one (``crc32c::Mask`` of LevelDB)."""
    rotated = (stored - _MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def _items(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a table in LevelDB's format. Blocks that overlap are refused, so
    that reading takes memory and time in proportion to the file. Raises ``ValueError``."""
    footer = data[-_FOOTER:]
    if len(footer) < _FOOTER or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("it does not end as an index of a checkpoint does")
    at = 0
    for _ in range(2):  # offset and size of a block of metadata
        _, at = read_varint(footer, at)
    blocks = (handle for _, handle in _entries(data, *_span(footer[at:])))
    end, last = 0, None
    for offset, size in map(_span, blocks):
        if offset < end:
            raise ValueError("its blocks overlap")
        end = offset + size
        for key, value in _entries(data, offset, size):
            # In sorted order no key comes twice, so that no entry replaces another.
            if last is not None and key <= last:
                raise ValueError("its keys are not in order")
            last = key
            yield key, value


def _span(handle: bytes) -> tuple[int, int]:
    """Return the offset and the size of the block at a handle."""
    offset, at = read_varint(handle, 0)
    return offset, read_varint(handle, at)[0]


def _entries(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block. Restart points for searches follow them. The keys of a
    block that stores every ``_INTERVAL``-th in full have at most ``_INTERVAL`` times its bytes."""
    block = _block(data, offset, size)
    room = _INTERVAL * size
    end = len(block) - 4
    restarts = int.from_bytes(block[end:], "little") if end >= 0 else 0
    end -= 4 * restarts
    if end < 0:
        raise ValueError("a block is shorter than it says")
    key, at = b"", 0
    while at < end:
        shared, at = read_varint(block, at)
        added, at = read_varint(block, at)
        length, at = read_varint(block, at)
        if shared > len(key) or at + added + length > end:  # slices would silently return less
            raise ValueError("an entry reaches beyond its block")
        room -= shared + added  # otherwise a few bytes could request a long key repeatedly
        if room < 0:
            raise ValueError("keys share more than they store")
        key = key[:shared] + block[at : at + added]
        at += added + length
        yield key, block[at - length : at]


def _block(data: bytes, offset: int, size: int) -> bytes:
    """Return the contents of a block."""
    end = offset + size
    if end + _TRAILER > len(data):
        raise ValueError("a block reaches beyond its end")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER], "little")
    if crc32c(data[offset : end + 1]) != _unmasked(stored):
        raise ValueError("the checksum of a block does not match its bytes")
    if data[end]:
        raise ValueError(f"compressed blocks (type {data[end]}) are not supported")
    return data[offset:end]
