"""Frames that wait."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.stepping.frames import FrameQueue

AXES = {"x": 1, "k": 0}


def rows(count: int, size: int = 3, rate: int = 8) -> dict[str, np.ndarray]:
    x = np.arange(2 * count * size).reshape(2, count, size)
    return {"x": x, "k": np.arange(count), "rate": np.array(rate)}


def test_frames_are_divided_along_batch_axes() -> None:
    queue, given = FrameQueue(AXES), rows(3)
    assert queue.size_of(given) == 3
    queue.add(given)
    assert queue.count == 3
    for i in range(3):
        inputs = queue.first.inputs
        np.testing.assert_array_equal(inputs["x"], given["x"][:, i : i + 1])
        assert inputs["k"].tolist() == [i]
        assert inputs["rate"] == 8
        queue.drop()
    assert queue.count == 3


def test_feed_without_batch_axes_is_one_frame() -> None:
    assert FrameQueue({}).size_of(rows(3)) == 1
    assert FrameQueue({}).size_of({}) == 1


@pytest.mark.parametrize(
    "given", [{"x": np.zeros(2)}, {"x": np.zeros((2, 0))}, rows(2) | {"k": [1]}]
)
def test_unequal_numbers_of_frames_are_refused(given: dict[str, np.ndarray]) -> None:
    with pytest.raises(ps.InvalidInput, match="concatenate frames"):
        FrameQueue(AXES).size_of({name: np.asarray(x) for name, x in given.items()})


def test_kind_is_that_of_shapes_and_of_values_without_batch_axis() -> None:
    kinds = []
    for given in (rows(1), rows(2), rows(1, size=4), rows(1, rate=16)):
        queue = FrameQueue(AXES)
        queue.add(given)
        kinds.append(queue.first.kind)
    assert kinds[0] == kinds[1]
    assert len({*kinds}) == 3


def test_cut_forgets_frames_that_wait() -> None:
    queue = FrameQueue(AXES)
    queue.add(rows(4))
    queue.drop()
    copy = queue.copied()
    queue.cut(2)
    assert queue.count == 2
    assert queue.first.inputs["k"].tolist() == [1]
    queue.cut(0)
    assert queue.count == 0
    queue.add(rows(1))
    assert queue.count == 1
    assert queue.first.inputs["k"].tolist() == [0]
    assert copy.count == 4
