"""TensorFlow's graphs to ours.

A node becomes one node of the same name wherever there is an operation with its meaning, ONNX's or
one of the domain "tensorflow"; where it takes several (``graphdef_rules``), the last one has the
name, and the others its name with ``#`` and a word behind. A constant stays a node: it may wait for
others, and so belong to a frame, and a run counts it. Values are named as in TensorFlow,
``node:output``, and ``Model.aliases`` lets ``node`` stand for ``node:0``.

What a node reads of constants while the graph is imported (axes, say), the node it becomes waits
for instead, so that the same nodes run as in TensorFlow, in the same frames.

Calls of functions are replaced by their bodies (``graphdef_functions``), but for functions that
call themselves. References to variables are handles: who reads the variable's value through one
gets a node that does it.

The file is not trusted. All that breaks the format's rules is reported at once, and so are all
operations that there is no kernel of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import InvalidModel, report
from penstock.frontends.tensorflow import rules, rules_functions
from penstock.frontends.tensorflow.attrs import attribute
from penstock.frontends.tensorflow.conversion import Conversion, Reference, Scope
from penstock.frontends.tensorflow.file import read_graph
from penstock.frontends.tensorflow.function_library import Library
from penstock.frontends.tensorflow.known_shapes import Shapes, in_order
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef, NodeDef
from penstock.frontends.tensorflow.schemas import Schema, schemas
from penstock.frontends.tensorflow.tensors import TensorError
from penstock.frontends.tensorflow.types import declared_type
from penstock.host import gc_pause
from penstock.ir.graph import Graph, Model, Value
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.ops.registry import TENSORFLOW, find
from penstock.ops.tensorflow.state import VARIABLES, Store
from penstock.types import ANY, TensorType

PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})
_NO_RESULTS = frozenset({"Const", "Placeholder", "PlaceholderV2"})


def load(source: bytes | Path, limits: Limits | None = None) -> Model:
    """Read a GraphDef from bytes, or from a ``.pb`` or ``.pbtxt`` file.

    Its inputs are the placeholders, its outputs the values of nodes that nobody reads. Raises
    ``InvalidModel`` for what breaks the rules of the format or ``limits``, ``Unsupported`` for
    operations without a kernel.
    """
    path = None if isinstance(source, bytes) else source
    proto = read_graph(source)
    with gc_pause.paused():
        importer = Importer(proto, path, limits or DEFAULT_LIMITS)
        return importer.model()


class Importer:
    """Imports one graph with its library of functions.

    ``store`` holds the variables; ``frozen`` has the values of those that nothing assigns to, by
    the name of the node that makes the handle. By the handles themselves, and by copies of these,
    ``handles`` has these values, and ``declared`` the types of all variables.
    """

    def __init__(
        self,
        proto: GraphDef,
        path: Path | None,
        limits: Limits,
        frozen: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.proto = proto
        self.path = path
        self.limits = limits
        self.frozen = frozen or {}
        self.store = Store()
        self.where = "the model" if path is None else path.name
        self.problems: list[str] = []
        self.unsupported: dict[tuple[str, str], list[str]] = {}
        self.library = Library(proto.library, self.where, limits, self.problems)
        self.functions: dict[str, Graph] = {}
        self.handles: dict[Value | None, np.ndarray] = {}
        self.declared: dict[Value | None, TensorType] = {}
        self.shapes = Shapes()
        self.nodes = 0
        self.taken = {node.name for node in proto.node}
        self.folders = {
            name[: i + 1] for name in self.taken for i, letter in enumerate(name) if letter == "/"
        }

    def model(self) -> Model:
        """The model whose entry is the whole graph."""
        scope = self.main()
        graph = Graph(scope.inputs, self.results(scope), scope.nodes, "main")
        self.report()
        return self.finished(graph, scope)

    def main(self) -> Scope:
        """The nodes of the graph itself."""
        if not self.proto.node:
            raise InvalidModel(f"{self.where} has no nodes: it is no GraphDef, or an empty one")
        scope = Scope(self.where, self.limits)
        self.fill(scope, self.proto.node)
        while self.library.called:
            rules_functions.define(self, *self.library.called.popitem())
        return scope

    def finished(self, graph: Graph, scope: Scope) -> Model:
        """The model, whose values can be named by the names of nodes alone."""
        named = scope.values.items()
        aliases = {name: values[0].name.removesuffix("&") for name, values in named if values}
        path = None if self.path is None else str(self.path)
        model = Model({graph.name: graph}, graph.name, self.functions, {}, path)
        model.aliases = aliases
        return model

    def report(self) -> None:
        """Raise what was found to be wrong, if anything was."""
        unsupported = self.unsupported.items()
        report(
            self.problems,
            {(f"{TENSORFLOW}.{op}", why): nodes for (op, why), nodes in unsupported},
        )

    def refuse(self, op: str, why: str, origin: str) -> None:
        """There is no kernel for a node."""
        self.unsupported.setdefault((op, why), []).append(origin)

    def results(self, scope: Scope) -> list[Value]:
        """The values that nobody reads: all of each node of which nobody reads any."""
        found: list[Value] = []
        for name, values in scope.values.items():
            op = scope.protos[name].op
            if (
                values is None
                or name in scope.read
                or op in _NO_RESULTS
                or any(v.type == ANY for v in values)
            ):
                continue
            found += [value for value in values if value.producer is not None]
        return found

    # Nodes

    def fill(self, scope: Scope, protos: Sequence[NodeDef]) -> None:
        """Import the nodes of a graph or of the body of a function."""
        self.nodes += len(protos)
        if self.limits.max_nodes is not None and self.nodes > self.limits.max_nodes:
            raise InvalidModel(
                f"{self.where} has more nodes than Limits.max_nodes = {self.limits.max_nodes}, "
                "function bodies expanded; raise the limit if you trust the model"
            )
        declared = [proto for proto in protos if self.declare(scope, proto)]
        for proto in in_order(declared):
            self.convert(scope, proto)
        scope.connect()

    def declare(self, scope: Scope, proto: NodeDef) -> bool:
        """Make a value of each output, before any node looks for its inputs: they may come in any
        order. Whether the node is one that can be imported."""
        name, op = proto.name, proto.op
        origin = f"{scope.prefix}{name} in {scope.where}"
        if not name or name in scope.protos or name in scope.arguments:
            fault = "twice; rename one" if name else "without a name; name it"
            self.problems.append(f"{scope.where} has a node {name!r} ({op}) {fault}")
            return False
        schema = schemas().get(op) or self.library.schema(op)
        scope.protos[name] = proto
        if schema is None:
            self.refuse(op, "there is no kernel of it", origin)
            scope.values[name] = None
            return False
        try:
            attrs = self.attributes(proto, schema, scope)
            outputs = list(schema.outputs_of(attrs))
            wanted = schema.inputs_of(attrs)
        except (TensorError, ValueError, RecursionError) as error:
            self.problems.append(f"{origin} ({op}): {error}")
            scope.values[name] = None
            return False
        scope.attrs[name] = attrs
        scope.schemas[name] = schema
        scope.arity[name] = wanted
        values = []
        for i, (argument, index, kind, ref) in enumerate(outputs):
            value_name = f"{scope.prefix}{name}:{i}"
            value = Value(f"{value_name}&" if ref else value_name, declared_type(kind, ref))
            if ref:
                scope.references.add(value)
            scope.outputs[name, argument, index] = i
            values.append(value)
        if values and scope.prefix + name in self.frozen:
            self.handles[values[0]] = self.frozen[scope.prefix + name]
        if op in VARIABLES and values:
            held = declared_type(attrs.get("dtype"), False, attrs.get("shape"))
            if isinstance(held, TensorType):
                self.declared[values[0]] = held
        scope.values[name] = values
        return True

    def attributes(self, proto: NodeDef, schema: Schema, scope: Scope) -> dict[str, Any]:
        attrs = dict(schema.defaults)
        for key, value in proto.attr.items():
            if key.startswith("_"):
                continue
            try:
                found = attribute(value, scope.bound, self.limits)
            except TensorError as error:
                raise TensorError(f"its attribute {key!r} {error}") from error
            default = attrs.get(key)
            kinds = _KINDS.get(key, ()) if default is None else _alike(default)
            if kinds and found is not None and not isinstance(found, kinds):
                raise TensorError(f"its attribute {key!r} is {found!r}, of another type")
            attrs[key] = found
        return attrs

    def convert(self, scope: Scope, proto: NodeDef) -> None:
        """Emit the nodes that one node becomes."""
        name, op = proto.name, proto.op
        origin = f"{scope.prefix}{name} in {scope.where}"
        data, controls, faults = self.inputs(scope, proto)
        wanted = scope.arity[name]
        if not faults and len(data) != len(wanted):
            faults = [f"has {len(data)} inputs, but {op} takes {len(wanted)}"]
        if faults:
            self.problems += [f"{origin} ({op}) {fault}" for fault in faults]
            return
        if any(reference is None for reference in data):
            return  # what it reads is reported already
        references: list[Reference] = data  # type: ignore[assignment]
        conversion = Conversion(self, scope, proto, references, controls, origin)
        for i, (argument, reference) in enumerate(zip(wanted, references, strict=True)):
            is_ref = reference.value in scope.references
            if is_ref and not argument.ref:
                conversion.dereference(i)
            elif argument.ref and not is_ref:
                self.problems.append(f"{origin} ({op}): its input {i} must refer to a variable")
                return
        try:
            self.rule(op, conversion, schemas().get(op) is None)
        except rules.InexpressibleError as error:
            self.refuse(op, str(error), origin)
        except (TensorError, rules.NodeError) as error:
            self.problems.append(f"{origin} ({op}) {error}")
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # Rules take attributes for what TensorFlow writes; a file may have anything there.
            self.problems.append(
                f"{origin} ({op}) has attributes or inputs that it cannot have: {error!r}"
            )
        else:
            conversion.close()

    def rule(self, op: str, conversion: Conversion, function: bool) -> None:
        rule = rules.RULES.get(op)
        if function:
            rules_functions.direct_call(conversion)
        elif rule is not None:
            rule(conversion)
        elif find(op, TENSORFLOW) is not None:
            conversion.own()
        else:
            raise rules.InexpressibleError("there is no kernel of it")

    def inputs(
        self, scope: Scope, proto: NodeDef
    ) -> tuple[list[Reference | None], list[str], list[str]]:
        """What a node reads, whom it waits for, and what is wrong with that. ``None`` stands for a
        value of a node that could not be imported."""
        data: list[Reference | None] = []
        controls: list[str] = []
        faults: list[str] = []
        for text in proto.input:
            if text.startswith("^"):
                source = text[1:]
                if source not in scope.protos and source not in scope.arguments:
                    faults.append(f"waits for {source!r}, which is no node of {scope.where}")
                else:
                    controls.append(source)
                continue
            if controls:
                faults.append(f"reads {text!r} behind its control inputs, which come last")
            try:
                data.append(scope.find(text))
            except KeyError as error:
                faults.append(f"reads {text!r}, {error.args[0]}")
        return data, controls, faults

    def prefix(self, name: str) -> str:
        """What the names of nodes inside of ``name`` begin with; nothing else in the model does."""
        found, n = f"{name}/", 0
        while found in self.folders:
            n += 1
            found = f"{name}/~{n}/"
        self.folders.add(found)
        return found


_KINDS: Mapping[str, tuple[type, ...]] = {"dtype": (str,), "shape": (tuple, str)}


def _alike(default: Any) -> tuple[type, ...]:
    """The types that an attribute with this default can be of."""
    return (int, float) if isinstance(default, float) else (type(default),)
