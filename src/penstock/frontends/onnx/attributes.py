"""Attributes of nodes: plain values, tensors, graphs, and references to attributes of a function.

A graph among the attributes is created empty, and recorded for the importer, which fills it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from penstock.analysis.schemas import LEGACY, TYPE_NAMES
from penstock.core.errors import InvalidModel, shortened
from penstock.core.records import NamedTuple, dataclass, field, replace
from penstock.core.types import FLOAT32, INT64, STRING
from penstock.frontends.common.builder import short_name
from penstock.frontends.common.diagnostics import Diagnostics, TensorError
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.file import Apart
from penstock.frontends.onnx.messages import (
    AttributeProto,
    GraphProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
)
from penstock.frontends.onnx.tensors import TensorReader, value_type
from penstock.frontends.onnx.upgrades import Meaning
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import AttrDict

_plain = itemgetter(slice(None))
"""converts a repeated field to a list: by a slice, several times faster than item by item"""


def _texts(items: Any) -> list[str]:
    """Return decoded strings, each decoded once: a tree ensemble repeats a few thousand strings."""
    encoded = items[:]
    texts = {item: decode_text(item) for item in {*encoded}}
    return list(map(texts.__getitem__, encoded))


_FIELDS: Mapping[int, tuple[str, Callable[[Any], Any] | None]] = {
    AttributeProto.FLOAT: ("f", float),
    AttributeProto.INT: ("i", int),
    AttributeProto.STRING: ("s", decode_text),
    AttributeProto.TENSOR: ("t", None),
    AttributeProto.GRAPH: ("g", None),
    AttributeProto.TYPE_PROTO: ("tp", value_type),
    AttributeProto.SPARSE_TENSOR: ("sparse_tensor", None),
    AttributeProto.FLOATS: ("floats", _plain),
    AttributeProto.INTS: ("ints", _plain),
    AttributeProto.STRINGS: ("strings", _texts),
    AttributeProto.TENSORS: ("tensors", None),
    AttributeProto.GRAPHS: ("graphs", None),
    AttributeProto.TYPE_PROTOS: ("type_protos", lambda items: [value_type(item) for item in items]),
    AttributeProto.SPARSE_TENSORS: ("sparse_tensors", None),
}
"""the field of each ``AttributeProto`` type, and its decoder; None for tensors and graphs"""

_CODES = {field: code for code, (field, _) in _FIELDS.items()}


def attribute_type(proto: AttributeProto) -> int:
    """Return the type of an attribute of IR version 1, which has none: that of the field in use."""
    return next((_CODES[f.name] for f, _ in proto.ListFields() if f.name in _CODES), 0)


CONSTANTS: Mapping[str, tuple[int, np.dtype | None]] = {
    "value": (AttributeProto.TENSOR, None),
    "sparse_value": (AttributeProto.SPARSE_TENSOR, None),
    "value_float": (AttributeProto.FLOAT, FLOAT32),
    "value_floats": (AttributeProto.FLOATS, FLOAT32),
    "value_int": (AttributeProto.INT, INT64),
    "value_ints": (AttributeProto.INTS, INT64),
    "value_string": (AttributeProto.STRING, STRING),
    "value_strings": (AttributeProto.STRINGS, STRING),
}
"""attributes that can be the value of a Constant: their type, and the dtype of their numbers and
strings"""


@dataclass(frozen=True, eq=False)
class AttributeReader:
    """Reads the attributes of one model's nodes. ``pending`` receives their graphs, which are empty
    until the importer fills them."""

    tensors: TensorReader
    diagnostics: Diagnostics
    pending: list[PendingGraph]

    def read(self, node: OnnxNode, attrs: AttrDict) -> dict[str, int]:
        """Add the attributes of a node to ``attrs``, and return their ``AttributeProto`` types.
        Raises ``InvalidModel`` for a graph beyond ``Limits.max_depth``, and adds other faults to
        the diagnostics."""
        types: dict[str, int] = {}
        for proto in node.proto.attribute:
            key, context = proto.name, node.context
            if key.__class__ is not str:  # most are; faster than a call
                key = decode_text(key)
            if key in types:
                self.diagnostics.problem(f"{node.origin} has attribute {key!r} twice; remove one")
            if proto.ref_attr_name:
                referred = self.referred(proto, node)
                if referred is None:
                    continue
                proto, context = referred
            if key in LEGACY:
                continue
            code = types[key] = proto.type or attribute_type(proto)
            field, read = _FIELDS.get(code, ("", None))
            if read is not None:
                try:
                    attrs[key] = read(getattr(proto, field))
                except InvalidModel as error:
                    self.diagnostics.problem(f"attribute {key!r} of {node.origin}: {error}")
                continue
            if code == AttributeProto.GRAPH:
                title = f"{key} of {node.origin}"
                self.diagnostics.check_depth(context.depth + 1, title)
                # Filled later, to avoid recursion.
                graph = attrs[key] = Graph([], [], [], decode_text(proto.g.name))
                self.pending.append((graph, proto.g, context.nested(title, node.proto.output)))
            elif code in (AttributeProto.TENSOR, AttributeProto.SPARSE_TENSOR):
                attrs[key] = self.tensor(getattr(proto, field), "attribute", key, node)
            elif code in (AttributeProto.TENSORS, AttributeProto.SPARSE_TENSORS):
                tensors = getattr(proto, field)
                attrs[key] = [self.tensor(tensor, "attribute", key, node) for tensor in tensors]
            else:
                fault = "is a list of graphs" if code == AttributeProto.GRAPHS else "has no value"
                self.diagnostics.problem(
                    f"attribute {key!r} of {node.origin} {fault}, which no operation takes; "
                    "remove it"
                )
        return types

    def referred(
        self, proto: AttributeProto, node: OnnxNode
    ) -> tuple[AttributeProto, ImportContext] | None:
        """Return the attribute that one within a function refers to, and the context in which it
        was written; ``None`` if the call leaves it out."""
        context = node.context
        while proto.ref_attr_name:
            wanted = proto.ref_attr_name
            if context.attributes is None:
                self.diagnostics.problem(
                    f"attribute {decode_text(proto.name)!r} of {node.origin} refers to attribute "
                    f"{decode_text(wanted)!r} of a function, but is in none; give it a value"
                )
                return None
            argument = context.attributes.get(wanted)
            if argument is None or argument[0] is proto:  # a default may refer to itself
                return None
            proto, context = argument
        return proto, context

    def constant(self, node: OnnxNode) -> np.ndarray | None:
        """Return the value of a Constant node, or ``None`` if it is invalid."""
        attrs: dict[str, Any] = {}
        types = self.read(node, attrs)
        if len(types) != 1 or not attrs.keys() & CONSTANTS.keys():
            self.diagnostics.problem(
                f"{node.origin} is a Constant with attributes {sorted(types)}; it must have one of "
                f"{', '.join(CONSTANTS)}"
            )
            return None
        ((key, value),) = attrs.items()
        code, dtype = CONSTANTS[key]
        if types[key] != code:
            kinds = f"{TYPE_NAMES.get(types[key])}, not {TYPE_NAMES[code]}"
            self.diagnostics.problem(f"{key} of {node.origin} is of kind {kinds}; write it as that")
            return None
        array = np.asarray(value, dtype)
        # A constant of a function is one array for all of its calls.
        array.flags.writeable = False
        return array

    def tensor(
        self,
        proto: TensorProto | Apart | SparseTensorProto,
        role: str,
        name: str,
        where: str | OnnxNode,
    ) -> np.ndarray:
        """Return the contents of a tensor, or an empty array if it is invalid. ``where``: its place
        for messages, or the node that has it."""
        try:
            if isinstance(proto, Apart) or proto.DESCRIPTOR.name == "TensorProto":
                return self.tensors.read(proto)
            return self.tensors.read_sparse(proto)
        except (InvalidModel, TensorError) as error:
            place = where if isinstance(where, str) else f"of {where.origin}"
            self.diagnostics.problem(f"{role} {name!r} {place}: {error}")
            return np.empty(0, np.float32)


# Scopes of names while a model is imported: values, operations, attributes of a graph or call.


_MAX_WHERE = 300


@dataclass(slots=True, eq=False)
class NameScope:
    """The names of a graph or function body, and of enclosing graphs. ``later``: the outputs of the
    node that contains a graph, whose names the graph may reuse."""

    parent: NameScope | None = None
    names: dict[str, Value | None] = field(default_factory=dict)
    later: Sequence[str] = ()

    @property
    def of_nodes_around(self) -> set[str]:
        """The names of outputs of containing nodes, which a graph may reuse."""
        names: set[str] = set()
        scope: NameScope | None = self
        while scope is not None:
            names.update(scope.later)
            scope = scope.parent
        return names

    def is_outer(self, name: str) -> bool:
        """Return whether an enclosing graph has a value of this name."""
        scope = self.parent
        while scope is not None and name not in scope.names:
            scope = scope.parent
        return scope is not None

    def find(self, name: str) -> Value | None:
        """Return the value of a name; ``None``: an input of a function that a call omits."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        # An undefined name: verification reports it with all nodes that read it.
        value = self.names[name] = Value(name)
        return value


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nodes of an operation cannot be imported. ``undeclared``: the model does not import an
    opset of the operation's domain, which is a fault of the file, not a missing kernel."""

    reason: str
    undeclared: bool = False


Meanings: TypeAlias = dict[tuple[str, str], Meaning | Refusal]
"""meanings of operations by domain and name"""


@dataclass(slots=True)
class ImportContext:
    """The meaning of names, operations and attribute references in a graph or body.

    ``attributes`` are those of a function call, each with the context in which it was written;
    ``constants`` those of the nodes themselves, by number, shared by all calls of a function."""

    scope: NameScope
    opsets: Mapping[str, int]
    where: str
    depth: int = 1
    prefix: str = ""  # of names, within functions
    attributes: Mapping[str, tuple[AttributeProto, ImportContext]] | None = None
    meanings: Meanings = field(default_factory=dict)
    constants: dict[int, np.ndarray | None] = field(default_factory=dict)

    def nested(self, where: str, outputs: Sequence[str]) -> ImportContext:
        """Return the context of a graph among the attributes of a node with these ``outputs``. All
        of its nodes repeat ``where``, which is therefore shortened."""
        where = shortened(where, _MAX_WHERE)
        scope = NameScope(self.scope, later=outputs)
        return replace(self, scope=scope, where=where, depth=self.depth + 1, constants={})


class OnnxNode(NamedTuple):
    """A node of a graph or body, whose output values exist already."""

    proto: NodeProto
    number: int
    outputs: list[Value | None]
    context: ImportContext

    @property
    def name(self) -> str:
        own = self.proto.name or f"{self.proto.op_type}_{self.number}"
        own = own if own.__class__ is str else decode_text(own)
        return short_name(self.context.prefix + own) if self.context.prefix else own

    @property
    def origin(self) -> str:
        """The node and its place, for messages."""
        return f"{shortened(self.name)} in {self.context.where}"


Expansion: TypeAlias = tuple[Iterator[OnnxNode], list[Node]]
"""nodes that remain to be imported, and nodes to add after them"""

PendingGraph: TypeAlias = tuple[Graph, GraphProto, ImportContext]
"""an empty graph, and the contents to import into it"""
