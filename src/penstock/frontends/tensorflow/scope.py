"""A graph, or one use of a function's body, while it is imported: the meaning of its names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import shortened
from penstock.core.records import dataclass, field
from penstock.core.types import TensorType, Type, accepts, dtype_name, type_of
from penstock.frontends.common.builder import UniqueNames, short_name
from penstock.frontends.common.inferred_types import source_of
from penstock.frontends.tensorflow.proto.graphdef_pb2 import NodeDef, TensorProto
from penstock.frontends.tensorflow.schemas import Argument
from penstock.frontends.tensorflow.tensors import ConstantReader, declared_type
from penstock.ir.graph import Node, Value
from penstock.ir.op import AttrDict
from penstock.ops.registry import standard
from penstock.ops.tensorflow.state import Store

# The most Identity nodes between a constant and a node that reads it.
_MAX_IDENTITIES = 8
_IDENTITIES = frozenset({"Identity", "StopGradient", "Snapshot"})


@dataclass(frozen=True, slots=True)
class Reference:
    """A value that a node reads, and the NodeDef that produces it ("" for an argument)."""

    value: Value
    source: str


@dataclass(slots=True)
class DeclaredNode:
    """A NodeDef whose output values exist. ``values`` is ``None`` if it cannot be imported.

    ``arguments`` has the argument and the element type of each data input, ``positions`` the index
    of each output by its name and number in the schema.
    """

    proto: NodeDef
    values: list[Value] | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    arguments: Sequence[tuple[Argument, str | None]] = ()
    positions: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class GraphScope:
    """The names of a graph or of one use of a function's body, and the nodes created for it.

    ``bound`` are the attributes of a function, ``arguments`` the values of its arguments.
    ``anchors`` are nodes for which nodes without inputs wait, so that they run if and only if the
    body does. ``read`` are NodeDefs whose outputs are read; ``final_nodes`` has the node of the
    same name for each NodeDef. ``references`` are values that refer to variables.
    """

    where: str
    constants: ConstantReader
    prefix: str = ""
    depth: int = 1
    bound: Mapping[str, Any] = field(default_factory=dict)
    function: bool = False
    anchors: Sequence[Node] = ()
    arguments: dict[str, list[Value]] = field(default_factory=dict, init=False)
    inputs: list[Value] = field(default_factory=list, init=False)
    placeholders: dict[str, Value] = field(default_factory=dict, init=False)
    nodes: list[Node] = field(default_factory=list, init=False)
    declared: dict[str, DeclaredNode] = field(default_factory=dict, init=False)
    references: set[Value] = field(default_factory=set, init=False)
    read: set[str] = field(default_factory=set, init=False)
    final_nodes: dict[str, Node] = field(default_factory=dict, init=False)
    waiting: list[tuple[Node, Sequence[str]]] = field(default_factory=list, init=False)

    def full_name(self, name: str) -> str:
        """Return the name in the model of a NodeDef; a long one is shortened in functions, whose
        bodies are used many times."""
        return short_name(self.prefix + name) if self.prefix else name

    def origin(self, name: str) -> str:
        """Return the name of a NodeDef for messages."""
        return f"{shortened(self.prefix + name)} in {self.where}"

    def find(self, text: str) -> Reference | None:
        """Resolve an input such as ``node:0``; ``None`` if its node could not be imported. Raises
        ``KeyError`` with the end of a sentence about the input."""
        name, *rest = text.split(":")
        if name in self.arguments and len(rest) <= 1:
            values, index = self.arguments[name], _number(rest[0] if rest else "0")
            if not 0 <= index < len(values):
                raise KeyError("an argument that has no such value")
            return Reference(values[index], "")
        declared = self.declared.get(name)
        if declared is None:
            raise KeyError(f"which is no node of {self.where}")
        if declared.values is None:
            return None
        index = _number(rest[0] if rest else "0") if len(rest) <= 1 else -1
        # In the body of a function, an input names an output by its argument and a number.
        if self.function and len(rest) == 2:
            index = declared.positions.get((rest[0], _number(rest[1])), -1)
        if not 0 <= index < len(declared.values):
            raise KeyError(f"but {name!r} has {len(declared.values)} outputs, and none like that")
        self.read.add(name)
        return Reference(declared.values[index], name)

    def constant(self, source: str) -> np.ndarray | None:
        """Return the value of a Const, or of Identity nodes of one. The nodes need not be
        converted yet. Raises ``TensorError``."""
        for _ in range(_MAX_IDENTITIES):
            declared = self.declared.get(source)
            if declared is None:
                return None
            proto = declared.proto
            if proto.op == "Const":
                tensor = declared.attrs.get("value")
                if not isinstance(tensor, TensorProto):
                    return None
                return self.constants.read(self.where, source, proto.attr["value"], tensor)
            if proto.op not in _IDENTITIES or not proto.input:
                return None
            source = proto.input[0].split(":")[0]
        return None

    def connect(self) -> None:
        """Add control inputs by name, after all nodes have been created. Arguments of a function
        exist from the start: no node can wait for one."""
        for node, names in self.waiting:
            nodes = (
                name for name in names if name in self.final_nodes or name in self.placeholders
            )
            sources = dict.fromkeys([*node.control_inputs, *map(self._final_node, nodes)])
            sources.pop(node, None)  # a node must not wait for itself
            node.control_inputs = list(sources)
        self.waiting.clear()

    def _final_node(self, name: str) -> Node:
        """Return the node of that name. A node that waits for a placeholder reads it instead."""
        if name not in self.final_nodes:
            op, value = standard("Identity"), self.placeholders[name]
            output = Value(f"{value.name}#fed", value.type)
            origin = self.origin(name)
            node = Node(op, [value], [output], name=output.name, origin=origin)
            self.final_nodes[name] = node
            self.nodes.append(node)
        return self.final_nodes[name]


def unique_prefixes(names: Iterable[str]) -> UniqueNames:
    """Return a source of name prefixes, ``folder/``, that no name in the file begins with:
    ``name/``, or ``name/~1/``, ``name/~2/``, ... if it is taken."""
    folders = (name[: i + 1] for name in names for i, char in enumerate(name) if char == "/")
    return UniqueNames(lambda: folders, "{}/", "{}/~{}/")


def producers_first(protos: Sequence[NodeDef]) -> list[NodeDef]:
    """Sort nodes after those that they read and wait for, otherwise in the given order. In a loop
    the order is arbitrary."""
    by_name = {proto.name: proto for proto in protos}
    ordered: list[NodeDef] = []
    seen: set[str] = set()
    for first in protos:
        stack: list[tuple[NodeDef, Iterator[str]]] = []
        if first.name not in seen:
            seen.add(first.name)
            stack.append((first, iter(first.input)))
        while stack:
            proto, inputs = stack[-1]
            for text in inputs:
                name = text.removeprefix("^").partition(":")[0]
                if name in by_name and name not in seen:
                    seen.add(name)
                    stack.append((by_name[name], iter(by_name[name].input)))
                    break
            else:
                ordered.append(proto)
                stack.pop()
    return ordered


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else -1


# The variables of a model: the store that holds them, and their types and values if constant.


def created_handle(handle: Value) -> Value:
    """Return the handle of which ``handle`` is a copy, perhaps in a branch or a loop."""
    for _ in range(_MAX_IDENTITIES):
        handle = source_of(handle)
        node = handle.producer
        if node is None or node.op.name not in ("Enter", "RefEnter", "RefSwitch", "Switch"):
            break
        source = node.inputs[0]
        if source is None:
            break
        handle = source
    return handle


class VariableFacts:
    """Facts about variables by handle, or by a copy of a handle.

    ``store`` holds the variables of a session. ``frozen`` has the values of those that nothing
    assigns to, by the name of the node that creates the handle: they are constants.
    """

    def __init__(self, store: Store, frozen: Mapping[str, np.ndarray]) -> None:
        self.store = store
        self._frozen_by_node = frozen
        self._frozen: dict[Value, np.ndarray] = {}
        self._types: dict[Value, TensorType] = {}

    def declare(self, node: str, handle: Value, type_: Type) -> None:
        """Record the first output of ``node``. ``type_`` is the variable's type if the node creates
        a handle, else ``ANY``. Raises ``ValueError`` if the saved value has another type."""
        if isinstance(type_, TensorType):
            self._types[handle] = type_
        value = self._frozen_by_node.get(node)
        if value is not None:
            self._frozen[handle] = value
            if not accepts(type_, type_of(value)):
                raise ValueError(f"it is {type_}, but {type_of(value)} in the checkpoint")

    def constant(self, handle: Value) -> np.ndarray | None:
        """Return the value of a variable that nothing assigns to, else None."""
        return self._frozen.get(created_handle(handle))

    def read_attrs(self, handle: Value, dtype: str | None) -> tuple[AttrDict, Type]:
        """Return the attributes of a node that reads a variable, and its output's type."""
        type_ = self._types.get(created_handle(handle))
        attrs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if type_ is None:
            return attrs, declared_type(dtype)
        if type_.shape is not None:
            attrs["shape"] = [dim if isinstance(dim, int) else -1 for dim in type_.shape]
        if type_.dtype is not None:
            attrs["dtype"] = dtype_name(type_.dtype)
        return attrs, type_
