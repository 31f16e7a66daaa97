"""Ranges of a file of weights: each read once, in memory that is linear in the file."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from penstock.frontends.common import weight_file as weight_files
from penstock.frontends.common.model_files import open_inside
from penstock.frontends.common.weight_file import WeightFile

BYTES = np.arange(100, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(weight_files, "_SMALL", 0)  # read in ranges, as large files are
    path = tmp_path / "w.bin"
    path.write_bytes(BYTES.tobytes())
    return path


def weight_file(path: Path, mapped: bool = False) -> WeightFile:
    return WeightFile(partial(open_inside, path.parent, path.name), mapped)


@pytest.mark.parametrize("mapped", [False, True])
def test_range_has_its_bytes_and_is_read_only(path: Path, mapped: bool) -> None:
    file = weight_file(path, mapped)
    for offset, size in ((0, 100), (3, 7), (100, 0), (0, 0)):
        data = file.read(offset, size)
        assert np.array_equal(data, BYTES[offset : offset + size])
        assert not data.flags.writeable


def test_small_file_is_read_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    file = weight_file(path)
    path.unlink()
    assert np.array_equal(file.read(3, 7), BYTES[3:10])
    assert np.shares_memory(file.read(0, 50), file.read(40, 50))


def test_range_that_is_read_again_is_the_same_memory(path: Path) -> None:
    file = weight_file(path)
    assert np.shares_memory(file.read(3, 50), file.read(3, 50))


def test_ranges_that_overlap_take_no_more_than_twice_the_file(path: Path) -> None:
    file = weight_file(path)
    ranges = [file.read(offset, 100 - offset) for offset in range(17)]
    memory = {id(r if r.base is None else r.base): r if r.base is None else r.base for r in ranges}
    assert sum(array.nbytes for array in memory.values()) <= 200
    assert all(np.array_equal(data, BYTES[i:]) for i, data in enumerate(ranges))


def test_ranges_that_overlap_more_than_16_times_are_refused(path: Path) -> None:
    file = weight_file(path)
    for _ in range(100):
        file.read(1, 99)
    with pytest.raises(ValueError, match="more than 16 times its 100 bytes"):
        for offset in range(2, 50):
            file.read(offset, 50)


def test_file_that_changes_between_ranges_is_refused(path: Path) -> None:
    file = weight_file(path)
    first = file.read(0, 10)
    os.truncate(path, 50)
    for offset, size in ((10, 10), (60, 10)):
        with pytest.raises(ValueError, match="changed while it was read"):
            file.read(offset, size)
    assert np.array_equal(first, BYTES[:10])


def test_file_that_is_held_open_is_opened_once(path: Path) -> None:
    opened = []

    def opening() -> BinaryIO:
        opened.append(open_inside(path.parent, path.name))
        return opened[-1]

    file = WeightFile(opening)
    with ExitStack() as stack:
        file.hold(stack)
        assert all(np.array_equal(file.read(i, 5), BYTES[i : i + 5]) for i in range(0, 90, 5))
    assert len(opened) == 2
    assert opened[-1].closed
    assert np.array_equal(file.read(90, 10), BYTES[90:])
    assert len(opened) == 3


def test_file_that_changes_while_it_is_held_open_is_refused(path: Path) -> None:
    file = weight_file(path)
    with ExitStack() as stack:
        file.hold(stack)
        os.truncate(path, 50)
        with pytest.raises(ValueError, match="changed while it was read"):
            file.read(10, 10)


def test_file_that_is_replaced_between_ranges_is_refused(path: Path) -> None:
    file = weight_file(path)
    path.rename(path.with_suffix(".old"))
    path.write_bytes(BYTES[::-1].tobytes())
    with pytest.raises(ValueError, match="changed while it was read"):
        file.read(0, 10)
