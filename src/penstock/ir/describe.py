"""Descriptions of nodes and numbers of bytes for messages."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import (
    MAX_SENTENCE,
    ExtensionError,
    InternalError,
    InvalidModel,
    LimitExceeded,
    PenstockError,
    shortened,
)
from penstock.core.types import ShapeError
from penstock.ir.contract import Named, is_own
from penstock.ir.graph import Node

# Domains whose schemas report missing attributes before an operation reads them.
_WITH_SCHEMAS = ("", "ai.onnx.ml")


def describe_node(node: Node, inputs: Sequence[str] | None = None) -> str:
    """Return operation, origin and inputs of ``node`` for an error message. ``inputs`` are the
    actual inputs ("x: float32[2]"), by default with the types that they have in the
    graph."""
    if inputs is None:
        inputs = ["none" if v is None else f"{shortened(v.name)}: {v.type}" for v in node.inputs]
    place = f"{node.op.name} ({shortened(node.label, MAX_SENTENCE)})"
    return f"{place} with inputs ({shortened(', '.join(inputs), MAX_SENTENCE)})"


def compile_error(node: Node, error: Exception, backend: Named | None = None) -> PenstockError:
    """Return the exception to raise for one out of an operation's own code, before any run.
    Operations raise ``ShapeError`` for faults of a model. Penstock's own errors stay as they are.
    Anything else except a lack of memory is a bug in the operation, or in the kernel of the
    ``backend``."""
    if isinstance(error, PenstockError):
        return error
    place = describe_node(node)
    if isinstance(error, ShapeError):
        return InvalidModel(f"{place}: {error}")
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(key, str) and key not in node.attrs and node.op.domain not in _WITH_SCHEMAS:
        return InvalidModel(f"{place} needs the attribute {key!r}")
    if isinstance(error, MemoryError):
        return LimitExceeded(f"{place}: there is not enough memory to compile it. {error}")
    failed = f"{place}: compiling it failed with {error!r}"
    if not is_own(node.op.compile):
        remedy = "Correct the function that was registered as this operation, or its infer"
        return ExtensionError(f"{failed}. {remedy}")
    if backend is not None and not is_own(backend.__class__):
        return ExtensionError(f"{failed}. Correct its kernel on the backend {backend.name}")
    return InternalError(f"{failed}. Please report it")


def format_bytes(n: float) -> str:
    """Return the bytes in the largest binary unit that keeps the number above 1."""
    if n < 1024:
        return f"{n:.0f} B"
    power = min((int(n).bit_length() - 1) // 10, 3)
    return f"{n / 1024**power:.2f} {'BKMG'[power]}iB"
