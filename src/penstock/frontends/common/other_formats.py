"""Recognize files of other formats by names or first bytes, and say what to do with them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NoReturn

from penstock.core.errors import InvalidModel, shortened
from penstock.frontends.common.encoding import read_varint
from penstock.frontends.common.model_files import open_path

_EXPORT = "export it to ONNX, TFLite or a SavedModel"
_TORCH = "a PyTorch file", "export the model with torch.onnx.export"
_CHECKPOINT = "part of a TensorFlow checkpoint", "export the model to a SavedModel"
_KERAS = "a Keras file", "export it to a SavedModel or to TFLite"
_PICKLE = "a pickled object", "convert it with skl2onnx, or torch.onnx.export"
_LLAMA = "a llama.cpp file of a format before GGUF", "convert the model again with llama.cpp"
_DAMAGED_GGUF = "no GGUF file, since it does not begin as one", "get the whole file anew"
_OPENVINO = "an OpenVINO model", "load the model that it was converted from, or " + _EXPORT
_ORT = "in ONNX Runtime's own format", "load the ONNX model that it was made from"
_ZIP = "a zip file without metadata/MANIFEST", "give the path of the model in it"
_CUT_ZIP = "a zip file that was cut short or damaged", "get the whole file"
_XGBOOST = "an XGBoost model", "convert it with onnxmltools.convert_xgboost"
_LIGHTGBM = "a LightGBM model", "convert it with onnxmltools.convert_lightgbm"
_CATBOOST = "a CatBoost model", 'save it with save_model(path, format="onnx")'
_MLIR = (
    "an MLIR module (StableHLO or another dialect)",
    "export what it was made from to ONNX, TFLite or a SavedModel (of JAX, with jax2tf)",
)
_TFJS = "a TensorFlow.js model", "load the SavedModel that it was converted from"
_HUB = (
    "the configuration of a model of the Hugging Face hub, not the model",
    "give the path of its folder, if that has weights in files of safetensors; or export the model "
    "with optimum-cli export onnx, and give the path of its model.onnx",
)
_WITHOUT_GRAPH = (
    "with a config.json and weights in files of safetensors it could be loaded; else export the "
    "model with optimum-cli export onnx, and give the path of its model.onnx"
)
_LFS = "a Git LFS pointer, not the file itself", "get that with git lfs pull"
_HTML = (
    "a page in HTML, as servers send in place of a file",
    "download the file itself; its address has /resolve/ on the Hugging Face hub, and /raw/ on "
    "GitHub, where that of the page has /blob/",
)
_ERROR_PAGE = "a server's error in XML, not the file", "see what it says, and download the file"
_TEXT = "a text file", "give the path of the model itself"
_EMPTY = "an empty file", "get the whole file, or export the model again"
_ARRAY = "an array of NumPy", "give the path of a model, and the array as an input of its run"
_IMAGE = "an image", "give the path of a model, and the image as an input of its run"
_PACKED = "a compressed file or an archive", "unpack it, and give the path of the model in it"

_SUFFIXES = {
    **dict.fromkeys((".h5", ".hdf5", ".keras"), _KERAS),
    **dict.fromkeys((".pt", ".pth", ".pt2"), _TORCH),
    **dict.fromkeys((".pkl", ".joblib"), _PICKLE),
    **dict.fromkeys((".mlmodel", ".mlpackage"), ("a Core ML model", _EXPORT)),
    **dict.fromkeys((".engine", ".plan"), ("a TensorRT engine", "load what it was built from")),
    ".ggml": _LLAMA,
    ".gguf": _DAMAGED_GGUF,
    **dict.fromkeys((".mlir", ".mlirbc", ".stablehlo"), _MLIR),
    ".caffemodel": ("a Caffe model", _EXPORT),
    ".pdmodel": ("a PaddlePaddle model", "convert it with paddle2onnx"),
    ".ckpt": ("a checkpoint of PyTorch or TensorFlow", "export the model to ONNX or a SavedModel"),
    ".safetensors": (
        "a file of weights without a graph",
        "give the path of its folder, if that has the model's config.json; or export the model to "
        "ONNX",
    ),
    ".xml": _OPENVINO,
    **dict.fromkeys((".index", ".meta", ".data"), _CHECKPOINT),
    ".ort": _ORT,
    ".ubj": _XGBOOST,
    ".cbm": _CATBOOST,
}
_MEMBERS = (("data.pkl", _TORCH), (".weights.h5", _KERAS))
"""files that identify the format of a zip file"""
_HEADS = (
    (0, b"\x89HDF", _KERAS),
    (0, b"\x93NUMPY", _ARRAY),
    *((0, start, _IMAGE) for start in (b"\x89PNG\r\n", b"\xff\xd8\xff")),
    *((0, start, _PACKED) for start in (b"\x1f\x8b", b"7z\xbc\xaf\x27\x1c", b"\xfd7zXZ\0")),
    (0, b"\x28\xb5\x2f\xfd", _PACKED),  # Zstandard
    (4, b"1AY&SY", _PACKED),  # bzip2
    (257, b"ustar", _PACKED),  # tar
    *((0, start, _LLAMA) for start in (b"lmgg", b"fmgg", b"tjgg")),
    # The opcode with which pickles begin from protocol 2 on.
    (0, b"\x80", _PICKLE),
    (4, b"ORTM", _ORT),
    (0, b"ML\xefR", _MLIR),
    (0, b"CBM1", _CATBOOST),
    # UBJSON: an object, whose first key is preceded by its length as an int64.
    (0, b"{L\0\0\0\0\0\0\0\x07learner", _XGBOOST),
    (0, b"{L\0\0\0\0\0\0\0\x06Config", _XGBOOST),
)
# First words of texts, in small letters; the first match is used. With a second text, both must be
# among the first bytes.
_TEXTS = (
    ("version https://git-lfs", "", _LFS),
    ("<?xml", "<error", _ERROR_PAGE),
    ("<?xml", "<html", _HTML),
    ("<?xml", "", _OPENVINO),
    ("<!doctype html", "", _HTML),
    ("<html", "", _HTML),
    ("{", '"learner"', _XGBOOST),
    ("{", '"tree_info"', _LIGHTGBM),
    ("{", '"modeltopology"', _TFJS),
    ("{", '"architectures"', _HUB),
    ("{", '"model_type"', _HUB),
    ("tree\n", "", _LIGHTGBM),
    ("module", "{", _MLIR),
    ("module", "@", _MLIR),
    ("#loc", "", _MLIR),
    ('"builtin.module"', "", _MLIR),
)
LFS_POINTER = f"it is {_LFS[0]}: {_LFS[1]}"
_MODELS = (".onnx", ".tflite", ".circle", ".pb", ".pbtxt", ".nnpackage")
_MOST_FIELDS = 100_000


def raise_missing(path: str) -> NoReturn:
    """Raise ``InvalidModel`` for a path at which there is nothing."""
    scheme, colon, _ = path.partition(":/")  # Path has replaced "://" by ":/"
    if colon and len(scheme) > 1 and scheme.replace("+", "").isalnum():
        raise InvalidModel(
            f"{path!r} is a URL, and Penstock downloads nothing: download it, and give the path of "
            "the file"
        )
    hint = ""
    owner, _, name = path.partition("/")
    stem, suffix = os.path.splitext(name or owner)
    is_id = bool(name) and "/" not in name and not os.path.exists(owner)
    if suffix.lower() not in (*_MODELS, *_SUFFIXES, ".penstock", ".zip") and (
        is_id or (not name and "-" in stem)
    ):
        hint = (
            f"; a model of the Hugging Face hub is not downloaded: hf download {path} --local-dir "
            "FOLDER fetches its weights, of which penstock.load(FOLDER) makes the graph of common "
            f"language models; optimum-cli export onnx --model {path} FOLDER writes others as "
            "FOLDER/model.onnx"
        )
    raise InvalidModel(f"there is no file {path!r}; check the path{hint}")


def refuse_by_name(path: str) -> None:
    """Raise ``InvalidModel`` for a file whose name shows that it has an unsupported format."""
    suffix = os.path.splitext(last_part(path))[1].lower()
    suffix = suffix.partition("-")[0]  # of .data-00000-of-00001
    if suffix in _SUFFIXES:
        _refuse(path, *_SUFFIXES[suffix])


def refuse_by_contents(source: str | bytes, head: bytes, *, text: bool = False) -> None:
    """Raise ``InvalidModel`` for an empty file, and for one whose beginning, ``head``, is not that
    of a model; with ``text``, not that of a model in text form."""
    if not head:
        _refuse(source, *_EMPTY)
    for at, start, form in _HEADS:
        if head[at:].startswith(start):
            _refuse(source, *form)
    if not _is_text(head):
        return
    beginning = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    small = beginning.lower()
    for start_of_text, inside, form in _TEXTS:
        if small.startswith(start_of_text) and inside in small:
            _refuse(source, *form)
    if text or not beginning:
        return
    first = shortened(beginning.splitlines()[0], 60)
    kind = "a file in JSON" if first[0] in "{[" else _TEXT[0]
    _refuse(source, f"{kind}, beginning with {first!r}", _TEXT[1])


def refuse_zip(source: str | bytes, head: bytes) -> None:
    """Raise ``InvalidModel`` if the file is a zip file; packages were recognized before."""
    if not head.startswith(b"PK\3\4"):
        return
    import zipfile
    from io import BytesIO

    members: list[str] = []
    form = _ZIP
    try:
        file = BytesIO(source) if isinstance(source, bytes) else open_path(source)
        with file, zipfile.ZipFile(file) as archive:
            members = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        form = _CUT_ZIP
    forms = [f for end, f in _MEMBERS if any(name.endswith(end) for name in members)]
    _refuse(source, *[*forms, form][0])


def no_model_folder(folder: str) -> InvalidModel:
    """Return the error for a folder that is neither a SavedModel nor a package. It names the models
    in the folder."""
    files = [*_entries(folder), *(f"onnx/{x}" for x in _entries(os.path.join(folder, "onnx")))]
    models = sorted(name for name in files if os.path.splitext(name)[1] in _MODELS)
    advice = ""
    if models:
        advice = f"; to load one of its files, give the path of {' or '.join(models[:3])}"
    elif any(name.endswith((".safetensors", "pytorch_model.bin")) for name in files):
        advice = "; it has weights without a graph: " + _WITHOUT_GRAPH
    return InvalidModel(
        f"there is no saved_model.pb in {folder!r}, nor metadata/MANIFEST: it is neither a "
        f"SavedModel nor an nnpackage{advice}"
    )


def cut_short(data: bytes, numbers: Collection[int]) -> str:
    """Return a clause that says where a protobuf message with fields of these ``numbers`` was cut
    short, or "" if it has another fault."""
    at = 0
    with suppress(ValueError):
        for _ in range(_MOST_FIELDS):
            if at == len(data):
                return ""
            tag, at = read_varint(data, at)
            if tag >> 3 not in numbers or tag & 7 not in (0, 2):
                return ""
            length, at = read_varint(data, at)
            at += length if tag & 7 == 2 else 0
            if at > len(data):
                return (
                    f"it was cut short, as by a download that broke off: it has {len(data):,} "
                    f"bytes of at least {at:,}; get the whole file"
                )
    return ""


def _entries(folder: str) -> Iterator[str]:
    with suppress(OSError):
        yield from os.listdir(folder)


def _is_text(head: bytes) -> bool:
    """Whether bytes are text in UTF-8, except for a last character that may be cut."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return False
        text = head[: error.start].decode()
    return all(character >= " " or character in "\t\n\r\f" for character in text)


def last_part(path: str) -> str:
    """Return the last part of a path."""
    return os.path.basename(path.rstrip(os.sep))


def _refuse(source: str | bytes, form: str, advice: str) -> NoReturn:
    name = "the model" if isinstance(source, bytes) else last_part(source)
    raise InvalidModel(f"{name} is {form}, which cannot be loaded: {advice}")
