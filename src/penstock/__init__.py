"""Penstock, a dataflow runtime for neural networks.

::

    import penstock as ps

    session = ps.compile("model.onnx")
    outputs = session.run({"x": x})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core import VERSION

if TYPE_CHECKING:
    from penstock.backends.torch.backend import TorchBackend as TorchBackend
    from penstock.cluster.cluster import Cluster
    from penstock.cluster.simulated import SimulatedCluster
    from penstock.compiler.options import ExpertOptions
    from penstock.core.errors import (
        Cancelled,
        DeadlineExceeded,
        DeadTensor,
        ExtensionError,
        InternalError,
        InvalidInput,
        InvalidModel,
        LimitExceeded,
        PenstockError,
        QueueFull,
        RunError,
        Unsupported,
        WorkerLost,
    )
    from penstock.core.limits import Limits
    from penstock.executors.control import CancelToken
    from penstock.frontends.load import load
    from penstock.observers.base import Observer
    from penstock.observers.nan_guard import NanGuard
    from penstock.observers.profile import Profile
    from penstock.observers.ranges import Ranges
    from penstock.observers.trace import Trace
    from penstock.peers.comparison import Comparison, compare
    from penstock.quantizing.quantize import Quantized, quantize
    from penstock.serving.ray_serve import ray_deployment
    from penstock.serving.replicas import Replicas
    from penstock.session.facts import Stats
    from penstock.session.session import Session, compile, open
    from penstock.session.stream import Signal, Stream
    from penstock.stepping.shared_loops import SharedLoops
    from penstock.stepping.stepper import Stepper, StepSequence


__version__ = VERSION

# Where public names live, but for those of penstock.core.errors. They are imported when first used:
# importing penstock costs a few milliseconds, reading an ONNX file imports its front end, and
# neither pays for the other.
_HOMES = {
    "CancelToken": "penstock.executors.control",
    "Cluster": "penstock.cluster.cluster",
    "ExpertOptions": "penstock.compiler.options",
    "Limits": "penstock.core.limits",
    "NanGuard": "penstock.observers.nan_guard",
    "Observer": "penstock.observers.base",
    "Profile": "penstock.observers.profile",
    "Ranges": "penstock.observers.ranges",
    "Replicas": "penstock.serving.replicas",
    **dict.fromkeys(("Session", "compile", "open"), "penstock.session.session"),
    **dict.fromkeys(("Comparison", "compare"), "penstock.peers.comparison"),
    **dict.fromkeys(("Quantized", "quantize"), "penstock.quantizing.quantize"),
    "Stats": "penstock.session.facts",
    **dict.fromkeys(("Signal", "Stream"), "penstock.session.stream"),
    "SharedLoops": "penstock.stepping.shared_loops",
    "SimulatedCluster": "penstock.cluster.simulated",
    "TorchBackend": "penstock.backends.torch.backend",
    **dict.fromkeys(("StepSequence", "Stepper"), "penstock.stepping.stepper"),
    "Trace": "penstock.observers.trace",
    "load": "penstock.frontends.load",
    "ray_deployment": "penstock.serving.ray_serve",
}

# TorchBackend is not among them: "from penstock import *" would need torch.
__all__ = [
    "CancelToken",
    "Cancelled",
    "Cluster",
    "Comparison",
    "DeadTensor",
    "DeadlineExceeded",
    "ExpertOptions",
    "ExtensionError",
    "InternalError",
    "InvalidInput",
    "InvalidModel",
    "LimitExceeded",
    "Limits",
    "NanGuard",
    "Observer",
    "PenstockError",
    "Profile",
    "Quantized",
    "QueueFull",
    "Ranges",
    "Replicas",
    "RunError",
    "Session",
    "SharedLoops",
    "Signal",
    "SimulatedCluster",
    "Stats",
    "StepSequence",
    "Stepper",
    "Stream",
    "Trace",
    "Unsupported",
    "WorkerLost",
    "compare",
    "compile",
    "load",
    "open",
    "quantize",
    "ray_deployment",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from penstock.host.gc_pause import paused

    if name not in __all__ and name not in _HOMES:
        hint = ""
        if name in ("InferenceSession", "SessionOptions"):
            hint = "; it is in penstock.compat.onnxruntime, and penstock.compile is Penstock's own"
        raise AttributeError(f"module 'penstock' has no attribute {name!r}{hint}")
    with paused():  # what modules define stays
        try:
            home = import_module(_HOMES.get(name, "penstock.core.errors"))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"penstock.{name} needs torch: pip install 'penstock-runtime[torch]'"
            ) from error
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOMES, "__version__"})
