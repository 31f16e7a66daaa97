"""Sessions of ONNX Runtime whose answers do not depend on the instructions of the processor."""

from __future__ import annotations

from pathlib import Path

import onnxruntime


def exact_session(
    model: bytes | Path, options: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """Session with sums of products of codes that do not saturate: on x86-64 without VNNI, ONNX Runtime
    adds up pairs of them as int16 otherwise."""
    options = options or onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
