"""Files of arrays in the safetensors format, compared with the library of that name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.artifact.tensor_file import load_arrays, save_arrays
from penstock.core.errors import InvalidInput
from penstock.core.limits import Limits

ARRAYS = {
    "one": np.array([True, False]),
    "a/b": np.arange(6, dtype=np.int64).reshape(2, 3),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "scalar": np.array(1.5),
    "empty": np.zeros((0, 3), np.float16),
    "odd": np.arange(3, dtype=np.uint8),
    "complex": np.array([1 + 2j], np.complex64),
}


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got[name], array)


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    arrays = {**ARRAYS, "brain": np.array([1, 2], ml_dtypes.bfloat16)}
    save_arrays(tmp_path / "f", arrays, {"about": "a model"})
    same(load_file(tmp_path / "f"), arrays)


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in ARRAYS.items()}
    save_file(arrays, tmp_path / "f", {"about": "a model"})
    got, texts = load_arrays(tmp_path / "f")
    same(got, arrays)
    assert texts == {"about": "a model"}
    assert all(array.flags.writeable for array in got.values())


@pytest.mark.parametrize("dtype", [object, np.complex128, ml_dtypes.int4])
def test_dtype_that_the_format_lacks_is_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(InvalidInput, match=r"'x' is of .*, which files of the safetensors format"):
        save_arrays(tmp_path / "f", {"x": np.zeros(2, dtype)}, {})
    assert not (tmp_path / "f").exists()


def entry(begin: Any = 0, end: Any = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"x": entry(end=8)},  # beyond the file
        {"x": entry(begin=-4)},
        {"x": entry(shape=[2])},
        {"x": entry(shape=[-1])},
        {"x": entry(shape=[True])},
        {"x": entry(shape="1")},
        {"x": entry(dtype="F4")},
        {"x": entry(dtype=["F32"])},
        {"x": entry(), "y": entry()},  # the same bytes twice
        {"x": entry(2, 4, [1], "F16")},  # bytes of no array
        {"x": {"dtype": "F32", "shape": [1]}},
        {"x": [1]},
        {"__metadata__": {"a": 1}, "x": entry()},
        {"__metadata__": [], "x": entry()},
        [entry()],
        7,
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(InvalidInput, match="is no file of the safetensors format, or is damaged"):
        load_arrays(tmp_path / "f")


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{", b"[" * 9000])
def test_file_of_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(InvalidInput, match="is no file of the safetensors format, or is damaged"):
        load_arrays(tmp_path / "f")


def test_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    text = b'{"x": {}, "x": {}}'
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(InvalidInput, match="two of its entries have one name"):
        load_arrays(tmp_path / "f")


def test_pipe_and_large_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="is no file"):
        load_arrays(tmp_path / "pipe")
    save_arrays(tmp_path / "f", {"x": np.zeros(100)}, {})
    with pytest.raises(InvalidInput, match=r"has more bytes than Limits\.max_bytes = 500"):
        load_arrays(tmp_path / "f", Limits(max_bytes=500))
