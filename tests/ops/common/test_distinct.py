"""Distinct rows, by compiled code and by NumPy's sorts."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.host.native import library
from penstock.ops.common import distinct
from penstock.ops.common.distinct import distinct_rows, of_equal_bytes

COMPILED = pytest.param(True, marks=pytest.mark.skipif(library() is None, reason="not compiled"))


@pytest.fixture(params=[COMPILED, False], ids=["compiled", "numpy"])
def _code(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(distinct, "library", lambda: None)


def by_dict(rows):
    """First places, numbers and counts, by the text of each row."""
    places, first, counts = {}, [], []
    numbers = []
    for i, row in enumerate(rows):
        number = places.setdefault(row.tobytes(), len(places))
        if number == len(first):
            first.append(i)
            counts.append(0)
        counts[number] += 1
        numbers.append(number)
    return first, numbers, counts


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float32", "int64", "float64"])
@pytest.mark.parametrize("width", [1, 2, 3, 9])
@pytest.mark.parametrize("count", [1, 7, 3000])
def test_distinct_rows_are_those_of_a_dict(count, width, dtype):
    rows = (
        np.random.default_rng(5).integers(0, 2 if width > 3 else 40, (count, width)).astype(dtype)
    )
    found = distinct_rows(rows)
    assert [array.dtype for array in found] == [np.int64] * 3
    for array, want in zip(found, by_dict(rows), strict=True):
        np.testing.assert_array_equal(array, want)


@pytest.mark.usefixtures("_code")
def test_rows_with_gaps_are_told_apart():
    rows = np.repeat(np.array([[1, 2], [3, 4], [1, 2]], np.int32), 2, axis=1)[:, ::2]
    assert [x.tolist() for x in distinct_rows(rows)] == [[0, 1], [0, 1, 0], [2, 1]]


def test_equal_numbers_of_other_bytes_are_comparable():
    other = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
    x = np.array([0.0, -0.0, np.nan, other, 1, -np.inf], np.float32)
    first, numbers, _ = distinct_rows(of_equal_bytes(x)[:, None])
    assert first.tolist() == [0, 2, 4, 5]
    assert numbers.tolist() == [0, 0, 1, 1, 2, 3]
    np.testing.assert_array_equal(of_equal_bytes(x), x)


def test_numbers_that_simple_hashes_put_together_are_told_apart():
    """Multiples of a power of two, of which a table by the lowest bits has all in one place."""
    rows = (np.arange(200_000) << 40)[:, None]
    first, numbers, _ = distinct_rows(rows)
    np.testing.assert_array_equal(first, np.arange(len(rows)))
    np.testing.assert_array_equal(numbers, np.arange(len(rows)))
