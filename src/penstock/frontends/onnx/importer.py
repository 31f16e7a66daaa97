"""ONNX models to graphs.

Names become ``Value`` objects once and for all here: a nested graph that takes a value from outside
refers to the very object. Nodes of older operator versions are rewritten (``onnx_versions``), calls
of functions are replaced by the functions' bodies (``onnx_functions``), and every attribute is
filled in with the default of the node's own schema version, so that operations never ask which
version they came from.

The file is not trusted, and no native code of the onnx package but protobuf's parser sees it. What
it breaks of ONNX's own rules (schemas, opsets, functions, tensors) is reported here, all of it at
once; what a valid graph is beyond that, ``verify`` knows: names that nobody defines become values
without a producer, names defined twice two values. Nothing recurses: graphs that carry graphs are
put on a list of what is left to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, zip_longest
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto

from penstock.errors import InvalidModel, report
from penstock.frontends.onnx.attributes import Attributes
from penstock.frontends.onnx.file import Source, Weights, opened
from penstock.frontends.onnx.functions import Function, Functions, imported, nested, plain_domain
from penstock.frontends.onnx.rewriter import (
    InexpressibleError,
    NodeError,
    Rewriting,
    Types,
    current,
)
from penstock.frontends.onnx.schemas import Schema, newest_opset
from penstock.frontends.onnx.scopes import Call, Entry, Frame, Meanings, NodeMeaning, Scope
from penstock.frontends.onnx.tensors import TensorReader, element_dtype, text
from penstock.frontends.onnx.types import value_type
from penstock.frontends.onnx.upgrades import Meaning, meaning
from penstock.host import gc_pause
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.types import ANY, Type, constant_type

__all__ = ["element_dtype", "load", "value_type"]


def load(source: Source, limits: Limits | None = None) -> Model:
    """Read an ONNX model from a path, from bytes or from a ``ModelProto``.

    Raises ``InvalidModel`` for what breaks the rules of the format or ``limits``, ``Unsupported``
    for operations without a kernel. Data in files beside the model is mapped, and read when used;
    it is found only if the model is given by its path.
    """
    path = None if isinstance(source, bytes | onnx.ModelProto) else Path(source)
    with opened(source) as (proto, weights), gc_pause.paused():
        return _Importer(proto, weights, path, limits or DEFAULT_LIMITS).model()


class _Importer:
    """Imports one model. ``weights`` are initializers of its graph that are not in ``proto``."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        weights: Weights,
        path: Path | None,
        limits: Limits,
    ) -> None:
        self.proto = proto
        self.weights = weights
        self.path = path
        self.limits = limits
        self.where = path.name if path is not None else "the model"
        self.problems: list[str] = []
        tensors = TensorReader(None if path is None else path.parent, limits)
        self.attributes = Attributes(tensors, self.problems, self.nested)
        self.unsupported: dict[tuple[str, str], list[str]] = {}
        self.undeclared: dict[str, list[str]] = {}
        self.functions = Functions(proto.functions)
        self.definitions: dict[Schema, Function] = {}
        self.bodies: dict[Function, tuple[dict[int, np.ndarray | None], Meanings]] = {}
        self.types = Types()
        self.top = Scope()
        self.left: list[tuple[Graph, GraphProto, Frame]] = []
        self.nodes = 0
        self.taken: set[str] = set()
        self.suffixes: dict[str, int] = {}

    def model(self) -> Model:
        proto = self.proto
        if not proto.HasField("graph"):
            raise InvalidModel(
                f"{self.where} has no graph: it is no ONNX model, or an empty one; export it again"
            )
        self.problems += self.functions.problems
        if self.functions.table:
            self.functions.check(proto.graph, self.limits)
        opsets = imported(proto.opset_import)
        for entry in proto.opset_import:
            if opsets[plain_domain(entry.domain)] != entry.version:
                domain = entry.domain or "ai.onnx"
                self.problems.append(f"{self.where} imports two opsets of {domain!r}; remove one")
        if not opsets and proto.ir_version < 3:
            opsets = {"": 1}
        graph = Graph([], [], [], text(proto.graph.name))
        self.left.append((graph, proto.graph, Frame(self.top, opsets, self.where)))
        while self.left:
            self.fill(*self.left.pop())
        self.report()
        metadata = {text(entry.key): text(entry.value) for entry in proto.metadata_props}
        path = None if self.path is None else str(self.path)
        return Model({graph.name: graph}, graph.name, {}, metadata, path)

    def report(self) -> None:
        """Raise what was found to be wrong, if anything was."""
        for domain, nodes in self.undeclared.items():
            more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
            self.problems.append(
                f"operator domain {domain or 'ai.onnx'!r} is undeclared: add it to the opset "
                f"imports (used by {', '.join(nodes[:5])}{more})"
            )
        report(self.problems, self.unsupported)

    def value(self, name: str, frame: Frame, kind: Type = ANY) -> Value:
        """A new value, with a name that is unique where a function may be expanded many times."""
        if name.__class__ is not str:
            self.problems.append(f"{frame.where}: the name {name!r} is not UTF-8; rename it")
            name = repr(name)
        return Value(self.unique(frame.prefix + name) if frame.prefix else name, kind)

    def unique(self, name: str) -> str:
        """``name``, or one made from it, that nothing in the model has."""
        if not self.taken:
            self.taken.update(self.top.names, _names(self.proto.graph))
        found, n = name, self.suffixes.get(name, 0)
        while found in self.taken:
            n += 1
            found = f"{name}_{n}"
        self.suffixes[name] = n
        self.taken.add(found)
        return found

    # Graphs

    def fill(self, graph: Graph, proto: GraphProto, frame: Frame) -> None:
        """Import the contents of one graph. Inputs that it has already are values around it, and
        stand for those of the file.
        """
        names = frame.scope.names
        entry = frame.depth == 1
        given, graph.inputs = graph.inputs, []
        for name, const in self.initializers(proto, frame):
            value = self.value(name, frame)
            value.const, value.type = const, constant_type(const)
            names[name] = value
        if given and len(given) != len(proto.input):
            self.problems.append(
                f"{frame.where} has {len(proto.input)} inputs, but must have {len(given)}"
            )
        for info, outer in zip_longest(proto.input, given[: len(proto.input)]):
            if outer is not None:
                names[info.name] = outer
                continue
            if entry and info.name in names and names[info.name].const is not None:  # type: ignore[union-attr]
                continue  # an initializer with a name to feed another value by
            # What a nested graph declares of its inputs is not relied on: inference says it.
            value = self.value(info.name, frame, self.input_type(info, frame) if entry else ANY)
            names[info.name] = value
            graph.inputs.append(value)
        body = self.declare(proto.node, frame, {})
        graph.outputs += [self.found(info.name, frame) for info in proto.output]
        self.expand(graph.nodes, body, frame)

    def found(self, name: str, frame: Frame) -> Value:
        """The value that a graph gives as an output."""
        value = frame.scope.find(name)
        if value is None:
            self.problems.append(
                f"{frame.where}: output {name!r} is an input of a function that a call leaves out"
            )
            value = Value(name)
        return value

    def initializers(self, proto: GraphProto, frame: Frame) -> Iterator[tuple[str, np.ndarray]]:
        """The constants of a graph by name."""
        seen: set[str] = set()
        where = f"in {frame.where}"
        dense = chain(proto.initializer, self.weights if frame.depth == 1 else ())
        sparse = ((tensor.values.name, tensor) for tensor in proto.sparse_initializer)
        for name, tensor in chain(((tensor.name, tensor) for tensor in dense), sparse):
            if not name:
                self.problems.append(f"{frame.where} has an initializer without a name; name it")
            elif name in seen:
                self.problems.append(f"{frame.where} has initializer {name!r} twice; remove one")
            seen.add(name)
            array = self.attributes.tensor(tensor, "initializer", name, where)
            yield name, array

    def input_type(self, info: onnx.ValueInfoProto, frame: Frame) -> Type:
        try:
            return value_type(info.type, entry=True)
        except InvalidModel as error:
            name = text(info.name)
            self.problems += [f"input {name!r} of {frame.where}: {e}" for e in error.problems]
            return ANY

    # Nodes

    def declare(
        self, nodes: Sequence[NodeProto], frame: Frame, bound: dict[str, Value]
    ) -> Iterator[NodeMeaning]:
        """Make a value of each output, before any node looks for its inputs: they may come in any
        order. ``bound`` has the values that outputs of a function are to be; those of its names
        that no node produces stay in it. Constants end here.
        """
        if self.limits.max_nodes is not None:
            self.nodes += len(nodes)
            if self.nodes > self.limits.max_nodes:
                raise InvalidModel(
                    f"{self.where} has more nodes than Limits.max_nodes = {self.limits.max_nodes}; "
                    "raise the limit if you trust the model"
                )
        names = frame.scope.names
        made: list[list[Value | None] | None] = []
        functions = self.functions.table
        for index, proto in enumerate(nodes):
            outputs: list[Value | None] = []
            for name in proto.output:
                value = None
                if name:
                    value = bound.pop(name, None) if bound else None
                    if value is None:
                        value = self.value(name, frame)
                    names[name] = value
                outputs.append(value)
            constant = proto.op_type == "Constant" and plain_domain(proto.domain) == ""
            if constant and not (functions and self.functions.find(proto)):
                self.constant(proto, outputs, index, frame)
                made.append(None)
            else:
                made.append(outputs)
        return zip(count(), nodes, made, strict=False)

    def expand(self, into: list[Node], body: Iterator[NodeMeaning], frame: Frame) -> None:
        """Import nodes, those of functions in the place of their calls."""
        stack: list[Entry] = [(body, frame, [])]
        while stack:
            left, frame, last = stack[-1]
            for index, proto, outputs in left:
                if outputs is None:
                    continue
                called = self.node(into, proto, outputs, index, frame)
                if called is not None:
                    stack.append(called)
                    break
            else:
                into += last
                stack.pop()

    def node(
        self,
        into: list[Node],
        proto: NodeProto,
        outputs: list[Value | None],
        index: int,
        frame: Frame,
    ) -> Entry | None:
        """Import one node; the body to go on with, if it is a call of a function."""
        op_type = proto.op_type
        own = proto.name
        name = f"{frame.prefix}{text(own) if own else f'{op_type}_{index}'}"
        origin = f"{name} in {frame.where}"
        names, scope = frame.scope.names, frame.scope
        inputs = [(names[i] if i in names else scope.find(i)) if i else None for i in proto.input]
        if self.functions.table:
            function = self.functions.find(proto)
            if function is not None:
                return self.call(function, proto, inputs, outputs, name, frame)
        key = (proto.domain, op_type)
        known = frame.meanings.get(key)
        if known is None:
            known = frame.meanings[key] = self.meaning(plain_domain(key[0]), op_type, frame)
        if isinstance(known, str):
            self.refuse(plain_domain(key[0]), op_type, known, origin)
            return None
        kinds: dict[str, int] = {}
        attrs = dict(known.defaults)
        for attribute in proto.attribute:
            self.attributes.add(attribute, attrs, kinds, name, frame)
        if known.schema is not None:
            faults = list(known.schema.faults(kinds, inputs, len(outputs)))
            if faults:
                self.problems += [f"{origin} {fault}" for fault in faults]
                return None
        if known.op is not None:
            into.append(Node(known.op, inputs, outputs, attrs, name=name, origin=origin))
        elif known.rule is not None:
            old = Rewriting(
                name,
                known.schema.version,  # type: ignore[union-attr]
                inputs,
                outputs,
                attrs,
                origin=origin,
                types=self.types,
                unique=self.unique,
            )
            try:
                known.rule(old)
            except InexpressibleError as error:
                self.refuse(plain_domain(key[0]), op_type, str(error), origin)
            except NodeError as error:
                self.problems.append(f"{origin} {error}")
            into += old.nodes
        else:
            return self.call(self.definition(known.schema), proto, inputs, outputs, name, frame)
        return None

    def meaning(self, domain: str, op_type: str, frame: Frame) -> Meaning | str:
        """What the nodes of one operation mean in a frame, or why they mean nothing here."""
        if op_type.__class__ is not str or domain.__class__ is not str:
            return "its name is not UTF-8"
        opset = frame.opsets.get(domain)
        if opset is None:
            return "undeclared"
        newest = newest_opset(domain)
        if newest and opset > newest:
            return (
                f"opset {opset} is newer than {newest}, the last that this version of Penstock "
                "knows; export the model with an older opset"
            )
        found = meaning(op_type, domain, opset)
        if found.schema is None and found.op is None and newest:
            return f"opset {opset} of {domain or 'ai.onnx'} has no such operation"
        if found.op is None and found.rule is None and found.function is None:
            return "there is no kernel of it"
        return found

    def refuse(self, domain: str, op_type: str, reason: str, origin: str) -> None:
        if reason == "undeclared":
            self.undeclared.setdefault(domain, []).append(origin)
            return
        full = f"{domain}.{op_type}" if domain else str(op_type)
        self.unsupported.setdefault((full, reason), []).append(origin)

    # Functions

    def definition(self, schema: Schema | None) -> Function:
        assert schema is not None
        if schema not in self.definitions:
            self.definitions[schema] = Function.of_schema(schema)
        return self.definitions[schema]

    def call(
        self,
        function: Function,
        proto: NodeProto,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        name: str,
        frame: Frame,
    ) -> Entry | None:
        """The body of a function, with the values and attributes of one call in place."""
        for what, given, formal in (
            ("inputs", inputs, function.inputs),
            ("outputs", outputs, function.outputs),
        ):
            if len(given) > len(formal):
                self.problems.append(
                    f"{name} in {frame.where} has {len(given)} {what}, but {function.title} "
                    f"has {len(formal)}"
                )
                return None
        if frame.depth >= self.limits.max_depth:
            raise self.too_deep(f"the call of {function.title} by {name} in {frame.where}")
        attributes: dict[str, tuple[AttributeProto, Frame]] = {}
        constants, meanings = self.bodies.setdefault(function, ({}, {}))
        inside = Frame(
            Scope(),
            function.opsets,
            f"{function.title} of {self.where}",
            frame.depth + 1,
            f"{name}/",
            Call(attributes, constants),
            body=True,
            meanings=meanings,
        )
        outside = replace(inside, call=None)
        attributes.update((key, (a, outside)) for key, a in function.defaults.items())
        for attribute in proto.attribute:
            if attribute.name in function.attributes:
                attributes[attribute.name] = (attribute, frame)
            else:
                self.problems.append(
                    f"{name} in {frame.where} has an attribute {attribute.name!r}, which "
                    f"{function.title} does not have"
                )
        names = inside.scope.names
        names.update((formal, None) for formal in function.inputs)
        names.update(zip(function.inputs, inputs, strict=False))
        bound: dict[str, Value] = {}
        again: list[tuple[str, Value]] = []
        for formal, output in zip(function.outputs, outputs, strict=False):
            if output is not None:
                if formal in bound:
                    again.append((formal, output))
                bound.setdefault(formal, output)
        body = self.declare(function.nodes, inside, bound)
        last = [
            self.copied(self.found(formal, inside), output, name, frame)
            for formal, output in [*bound.items(), *again]
        ]
        return body, inside, [node for node in last if node is not None]

    def copied(self, value: Value, output: Value, name: str, frame: Frame) -> Node | None:
        """What makes ``output`` a copy of ``value``."""
        if value.const is not None:
            output.const, output.type = value.const, value.type
            return None
        op, _ = current("Identity")
        name = f"{name}/Identity"
        return Node(op, [value], [output], name=name, origin=f"{name} in {frame.where}")

    def too_deep(self, what: str) -> InvalidModel:
        return InvalidModel(
            f"{what} nests deeper than Limits.max_depth = {self.limits.max_depth}; raise the "
            "limit if you trust the model"
        )

    def nested(self, proto: GraphProto, key: str, name: str, frame: Frame) -> Graph:
        """A graph among the attributes of a node; its contents are imported later."""
        if frame.depth >= self.limits.max_depth:
            raise self.too_deep(f"{key} of {name} in {frame.where}")
        graph = Graph([], [], [], text(proto.name))
        inside = Frame(
            Scope(frame.scope),
            frame.opsets,
            f"{key} of {name} in {frame.where}",
            frame.depth + 1,
            frame.prefix,
            frame.call,
            meanings=frame.meanings,
        )
        self.left.append((graph, proto, inside))
        return graph

    def constant(
        self, proto: NodeProto, outputs: Sequence[Value | None], index: int, frame: Frame
    ) -> None:
        """Make the output of a Constant node a constant."""
        shared = frame.call.constants if frame.call is not None and frame.body else {}
        array = shared.get(index)
        if array is None:
            array = self.attributes.constant(proto, index, frame)
            if not any(attribute.ref_attr_name for attribute in proto.attribute):
                shared[index] = array
        if len(outputs) != 1:
            self.problems.append(f"a Constant in {frame.where} has {len(outputs)} outputs, not 1")
        for value in outputs:
            if value is not None and array is not None:
                value.const, value.type = array, constant_type(array)


def _names(graph: GraphProto) -> Iterator[str]:
    """The names of all values of a graph and of those nested in it; some more than once."""
    left = [graph]
    while left:
        graph = left.pop()
        for tensor in graph.initializer:
            yield tensor.name
        for sparse in graph.sparse_initializer:
            yield sparse.values.name
        for info in graph.input:
            yield info.name
        for node in graph.node:
            yield from node.output
            if node.attribute:
                left += nested(node)
