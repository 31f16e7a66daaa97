"""Convert ONNX models to graphs.

Names become ``Value`` objects here: a nested graph that reads a value of an outer graph refers to
the same object. Nodes of older operator versions are rewritten (``upgrades``), calls of functions
are replaced by the functions' bodies (``functions``), and attributes get the defaults of the node's
own schema version, so that operations do not depend on the version of the file.

The file is not trusted, and only protobuf's parser reads it in native code. Violations of ONNX's
own rules (schemas, opsets, functions, tensors) are collected and reported here all at once.
``verify`` checks the rules of every graph: undefined names become values without a producer, and
names that are defined twice become two values. Nothing recurses: graphs among attributes are
added to a list of pending graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, zip_longest
from operator import attrgetter

import numpy as np

from penstock.analysis.schemas import first_schema, newest_opset, operation_names, value_faults
from penstock.analysis.type_constraints import check_types
from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.errors import MAX_NAME, InvalidModel, shortened
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import replace
from penstock.core.types import ANY, TensorType, Type
from penstock.frontends.common.builder import UniqueNames, short_name
from penstock.frontends.common.diagnostics import NO_KERNEL, ConversionError, Diagnostics
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.common.inferred_types import InferredTypes
from penstock.frontends.onnx.attributes import (
    AttributeReader,
    Expansion,
    ImportContext,
    Meanings,
    NameScope,
    OnnxNode,
    PendingGraph,
    Refusal,
)
from penstock.frontends.onnx.file import Source, Weights, opened
from penstock.frontends.onnx.functions import (
    FunctionTable,
    OnnxFunction,
    nested_graphs,
    opsets_of,
    plain_domain,
)
from penstock.frontends.onnx.messages import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    ValueInfoProto,
)
from penstock.frontends.onnx.node_upgrade import NCHWC, NodeUpgrade, current
from penstock.frontends.onnx.tensors import TensorReader, value_type
from penstock.frontends.onnx.upgrades import Meaning, meaning
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops.registry import MICROSOFT

_REGISTER = "register it with penstock.extend.operator (docs/how-to/custom-operation.md)"
_LONGEST_NAME = 64  # that is compared with those of ONNX


def load_onnx(source: Source, limits: Limits = DEFAULT_LIMITS, map_weights: bool = False) -> Model:
    """Read an ONNX model from a path, from bytes or from a ``ModelProto``.

    Raises ``InvalidModel`` for violations of the format or of ``limits``, ``Unsupported`` for
    operations without a kernel. External data are found only if the model is given by its path;
    they are read, or mapped into memory if ``map_weights``.
    """
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    with opened(source) as (proto, weights), ExitStack() as files:
        tensors = TensorReader(limits, path, map_weights, files)
        return _Importer(proto, weights, path, tensors).model()


_METADATA = attrgetter("metadata_props")
_REFERENCE = attrgetter("ref_attr_name")
# Opsets of domains that a model does not import, as in ONNX Runtime, since exporters forget them.
_IMPLIED = {MICROSOFT: 1, "ai.onnx.ml": 5}
_ALIGNING_OUTPUTS = "pytorch", "onnx.quantize"  # the second is ONNX Runtime's quantizer
_OVERRIDABLE_SINCE = 4  # version of the format


class _Importer:
    """Imports one model. ``weights`` are initializers of its graph that are not in ``proto``."""

    def __init__(
        self, proto: ModelProto, weights: Weights, path: str | None, tensors: TensorReader
    ) -> None:
        self.proto = proto
        self.weights = weights
        self.path = path
        where = "the model" if path is None else os.path.basename(path)
        self.diagnostics = Diagnostics(where, tensors.limits, proto.ByteSize)
        self.pending: list[PendingGraph] = []
        self.last_calls: list[Callable[[], None]] = []
        self.attributes = AttributeReader(tensors, self.diagnostics, self.pending)
        self.functions = FunctionTable(proto.functions)
        self.bodies: dict[OnnxFunction, tuple[dict[int, np.ndarray | None], Meanings]] = {}
        self.types = InferredTypes()
        self.scopes: dict[str, str] = {}
        self.overridable: dict[Value, Type] = {}
        self.top = top = NameScope()
        self.names = UniqueNames(lambda: chain(top.names, _names(proto.graph)))

    def model(self) -> Model:
        proto, diagnostics = self.proto, self.diagnostics
        where = diagnostics.where
        if not proto.HasField("graph"):
            raise InvalidModel(
                f"{where} has no graph: it is no ONNX model, or an empty one; export it again"
            )
        diagnostics.problem(*self.functions.problems)
        if self.functions.table:
            self.functions.check(proto.graph, diagnostics)
        opsets = opsets_of(proto.opset_import)
        for entry in proto.opset_import:
            if opsets[plain_domain(entry.domain)] != entry.version:
                domain = entry.domain or "ai.onnx"
                diagnostics.problem(f"{where} imports two opsets of {domain!r}; remove one")
        if not opsets and proto.ir_version < 3:
            opsets = {"": 1}  # the first version of the format had no opset imports
        graph = Graph([], [], [], decode_text(proto.graph.name))
        self.pending.append((graph, proto.graph, ImportContext(self.top, opsets, where)))
        while self.pending:
            self.fill(*self.pending.pop())  # may add nested graphs to the list
        diagnostics.raise_collected()
        for call in reversed(self.last_calls):
            call()
        graph.nodes += self.readers(graph)
        if proto.producer_name in _ALIGNING_OUTPUTS:
            _align_corners_as_torch(graph)
        if NCHWC in opsets:
            from penstock.frontends.onnx import nchwc

            for inner in list(graph.graphs()):
                nchwc.to_plain_layout(inner, self.names.unique, diagnostics)
            diagnostics.raise_collected()
        metadata = {decode_text(x.key): decode_text(x.value) for x in proto.metadata_props}
        return Model(
            {graph.name: graph},
            graph.name,
            {},
            metadata,
            self.path,
            check_types=check_types,
            about=self.about(opsets),
            scopes=self.scopes,
            output_dims=self.output_dims(),
            overridable={value.name: type_ for value, type_ in self.overridable.items()},
        )

    def readers(self, graph: Graph) -> list[Node]:
        """Return nodes that read the overridable initializers that nothing reads: a graph has the
        values of its nodes only, and callers may feed these too."""
        if not self.overridable:
            return []
        read = {value for node in graph.walk() for value in node.inputs}.union(graph.outputs)
        unread = [value for value in self.overridable if value not in read]
        op, _ = current("Identity")
        return [
            Node(op, [value], [Value(self.names.unique(value.name))], origin="the inputs")
            for value in unread
        ]

    def about(self, opsets: Mapping[str, int]) -> dict[str, str]:
        """Return the file's statements about its producer and its versions."""
        proto = self.proto
        opset = [f"{domain or 'ai.onnx'} {version}" for domain, version in opsets.items()]
        texts = {
            "producer": decode_text(proto.producer_name),
            "producer version": decode_text(proto.producer_version),
            "domain": decode_text(proto.domain),
            "model version": str(proto.model_version) if proto.model_version else "",
            "description": decode_text(proto.doc_string),
            "graph description": decode_text(proto.graph.doc_string),
            "IR version": str(proto.ir_version),
            "opset": ", ".join(opset),
        }
        return {name: text for name, text in texts.items() if text}

    def output_dims(self) -> dict[str, tuple[int | str | None, ...]]:
        """Return the dims that the file declares for its outputs."""
        dims = {}
        for info in self.proto.graph.output:
            with suppress(InvalidModel):  # the type is invalid, but not used
                type_ = value_type(info.type)
                if isinstance(type_, TensorType) and type_.shape is not None:
                    dims[info.name] = type_.shape
        return dims

    def name(self, name: str, context: ImportContext) -> str:
        """Return the name of a new value: a unique one in functions, which may be expanded many
        times, and in graphs that reuse names of the outputs of the containing node."""
        if name.__class__ is not str:  # protobuf returns bytes if it is not UTF-8
            self.diagnostics.problem(f"{context.where}: the name {name!r} is not UTF-8; rename it")
            name = repr(name)
        if context.prefix:
            return self.names.unique(short_name(context.prefix + name))
        # Names of this package's graphs are unique, unlike those of files.
        return self.names.unique(name) if name in context.scope.of_nodes_around else name

    # Graphs

    def fill(self, graph: Graph, proto: GraphProto, context: ImportContext) -> None:
        """Import the contents of one graph. Inputs that it already has are values of the outer
        graph, which replace the inputs of the file."""
        names = context.scope.names
        entry = context.depth == 1
        outer_inputs, graph.inputs = graph.inputs, []  # given by rules, such as those of searches
        around = context.scope.of_nodes_around
        for name, const in self.initializers(proto, context):
            # Most names stay as they are.
            stays = not context.prefix and name.__class__ is str and name not in around
            names[name] = Value(name if stays else self.name(name, context), const=const)
        n, wanted = len(proto.input), len(outer_inputs)
        if wanted not in (0, n):
            self.diagnostics.problem(f"{context.where} has {n} inputs, but must have {wanted}")
        for info, outer in zip_longest(proto.input, outer_inputs[:n]):
            if outer is not None:
                names[info.name] = outer
                continue
            initial = names.get(info.name) if entry else None
            if initial is not None and initial.const is not None:
                # Callers may override it. Before version 4, every initializer is an input.
                if self.proto.ir_version >= _OVERRIDABLE_SINCE:
                    self.overridable[initial] = TensorType(initial.const.dtype, initial.const.shape)
                    with suppress(InvalidModel):  # a declared type that is invalid is not used
                        self.overridable[initial] = value_type(info.type, entry=True)
                continue
            # Declared types of the inputs of nested graphs are not trusted but inferred.
            type_ = self.input_type(info, context) if entry else ANY
            name = self.name(info.name, context)
            # ONNX Runtime, too, lets inputs of nested graphs hide values of the graphs around.
            if not entry and context.scope.is_outer(name):
                name = self.names.unique(name)
            value = names[info.name] = Value(name, type_)
            graph.inputs.append(value)
        # Declared types of intermediate values are not read: memory is planned from types, and a
        # wrong one would mean writing beyond a buffer (decision 14).
        body = self.declare(proto.node, context, {})
        graph.outputs += [self.output(info.name, context) for info in proto.output]
        self.expand(graph.nodes, body)

    def output(self, name: str, context: ImportContext) -> Value:
        """Return the value of an output of a graph or function."""
        value = context.scope.find(name)
        if value is None:
            self.diagnostics.problem(
                f"{context.where}: output {name!r} is an input of a function that a call leaves "
                "out; give the call that input"
            )
            value = Value(name)
        return value

    def initializers(
        self, proto: GraphProto, context: ImportContext
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Return the constants of a graph by name."""
        seen: set[str] = set()
        where = f"in {context.where}"
        dense = chain(proto.initializer, self.weights if context.depth == 1 else ())
        for tensors, is_sparse in ((dense, False), (proto.sparse_initializer, True)):
            for tensor in tensors:
                name = tensor.values.name if is_sparse else tensor.name
                checkpoint()
                if not name or name in seen:
                    fault = f"initializer {name!r} twice; remove one" if name else ""
                    fault = fault or "an initializer without a name; name it"
                    self.diagnostics.problem(f"{context.where} has {fault}")
                seen.add(name)
                yield name, self.attributes.tensor(tensor, "initializer", name, where)

    def input_type(self, info: ValueInfoProto, context: ImportContext) -> Type:
        try:
            return value_type(info.type, entry=True)
        except InvalidModel as error:
            name = decode_text(info.name)
            for problem in error.problems:
                self.diagnostics.problem(f"input {name!r} of {context.where}: {problem}")
            return ANY

    # Nodes

    def declare(
        self, nodes: Sequence[NodeProto], context: ImportContext, bound: dict[str, Value]
    ) -> Iterator[OnnxNode]:
        """Create the output values of all nodes, and the constants of Constant nodes. Nodes may be
        in any order, so outputs are needed before inputs are looked up. ``bound`` has values
        for outputs of a function by name; names that no node produces remain in it."""
        self.diagnostics.count_nodes(len(nodes))
        if not context.prefix and any(map(_METADATA, with_checkpoints(nodes))):
            from penstock.frontends.onnx.module_scopes import module_scopes

            self.scopes |= module_scopes(nodes)
        names = context.scope.names
        around = context.scope.of_nodes_around
        declared: list[OnnxNode] = []
        functions = self.functions.table
        for index, proto in enumerate(with_checkpoints(nodes)):
            outputs: list[Value | None] = []
            for name in proto.output:
                value = None
                if name:
                    # Removed: a second definition of the name is a fault.
                    value = bound.pop(name, None) if bound else None
                    if value is None:
                        # Most names stay as they are.
                        stays = not context.prefix and name.__class__ is str and name not in around
                        value = Value(name if stays else self.name(name, context))
                    # A name that is defined twice gets two values, which verify reports.
                    names[name] = value
                outputs.append(value)
            node = OnnxNode(proto, index, outputs, context)
            constant = proto.op_type == "Constant" and plain_domain(proto.domain) == ""
            if constant and not (functions and self.functions.find(proto)):
                self.constant(node)
            else:
                declared.append(node)
        return with_checkpoints(declared)

    def expand(self, into: list[Node], body: Iterator[OnnxNode]) -> None:
        """Import nodes; the nodes of functions replace the calls."""
        stack: list[Expansion] = [(body, [])]  # a call of a function pauses the body around it
        while stack:
            rest, last = stack[-1]
            for node in rest:
                expansion = self.node(into, node)
                if expansion is not None:
                    stack.append(expansion)
                    break
            else:
                into += last
                stack.pop()

    def node(self, into: list[Node], node: OnnxNode) -> Expansion | None:
        """Import one node. Return the body to continue with if it calls a function, else None."""
        proto, _, outputs, context = node
        name = node.name
        origin = f"{name if len(name) <= MAX_NAME else shortened(name)} in {context.where}"
        names, scope = context.scope.names, context.scope
        # ONNX writes an empty name for an input that is left out.
        inputs = [(names[i] if i in names else scope.find(i)) if i else None for i in proto.input]
        if self.functions.table:
            function = self.functions.find(proto)
            if function is not None:
                return self.call(function, node, inputs)
        domain, op_type = proto.domain, proto.op_type
        meaning = context.meanings.get((domain, op_type))
        if meaning is None:
            meaning = self.meaning(plain_domain(domain), op_type, context)
            context.meanings[domain, op_type] = meaning
        if isinstance(meaning, Refusal):
            if meaning.undeclared:
                self.diagnostics.shared_problem(meaning.reason, origin)
            else:
                self.diagnostics.unsupported(_full_name(domain, op_type), meaning.reason, origin)
            return None
        attrs = dict(meaning.defaults)
        types = self.attributes.read(node, attrs)
        faults = list(value_faults(op_type, types, attrs)) if types else []
        if meaning.schema is not None:
            faults += meaning.schema.faults(types, inputs, len(outputs))
        if faults:
            self.diagnostics.problem(*[f"{origin} {fault}" for fault in faults])
            return None
        if meaning.rule is not None:
            unique = self.names.unique
            old = NodeUpgrade(name, inputs, outputs, attrs, types=self.types, unique=unique)
            old.op, old.origin = op_type, origin
            # From the end, where reading this node's attributes has added its graphs.
            old.contents = lambda graph: next(p for g, p, _ in self.pending[::-1] if g is graph)
            old.when_imported = self.last_calls.append
            old.version = 1 if meaning.schema is None else meaning.schema.version
            try:
                meaning.rule(old)
            except ConversionError as error:
                self.diagnostics.record(error, _full_name(domain, op_type), origin, origin)
                return None
            into += old.nodes
            if old.nodes:  # otherwise the rule leaves the node unchanged
                return None
        if meaning.op is not None:
            into.append(Node(meaning.op, inputs, outputs, attrs, name=name, origin=origin))
            return None
        self.diagnostics.unsupported(_full_name(domain, op_type), NO_KERNEL, origin)
        return None

    def meaning(self, domain: str, op_type: str, context: ImportContext) -> Meaning | Refusal:
        """Return the meaning of one operation's nodes in a context, or why they are refused."""
        if op_type.__class__ is not str or domain.__class__ is not str:
            return Refusal("its name is not UTF-8; rename it")
        opset = context.opsets.get(domain, _IMPLIED.get(domain))
        if opset is None:
            return Refusal(
                f"operator domain {domain or 'ai.onnx'!r} is undeclared: add it to the opset "
                "imports",
                undeclared=True,
            )
        newest = newest_opset(domain)
        if newest and opset > newest:
            return Refusal(
                f"opset {opset} is newer than {newest}, the last that this version of Penstock "
                "knows; export the model with an older opset"
            )
        result = meaning(op_type, domain, opset)
        if result.schema is None and result.op is None and result.rule is None and newest:
            hint = _hint(op_type, domain)
            return Refusal(f"opset {opset} of {domain or 'ai.onnx'} has no such operation{hint}")
        if result.op or result.rule:
            return result
        is_known = newest or domain in (MICROSOFT, NCHWC)
        return Refusal(NO_KERNEL if is_known else f"{NO_KERNEL}; {_REGISTER}")

    # Functions

    def call(
        self, function: OnnxFunction, node: OnnxNode, inputs: Sequence[Value | None]
    ) -> Expansion | None:
        """Return the body of a function, with the values and attributes of one call."""
        for role, actual, formal in (
            ("inputs", inputs, function.proto.input),
            ("outputs", node.outputs, function.proto.output),
        ):
            if len(actual) > len(formal):
                counts = f"{len(actual)} {role}, but {function.title} has {len(formal)}"
                self.diagnostics.problem(f"{node.origin} has {counts}")
                return None
        title = f"the call of {function.title} by {node.origin}"
        self.diagnostics.check_depth(node.context.depth + 1, title)
        inside = self.inside(function, node)
        names = inside.scope.names
        # Inputs that the call leaves out have no value.
        names.update((formal, None) for formal in function.proto.input)
        names.update(zip(function.proto.input, inputs, strict=False))
        pairs = zip(function.proto.output, node.outputs, strict=False)
        results = [(formal, output) for formal, output in pairs if output is not None]
        bound = dict(reversed(results))  # for an output that is listed twice, the first value
        own = set(bound.values())  # the other outputs repeat one of these
        body = self.declare(function.proto.node, inside, bound)
        copies = [
            self.copy(self.output(formal, inside), output, node)
            for formal, output in results
            if formal in bound or output not in own
        ]
        return body, [copy for copy in copies if copy is not None]

    def inside(self, function: OnnxFunction, node: OnnxNode) -> ImportContext:
        """Return the context of the body of a function in one call."""
        attributes: dict[str, tuple[AttributeProto, ImportContext]] = {}
        constants, meanings = self.bodies.setdefault(function, ({}, {}))  # shared by all calls
        inside = ImportContext(
            NameScope(),
            function.opsets,
            f"{function.title} of {self.diagnostics.where}",
            node.context.depth + 1,
            f"{short_name(node.name)}/",
            attributes,
            meanings,
            constants,
        )
        # A default must not refer to attributes of the call.
        outside = replace(inside, attributes=None)
        attributes.update((key, (a, outside)) for key, a in function.defaults.items())
        for attribute in node.proto.attribute:
            if attribute.name in function.attributes:
                attributes[attribute.name] = (attribute, node.context)
            else:
                self.diagnostics.problem(
                    f"{node.origin} has an attribute {attribute.name!r}, which {function.title} "
                    "does not have"
                )
        return inside

    def copy(self, value: Value, output: Value, call: OnnxNode) -> Node | None:
        """Make ``output`` a copy of ``value``: a constant, or the output of a new node."""
        if value.const is not None:
            output.set_constant(value.const)
            return None
        op, _ = current("Identity")
        name = f"{short_name(call.name)}/Identity"
        return Node(op, [value], [output], name=name, origin=f"{name} in {call.context.where}")

    def constant(self, node: OnnxNode) -> None:
        """Make the output of a Constant node a constant."""
        shared = node.context.constants
        array = shared.get(node.number)
        if array is None:
            array = self.attributes.constant(node)
            # A constant that refers to an attribute differs between calls.
            if not any(map(_REFERENCE, node.proto.attribute)):
                shared[node.number] = array
        if len(node.outputs) != 1:
            where, count = node.context.where, len(node.outputs)
            self.diagnostics.problem(f"a Constant in {where} has {count} outputs, not 1")
        for value in node.outputs:
            if value is not None and array is not None:
                value.set_constant(array)


def _align_corners_as_torch(graph: Graph) -> None:
    """Align the corners of what each Resize writes, as torch and ONNX Runtime do; ONNX's reference
    implementation aligns those of its size before rounding, such as 13.5 pixels."""
    for node in graph.walk():
        if node.attrs.get("coordinate_transformation_mode") == "align_corners":
            node.attrs = {**node.attrs, "whole_length": 1}


def _hint(op_type: str, domain: str) -> str:
    """What to do about an operation that an opset of ONNX lacks."""
    from difflib import get_close_matches  # for errors alone

    first = first_schema(op_type, domain)
    if first is not None:
        return f": it is in opsets from {first.version} on; export the model with such a one"
    names = operation_names(domain)
    alike = [name for name in names if name.casefold() == op_type.casefold()]
    alike = alike or get_close_matches(op_type[:_LONGEST_NAME], names, n=1, cutoff=0.75)
    return f"; did you mean {alike[0]!r}?" if alike else f"; if it is a custom one, {_REGISTER}"


def _full_name(domain: str, op_type: str) -> str:
    domain = plain_domain(domain)
    return f"{domain}.{op_type}" if domain else str(op_type)


def _names(graph: GraphProto) -> list[str]:
    """Return the names of all values of a graph and its nested graphs; some more than once."""
    names: list[str] = []
    stack = [graph]
    while stack:
        graph = stack.pop()
        names += [named.name for named in chain(graph.initializer, graph.input)]
        names += [sparse.values.name for sparse in graph.sparse_initializer]
        for node in graph.node:
            names += node.output
            stack += nested_graphs(node)
    return names
