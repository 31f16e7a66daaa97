"""Where members are that a session has not: those that moved, and those of other runtimes."""

from __future__ import annotations

_MOVED = frozenset(
    [
        *("backends", "describe", "forecast", "forecast_on_cluster", "plan", "reasons", "report"),
        *("schedule", "stale"),
    ]
)

# What methods of ONNX Runtime's sessions are called here.
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
    if name == "latest":
        return "; it is session.inspect.executor"
    if name in _ELSEWHERE:
        return (
            f"; that is {_ELSEWHERE[name]} here, and penstock.compat.onnxruntime has ONNX "
            "Runtime's interface"
        )
    return ""
