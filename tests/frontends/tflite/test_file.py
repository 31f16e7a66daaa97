"""Files: what is recognized, and buffers outside of the flatbuffer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.frontends.tflite.test_importer import ONE, calling, doubled, run
from tests.support.tflite_models import model


def test_buffer_outside_of_the_flatbuffer_is_read(tmp_path: Path) -> None:
    graph = doubled(buffer=1)
    size = len(model([graph], buffers=[{}, {"offset": 2**40, "size": 8}]))
    file = model([graph], buffers=[{}, {"offset": size, "size": 8}])
    assert len(file) == size
    path = tmp_path / "m.tflite"
    path.write_bytes(file + ONE.tobytes())
    for options in ({}, {"map_weights": True}):
        np.testing.assert_array_equal(run(path, **options), 2 * ONE)
    with pytest.raises(ps.InvalidModel, match="it was cut short"):
        ps.load(file)


def test_tflite_file_is_recognized_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(calling(1))
    np.testing.assert_array_equal(run(path, -ONE), ONE)
