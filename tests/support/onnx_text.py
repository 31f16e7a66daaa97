"""ONNX models for tests, from ONNX's textual form without its header.

model_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import parser

import penstock as ps
from penstock.ir.graph import Graph
from tests.support.expert import with_expert

OPSET = 20
"""The version of ONNX's operations, for tests to which it makes no difference."""

_IR_VERSION = 10


def model_from_text(
    text: str, *, opset: int = OPSET, domains: Mapping[str, int] | None = None
) -> onnx.ModelProto:
    """Return the model whose graph is ``text``; ``domains`` are the versions of further domains."""
    versions = {"": opset, **(domains or {})}
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in versions.items())
    return parser.parse_model(f"<ir_version: {_IR_VERSION}, opset_import: [{imports}]>\n{text}")


def graph_from_text(text: str, *, opset: int = OPSET) -> Graph:
    """Return the graph that Penstock loads from ``text``."""
    return ps.load(model_from_text(text, opset=opset)).graph


def compile_text(
    text: str, *, opset: int = OPSET, domains: Mapping[str, int] | None = None, **options: Any
) -> ps.Session:
    """Compile the graph ``text`` with the options of ``penstock.compile``, the expert ones by their
    own names."""
    model = model_from_text(text, opset=opset, domains=domains)
    return ps.compile(model, **with_expert(options))
