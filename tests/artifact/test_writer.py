"""The file of an artifact, as it is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.artifact.container import ArtifactFile
from penstock.artifact.writer import ArtifactWriter
from penstock.core.limits import DEFAULT_LIMITS


def read(path: Path) -> ArtifactFile:
    with path.open("rb") as file:
        return ArtifactFile(file, path.name, DEFAULT_LIMITS)


def test_array_that_is_added_twice_is_written_once(tmp_path: Path) -> None:
    writer, array = ArtifactWriter(), np.arange(6, dtype=np.float32).reshape(2, 3)
    assert [writer.array(array), writer.array(array), writer.array(array.copy())] == [0, 0, 1]
    writer.save(tmp_path / "file")
    got = read(tmp_path / "file").array(0)
    np.testing.assert_array_equal(got, array)
    # Not one of an own byte order, which would be the dtype of results.
    assert got.dtype.byteorder == array.dtype.byteorder and not got.flags.writeable


@pytest.mark.parametrize(
    "shape", [(1000, 1000, 5), (1000, 1, 3), (2, 3), ()], ids=["first", "middle", "none", "scalar"]
)
def test_broadcast_array_takes_the_bytes_of_one_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    row = np.arange(np.prod(shape[-1:], dtype=int), dtype=np.float32).reshape(shape[-1:])
    array, writer, path = np.broadcast_to(row, shape), ArtifactWriter(), tmp_path / "file"
    writer.array(array)
    writer.save(path)
    got = read(path).array(0)
    np.testing.assert_array_equal(got, array)
    assert got.strides == array.strides
    assert path.stat().st_size < 1000


def test_documents_are_read_as_they_were_added(tmp_path: Path) -> None:
    writer = ArtifactWriter()
    writer.document("head", {"entry": "main", "sizes": [1, 2]})
    writer.save(tmp_path / "file")
    file = read(tmp_path / "file")
    assert file.documents == ["head"]
    assert file.document("head") == file.head == {"entry": "main", "sizes": [1, 2]}
    assert writer.to_bytes() == (tmp_path / "file").read_bytes()


def test_writer_with_a_limit_counts_its_bytes() -> None:
    writer = ArtifactWriter(most=100)
    writer.array(np.zeros(16, np.float32))
    assert writer.fits() and writer.fits(36) and not writer.fits(37)
