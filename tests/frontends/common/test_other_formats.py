"""Files of formats that are not read are told by names and contents, with what to do."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.frontends.common.other_formats import cut_short
from tests.support.onnx_text import model_from_text

MODELS = Path(__file__).parents[2] / "models"

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
    "m.gguf": (b"\0", "no GGUF file.*whole file anew"),
    "m.ggml": (b"lmgg", "before GGUF.*convert the model again"),
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
    "ggml": (b"tjgg" + bytes(100), "before GGUF"),
    "pickle": (b"\x80\x04" + bytes(100), "a pickled object"),
    "ort": (b"\0\0\0\0ORTM" + bytes(100), "ONNX Runtime's own format"),
    "xml": (b"<?xml version='1.0'?><net/>", "an OpenVINO model"),
    "torch": ({"archive/data.pkl": b""}, "a PyTorch file"),
    "keras": ({"config.json": b"{}", "model.weights.h5": b""}, "a Keras file"),
    "zip": ({"a/model.onnx": b"", "b": b""}, "a zip file without metadata/MANIFEST"),
    "damaged zip": (b"PK\3\4" + bytes(100), "a zip file that was cut short.*get the whole file"),
    "ubj": (b"{L\0\0\0\0\0\0\0\x07learner{", "an XGBoost model"),
    "catboost": (b"CBM1" + bytes(100), 'a CatBoost model.*format="onnx"'),
    "empty": (b"", "an empty file.*get the whole file"),
    "numpy": (b"\x93NUMPY\x01\0" + bytes(100), "an array of NumPy.*as an input"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "an image.*as an input"),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(100), "an image"),
    "gzip": (gzip.compress(bytes(100)), "a compressed file or an archive.*unpack it"),
    "bzip2": (bz2.compress(bytes(100)), "a compressed file or an archive"),
    "xz": (lzma.compress(bytes(100)), "a compressed file or an archive"),
    "tar": (tarfile.TarInfo("model.onnx").tobuf(), "a compressed file or an archive"),
    "bytecode": (b"ML\xefR\x01StableHLO", "an MLIR module"),
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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90405214\n"
TEXTS = {
    "lfs": (POINTER, "a Git LFS pointer.*git lfs pull"),
    "html": ("\n<!DOCTYPE html><html>Not found</html>", "a page in HTML.*/resolve/"),
    "html, capitals": ("<HTML><HEAD>", "a page in HTML"),
    "xhtml": ('<?xml version="1.0"?><html xmlns="">', "a page in HTML"),
    "error": ('<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code>', "a server's error in XML"),
    "xgboost": ('{"learner":{"attributes":{}', "an XGBoost model.*convert_xgboost"),
    "lightgbm": ("tree\nversion=v4\nnum_class=1\n", "a LightGBM model.*convert_lightgbm"),
    "lightgbm in JSON": ('{"name":"tree", "tree_info": []}', "a LightGBM model"),
    "tfjs": ('{"format": "graph-model", "modelTopology": {}}', "a TensorFlow.js model"),
    "hub": ('{\n  "architectures": ["BertModel"]}', "configuration of a model.*optimum-cli export"),
    "json": ('\ufeff{"a": 1}', "a file in JSON, beginning with '{\"a\": 1}'"),
    "mlir": ("module @jit_f attributes {} {\n}", "an MLIR module"),
    "mlir without a name": ("module {\n  func.func @main()", "an MLIR module"),
    "markdown": (
        "---\nlicense: mit\n---\n# \u00c4 model\n" + "\u00e9" * 300,
        "a text file, beginning with '---'",
    ),
}


@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".pb", ".bin", ""])
@pytest.mark.parametrize("name", TEXTS)
def test_text_in_place_of_a_model_is_named(tmp_path: Path, name: str, suffix: str) -> None:
    contents, reason = TEXTS[name]
    path = tmp_path / f"model{suffix}"
    path.write_text(contents, encoding="utf-8")
    for source in (path, path.read_bytes()):
        with pytest.raises(ps.InvalidModel, match=reason):
            ps.load(source)


@pytest.mark.parametrize("name", ["lfs", "html"])
@pytest.mark.parametrize("file", ["graph.pbtxt", "saved_model.pb", "folder/saved_model.pb"])
def test_text_in_place_of_a_graph_of_tensorflow_is_named(
    tmp_path: Path, name: str, file: str
) -> None:
    contents, reason = TEXTS[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(contents)
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(path.parent if path.parent != tmp_path else path)


def test_external_data_that_are_a_pointer_of_git_lfs_are_named(tmp_path: Path) -> None:
    w = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    model = model_from_text("g (float[1, 64] x) => (float[1, 64] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(w)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.onnx_data", size_threshold=0)
    ps.load(path)
    (tmp_path / "m.onnx_data").write_text(POINTER)
    with pytest.raises(
        ps.InvalidModel, match=r"'m.onnx_data': it is a Git LFS pointer.*git lfs pull"
    ):
        ps.load(path)


# Downloads that broke off.


@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", ["m.onnx", "large.onnx", "m.pb"])
def test_file_that_was_cut_short_says_what_it_lacks(tmp_path: Path, name: str, part: float) -> None:
    if name == "m.pb":
        data = (MODELS / "tf" / "model_mlp.pb").read_bytes()
    else:
        model = model_from_text("g (float[1, 64] x) => (float[1, 64] y) { y = MatMul(x, w) }")
        size = 64 if name == "m.onnx" else 8192
        w = np.ones((64, size), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
        data = model.SerializeToString()
    path = tmp_path / name
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ps.InvalidModel, match=r"was cut short.*: it has [\d,]+ bytes of at least"):
        ps.load(path)


def test_damage_inside_is_not_called_a_broken_download() -> None:
    data = model_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }").SerializeToString()
    at = data.index(b"Neg") - 1
    damaged = data[:at] + b"\x7f" + data[at + 1 :]
    with pytest.raises(ps.InvalidModel) as caught:
        ps.load(damaged)
    assert "cut short" not in str(caught.value)
    assert cut_short(data, range(30)) == ""
    assert "8 bytes of at least 12" in cut_short(b"\x08\x07\x3a\x08abcd", [1, 7])
    assert cut_short(b"\x08\x07\x3a\x08abcd", [1]) == ""


# What is no file.


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("https://example.org/model.onnx", "is a URL, and Penstock downloads nothing"),
        (Path("https://example.org/model.onnx"), "is a URL"),
        ("s3://bucket/model.onnx", "is a URL"),
        (
            "sentence-transformers/all-MiniLM-L6-v2",
            "export onnx --model sentence-transformers/all-",
        ),
        ("bert-base-uncased", "optimum-cli export onnx --model bert-base-uncased FOLDER"),
    ],
)
def test_path_that_is_an_address_says_what_to_do(path: str | Path, hint: str) -> None:
    with pytest.raises(ps.InvalidModel) as caught:
        ps.load(path)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["model.onnx", "models/model-v2.onnx", "a/b/c", "model"])
def test_missing_file_is_no_model_of_a_hub(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ps.InvalidModel, match=r"check the path$"):
        ps.load(name)


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (["config.json", "onnx/model.onnx"], "give the path of onnx/model.onnx"),
        (["a.tflite", "b.onnx"], "give the path of a.tflite or b.onnx"),
        (["model.safetensors"], "weights without a graph.*config.json.*optimum-cli export"),
        (["config.json", "pytorch_model.bin"], "weights without a graph.*optimum-cli export"),
        (["notes.txt"], "neither a SavedModel nor an nnpackage$"),
    ],
)
def test_folder_says_what_in_it_can_be_loaded(tmp_path: Path, files: list[str], hint: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(ps.InvalidModel, match=hint):
        ps.load(tmp_path)
