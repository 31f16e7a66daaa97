"""FlatBuffers are checked while they are read."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from penstock.core.errors import InvalidModel
from penstock.frontends.tflite import flatbuffer
from penstock.frontends.tflite.flatbuffer import FILE, FlatBuffer, FlatTable, schema
from tests.support.tflite_models import serialized
from tools import tflite_schema


def root(data: bytes) -> FlatTable:
    return FlatBuffer("m.tflite", len(data), lambda at, n: data[at : at + n]).root("Model")


def test_schema_is_that_of_the_circle_package() -> None:
    assert Path(FILE).read_text() == tflite_schema.text()


def test_schema_numbers_tables_of_unions_and_operators() -> None:
    assert schema().unions["BuiltinOptions"][1] == "Conv2DOptions"
    assert schema().operators[0] == "ADD"
    assert schema().operators[-6] == "RMS_NORM"
    assert schema().tables["ResizeBilinearOptions"]["align_corners"].slot == 2
    assert schema().tables["SubGraph"]["debug_metadata_index"].default == -1


def test_fields_that_were_written_are_read_and_others_have_defaults() -> None:
    operator = {"inputs": [1, -1], "builtin_options_type": 8, "custom_options": b"abc"}
    operator["builtin_options"] = ("FullyConnectedOptions", {"keep_num_dims": True})
    table = root(serialized({"description": "é", "subgraphs": [{"operators": [operator]}, {}]}))
    assert (table.version, table.description, table.buffers) == (0, "é", ())
    first, second = table.subgraphs
    assert second.name == "" and second.debug_metadata_index == -1
    (read,) = first.operators
    assert read.inputs == [1, -1]
    assert read.content("custom_options") == b"abc"
    assert read.builtin_options.kind == "FullyConnectedOptions"
    assert read.builtin_options.keep_num_dims is True


@pytest.mark.parametrize("whole", [0, 2**18])
def test_fields_are_read_from_pages_of_large_files_and_from_small_ones_at_once(
    monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    monkeypatch.setattr(flatbuffer, "_WHOLE", whole)
    numbers, texts = [*range(3000)], [f"{i} " * i for i in range(300)]
    subgraphs = [{"name": text, "inputs": [i, -1]} for i, text in enumerate(texts)]
    data = serialized({"metadata_buffer": numbers, "subgraphs": subgraphs})
    parts: list[int] = []
    table = FlatBuffer("m", len(data), lambda at, n: parts.append(n) or data[at : at + n])
    model = table.root("Model")
    assert model.metadata_buffer == numbers
    assert [(graph.name, graph.inputs) for graph in model.subgraphs] == [
        (text, [i, -1]) for i, text in enumerate(texts)
    ]
    assert (parts == [len(data)]) == bool(whole)


@pytest.mark.parametrize("whole", [0, 2**18])
def test_file_that_is_cut_while_it_is_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    monkeypatch.setattr(flatbuffer, "_WHOLE", whole)
    data = serialized({"metadata_buffer": range(3000)})
    for size in (4, 100, 4096, 5000):
        with pytest.raises(InvalidModel, match="been cut while it was read"):
            buffer = FlatBuffer("m", len(data), lambda at, n, end=size: data[at : min(at + n, end)])
            print(len(buffer.root("Model").metadata_buffer))


def test_field_outside_of_its_table_is_refused_when_it_is_asked_for() -> None:
    data = bytearray(serialized({"version": 3, "description": "x"}))
    (table,) = struct.unpack_from("<I", data)
    vtable = table - struct.unpack_from("<i", data, table)[0]
    struct.pack_into("<H", data, vtable + 4, 2**15)
    assert root(bytes(data)).description == "x"
    with pytest.raises(InvalidModel, match="a field outside of its table"):
        print(root(bytes(data)).version)


@pytest.mark.parametrize("number", [1, 2**16, 2**31 - 1, 2**32 - 1])
def test_offset_out_of_range_is_refused(number: int) -> None:
    data = struct.pack("<I", number) + serialized({"description": "x"})[4:]
    with pytest.raises(InvalidModel, match=r"m\.tflite is cut short or damaged"):
        print(root(data).description)


@pytest.mark.parametrize("size", [5, 2**16 - 1])
def test_table_longer_than_the_file_or_shorter_than_a_field_is_refused(size: int) -> None:
    data = bytearray(serialized({"description": "x"}))
    (table,) = struct.unpack_from("<I", data)
    (distance,) = struct.unpack_from("<i", data, table)
    struct.pack_into("<H", data, table - distance + 2, size)
    with pytest.raises(InvalidModel, match=r"a field outside of its table|a table beyond its end"):
        print(root(bytes(data)).description)


def test_vector_longer_than_the_file_is_refused() -> None:
    data = serialized({"metadata_buffer": [7, 8, 9]})
    vector = data.index(struct.pack("<4I", 3, 7, 8, 9))
    longer = data[:vector] + struct.pack("<I", 2**30) + data[vector + 4 :]
    with pytest.raises(InvalidModel, match="a vector beyond its end"):
        print(root(longer).metadata_buffer)


def test_tables_that_share_vectors_more_than_sixteen_times_are_refused() -> None:
    count = 20_000
    data = bytearray(serialized({"subgraphs": [{"inputs": range(count)}] + [{}] * 1000}))
    table = root(bytes(data))
    first = table.subgraphs[0]._at
    for place in [
        i
        for i in range(0, len(data), 4)
        if table.subgraphs[1]._at == i + struct.unpack_from("<I", data, i)[0]
    ]:
        for i in range(1000):
            struct.pack_into("<I", data, place + 4 * i, first - place - 4 * i)
    shared = root(bytes(data))
    with pytest.raises(InvalidModel, match="vectors that overlap"):
        print(sum(len(subgraph.inputs) for subgraph in shared.subgraphs))
