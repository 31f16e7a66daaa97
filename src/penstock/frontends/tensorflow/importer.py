"""TensorFlow's GraphDefs to graphs.

A node becomes one node of the same name if an operation of ONNX or of the domain "tensorflow" has
its meaning; where it takes several (``rules``), the final one has the name, and the others the name
followed by ``#`` and a hint. A constant stays a node: it may wait for others, and so belong to a
frame, and a run counts it. Values are named as in TensorFlow, ``node:output``, and
``Model.aliases`` lets ``node`` stand for ``node:0``.

A node waits for the constants that were read at import time (axes, for instance) instead of reading
them, so that the same nodes run as in TensorFlow, in the same frames.

Calls of functions are replaced by their bodies (``rules_functions``), except for functions that
call themselves. References to variables are handles: nodes that read the value of a variable get a
node that reads the handle.

The file is not trusted. All violations of the format, or else all operations without a kernel, are
reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.types import ANY, TensorType
from penstock.frontends.common.builder import short_name
from penstock.frontends.common.diagnostics import (
    NO_KERNEL,
    Diagnostics,
    InexpressibleError,
    TensorError,
)
from penstock.frontends.tensorflow import (  # noqa: F401 - modules register their rules
    rules,
    rules_arrays,
    rules_functions,
    rules_images,
    rules_text,
)
from penstock.frontends.tensorflow.conversion import RULES, Conversion, ConversionContext
from penstock.frontends.tensorflow.file import read_graph
from penstock.frontends.tensorflow.function_library import FunctionLibrary
from penstock.frontends.tensorflow.proto.graphdef_pb2 import NodeDef
from penstock.frontends.tensorflow.reference_reads import late_reads
from penstock.frontends.tensorflow.schemas import TfSchema, schemas
from penstock.frontends.tensorflow.scope import (
    DeclaredNode,
    GraphScope,
    Reference,
    producers_first,
    unique_prefixes,
)
from penstock.frontends.tensorflow.tables import TABLES, Tables, table_contents
from penstock.frontends.tensorflow.tensors import declared_type, decode_attribute
from penstock.frontends.tensorflow.variables import VariableFacts
from penstock.ir.graph import Graph, Model, Value
from penstock.ir.op import AttrDict
from penstock.ops.registry import TENSORFLOW, find
from penstock.ops.tensorflow.state import VARIABLES, Store

PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})
# Characters of the names of a node's outputs, from which on those behind the first are shortened.
_MAX_NAMES = 2**16
# Outputs of a node, from which on they count as nodes.
_MANY_OUTPUTS = 256
_NO_RESULTS = frozenset({"Const", *PLACEHOLDERS})


def load_graph_def(source: bytes | Path, limits: Limits = DEFAULT_LIMITS) -> Model:
    """Read a GraphDef from bytes, or from a ``.pb`` or ``.pbtxt`` file.

    Its inputs are the placeholders, its outputs the values of nodes without readers. Raises
    ``InvalidModel`` for violations of the format or of ``limits``, ``Unsupported`` for operations
    without a kernel.
    """
    path = None if isinstance(source, bytes) else source
    proto = read_graph(source)
    where = "the model" if path is None else path.name
    diagnostics = Diagnostics(where, limits, proto.ByteSize)
    library = FunctionLibrary(proto.library, where, limits)
    return Importer(proto.node, proto.versions.producer, library, diagnostics).model(path)


class Importer(ConversionContext):
    """Imports one graph. ``tables`` has what tables hold, by default what the nodes themselves fill
    them with."""

    def __init__(
        self,
        nodes: Sequence[NodeDef],
        producer: int,
        library: FunctionLibrary,
        diagnostics: Diagnostics,
        variables: VariableFacts | None = None,
        tables: Tables | None = None,
    ) -> None:
        variables = variables or VariableFacts(Store(), {})
        prefixes = unique_prefixes(node.name for node in nodes)
        tables = tables or table_contents(nodes, library, diagnostics.where)
        super().__init__(producer, library, diagnostics, variables, tables, prefixes)
        self.nodes = nodes
        diagnostics.problem(*library.problems)
        self.functions: dict[str, Graph] = {}

    def model(self, path: Path | None) -> Model:
        """The model whose entry is the whole graph, which ``path`` has."""
        scope = self.main()
        graph = Graph(scope.inputs, _results(scope), scope.nodes, "main")
        self.diagnostics.raise_collected()
        # A reference is fetched as the value of its variable, which has the name without the mark.
        aliases = {
            name: declared.values[0].name.removesuffix("&")
            for name, declared in scope.declared.items()
            if declared.values
        }
        source = None if path is None else str(path)
        return Model({graph.name: graph}, graph.name, self.functions, {}, source, aliases)

    def main(self) -> GraphScope:
        """Import the nodes of the graph itself, and the functions that remain functions."""
        where = self.diagnostics.where
        if not self.nodes:
            raise InvalidModel(
                f"{where} has no nodes: it is no GraphDef, or an empty one; export it again"
            )
        scope = GraphScope(where, self.library.constants)
        # Functions can double the nodes with each call.
        expanded = self.library.expanded_nodes(self.nodes)
        self.diagnostics.check_nodes(self.diagnostics.nodes + expanded)
        self.import_nodes(scope, self.nodes)
        if scope.references:
            scope.nodes += late_reads(scope.nodes)
        while self.library.called:  # functions may call others that remain, too
            name, function = self.library.called.popitem()
            graph = rules_functions.remaining_function(self, name, function)
            if graph is not None:
                self.functions[name] = graph
        return scope

    def import_nodes(self, scope: GraphScope, protos: Sequence[NodeDef]) -> None:
        """Import the nodes of a graph or of the body of a function."""
        self.diagnostics.count_nodes(len(protos))
        importable = [proto for proto in with_checkpoints(protos) if self.declare(scope, proto)]
        # Rules ask for the types and constants of inputs, which must have been converted.
        for proto in with_checkpoints(producers_first(importable)):
            self.convert(scope, proto)
        scope.connect()

    def declare(self, scope: GraphScope, proto: NodeDef) -> bool:
        """Make the output values of a node, and return whether it can be imported. Nodes may come
        in any order, so that outputs are needed before inputs are looked up."""
        name, op = proto.name, proto.op
        origin = scope.origin(name)
        if not name or name in scope.declared or name in scope.arguments:
            fault = "twice; rename one" if name else "without a name; name it"
            self.diagnostics.problem(f"{scope.where} has a node {name!r} ({op}) {fault}")
            return False
        schema = schemas().get(op) or self.library.schema(op)
        declared = scope.declared[name] = DeclaredNode(proto)
        if schema is None:
            self.diagnostics.unsupported(f"{TENSORFLOW}.{op}", NO_KERNEL, origin)
            return False
        try:
            attrs = declared.attrs = self.attributes(proto, schema, scope)
            outputs = list(schema.outputs_of(attrs))
            declared.arguments = schema.inputs_of(attrs)
        except (TensorError, ValueError, RecursionError) as error:
            self.diagnostics.problem(f"{origin} ({op}): {error}")
            return False
        if len(outputs) > _MANY_OUTPUTS:  # one number in the file makes them
            self.diagnostics.count_nodes(len(outputs))
        declared.values = []
        full_name = scope.full_name(name)
        for i, (argument, index, dtype) in enumerate(outputs):
            value = Value(f"{full_name}:{i}", declared_type(dtype))
            if i == 0 and len(full_name) * len(outputs) > _MAX_NAMES:
                full_name = short_name(full_name)
            if argument.ref:
                value = Value(f"{value.name}&", ANY)
                scope.references.add(value)
            declared.positions[argument.name, index] = i
            declared.values.append(value)
        if outputs:
            dtype, shape = attrs.get("dtype"), attrs.get("shape")
            held = declared_type(dtype, shape) if op in VARIABLES else ANY
            if op in TABLES:
                self.tables.declare(scope.full_name(name), declared.values[0])
            try:
                self.variables.declare(scope.full_name(name), declared.values[0], held)
            except ValueError as error:
                self.diagnostics.problem(f"{origin} ({op}): {error}")
        return True

    def attributes(self, proto: NodeDef, schema: TfSchema, scope: GraphScope) -> AttrDict:
        """The attributes of a node, with defaults. Raises ``TensorError``."""
        attrs = dict(schema.defaults)
        for key, encoded in proto.attr.items():
            if key.startswith("_"):  # hints for other runtimes, such as _output_shapes
                continue
            try:
                value = decode_attribute(encoded, scope.bound, self.diagnostics.limits)
                if value is not None and key in schema.attributes:
                    schema.attributes[key].check(value)
            except (TensorError, ValueError) as error:
                raise TensorError(f"its attribute {key!r} {error}") from error
            if value is not None or attrs.get(key) is None:  # no value stands for the default
                attrs[key] = value
        missing = [key for key in schema.required if attrs.get(key) is None]
        if missing:
            raise TensorError(f"it has no attribute {', '.join(missing)}; export the model again")
        return attrs

    def convert(self, scope: GraphScope, proto: NodeDef) -> None:
        """Emit the nodes that one node becomes."""
        name, op = proto.name, proto.op
        origin = scope.origin(name)
        subject = f"{origin} ({op})"
        declared = scope.declared[name]
        data, controls, faults = _inputs(scope, proto)
        arguments = declared.arguments
        if not faults and len(data) != len(arguments):
            faults = [f"has {len(data)} inputs, but {op} takes {len(arguments)}"]
        if faults:
            self.diagnostics.problem(*[f"{subject} {fault}" for fault in faults])
            return
        references = [reference for reference in data if reference is not None]
        if len(references) < len(data):
            return  # a node that it reads is reported already
        conversion = Conversion(self, scope, declared, references, controls, origin)
        inputs = zip(arguments, references, strict=True)
        for i, ((argument, dtype), reference) in enumerate(inputs):
            is_reference = reference.value in scope.references
            if is_reference and not argument.ref:
                # It wants the value.
                conversion.inputs[i] = conversion.variable(conversion.inputs[i], None)
            elif argument.ref and not is_reference:
                self.diagnostics.problem(f"{subject}: its input {i} must refer to a variable")
                return
            elif fault := _dtype_fault(reference.value, dtype):
                self.diagnostics.problem(f"{subject}: its input {i} {fault}")
                return
        rule = partial(_apply_rule, op, conversion)
        self.diagnostics.convert(rule, f"{TENSORFLOW}.{op}", origin, subject)


def _apply_rule(op: str, conversion: Conversion) -> None:
    rule = RULES.get(op)
    if op not in schemas():
        rules_functions.call(conversion)
    elif rule is not None:
        rule(conversion)
    elif find(op, TENSORFLOW) is not None:
        conversion.emit_same_op()
    else:
        raise InexpressibleError(NO_KERNEL)
    conversion.commit()


def _inputs(
    scope: GraphScope, proto: NodeDef
) -> tuple[list[Reference | None], list[str], list[str]]:
    """The values that a node reads, the NodeDefs that it waits for, and what is wrong with them.
    ``None`` stands for a value of a node that could not be imported."""
    data: list[Reference | None] = []
    controls: list[str] = []
    faults: list[str] = []
    for text in proto.input:
        if text.startswith("^"):
            source = text[1:]
            if source not in scope.declared and source not in scope.arguments:
                faults.append(f"waits for {source!r}, which is no node of {scope.where}")
            else:
                controls.append(source)
            continue
        # The format of GraphDefs has control inputs behind all others.
        if controls:
            faults.append(f"reads {text!r} behind its control inputs, which come last")
        try:
            data.append(scope.find(text))
        except KeyError as error:
            faults.append(f"reads {text!r}, {error.args[0]}")
    return data, controls, faults


def _dtype_fault(value: Value, dtype: str | None) -> str:
    """The fault of an input of this element type; "" if nothing is known to be."""
    given, expected = value.type, declared_type(dtype)
    if not isinstance(given, TensorType) or not isinstance(expected, TensorType):
        return ""
    same = given.dtype == expected.dtype
    return "" if same or given.dtype is None else f"must be {expected.dtype}, but is {given.dtype}"


def _results(scope: GraphScope) -> list[Value]:
    """The outputs of a graph without signature: all values of nodes of which none is read."""
    results: list[Value] = []
    for name, declared in scope.declared.items():
        values = declared.values
        if values is None or name in scope.read or declared.proto.op in _NO_RESULTS:
            continue
        # Handles and references are values of this process alone, which no caller could use.
        if not any(value.type == ANY for value in values):
            results += [value for value in values if value.producer is not None]
    return results
