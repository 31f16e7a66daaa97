"""Varints, text and arrays out of bytes."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.frontends.common.encoding import array_from_bytes, decode_text, read_varint, vector_of


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"\x00", 0), (b"\x7f", 127), (b"\x80\x01", 128), (b"\xff" * 9 + b"\x01", 2**64 - 1)],
)
def test_varint_is_read_to_its_end(data: bytes, value: int) -> None:
    assert read_varint(b"?" + data + b"?", 1) == (value, 1 + len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 10 + b"\x01"])
def test_varint_without_an_end_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no end"):
        read_varint(data, 0)


def test_text_that_is_not_utf8_survives() -> None:
    assert decode_text("é".encode()) == decode_text("é") == "é"
    assert decode_text(b"\xff").encode("utf-8", "surrogateescape") == b"\xff"


def test_aligned_array_is_a_view() -> None:
    data = np.arange(4, dtype=np.float32)
    array = array_from_bytes(data.view(np.uint8), np.dtype(np.float32))
    assert np.shares_memory(array, data)
    np.testing.assert_array_equal(array, data)


def test_unaligned_array_is_copied() -> None:
    data = np.frombuffer(b"?" + np.arange(3, dtype=np.int64).tobytes(), np.uint8)[1:]
    array = array_from_bytes(data, np.dtype(np.int64))
    assert array.flags.aligned
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [np.float64, np.bool_])
def test_empty_array_has_its_dtype(dtype: type) -> None:
    array = array_from_bytes(b"", np.dtype(dtype))
    assert (array.dtype, array.size) == (dtype, 0)


def test_bools_of_any_byte_but_zero_are_true() -> None:
    array = array_from_bytes(b"\x00\x01\x07", np.dtype(np.bool_))
    assert array.view(np.uint8).tolist() == [0, 1, 1]


def test_vector_of_texts_has_texts_of_python() -> None:
    vector = vector_of(["a", "bcd"], np.dtype(object))
    assert (vector.dtype, vector.tolist()) == (object, ["a", "bcd"])
