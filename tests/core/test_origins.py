"""Where arrays were read from."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from penstock.core import origins
from penstock.core.origins import LEAST_BYTES, Origin, note_origin, origin_of

COUNT = LEAST_BYTES // 4


@pytest.fixture
def data() -> np.ndarray:
    """The bytes of twice as many float32 as an origin needs, read from byte 64 of a file."""
    data = np.zeros(2 * LEAST_BYTES, np.uint8)
    note_origin(data, Origin("/model", 64))
    return data


def test_views_of_what_was_read_lie_where_their_first_element_does(data: np.ndarray) -> None:
    assert origin_of(data) == Origin("/model", 64)
    assert origin_of(data.view(np.float32).reshape(2, -1)[1]) == Origin("/model", 64 + LEAST_BYTES)


def test_elements_in_another_order_and_copies_have_no_origin(data: np.ndarray) -> None:
    floats = data.view(np.float32)
    assert origin_of(floats.reshape(2, -1).T) is None
    assert origin_of(floats[::2]) is None
    assert origin_of(floats.copy()) is None
    assert origin_of(np.zeros(COUNT, np.float32)) is None


def test_few_bytes_have_no_origin(data: np.ndarray) -> None:
    assert origin_of(data[: LEAST_BYTES - 1]) is None
    few = np.zeros(LEAST_BYTES - 1, np.uint8)
    note_origin(few, Origin("/model", 0))
    assert origin_of(few) is None


def test_origin_is_forgotten_with_the_bytes() -> None:
    data = np.zeros(LEAST_BYTES, np.uint8)
    note_origin(data, Origin("/model", 64))
    view, before = data[:], len(origins._ORIGINS)
    del data
    assert origin_of(view) == Origin("/model", 64)  # it keeps them
    del view
    gc.collect()
    assert len(origins._ORIGINS) == before - 1
