"""From a file, bytes or a parsed model of any supported format to a verified ``Model``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock import garbage
from penstock.errors import InvalidModel
from penstock.ir import Model, sort
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.verify import verify


def load(source: str | Path | bytes | Any, *, limits: Limits | None = None) -> Model:
    """Load a model from a path, from bytes, or from an ``onnx.ModelProto``, and verify it.

    Raises ``InvalidModel`` with everything that is wrong with it, and ``Unsupported`` with every
    operation that has no kernel.
    """
    limits = limits or DEFAULT_LIMITS
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.exists():
            raise InvalidModel(f"there is no file {str(path)!r}")
        source = path
    from penstock.frontends import onnx

    with garbage.paused():
        model = onnx.load(source, limits)
        verify(model, limits)
        for graph in model.graphs.values():
            sort(graph)
    return model
