"""A node of an older operator version, rewritten as nodes of the current versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from penstock.analysis.schemas import OnnxSchema, find_schema, newest_opset
from penstock.core.errors import InternalError
from penstock.frontends.common.builder import NodeBuilder, Operand, short_name
from penstock.frontends.common.diagnostics import NodeError
from penstock.frontends.onnx.messages import GraphProto
from penstock.frontends.onnx.schema_protos import defaults
from penstock.ir.graph import Graph, Value
from penstock.ir.op import Attrs
from penstock.ops import Op, find

NCHWC = "com.microsoft.nchwc"
"""the domain of ONNX Runtime's operations in a layout of its own"""


@cache
def current(name: str) -> tuple[Op, OnnxSchema]:
    """Return the newest version of an operation of ONNX's own domain, and its schema."""
    schema = find_schema(name, "", newest_opset(""))
    if schema is None:
        raise InternalError(f"ONNX has no operation {name}")
    op = find(name)
    if op is None:
        raise InternalError(f"no kernel is available for {schema}")
    return op, schema


class NodeUpgrade(NodeBuilder):
    """A node of operation ``op`` in schema version ``version``. Emitted nodes have the current
    versions, with the defaults of these for attributes that are not given."""

    op: str
    version: int
    contents: Callable[[Graph], GraphProto]
    """returns the file's graph for a graph attribute, which is filled later"""
    when_imported: Callable[[Callable[[], None]], None]
    """registers a function to call when all graphs are filled, the last registered first"""

    def input(self, index: int) -> Value:
        """Return an input that the old version requires."""
        value = self.optional(index)
        if value is None:
            raise NodeError(f"lacks input {index}, which {self.op} requires; give it one")
        return value

    def optional(self, index: int) -> Value | None:
        """Return an input that may be left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def become(
        self,
        op: str,
        inputs: Sequence[Operand],
        attrs: Attrs | None = None,
        outputs: Sequence[Value | None] | None = None,
    ) -> None:
        """Emit the final node, with those of ``attrs`` that the current version has."""
        self.emit_final(op, inputs, self.kept(op, attrs or {}), outputs=outputs)

    def give(
        self,
        outputs: Sequence[Value | None],
        op: str,
        inputs: Sequence[Operand],
        attrs: Attrs | None = None,
    ) -> None:
        """Emit a node, before the final one, that has these outputs."""
        self.append(op, "", inputs, outputs, attrs, f"{short_name(self.name)}/{op}")

    def kept(self, op: str, attrs: Attrs) -> Attrs:
        """Return the entries of ``attrs`` that the current version of ``op`` has."""
        allowed = current(op)[1].attributes
        return {key: value for key, value in attrs.items() if key in allowed}

    def operation(self, op: str, domain: str) -> tuple[Op, Attrs]:
        if domain:
            return super().operation(op, domain)
        operation, schema = current(op)
        return operation, defaults(schema)
