"""Penstock, a dataflow runtime for neural networks.

::

    import penstock as ps

    session = ps.compile("model.onnx")
    outputs = session.run({"x": x})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.errors import (
        Cancelled,
        DeadlineExceeded,
        DeadTensor,
        InternalError,
        InvalidInput,
        InvalidModel,
        LimitExceeded,
        PenstockError,
        RunError,
        Unsupported,
    )
    from penstock.executors.base import CancelToken
    from penstock.limits import Limits
    from penstock.loading import load
    from penstock.observe import Observer
    from penstock.profile import Profile
    from penstock.session import Session, compile
    from penstock.stream import Signal, Stream
    from penstock.trace import Trace
    from penstock.watch import NanGuard, Ranges

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used: importing penstock costs a few
# milliseconds, reading an ONNX file imports the onnx package, and neither pays for the other.
_HOMES = {
    "CancelToken": "penstock.executors.base",
    "Cancelled": "penstock.errors",
    "DeadTensor": "penstock.errors",
    "DeadlineExceeded": "penstock.errors",
    "InternalError": "penstock.errors",
    "InvalidInput": "penstock.errors",
    "InvalidModel": "penstock.errors",
    "LimitExceeded": "penstock.errors",
    "Limits": "penstock.limits",
    "NanGuard": "penstock.watch",
    "Observer": "penstock.observe",
    "PenstockError": "penstock.errors",
    "Profile": "penstock.profile",
    "Ranges": "penstock.watch",
    "RunError": "penstock.errors",
    "Session": "penstock.session",
    "Signal": "penstock.stream",
    "Stream": "penstock.stream",
    "Trace": "penstock.trace",
    "Unsupported": "penstock.errors",
    "compile": "penstock.session",
    "load": "penstock.loading",
}

__all__ = [
    "CancelToken",
    "Cancelled",
    "DeadTensor",
    "DeadlineExceeded",
    "InternalError",
    "InvalidInput",
    "InvalidModel",
    "LimitExceeded",
    "Limits",
    "NanGuard",
    "Observer",
    "PenstockError",
    "Profile",
    "Ranges",
    "RunError",
    "Session",
    "Signal",
    "Stream",
    "Trace",
    "Unsupported",
    "compile",
    "load",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
