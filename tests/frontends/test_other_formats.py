"""Files of formats that are not read are told by their names, with what to do."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import penstock as ps

HDF, ZIP = b"\x89HDF\r\n", b"PK"
FORMATS = {
    "m.h5": (HDF, "a Keras file.*export it to a SavedModel or to TFLite"),
    "m.keras": (ZIP, "a Keras file.*export it"),
    "m.pt": (ZIP, r"a PyTorch file.*torch\.onnx\.export"),
    "m.pth": (b"\x80\x02", "a PyTorch file"),
    "m.safetensors": (b"{}", "weights without a graph.*export the model to ONNX"),
    "m.xml": (b"<net/>", "an OpenVINO model"),
    "m.mlmodel": (b"\x08\x04", "a Core ML model.*export it"),
    "m.ckpt": (ZIP, "a checkpoint of PyTorch or TensorFlow"),
    "variables.index": (b"\0", "part of a TensorFlow checkpoint.*SavedModel"),
    "model.ckpt-1000.meta": (b"\x0a", "part of a TensorFlow checkpoint"),
    "variables.data-00000-of-00001": (b"\0", "part of a TensorFlow checkpoint"),
    "m.ort": (b"\0\0\0\0ORTM", "ONNX Runtime's own format"),
    "m.gguf": (b"GGUF", r"a llama\.cpp file"),
    "m.pdmodel": (b"\x0a", "paddle2onnx"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_file_of_another_format_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    head, reason = FORMATS[name]
    path = tmp_path / name
    if head == ZIP:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("config.json", "{}")
    else:
        path.write_bytes(head + bytes(100))
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(path)


def test_folder_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.mlpackage").mkdir()
    with pytest.raises(ps.InvalidModel, match="a Core ML model"):
        ps.load(tmp_path / "m.mlpackage")
