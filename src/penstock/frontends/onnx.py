"""ONNX models to graphs.

Names become ``Value`` objects once and for all here: a nested graph that takes a value from outside
refers to the very object. Every attribute is filled in with the default of the node's own schema
version, so that operations never ask which version they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from penstock.errors import InvalidModel, Unsupported, UnsupportedOperation
from penstock.ir import Graph, Model, Node, Value
from penstock.ops import Op, find
from penstock.ops.reference import reference_op
from penstock.types import (
    ANY,
    STRING,
    AnyType,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
)


def load(source: str | Path | bytes | onnx.ModelProto) -> Model:
    """Read an ONNX model from a path, from bytes or from a ``ModelProto``."""
    if isinstance(source, onnx.ModelProto):
        return _Importer(source, None).model()
    path = None if isinstance(source, bytes) else Path(source)
    proto = onnx.ModelProto()
    proto.ParseFromString(source if isinstance(source, bytes) else Path(source).read_bytes())
    return _Importer(proto, path).model()


@cache
def _schema(name: str, domain: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None


@cache
def _defaults(name: str, domain: str, version: int) -> Mapping[str, Any]:
    schema = _schema(name, domain, version)
    if schema is None:
        return {}
    found = {}
    for attribute in schema.attributes.values():
        if attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            if isinstance(value, bytes):
                value = value.decode()
            elif attribute.default_value.type == onnx.AttributeProto.STRINGS:
                value = [text.decode() for text in value]
            found[attribute.name] = value
    return found


class _Importer:
    def __init__(self, proto: onnx.ModelProto, path: Path | None) -> None:
        self.proto = proto
        self.path = path
        self.opsets = {_domain(entry.domain): entry.version for entry in proto.opset_import}
        self.unsupported: dict[tuple[str, str], list[str]] = {}
        self.where = path.name if path is not None else "the model"

    def model(self) -> Model:
        graph = self.graph(self.proto.graph, {})
        if self.unsupported:
            raise Unsupported(
                [
                    UnsupportedOperation(name, reason, tuple(nodes))
                    for (name, reason), nodes in self.unsupported.items()
                ]
            )
        metadata = {entry.key: entry.value for entry in self.proto.metadata_props}
        path = None if self.path is None else str(self.path)
        return Model({graph.name: graph}, graph.name, {}, metadata, path)

    def graph(self, proto: onnx.GraphProto, outer: Mapping[str, Value]) -> Graph:
        scope = dict(outer)
        for tensor in proto.initializer:
            scope[tensor.name] = Value(tensor.name, const=numpy_helper.to_array(tensor))
        inputs = []
        for info in proto.input:
            if any(info.name == tensor.name for tensor in proto.initializer):
                continue
            value = Value(info.name, value_type(info.type))
            scope[info.name] = value
            inputs.append(value)
        made: list[tuple[onnx.NodeProto, list[Value | None]]] = []
        for node in proto.node:
            outputs = [Value(name) if name else None for name in node.output]
            made.append((node, outputs))
            scope.update((v.name, v) for v in outputs if v is not None)
        nodes = []
        for index, (node, outputs) in enumerate(made):
            converted = self.node(node, outputs, scope, index)
            if converted is not None:
                nodes.append(converted)
        return Graph(inputs, [scope[info.name] for info in proto.output], nodes, proto.name)

    def node(
        self,
        proto: onnx.NodeProto,
        outputs: Sequence[Value | None],
        scope: Mapping[str, Value],
        index: int,
    ) -> Node | None:
        domain = _domain(proto.domain)
        name = proto.name or f"{proto.op_type}_{index}"
        origin = f"{name} in {self.where}"
        attrs = dict(_defaults(proto.op_type, domain, self.opsets.get(domain, 1)))
        attrs.update((a.name, self.attribute(a, scope)) for a in proto.attribute)
        op = self.resolve(proto, domain)
        if op is None:
            full = f"{domain}.{proto.op_type}" if domain else proto.op_type
            self.unsupported.setdefault((full, "no kernel"), []).append(origin)
            return None
        inputs = [scope[i] if i else None for i in proto.input]
        return Node(op, inputs, outputs, attrs, name=name, origin=origin)

    def resolve(self, proto: onnx.NodeProto, domain: str) -> Op | None:
        schema = _schema(proto.op_type, domain, self.opsets.get(domain, 1))
        version = schema.since_version if schema is not None else 1
        op = find(proto.op_type, domain, version)
        if op is None and schema is not None:
            return reference_op(proto.op_type, domain, version)
        return op

    def attribute(self, proto: onnx.AttributeProto, scope: Mapping[str, Value]) -> Any:
        kind = proto.type
        if kind == onnx.AttributeProto.GRAPH:
            return self.graph(proto.g, scope)
        if kind == onnx.AttributeProto.TENSOR:
            return numpy_helper.to_array(proto.t)
        if kind == onnx.AttributeProto.STRING:
            return proto.s.decode("utf-8", "surrogateescape")
        if kind == onnx.AttributeProto.STRINGS:
            return [s.decode("utf-8", "surrogateescape") for s in proto.strings]
        if kind == onnx.AttributeProto.TYPE_PROTO:
            return value_type(proto.tp)
        value = onnx.helper.get_attribute_value(proto)
        return list(value) if kind in _LISTS else value


_LISTS = (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def element_dtype(code: int) -> np.dtype:
    """The NumPy dtype of a ``TensorProto.DataType``; int4 and its like are those of ml_dtypes."""
    if code == onnx.TensorProto.STRING:
        return STRING
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
    except KeyError:
        raise InvalidModel(f"unknown tensor element type {code}") from None


def value_type(proto: onnx.TypeProto) -> Type:
    """The type that a ``TypeProto`` declares."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        tensor = proto.tensor_type
        dtype = element_dtype(tensor.elem_type) if tensor.elem_type else None
        if not tensor.HasField("shape"):
            return TensorType(dtype, None)
        return TensorType(dtype, tuple(_dim(d) for d in tensor.shape.dim))
    if kind == "sequence_type":
        return SequenceType(value_type(proto.sequence_type.elem_type))
    if kind == "optional_type":
        return OptionalType(value_type(proto.optional_type.elem_type))
    if kind == "map_type":
        key = element_dtype(proto.map_type.key_type)
        return MapType(key, value_type(proto.map_type.value_type))
    return ANY


def _dim(proto: onnx.TensorShapeProto.Dimension) -> Dim:
    kind = proto.WhichOneof("value")
    if kind == "dim_value":
        return int(proto.dim_value)
    return proto.dim_param or None if kind == "dim_param" else None


_ = AnyType
