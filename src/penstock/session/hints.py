"""Hints for attributes that a session lacks: members that moved, and those of other runtimes."""

from __future__ import annotations

_MOVED = frozenset(
    [
        *("backends", "describe", "forecast", "forecast_on_cluster", "plan", "reasons", "report"),
        *("schedule", "stale"),
    ]
)
_RENAMED = {"granted": "session.effective", "latest": "session.inspect.executor"}

# The names here of methods of ONNX Runtime's sessions.
_ELSEWHERE = {
    "get_inputs": "session.inputs",
    "get_outputs": "session.outputs",
    "get_modelmeta": "session.model.metadata and session.model.about",
    "get_providers": "session.effective.backends",
    "io_binding": "session.run(feeds, out=...)",
    "run_with_iobinding": "session.run(feeds, out=...)",
    "end_profiling": "session.run(feeds, trace=penstock.Trace())",
}


def hint_for(name: str) -> str:
    """The end of the message that a session has no attribute ``name``."""
    if name in _MOVED:
        return f"; it is session.inspect.{name}"
    if name in _RENAMED:
        return f"; it is {_RENAMED[name]}"
    if name in _ELSEWHERE:
        return (
            f"; that is {_ELSEWHERE[name]} here, and penstock.compat.onnxruntime has ONNX "
            "Runtime's interface"
        )
    return ""
