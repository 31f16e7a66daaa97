"""The interfaces of other runtimes, on top of Penstock's sessions.

``import penstock.compat.onnxruntime as ort`` is the one line that a program changes. A package that
cannot be changed, because it imports the other runtime itself, is served by ``install``::

    import penstock.compat

    penstock.compat.install("onnxruntime")
    import rapidocr  # imports onnxruntime, and gets Penstock
"""

from __future__ import annotations

import sys
from importlib import import_module

_MODULES = {
    "onnxruntime": (
        "onnxruntime",
        "onnxruntime.capi",
        "onnxruntime.capi.onnxruntime_pybind11_state",
        "onnxruntime.capi._pybind_state",
        "onnxruntime.capi.onnxruntime_inference_collection",
    ),
    "ai_edge_litert": ("ai_edge_litert", "ai_edge_litert.interpreter"),
}


def install(name: str) -> None:
    """Let ``import NAME`` give Penstock's implementation of that package in this process.

    Raises ``ValueError`` for another name, and ``RuntimeError`` if the real package is imported
    already: parts of a program would have the one, and parts the other.

    Args:
        name: "onnxruntime" or "ai_edge_litert".
    """
    if name not in _MODULES:
        raise ValueError(f"install({name!r}): there is {' and '.join(map(repr, _MODULES))}")
    modules = {module: import_module(f"penstock.compat.{module}") for module in _MODULES[name]}
    for module, own in modules.items():
        if sys.modules.get(module, own) is not own:
            raise RuntimeError(
                f"install({name!r}): {module} is imported already; call it before anything "
                "imports that package"
            )
    sys.modules.update(modules)
