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


CONTENTS = {
    "hdf": (HDF + bytes(100), "a Keras file"),
    "gguf": (b"GGUF" + bytes(100), r"a llama\.cpp file"),
    "pickle": (b"\x80\x04" + bytes(100), "a pickled object"),
    "ort": (b"\0\0\0\0ORTM" + bytes(100), "ONNX Runtime's own format"),
    "xml": (b"<?xml version='1.0'?><net/>", "an OpenVINO model"),
    "torch": ({"archive/data.pkl": b""}, "a PyTorch file"),
    "keras": ({"config.json": b"{}", "model.weights.h5": b""}, "a Keras file"),
    "zip": ({"a/model.onnx": b"", "b": b""}, "a zip file without metadata/MANIFEST"),
    "damaged zip": (b"PK\3\4" + bytes(100), "a zip file without metadata/MANIFEST"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_of_another_format_are_named_whatever_the_file_is_called(
    tmp_path: Path, name: str
) -> None:
    contents, reason = CONTENTS[name]
    path = tmp_path / "model"
    if isinstance(contents, dict):
        with zipfile.ZipFile(path, "w") as file:
            for member, data in contents.items():
                file.writestr(member, data)
    else:
        path.write_bytes(contents)
    for source in (path, path.read_bytes()):
        with pytest.raises(ps.InvalidModel, match=reason):
            ps.load(source)
