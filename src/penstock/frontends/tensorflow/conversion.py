"""One node of TensorFlow on its way to nodes of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.frontends.tensorflow.attrs import Tensor
from penstock.frontends.tensorflow.known_shapes import made_constant
from penstock.frontends.tensorflow.proto.graphdef_pb2 import NodeDef
from penstock.frontends.tensorflow.schemas import Argument, Schema
from penstock.frontends.tensorflow.tensors import array_of
from penstock.frontends.tensorflow.types import declared_type
from penstock.ir.graph import Node, Value
from penstock.limits import Limits
from penstock.ops.registry import TENSORFLOW, find
from penstock.types import ANY, Dim, Shape, TensorType, Type, dtype_name

if TYPE_CHECKING:
    from penstock.frontends.tensorflow.importer import Importer


Rule: TypeAlias = Callable[["Conversion"], None]


def registering(rules: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """What puts a rule into ``rules``, for operations of the names that it is given."""

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            rules.update(dict.fromkeys(names, function))
            return function

        return register

    return rule


class NodeError(Exception):
    """What is wrong with a node: how the sentence goes on that begins with its name."""


class InexpressibleError(Exception):
    """Why there is no kernel for a node of an operation that there are kernels for."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A value that a node reads, and the node of TensorFlow that makes it ("" for an argument)."""

    value: Value
    source: str


class Scope:
    """The graph, or one use of a function's body, while it is imported.

    ``arguments``: the values of a function's arguments. ``read``: nodes whose outputs somebody
    reads. ``made``: for each node of TensorFlow the node that has its name. ``anchors``: for whom
    nodes wait that read nothing, so that they run when, and only when, the body does.
    """

    def __init__(
        self,
        where: str,
        limits: Limits,
        prefix: str = "",
        depth: int = 1,
        bound: Mapping[str, Any] | None = None,
        function: bool = False,
    ) -> None:
        self.where = where
        self.limits = limits
        self.prefix = prefix
        self.depth = depth
        self.bound = bound or {}
        self.function = function
        self.arguments: dict[str, list[Value]] = {}
        self.anchors: list[Node] = []
        self.inputs: list[Value] = []
        self.placeholders: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.protos: dict[str, NodeDef] = {}
        self.attrs: dict[str, dict[str, Any]] = {}
        self.schemas: dict[str, Schema] = {}
        self.arity: dict[str, list[Argument]] = {}
        self.values: dict[str, Any] = {}
        self.outputs: dict[tuple[str, str, int], int] = {}
        self.references: set[Value] = set()
        self.read: set[str] = set()
        self.made: dict[str, Node] = {}
        self.waiting: list[tuple[Node, Sequence[str]]] = []

    def find(self, text: str) -> Reference | None:
        """What an input refers to; ``None`` for a value of a node that was not imported. Raises
        ``KeyError`` with the reason."""
        name, *rest = text.split(":")
        if name in self.arguments and len(rest) <= 1:
            values, index = self.arguments[name], _number(rest[0] if rest else "0")
            if not 0 <= index < len(values):
                raise KeyError("an argument that has no such value")
            return Reference(values[index], "")
        if name not in self.protos:
            raise KeyError(f"which is no node of {self.where}")
        if self.values.get(name) is None:
            return None
        if self.function and len(rest) == 2:
            index = self.outputs.get((name, rest[0], _number(rest[1])), -1)
        elif len(rest) <= 1:
            index = _number(rest[0] if rest else "0")
        else:
            index = -1
        values = self.values[name]
        if not 0 <= index < len(values):
            raise KeyError(f"but {name!r} has {len(values)} outputs, and none like that")
        self.read.add(name)
        return Reference(values[index], name)

    def constant(self, source: str) -> np.ndarray | None:
        """What the node ``source`` makes if that is a constant, perhaps through identities."""
        for _ in range(8):
            proto = self.protos.get(source)
            if proto is None:
                return None
            if proto.op == "Const":
                value = self.attrs.get(source, {}).get("value")
                return array_of(value.proto, self.limits) if isinstance(value, Tensor) else None
            if proto.op not in ("Identity", "StopGradient", "Snapshot") or not proto.input:
                return None
            source = proto.input[0].split(":")[0]
        return None

    def connect(self) -> None:
        """Let nodes wait for those that they name, now that all are made."""
        for node, names in self.waiting:
            found = dict.fromkeys(self._maker(name) for name in names if self._runs(name))
            node.control_inputs = list(dict.fromkeys([*node.control_inputs, *found]))
            if node in found:
                node.control_inputs.remove(node)
        self.waiting.clear()

    def _runs(self, name: str) -> bool:
        """Whether there is something to wait for; arguments of a function are there from the
        start."""
        return name in self.made or (name in self.placeholders and name in self.protos)

    def _maker(self, name: str) -> Node:
        """The node of that name. Who waits for a placeholder reads it: it must be fed."""
        if name not in self.made:
            op, value = find("Identity"), self.placeholders[name]
            assert op is not None
            made = Value(f"{value.name}#fed", value.type)
            origin = f"{name} in {self.where}"
            self.made[name] = Node(op, [value], [made], name=made.name, origin=origin)
            self.nodes.append(self.made[name])
        return self.made[name]


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else -1


class Conversion:
    """One node, what it reads and makes, and the nodes that were emitted for it."""

    def __init__(
        self,
        importer: Importer,
        scope: Scope,
        proto: NodeDef,
        references: Sequence[Reference],
        controls: Sequence[str],
        origin: str,
    ) -> None:
        self.importer = importer
        self.scope = scope
        self.name = scope.prefix + proto.name
        self.own_name = proto.name
        self.op = proto.op
        self.device = proto.device
        self.attrs = scope.attrs[proto.name]
        self.references = references
        self.inputs = [reference.value for reference in references]
        self.outputs: list[Value] = scope.values[proto.name]
        self.controls = controls
        self.origin = origin
        self.emitted: list[Node] = []
        self.last: Node | None = None

    # What rules ask.

    def constant(self, index: int) -> np.ndarray | None:
        """Input ``index`` if it is a constant."""
        source = self.references[index].source
        found = self.scope.constant(source) if source else None
        # Where variables are constants, or constants are arguments, that shows only afterwards.
        return made_constant(self.inputs[index]) if found is None else found

    def integers(self, index: int) -> list[int] | None:
        """The elements of input ``index`` if it is a constant of integers, row-major."""
        found = self.constant(index)
        if found is None or found.dtype.kind not in "iu" or found.size > 65536:
            return None
        return [int(each) for each in found.reshape(-1)]

    def elements(self, index: int) -> Sequence[Dim] | None:
        """The elements of input ``index``, a vector of integers, as far as they follow from the
        file: an element that does not is None, or has a name."""
        found = self.integers(index)
        kind = None if found is not None else self.importer.shapes.of(self.inputs[index])
        return kind.data if isinstance(kind, TensorType) else found

    def integer(self, index: int) -> int | None:
        """The one element of input ``index`` if it is a constant."""
        found = self.integers(index)
        return found[0] if found is not None and len(found) == 1 else None

    def type(self, index: int) -> Type:
        return self.inputs[index].type

    def dtype(self, index: int) -> np.dtype | None:
        """The element type of input ``index``, as far as the file says."""
        kind = self.inputs[index].type
        return kind.dtype if isinstance(kind, TensorType) else None

    def rank(self, index: int) -> int | None:
        """The number of dims of input ``index``, as far as it follows from the file."""
        shape = self.shape(index)
        return None if shape is None else len(shape)

    def shape(self, index: int) -> Shape | None:
        """The shape of input ``index``, as far as it follows from the file."""
        found = self.constant(index)
        if found is not None:
            return found.shape
        kind = self.importer.shapes.of(self.inputs[index])
        return kind.shape if isinstance(kind, TensorType) else None

    def static(self, index: int, what: str) -> tuple[int, ...]:
        """The shape of input ``index``, which must be known to convert the node."""
        shape = self.shape(index)
        if shape is None or not all(isinstance(dim, int) for dim in shape):
            raise InexpressibleError(f"the shape of {what} is not known")
        return shape  # type: ignore[return-value]

    # What rules emit.

    def known(self, value: Any, dtype: Any = None) -> Value:
        """A constant of our own."""
        return Value(self._fresh("constant"), const=np.asarray(value, dtype))

    def node(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        type: Type = ANY,
    ) -> Value:
        """The output of one more node, before the last."""
        name = self._fresh(op.lower())
        value = Value(name, type)
        self._emit(op, domain, inputs, [value], attrs, name)
        return value

    def end(
        self,
        op: str,
        inputs: Sequence[Value | None] | None = None,
        attrs: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: Sequence[Value] | None = None,
    ) -> Node:
        """The last node, which has the name and makes the outputs."""
        made = self.outputs if outputs is None else outputs
        given = self.inputs if inputs is None else inputs
        self.last = self._emit(op, domain, given, made, attrs, self.name)
        return self.last

    def own(self, attrs: Iterable[str] | None = None, **more: Any) -> Node:
        """The last node, of the operation of this name in our own domain."""
        chosen = [key for key in self.attrs if attrs is None or key in attrs]
        kept = {key: _listed(self.attrs[key]) for key in chosen if _plain(self.attrs[key])}
        return self.end(self.op, attrs={**kept, **more}, domain=TENSORFLOW)

    def further(
        self,
        output: Value,
        op: str,
        inputs: Sequence[Value],
        attrs: Mapping[str, Any] | None = None,
    ) -> Node:
        """A node behind the last that makes one more of the outputs. It waits for the last one,
        which stands for all of them where runs are counted."""
        name = f"{self.name}#{output.name.rpartition(':')[2]}"
        node = self._emit(op, "", inputs, [output], attrs, name)
        if self.last is not None:
            node.control_inputs.append(self.last)
        return node

    def effect(self, op: str, word: str) -> Node:
        """A node of our own domain, before the last, that makes nothing."""
        return self._emit(op, TENSORFLOW, [], [], None, f"{self.name}#{word}")

    def dereference(self, index: int) -> None:
        """Read the variable that input ``index`` refers to."""
        self.inputs[index] = self.variable(self.inputs[index], None)

    def variable(self, handle: Value, dtype: str | None) -> Value:
        """The value of a variable: a constant where nothing can change it."""
        frozen = self.importer.handles.get(handle)
        if frozen is not None:
            return self.node("Const", [], {"value": frozen}, domain=TENSORFLOW)
        attrs, kind = self.reading(handle, dtype)
        return self.node("ReadVariableOp", [handle], attrs, domain=TENSORFLOW, type=kind)

    def reading(self, handle: Value, dtype: str | None) -> tuple[dict[str, Any], Type]:
        """What a node that reads a variable knows of it, and the type of what it reads."""
        declared = self.importer.declared.get(handle)
        attrs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if declared is None:
            return attrs, declared_type(dtype)
        if declared.shape is not None:
            attrs["shape"] = [dim if isinstance(dim, int) else -1 for dim in declared.shape]
        if declared.dtype is not None:
            attrs["dtype"] = dtype_name(declared.dtype)
        return attrs, declared

    def close(self) -> None:
        """Add the emitted nodes to the graph, waiting for whom they have to."""
        scope = self.scope
        last = self.last
        if last is None:
            return
        read = {value for node in self.emitted for value in node.inputs}
        for node in self.emitted:
            for _, graph in node.graphs:
                read.update(value for inner in graph.walk() for value in inner.inputs)
        unread = [r.source for r in self.references if r.source and r.value not in read]
        # Nodes in front of an emitted one are ordered by what they read.
        for node in self.emitted:
            names = [*self.controls, *unread] if node is last else self.controls
            if names:
                scope.waiting.append((node, names))
            lonely = all(v is None or v.const is not None for v in node.inputs)
            if scope.anchors and (not node.op.pure or (lonely and not self.controls)):
                node.control_inputs += scope.anchors
        scope.nodes += self.emitted
        scope.made[self.own_name] = last
        for value in self.outputs:
            if value in scope.references and not scope.function and value.producer is not None:
                self._readable(value)

    def _readable(self, reference: Value) -> None:
        """What a reference refers to, under the name that it has when somebody fetches it."""
        name = reference.name.removesuffix("&")
        op = find("ReadVariableOp", TENSORFLOW)
        assert op is not None
        node = Node(op, [reference], [Value(name)], name=f"{name}#read", origin=self.origin)
        self.scope.nodes.append(node)

    def _fresh(self, word: str) -> str:
        return f"{self.name}#{word}_{len(self.emitted)}"

    def _emit(
        self,
        op: str,
        domain: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value],
        attrs: Mapping[str, Any] | None,
        name: str,
    ) -> Node:
        found = find(op, domain)
        if found is None:
            raise InexpressibleError("there is no kernel of it")
        node = Node(
            found, inputs, outputs, attrs, name=name, device=self.device, origin=self.origin
        )
        self.emitted.append(node)
        if op == "Identity":  # perhaps of a handle, of which something is known
            for known in (self.importer.handles, self.importer.declared):
                if node.inputs[0] in known:
                    known[outputs[0]] = known[node.inputs[0]]  # type: ignore[assignment]
        return node


def _plain(value: Any) -> bool:
    """Whether an attribute is one that our nodes may carry."""
    if isinstance(value, tuple):
        return True  # a shape
    if isinstance(value, list):
        return all(isinstance(each, str | int | float) for each in value)
    return isinstance(value, str | int | float)


def _listed(value: Any) -> Any:
    """A shape as a list, with -1 for what is not known."""
    return [-1 if each is None else each for each in value] if isinstance(value, tuple) else value
