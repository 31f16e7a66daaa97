"""One NodeDef of TensorFlow for the rule that converts it, and the import as rules see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from penstock.core.records import dataclass, field
from penstock.frontends.common.builder import NodeBuilder, UniqueNames, short_name
from penstock.frontends.common.diagnostics import Diagnostics
from penstock.frontends.common.inferred_types import InferredTypes, constant_of
from penstock.frontends.tensorflow.function_library import FunctionLibrary
from penstock.frontends.tensorflow.proto.graphdef_pb2 import NodeDef
from penstock.frontends.tensorflow.scope import DeclaredNode, GraphScope, Reference, VariableFacts
from penstock.frontends.tensorflow.tables import Tables
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Attrs
from penstock.ops.registry import TENSORFLOW, standard

Rule: TypeAlias = Callable[["Conversion"], None]


RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """A decorator that registers a rule for operations of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(eq=False)
class ConversionContext(ABC):
    """The import of a graph, as rules see it. ``producer`` is the version of the GraphDef's
    writer; ``library`` has the functions that its nodes may call."""

    producer: int
    library: FunctionLibrary
    diagnostics: Diagnostics
    variables: VariableFacts
    tables: Tables
    prefixes: UniqueNames
    types: InferredTypes = field(default_factory=InferredTypes)

    @abstractmethod
    def import_nodes(self, scope: GraphScope, protos: Sequence[NodeDef]) -> None:
        """Import the nodes of a graph or of the body of a function."""


class Conversion(NodeBuilder):
    """A NodeDef, its inputs and outputs, and the nodes emitted for it.

    ``name`` is unique in the model, ``own_name`` in the graph or function of the file; ``stem`` is
    short. ``controls`` are the names of the NodeDefs that it waits for.
    """

    inputs: list[Value]
    outputs: list[Value]
    attrs: dict[str, Any]

    def __init__(
        self,
        context: ConversionContext,
        scope: GraphScope,
        declared: DeclaredNode,
        references: Sequence[Reference],
        controls: Sequence[str],
        origin: str,
    ) -> None:
        proto = declared.proto
        super().__init__(
            scope.full_name(proto.name),
            [reference.value for reference in references],
            declared.values or [],
            declared.attrs,
            types=context.types,
            origin=origin,
            device=proto.device,
        )
        self.context = context
        self.scope = scope
        self.own_name = proto.name
        self.stem = short_name(self.name)
        self.op = proto.op
        self.references = references
        self.controls = controls
        self.given: set[str] = set()

    def input_constant(self, index: int) -> np.ndarray | None:
        """Return input ``index`` if it is a constant of the file, a frozen variable, or an argument
        with such a value, else None."""
        array = constant_of(self.inputs[index])
        source = self.references[index].source
        # In a loop, a constant may be converted after the nodes that read it.
        return self.scope.constant(source) if array is None and source else array

    def fresh(self, hint: str) -> str:
        name = f"{self.stem}#{hint}_{len(self.nodes)}"
        while name in self.given:  # a node may have several outputs
            name += "_"
        self.given.add(name)
        return name

    def emit_same_op(self, attrs: Iterable[str] | None = None, **more: Any) -> Node:
        """Emit the operation of the same name in the domain "tensorflow" as the final node, with
        the attributes named in ``attrs`` (by default all), and ``more``."""
        names = [key for key in self.attrs if attrs is None or key in attrs]
        kept = {key: listed(self.attrs[key]) for key in names if _is_plain(self.attrs[key])}
        return self.emit_final(self.op, attrs={**kept, **more}, domain=TENSORFLOW)

    def emit_extra_output(
        self, output: Value, op: str, inputs: Sequence[Value], attrs: Attrs | None = None
    ) -> Node:
        """Emit a node after the final one for one more output. It waits for the final node, which
        represents all of them where runs are counted."""
        name = f"{self.stem}#{output.name.rpartition(':')[2]}"
        node = self.append(op, "", inputs, [output], attrs, name)
        if self.final is not None:
            node.control_inputs.append(self.final)
        return node

    def variable(self, handle: Value, dtype: str | None) -> Value:
        """Return the value of a variable, a constant if nothing assigns to it. ``dtype``: the dtype
        that the reading node declares, or None."""
        frozen = self.context.variables.constant(handle)
        if frozen is not None:
            return self.constant(frozen, frozen.dtype)
        attrs, type_ = self.context.variables.read_attrs(handle, dtype)
        return self.emit("ReadVariableOp", [handle], attrs, domain=TENSORFLOW, type_=type_)

    def commit(self) -> None:
        """Add the emitted nodes to the graph, with the nodes that they wait for."""
        final, scope = self.final, self.scope
        if final is None:
            return
        # Instead of reading inputs such as axes, the final node waits for their producers. Earlier
        # nodes are ordered by what they read.
        read = {value for node in Graph([], [], self.nodes).walk() for value in node.inputs}
        unread = [r.source for r in self.references if r.source and r.value not in read]
        for node in self.nodes:
            names = [*self.controls, *unread] if node is final else self.controls
            if names:
                scope.waiting.append((node, names))
            if scope.anchors and self._needs_anchors(node):
                node.control_inputs += scope.anchors
        scope.nodes += self.nodes
        scope.final_nodes[self.own_name] = final
        # Values inside a function cannot be fetched.
        if scope.references and not scope.function:
            for value in self.outputs:
                if value in scope.references and value.producer is not None:
                    self._add_fetched_value(value)

    def _needs_anchors(self, node: Node) -> bool:
        """Whether a node of a body could run without the body: it has effects, or no inputs."""
        if not node.op.pure:
            return True
        return not self.controls and all(v is None or v.const is not None for v in node.inputs)

    def _add_fetched_value(self, reference: Value) -> None:
        """Read a reference to a variable, under the name by which it is fetched."""
        op = standard("ReadVariableOp", TENSORFLOW)
        name = reference.name.removesuffix("&")
        node = Node(op, [reference], [Value(name)], name=f"{name}#read", origin=self.origin)
        self.scope.nodes.append(node)


def _is_plain(value: Any) -> bool:
    """Whether nodes may have this attribute: a number, a string, a shape, or a list of such."""
    if isinstance(value, list):
        return all(isinstance(element, str | int | float) for element in value)
    return isinstance(value, tuple | str | int | float)


def listed(value: Any) -> Any:
    """Return a shape as a list, with -1 for unknown dims, and other values unchanged."""
    return [-1 if dim is None else dim for dim in value] if isinstance(value, tuple) else value
