"""From a file, bytes or a parsed model of any supported format to a verified ``Model``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.analysis.verify import verify
from penstock.errors import InvalidModel
from penstock.host import gc_pause
from penstock.ir.graph import Model, sort
from penstock.limits import DEFAULT_LIMITS, Limits


def load(source: str | Path | bytes | Any, *, limits: Limits | None = None) -> Model:
    """Load a model from a path, from bytes, or from an ``onnx.ModelProto``, and verify it.

    ONNX models, TensorFlow's GraphDefs (``.pb``, ``.pbtxt``) and folders of SavedModels are told
    apart by what they look like. Raises ``InvalidModel`` with everything that is wrong with it, and
    ``Unsupported`` with every operation that has no kernel.
    """
    limits = limits or DEFAULT_LIMITS
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.exists():
            raise InvalidModel(f"there is no file {str(path)!r}")
        source = path
    with gc_pause.paused():
        model = _read(source, limits)
        verify(model, limits)
        for graph in (*model.graphs.values(), *model.functions.values()):
            sort(graph)
    return model


# How messages begin: GraphDef with a node, a library or versions; ModelProto and SavedModel with a
# number, the version of the format.
_GRAPH_DEF = (b"\x0a", b"\x12", b"\x22")
_TEXT = (".pbtxt", ".prototxt")


def _read(source: Any, limits: Limits) -> Model:
    """The model as its front end reads it."""
    if isinstance(source, Path):
        if source.is_dir() or source.stem == "saved_model":
            from penstock.frontends.tensorflow import saved_model

            return saved_model.load(source if source.is_dir() else source.parent, limits)
        if _is_graph_def(source):
            from penstock.frontends.tensorflow import importer as graphdef

            return graphdef.load(source, limits)
    elif isinstance(source, bytes) and source.startswith(_GRAPH_DEF[0]):
        from penstock.frontends.tensorflow import importer as graphdef

        return graphdef.load(source, limits)
    from penstock.frontends.onnx import importer as onnx

    return onnx.load(source, limits)


def _is_graph_def(path: Path) -> bool:
    if path.suffix in _TEXT:
        return True
    if path.suffix != ".pb":
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) in (b"", *_GRAPH_DEF)
    except OSError:
        return False  # which the other front end says
