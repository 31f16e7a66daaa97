"""Write a model as the bytes of an ONNX file: the inverse of ``importer``.

Nodes are written in the lowest opset, from that of blockwise quantization on, in which each
operation has its meaning here. Operations that ONNX does not have are refused, all at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.analysis.schemas import (
    DTYPE_NAMES,
    AttributeKind,
    OnnxSchema,
    find_schema,
    newest_opset,
)
from penstock.analysis.type_inference import infer_types
from penstock.core.errors import Unsupported
from penstock.core.records import dataclass
from penstock.core.types import (
    STRING,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtype_name,
)
from penstock.frontends.onnx.file import MAX_MESSAGE
from penstock.frontends.onnx.messages import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
)
from penstock.frontends.onnx.schema_protos import defaults
from penstock.frontends.onnx.tensors import PACKED_BITS
from penstock.ir.graph import Graph, Model, Node, Value, clone
from penstock.ir.op import Attrs
from penstock.ops.registry import MICROSOFT

DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}
"""codes of element types by the names of dtypes"""
LEAST_OPSET = 21
"""the first opset with int4 and with scales of blocks"""
_IR_VERSION = 10  # of ONNX 1.16, the first with that opset
_DOMAINS = ("", "ai.onnx.ml", MICROSOFT)


def onnx_bytes(model: Model) -> bytes:
    """Return the entry of ``model`` as the bytes of an ONNX file. Raises ``Unsupported`` with all
    operations that ONNX cannot express, and for a model of more than 2 GB."""
    proto = onnx_message(model)
    if proto.ByteSize() > MAX_MESSAGE:
        reason = "the model has more than 2 GB, which one ONNX file cannot hold"
        raise Unsupported.of([("ModelProto", reason, model.entry)])
    data: bytes = proto.SerializeToString()
    return data


def onnx_message(model: Model, weights: bool = True) -> ModelProto:
    """Return the entry of ``model`` as a message, whose initializers have no contents without
    ``weights``. Raises ``Unsupported``."""
    # A model that was only loaded has no types in nested graphs, which other runtimes require.
    graph = clone(model.graph)
    infer_types(graph)
    opset = _opset(graph)
    proto = ModelProto(ir_version=_IR_VERSION, producer_name="penstock")
    proto.opset_import.add(domain="", version=opset)
    domains = {node.op.domain for node in graph.walk()} - {""}
    for domain in sorted(domains):
        proto.opset_import.add(domain=domain, version=newest_opset(domain) or 1)
    for key, text in model.metadata.items():
        proto.metadata_props.add(key=key, value=text)
    _GraphWriter(_Names(graph), opset, _constants_of(graph), weights).write(graph, proto.graph)
    return proto


def _constants_of(graph: Graph) -> dict[Graph, list[Value]]:
    """Return the constants to write into each graph: those that only this graph reads, and in the
    outermost one those that several read. Optimizers find weights only beside their readers."""
    place_of: dict[Value, Graph] = {}
    for inner in graph.graphs():
        inputs = [value for node in inner.nodes for value in node.inputs]
        for value in [*inputs, *inner.outputs]:
            if value is not None and value.is_constant:
                place_of[value] = inner if place_of.get(value, inner) is inner else graph
    constants: dict[Graph, list[Value]] = {}
    for value, place in place_of.items():
        constants.setdefault(place, []).append(value)
    return constants


def _opset(graph: Graph) -> int:
    """Return the lowest opset in which all nodes have their meaning. Raises ``Unsupported``."""
    newest = newest_opset("")
    nodes = list(graph.walk())
    # ONNX has no control edges.
    foreign = [n for n in nodes if n.op.domain not in _DOMAINS or n.control_inputs]
    if not foreign:
        for opset in range(LEAST_OPSET, newest + 1):
            if all(node.op.domain or _schema_for(node, opset) for node in nodes):
                return opset
        foreign = [n for n in nodes if not n.op.domain and not _schema_for(n, newest)]
    reason = f"the opsets of ONNX from {LEAST_OPSET} on cannot express it"
    raise Unsupported.of([(node.op.full_name, reason, node.label) for node in foreign])


def _schema_for(node: Node, opset: int) -> OnnxSchema | None:
    """Return the schema of an operation of ONNX in an opset if it has the node's meaning there."""
    op = node.op
    schema = find_schema(op.name, "", opset)
    if schema is None or not op.since <= schema.version <= op.version:
        return None
    if len(node.inputs) > schema.max_input or len(node.outputs) > schema.max_output:
        return None
    newer = find_schema(op.name, "", op.version)
    known = defaults(newer) if newer is not None else {}
    for name, value in node.attrs.items():
        is_new = newer is not None and name in newer.attributes and name not in schema.attributes
        if is_new and value is not None and value != known.get(name):
            return None
    return schema


class _Names(dict[Value, str]):
    """A unique name for each value; inputs and outputs keep their own."""

    def __init__(self, graph: Graph) -> None:
        super().__init__({value: value.name for value in graph.inputs})
        self.taken = Counter(self.values())
        self.reserved: dict[Value, str] = {}
        """names of outputs that are constants, which have others"""
        for value in graph.outputs:
            if value not in self and value not in self.reserved:
                (self.reserved if value.producer is None else self)[value] = value.name
                self.taken[value.name] += 1

    def __missing__(self, value: Value) -> str:
        name = wanted = value.name or "value"
        number = 0
        while not name or name in self.taken:
            number += 1
            name = f"{wanted}/{number}"
        self.taken[name] += 1
        self[value] = name
        return name


@dataclass
class _GraphWriter:
    """Writes one model's graphs, each with its ``constants``, with their contents if it has
    ``weights``."""

    names: _Names
    opset: int
    constants: Mapping[Graph, Sequence[Value]]
    weights: bool

    def write(self, graph: Graph, proto: GraphProto) -> None:
        proto.name = graph.name or "main"
        for value in graph.inputs:
            info = proto.input.add(name=self.names[value])
            _set_type(info.type, value.type)
        for node in graph.nodes:
            self.node(node, proto.node.add())
        for value in graph.outputs:
            self.output(value, graph, proto)
        for value in self.constants.get(graph, ()):
            assert value.peek is not None
            array = value.peek if self.weights else value.peek.reshape(-1)[:0]
            tensor_message(array, proto.initializer.add(name=self.names[value]))

    def output(self, value: Value, graph: Graph, proto: GraphProto) -> None:
        """Write an output of a graph, which a node of that graph must produce, once."""
        name, node = self.names[value], value.producer
        repeated = name in [info.name for info in proto.output]
        if repeated or node is None or node not in graph.nodes:
            name = self.names.reserved.pop(value, "") or self.names[Value(f"{name}/output")]
            proto.node.add(op_type="Identity", input=[self.read(value)], output=[name])
        info = proto.output.add(name=name)
        _set_type(info.type, value.type)

    def read(self, value: Value | None) -> str:
        return "" if value is None else self.names[value]

    def node(self, node: Node, proto: NodeProto) -> None:
        proto.op_type, proto.domain, proto.name = node.op.name, node.op.domain, node.name
        inputs = [self.read(value) for value in node.inputs]
        outputs = [self.names[value] if value is not None else "" for value in node.outputs]
        for names, field_ in ((inputs, proto.input), (outputs, proto.output)):
            # Trailing ones that are left out are not written; others have empty names.
            while names and not names[-1]:
                names.pop()
            field_.extend(names)
        schema = None if node.op.domain else find_schema(node.op.name, "", self.opset)
        if schema is None:
            schema = find_schema(node.op.name, node.op.domain, newest_opset(node.op.domain) or 1)
        known = defaults(schema) if schema is not None else {}
        for name, value in node.attrs.items():
            # Importers add defaults of later versions, and passes attributes of their own.
            if schema is not None and (name not in schema.attributes or known.get(name) == value):
                continue
            if value is not None and not name.startswith("_"):
                kind = schema.attributes[name].type if schema is not None else 0
                self.attribute(proto.attribute.add(name=name), node.attrs, kind)

    def attribute(self, proto: AttributeProto, attrs: Attrs, kind: int) -> None:
        """Write an attribute under the message's name, as this ``AttributeKind`` or, for 0, as the
        kind of its value."""
        value = attrs[proto.name]
        items = list(value) if isinstance(value, list | tuple) else [value]
        if kind == 0:
            kind = _kind_of(value, items)
        proto.type = kind  # type: ignore[assignment]
        match kind:
            case AttributeKind.INT:
                proto.i = int(value)
            case AttributeKind.FLOAT:
                proto.f = float(value)
            case AttributeKind.STRING:
                proto.s = _encoded(value)
            case AttributeKind.INTS:
                proto.ints.extend(map(int, items))
            case AttributeKind.FLOATS:
                proto.floats.extend(map(float, items))
            case AttributeKind.STRINGS:
                proto.strings.extend(map(_encoded, items))
            case AttributeKind.TENSOR:
                tensor_message(value, proto.t)
            case AttributeKind.GRAPH:
                self.write(value, proto.g)
            case AttributeKind.TYPE_PROTO:
                _set_type(proto.tp, value)
            case _:
                reason = f"an attribute of kind {kind} cannot be written"
                raise Unsupported.of([(proto.name, reason, "")])


def _kind_of(value: object, items: Sequence[object]) -> int:
    first = items[0] if items else 0
    is_list = isinstance(value, list | tuple)
    if isinstance(value, Graph):
        return AttributeKind.GRAPH
    if isinstance(value, np.ndarray):
        return AttributeKind.TENSOR
    if isinstance(first, str | bytes):
        return AttributeKind.STRINGS if is_list else AttributeKind.STRING
    if isinstance(first, float):
        return AttributeKind.FLOATS if is_list else AttributeKind.FLOAT
    return AttributeKind.INTS if is_list else AttributeKind.INT


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def tensor_message(array: np.ndarray, proto: TensorProto) -> None:
    """Write an array into a message."""
    code = DTYPE_CODES[dtype_name(array.dtype)]
    proto.data_type = code
    proto.dims.extend(array.shape)
    if array.dtype == STRING:
        proto.string_data.extend(_encoded(text) for text in array.reshape(-1).tolist())
        return
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = PACKED_BITS.get(code)
    if bits is not None:
        flat = _packed(flat.view(np.uint8), bits)
    elif flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("<"))
    proto.raw_data = flat.tobytes()


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return elements of ``bits`` bits, the first in the lowest bits of each byte."""
    # In NumPy, elements of less than a byte take one byte each.
    spread = np.unpackbits(codes, bitorder="little").reshape(-1, 8)[:, :bits]
    return np.packbits(spread.reshape(-1), bitorder="little")


def _set_type(proto: TypeProto, type_: Type) -> None:
    """Write a type, as far as it is known."""
    if isinstance(type_, TensorType):
        if type_.dtype is None:
            return
        proto.tensor_type.elem_type = DTYPE_CODES[dtype_name(type_.dtype)]
        if type_.shape is not None:
            proto.tensor_type.shape.SetInParent()
            for dim in type_.shape:
                message = proto.tensor_type.shape.dim.add()
                if isinstance(dim, str):
                    message.dim_param = dim
                elif dim is not None:
                    message.dim_value = dim
    elif isinstance(type_, SequenceType):
        proto.sequence_type.SetInParent()
        _set_type(proto.sequence_type.elem_type, type_.element)
    elif isinstance(type_, OptionalType):
        proto.optional_type.SetInParent()
        _set_type(proto.optional_type.elem_type, type_.element)
    elif isinstance(type_, MapType):
        proto.map_type.key_type = DTYPE_CODES[dtype_name(type_.key)]
        _set_type(proto.map_type.value_type, type_.value)
