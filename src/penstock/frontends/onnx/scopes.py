"""Scopes of names while a model is imported: values, operations, attributes of a graph or call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np

from penstock.core.errors import shortened
from penstock.core.records import NamedTuple, dataclass, field, replace
from penstock.frontends.common.builder import short_name
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.messages import AttributeProto, GraphProto, NodeProto
from penstock.frontends.onnx.upgrades import Meaning
from penstock.ir.graph import Graph, Node, Value

_MAX_WHERE = 300


@dataclass(slots=True, eq=False)
class NameScope:
    """The names of a graph or function body, and of the graphs around it."""

    parent: NameScope | None = None
    names: dict[str, Value | None] = field(default_factory=dict)

    def find(self, name: str) -> Value | None:
        """The value of a name; ``None`` for an input of a function that a call leaves out."""
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
    """Why nodes of an operation cannot be imported. With ``undeclared``, the model does not import
    an opset of the operation's domain: a fault of the file, not a missing kernel."""

    reason: str
    undeclared: bool = False


Meanings: TypeAlias = dict[tuple[str, str], Meaning | Refusal]
"""Meanings of operations by domain and name."""


@dataclass(slots=True)
class ImportContext:
    """The meaning of names, operations and attribute references in a graph or body.

    ``attributes`` are those of the call of a function, each with the context that it was written
    in; ``constants`` those of the nodes themselves, by number: for all calls of a function."""

    scope: NameScope
    opsets: Mapping[str, int]
    where: str
    depth: int = 1
    prefix: str = ""  # of names, within functions
    attributes: Mapping[str, tuple[AttributeProto, ImportContext]] | None = None
    meanings: Meanings = field(default_factory=dict)
    constants: dict[int, np.ndarray | None] = field(default_factory=dict)

    def nested(self, where: str) -> ImportContext:
        """The context of a graph among the attributes of a node. Each of its nodes repeats
        ``where``, which is shortened."""
        where = shortened(where, _MAX_WHERE)
        scope = NameScope(self.scope)
        return replace(self, scope=scope, where=where, depth=self.depth + 1, constants={})


class OnnxNode(NamedTuple):
    """A node of a graph or body, whose output values have been made."""

    proto: NodeProto
    number: int
    outputs: list[Value | None]
    context: ImportContext

    @property
    def name(self) -> str:
        own = self.proto.name
        own = decode_text(own) if own else f"{self.proto.op_type}_{self.number}"
        return short_name(self.context.prefix + own) if self.context.prefix else own

    @property
    def origin(self) -> str:
        """The node and where it stands, for messages."""
        return f"{shortened(self.name)} in {self.context.where}"


Expansion: TypeAlias = tuple[Iterator[OnnxNode], list[Node]]
"""Nodes left to import, and nodes to add after them."""

PendingGraph: TypeAlias = tuple[Graph, GraphProto, ImportContext]
"""An empty graph, and the contents to import into it."""
