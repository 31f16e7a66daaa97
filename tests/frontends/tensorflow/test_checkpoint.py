"""Checkpoints take memory in proportion to their files, whatever these say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from penstock.core.errors import InvalidModel
from penstock.core.limits import DEFAULT_LIMITS
from penstock.frontends.tensorflow import checkpoint
from penstock.frontends.tensorflow.checkpoint import Bundle
from penstock.frontends.tensorflow.proto.graphdef_pb2 import BundleEntryProto, BundleHeaderProto

HEADER = BundleHeaderProto(num_shards=1).SerializeToString()


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


def entry(shared: int, added: bytes, value: bytes = b"") -> bytes:
    return varint(shared) + varint(len(added)) + varint(len(value)) + added + value


def masked(value: int) -> int:
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def table(*blocks: bytes, handles: Callable[[list[bytes]], Iterable[bytes]] = list) -> bytes:
    """An index with these blocks of entries. ``handles`` changes what the block of blocks names."""
    data, spans = b"", []

    def add(block: bytes) -> bytes:
        nonlocal data
        block += bytes(4)  # no restart points
        span = varint(len(data)) + varint(len(block))
        checksum = masked(google_crc32c.value(block + b"\0"))
        data += block + b"\0" + checksum.to_bytes(4, "little")
        return span

    spans = [add(block) for block in blocks]
    named = [entry(0, b"%08d" % i, span) for i, span in enumerate(handles(spans))]
    footer = (b"\0\0" + add(b"".join(named))).ljust(40, b"\0")
    return data + footer + checkpoint._MAGIC.to_bytes(8, "little")


def bundle(folder: Path, index: bytes) -> Bundle:
    (folder / "v.index").write_bytes(index)
    return Bundle(folder, "v", DEFAULT_LIMITS)


def test_index_of_several_blocks_is_read(tmp_path: Path) -> None:
    values = [BundleEntryProto(size=i).SerializeToString() for i in range(4)]
    first = entry(0, b"", HEADER) + entry(0, b"name/a", values[0]) + entry(5, b"b", values[1])
    second = entry(0, b"name/c", values[2]) + entry(5, b"d", values[3])
    assert list(bundle(tmp_path, table(first, second)).entries) == [
        *("name/a", "name/b", "name/c", "name/d")
    ]


def test_block_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    block = entry(0, b"", HEADER) + entry(0, b"a")
    with pytest.raises(InvalidModel, match="blocks overlap"):
        bundle(tmp_path, table(block, handles=lambda spans: spans * 2))


def test_block_that_is_part_of_another_is_refused(tmp_path: Path) -> None:
    inner = table(entry(0, b"b"))[:13]
    outer = entry(0, b"", HEADER) + entry(0, b"a", inner)
    span = varint(outer.index(inner)) + varint(8)
    with pytest.raises(InvalidModel, match="blocks overlap"):
        bundle(tmp_path, table(outer, handles=lambda spans: [*spans, span]))


def test_keys_out_of_order_are_refused(tmp_path: Path) -> None:
    for keys in ((b"", b"b", b"a"), (b"", b"a", b"a")):
        block = b"".join(entry(0, key, HEADER) for key in keys)
        with pytest.raises(InvalidModel, match="not in order"):
            bundle(tmp_path, table(block))


def test_shared_prefixes_of_keys_take_memory_in_proportion_to_the_file(
    tmp_path: Path, most_bytes: Callable[[Callable[[], object]], int]
) -> None:
    keys = entry(0, b"K" * 100_000) + b"".join(entry(100_000, b"%05d" % i) for i in range(30_000))
    index = table(entry(0, b"", HEADER) + keys)

    def job() -> None:
        with pytest.raises(InvalidModel):
            bundle(tmp_path, index)

    assert most_bytes(job) < 40 * len(index)


@pytest.mark.costly
def test_many_small_entries_take_memory_in_proportion_to_the_file(
    tmp_path: Path, most_bytes: Callable[[Callable[[], object]], int]
) -> None:
    keys = b"".join(entry(0, b"%07d" % i) for i in range(100_000))
    index = table(entry(0, b"", HEADER) + keys)
    read = []
    assert most_bytes(lambda: read.append(bundle(tmp_path, index))) < 40 * len(index)
    assert len(read[0].entries) == 100_000


def tensors(folder: Path, offsets: list[int], count: int) -> Bundle:
    """A checkpoint of vectors of ``count`` bytes at these offsets of one shard."""
    (folder / "v.data-00000-of-00001").write_bytes(bytes(count + 1))
    checksum = masked(google_crc32c.value(bytes(count)))
    entries = entry(0, b"", HEADER)
    for i, offset in enumerate(offsets):
        proto = BundleEntryProto(dtype=4, offset=offset, size=count, crc32c=checksum)
        proto.shape.dim.add(size=count)
        entries += entry(0, b"%07d" % i, proto.SerializeToString())
    return bundle(folder, table(entries))


def test_tensor_that_several_variables_name_is_read_once(tmp_path: Path) -> None:
    checkpoint = tensors(tmp_path, [1], 1000)
    array = checkpoint.read("0000000")
    assert np.array_equal(array, np.zeros(1000, np.uint8))
    assert checkpoint.read("0000000") is array


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    checkpoint = tensors(tmp_path, [0, 1], 1000)
    checkpoint.read("0000000")
    with pytest.raises(InvalidModel, match="overlaps other tensors"):
        checkpoint.read("0000001")
