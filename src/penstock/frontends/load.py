"""From a file, bytes or a parsed model of any supported format to a verified ``Model``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.analysis.verify import verify
from penstock.artifact import MAGIC
from penstock.core.checkpoints import cancelled_by
from penstock.core.errors import InvalidInput, InvalidModel, wrong_type
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import replace
from penstock.frontends.common.model_files import HEAD_BYTES, open_path
from penstock.host import gc_pause
from penstock.host.stop_condition import Cancellation, StopCondition
from penstock.ir.graph import Model

if TYPE_CHECKING:
    from pathlib import Path


def load(
    source: str | Path | bytes | Any,
    *,
    limits: Limits | None = None,
    map_weights: bool = False,
    signature: str | None = None,
    timeout: float | None = None,
    cancel: Cancellation | None = None,
) -> Model:
    """Load a model from a path, from bytes, or from an ``onnx.ModelProto``, and verify it.

    Reads ONNX models, TFLite and Circle files, nnpackages of these, TensorFlow's GraphDefs
    (``.pb``, ``.pbtxt``), folders of SavedModels, GGUF files, and folders of Hugging Face's models
    (``config.json`` and ``*.safetensors``); the format is recognized by the path and the first
    bytes. For the last two, the graph is built from the configuration and the weights. Raises
    ``InvalidModel`` with all faults of the model, or ``Unsupported`` with all operations that have
    no kernel; ``InvalidInput`` if there is no such signature, ``DeadlineExceeded`` or ``Cancelled``
    if it is stopped.

    Args:
        source: A path of a file or a folder, the bytes of a file, or an ``onnx.ModelProto``.
        limits: Bounds on what the model may ask for; by default ``Limits()``.
        map_weights: Map files of weights (ONNX's external data, the shards of a SavedModel, a
            TFLite or GGUF file itself, safetensors) into memory instead of reading them: see
            ``penstock.compile``.
        signature: The signature of a SavedModel or a TFLite file to use as the entry.
        timeout: Seconds after which loading ends with ``DeadlineExceeded``.
        cancel: A ``CancelToken`` that ends loading with ``Cancelled``.
    """
    limits = DEFAULT_LIMITS if limits is None else limits
    if not isinstance(limits, Limits):
        raise wrong_type("limits", limits, "a penstock.Limits")
    if signature is not None and not isinstance(signature, str):
        raise wrong_type("signature", signature, "a name")
    if isinstance(source, bytearray | memoryview):  # their owner may change them meanwhile
        source = bytes(source)
    if not isinstance(source, str | os.PathLike | bytes) and not _is_model_proto(source):
        more = " (of an open file its read())" if hasattr(source, "read") else ""
        raise wrong_type("source", source, f"a path, bytes{more} or an onnx.ModelProto")
    if isinstance(source, str | os.PathLike) and not os.path.exists(source):
        from penstock.frontends.common.other_formats import raise_missing

        raise_missing(os.fspath(source))
    stop = StopCondition(timeout, cancel, "loading the model")
    # A graph has no cycles to collect, but many objects.
    with cancelled_by(stop), gc_pause.paused():
        try:
            model = _read(source, limits, map_weights, signature)
        except OSError as error:
            raise InvalidModel(f"{str(source)!r} cannot be read: {error.strerror}") from error
        if model.path is not None:
            model.path = os.path.abspath(model.path)  # the process may change its directory
        if signature is not None:
            model = entered(model, signature)
        if model.artifact is not None:
            return model  # verified graph by graph, when one is needed
        check_and_sort(model, limits)
        if model.check_types is not None:
            model.check_types(model.graph, {})
    return model


def entered(model: Model, signature: str) -> Model:
    """Return the model with a signature as its entry. ``InvalidInput``: an unknown signature."""
    if signature in model.graphs:
        return replace(model, entry=signature)
    if signature in model.signatures:
        hint = "it was loaded without: give signature= to penstock.load"
    else:
        hint = f"it has {', '.join(map(repr, model.signatures)) or 'none'}"
    raise InvalidInput(f"the model has no signature {signature!r}; {hint}")


def check_and_sort(model: Model, limits: Limits = DEFAULT_LIMITS) -> None:
    """Verify a model, and sort the nodes of its graphs. Raises ``InvalidModel``."""
    for graph, nodes in verify(model, limits).items():
        graph.nodes[:] = nodes


def load_text(text: str, limits: Limits = DEFAULT_LIMITS) -> Model:
    """Read a model in text form, verified and sorted as ``load`` does. Raises ``InvalidModel``."""
    from penstock.analysis.schemas import check_schemas, nodes_of
    from penstock.textual.parser import parse_model

    model = parse_model(text)
    check_schemas(nodes_of(model))
    check_and_sort(model, limits)
    return model


# First bytes: a GraphDef begins with a node, a library or versions; ModelProto and SavedModel begin
# with a number, the version of the format.
_GRAPH_DEF = (b"\x0a", b"\x12", b"\x22")
_TEXT = (".pbtxt", ".prototxt")


def _read(source: Any, limits: Limits, map_weights: bool, signature: str | None) -> Model:
    """Return the model, read by the front end of its format."""
    is_path = isinstance(source, str | os.PathLike)
    is_folder = is_path and os.path.isdir(source)
    head = b"" if is_folder else _head(source)
    if head.startswith(MAGIC):
        from penstock.frontends.artifact.importer import load_artifact

        return load_artifact(source, limits, map_weights)
    source = os.fspath(source) if is_path else source
    if is_folder or head.startswith(_GGUF):
        model = _of_weights(source, limits, map_weights)
        if model is not None:
            return model
    return _imported(source, head, limits, map_weights, signature)


def _of_weights(source: str | bytes, limits: Limits, map_weights: bool) -> Model | None:
    """Return the model of a GGUF file or a folder of weights, or None for other sources."""
    if isinstance(source, bytes) or not os.path.isdir(source):
        from penstock.frontends.weights.gguf_model import load_gguf

        return load_gguf(source, limits, map_weights)
    from penstock.frontends.weights.folder import is_weights_folder, load_folder

    if not is_weights_folder(source):
        return None
    return load_folder(_path_or_bytes(source), limits, map_weights)


def _imported(
    source: Any, head: bytes, limits: Limits, map_weights: bool, signature: str | None
) -> Model:
    """Return a model that no session has saved. ``head``: its first bytes, b"" for a folder."""
    is_path = isinstance(source, str)
    if is_path and source.endswith(".onnx") and _begins_as_onnx(head):
        from penstock.frontends.onnx.importer import load_onnx

        return load_onnx(source, limits, map_weights)
    # Imported here: ONNX files and saved sessions, which open in milliseconds, do not need these.
    from penstock.frontends.common.other_formats import (
        last_part,
        refuse_by_contents,
        refuse_by_name,
        refuse_zip,
    )

    is_folder = is_path and os.path.isdir(source)
    if is_folder or head.startswith(b"PK"):
        from penstock.frontends.nnpackage.package import is_package, load_package

        package = _path_or_bytes(source)
        if is_package(package):
            from penstock.analysis.type_constraints import check_types

            model = load_package(package, limits, map_weights)
            model.check_types = check_types
            return model
    stem, suffix = os.path.splitext(last_part(source)) if is_path else (None, None)
    if is_folder or stem == "saved_model":
        if is_folder:
            refuse_by_name(source)
        from penstock.frontends.tensorflow.saved_model import load_saved_model

        path = _path_or_bytes(source)
        folder = path if is_folder else path.parent
        return load_saved_model(folder, limits, map_weights, signature)
    if is_path:
        refuse_by_name(source)
    if isinstance(source, str | bytes) and head[4:8] not in _TFLITE:
        refuse_by_contents(source, head, text=suffix in _TEXT)
        refuse_zip(source, head)
    graph_def = suffix in _TEXT
    if suffix == ".pb":
        graph_def = head[:1] in (b"", *_GRAPH_DEF)
    elif suffix is None:
        graph_def = head.startswith(_GRAPH_DEF[0])
    if graph_def:
        from penstock.frontends.tensorflow.importer import load_graph_def

        return load_graph_def(_path_or_bytes(source), limits)
    if head[4:8] in _TFLITE or (suffix or "").lower() in _TFLITE_SUFFIXES:
        from penstock.analysis.type_constraints import check_types
        from penstock.frontends.tflite.importer import load_tflite

        model = load_tflite(source, limits, map_weights, signature)
        model.check_types = check_types  # for the ONNX operations to which operators were converted
        return model
    from penstock.frontends.onnx.importer import load_onnx

    return load_onnx(source, limits, map_weights)


def _begins_as_onnx(head: bytes) -> bool:
    """Whether a file begins as a ModelProto: with its version, which is small, and another field.
    Files of FlatBuffers begin with an offset, whose third byte is 0."""
    return head[:1] == b"\x08" and len(head) > 2 and 0 < head[1] < 32 and head[2] != 0


def _is_model_proto(source: object) -> bool:
    """Whether it is an ``onnx.ModelProto``, a class of a package that may not be installed."""
    return getattr(getattr(source, "DESCRIPTOR", None), "name", None) == "ModelProto"


def is_artifact(path: str | Path) -> bool:
    """Whether a file begins as a saved session does."""
    return _head(path).startswith(MAGIC)


def _head(source: object) -> bytes:
    """Return the first bytes of a file, or b"" for a parsed model."""
    if isinstance(source, bytes):
        return source[:HEAD_BYTES]
    if not isinstance(source, str | os.PathLike):
        return b""
    with open_path(os.fspath(source)) as file:
        return file.read(HEAD_BYTES)


_GGUF = b"GGUF"
_TFLITE = (b"TFL3", b"CIR0")  # after four bytes
_TFLITE_SUFFIXES = (".tflite", ".circle", ".lite")


def _path_or_bytes(source: Any) -> Any:
    """Return a path as a ``Path``, whose module ONNX and TFLite files do not need, or the bytes."""
    from pathlib import Path

    return Path(source) if isinstance(source, str) else source
