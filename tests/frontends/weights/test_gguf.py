from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.weights.gguf import read_gguf
from tests.support.weight_cases import GgufWriter, random_blocks


def small() -> GgufWriter:
    writer = GgufWriter(
        {
            "general.architecture": "llama",
            "a.number": 7,
            "a.fraction": 0.5,
            "a.flag": True,
            "a.list": ["x", "é"],
            "a.numbers": [1, 2, 3],
        }
    )
    writer.add("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add("half", np.arange(4, dtype=np.float16), "F16")
    writer.add_blocks("blocks", (2, 32), "Q4_0", random_blocks("Q4_0", 2, 32).tobytes())
    return writer


@pytest.mark.parametrize("form", ["bytes", "read", "mapped"])
def test_file_has_its_metadata_and_tensors(tmp_path: Path, form: str) -> None:
    data = small().bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    file = read_gguf(data if form == "bytes" else str(path), "m.gguf", form == "mapped")
    assert file.metadata["a.number"] == 7
    assert file.metadata["a.fraction"] == 0.5
    assert file.metadata["a.flag"] is True
    assert file.metadata["a.list"] == ["x", "é"]
    assert file.metadata["a.numbers"] == [1, 2, 3]
    np.testing.assert_array_equal(file.tensors["plain"].array(), [[0, 1, 2], [3, 4, 5]])
    assert file.tensors["half"].array().dtype == np.float16
    assert file.tensors["blocks"].array().shape == (2, 32)


def test_mapped_tensor_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small().bytes())
    array = read_gguf(str(path), "m.gguf", True).tensors["plain"].array()
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_file_that_is_cut_short_is_refused_wherever_it_ends() -> None:
    data = small().bytes()
    end = len(data) - 28 + 1  # what pads the last tensor may be missing
    for length in range(4, end - 1):
        with pytest.raises(ps.InvalidModel, match=r"damaged GGUF file.*get the whole file anew"):
            read_gguf(data[:length], "m.gguf", False)


def test_changed_bytes_give_a_file_or_a_refusal() -> None:
    data = small().bytes()
    rng = np.random.default_rng(3)
    for _ in range(2000):
        changed = bytearray(data)
        for at in rng.integers(4, len(data), rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        try:
            file = read_gguf(bytes(changed), "m.gguf", False)
        except (ps.InvalidModel, ps.Unsupported):
            continue
        for tensor in file.tensors.values():
            if tensor.format in ("F32", "F16", "Q4_0"):
                tensor.array()


@pytest.mark.parametrize(
    ("at", "form", "value", "reason"),
    [
        (8, "<Q", 1 << 60, "tensors follow"),
        (16, "<Q", 1 << 60, "metadata follow"),
        (24, "<Q", 1 << 62, "letters of a name follow"),
        (24, "<Q", 70_000, "letters"),
    ],
)
def test_counts_are_compared_with_the_bytes_that_follow(
    at: int, form: str, value: int, reason: str
) -> None:
    data = bytearray(small().bytes() + bytes(100_000))
    struct.pack_into(form, data, at, value)
    with pytest.raises(ps.InvalidModel, match=reason):
        read_gguf(bytes(data), "m.gguf", False)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_version_is_unsupported(version: int) -> None:
    data = bytearray(small().bytes())
    struct.pack_into("<I", data, 4, version)
    with pytest.raises(ps.Unsupported, match="version"):
        read_gguf(bytes(data), "m.gguf", False)


def test_two_tensors_of_one_name_are_refused() -> None:
    data = small().bytes().replace(b"plain", b"halfx").replace(b"halfx", b"plain")
    assert read_gguf(data, "m.gguf", False).tensors
    writer = GgufWriter({"general.architecture": "llama"})
    writer.add("aaa", np.zeros(3, np.float32))
    writer.add("bbb", np.zeros(3, np.float32))
    with pytest.raises(ps.InvalidModel, match="two tensors 'aaa'"):
        read_gguf(writer.bytes().replace(b"bbb", b"aaa"), "m.gguf", False)


def test_rows_of_no_whole_blocks_are_refused() -> None:
    writer = GgufWriter({"general.architecture": "llama"})
    writer.add_blocks("blocks", (2, 33), "Q4_0", bytes(64))
    with pytest.raises(ps.InvalidModel, match="whole blocks of 32"):
        read_gguf(writer.bytes(), "m.gguf", False)
