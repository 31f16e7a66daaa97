"""Convert TensorFlow's GraphDefs to graphs.

A node becomes one node of the same name if an operation of ONNX or of the domain "tensorflow" has
its meaning. If it takes several (``rules``), the final one has the name, and the others the name
followed by ``#`` and a hint. A constant stays a node: it may wait for others, and so belong to a
frame, and a run counts it. Values are named as in TensorFlow, ``node:output``, and
``Model.aliases`` lets ``node`` mean ``node:0``.

A node waits for the constants that were read at import time (axes, for instance) instead of reading
them, so that the same nodes run as in TensorFlow, in the same frames.

Calls of functions are replaced by their bodies (``rules_functions``), except for recursive
functions. References to variables are handles: nodes that read the value of a variable get a
node that reads the handle.

The file is not trusted. All violations of the format, or else all operations without a kernel, are
reported at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
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
from penstock.frontends.common.inferred_types import source_of
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
from penstock.frontends.tensorflow.schemas import TfSchema, schemas
from penstock.frontends.tensorflow.scope import (
    DeclaredNode,
    GraphScope,
    Reference,
    VariableFacts,
    producers_first,
    unique_prefixes,
)
from penstock.frontends.tensorflow.tables import TABLES, Tables, table_contents
from penstock.frontends.tensorflow.tensors import declared_type, decode_attribute
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.op import PRIMITIVES, AttrDict, Op, Role
from penstock.ops.registry import TENSORFLOW, find, standard
from penstock.ops.tensorflow.state import VARIABLES, Store

PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})
# Characters of the names of a node's outputs, from which on those after the first are shortened.
_MAX_NAMES = 2**16
# The number of outputs of a node from which on they count as nodes.
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
    """Imports one graph. ``tables`` has the contents of tables, by default those with which the
    nodes themselves fill them."""

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
        """Return the model whose entry is the whole graph of the file ``path``."""
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
        # Rules read the types and constants of inputs, which must have been converted before.
        for proto in with_checkpoints(producers_first(importable)):
            self.convert(scope, proto)
        scope.connect()

    def declare(self, scope: GraphScope, proto: NodeDef) -> bool:
        """Create the output values of a node, and return whether it can be imported. Nodes may be
        in any order, so outputs are needed before inputs are looked up."""
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
        if len(outputs) > _MANY_OUTPUTS:  # a single number in the file creates them
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
        """Return the attributes of a node, with defaults. Raises ``TensorError``."""
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
            if value is not None or attrs.get(key) is None:  # no value means the default
                attrs[key] = value
        missing = [key for key in schema.required if attrs.get(key) is None]
        if missing:
            raise TensorError(f"it has no attribute {', '.join(missing)}; export the model again")
        return attrs

    def convert(self, scope: GraphScope, proto: NodeDef) -> None:
        """Emit the nodes into which one node is converted."""
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
                # The input reads the value of the variable.
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
    """Return the values that a node reads, the NodeDefs that it waits for, and its faults. ``None``
    stands for a value of a node that could not be imported."""
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
        # In GraphDefs, control inputs follow all others.
        if controls:
            faults.append(f"reads {text!r} behind its control inputs, which come last")
        try:
            data.append(scope.find(text))
        except KeyError as error:
            faults.append(f"reads {text!r}, {error.args[0]}")
    return data, controls, faults


def _dtype_fault(value: Value, dtype: str | None) -> str:
    """Return the fault of an input for this element type, or "" if none is known."""
    given, expected = value.type, declared_type(dtype)
    if not isinstance(given, TensorType) or not isinstance(expected, TensorType):
        return ""
    same = given.dtype == expected.dtype
    return "" if same or given.dtype is None else f"must be {expected.dtype}, but is {given.dtype}"


def _results(scope: GraphScope) -> list[Value]:
    """Return the outputs of a graph without signature: values of nodes of which none is read."""
    results: list[Value] = []
    for name, declared in scope.declared.items():
        values = declared.values
        if values is None or name in scope.read or declared.proto.op in _NO_RESULTS:
            continue
        # Handles and references have a meaning only in this process, so no caller could use them.
        if not any(value.type == ANY for value in values):
            results += [value for value in values if value.producer is not None]
    return results


# Reads of TensorFlow 1's reference variables at the time when their value is used.
#
# The value read from a reference variable (``v/read``, an Identity) shares the variable's buffer,
# which assignments write in place. So a node that runs after an assignment sees it, even if the
# Identity ran before, and even outside of the loop that contains the node::
#
#     v ──> read ──> Enter ──> Add      becomes      v ──> Enter ──> read ──> Add
#                  AssignAdd ····^                       AssignAdd ···^
#
# Only nodes that depend on an assignment are changed: for others, TensorFlow does not define what
# they see. Reshapes of the value, which share the buffer too, and values that a loop carries keep
# what was read.


_PASSING = frozenset({Role.ENTER, Role.SWITCH, Role.EXIT})
"""the primitives that pass on the read value, as they do references"""


def late_reads(nodes: Sequence[Node]) -> list[Node]:
    """Let nodes that depend on an assignment read the variable themselves. Return the nodes added
    to ``nodes``, which are those of a graph in any order."""
    assignments: dict[Value, set[Node]] = defaultdict(set)
    for node in with_checkpoints(nodes):
        if not node.op.pure and "forwards handle" in node.op.traits:
            assignments[_variable(node.outputs[0])].add(node)
    return _LateReads(nodes, assignments).nodes if assignments else []


def _variable(value: Value | None) -> Value:
    """Return the output of the VariableV2 to which a reference refers, or the value itself."""
    seen = set()
    while value is not None and value not in seen:
        seen.add(value)
        value = source_of(value)
        node = value.producer
        if node is None or not (node.op.role in _PASSING or "forwards handle" in node.op.traits):
            return value
        value = node.inputs[0]
    return Value("#none")


class _LateReads:
    """The ``nodes`` that are added. ``assignments``: those to each variable."""

    def __init__(self, nodes: Sequence[Node], assignments: dict[Value, set[Node]]) -> None:
        self.nodes: list[Node] = []
        self.assignments = assignments
        self.handles: dict[Value, Value] = {}
        self.readers: dict[Value, list[tuple[Node, int]]] = defaultdict(list)
        self.followers: dict[Node, list[Node]] = defaultdict(list)
        for node in with_checkpoints(nodes):
            for i, value in enumerate(node.inputs):
                if value is not None:
                    self.readers[value].append((node, i))
            for before in self._before(node):
                self.followers[before].append(node)
        self.seeing = cache(self._seeing)
        for node in with_checkpoints(nodes):
            if node.op.name == "ReadVariableOp" and node.op.domain == TENSORFLOW:
                self._follow(node)

    @staticmethod
    def _before(node: Node, but: Value | None = None) -> Iterator[Node]:
        """Yield the nodes that ``node`` waits for, not counting those of input ``but``."""
        yield from node.control_inputs
        for value in node.inputs:
            if value is not None and value is not but and value.producer is not None:
                yield value.producer

    def _seeing(self, variable: Value) -> set[Node]:
        """Return the nodes that depend on an assignment to a variable of constant shape."""
        stack = list(self.assignments.get(variable, ()))
        if any(node.attrs.get("validate_shape") is False for node in stack):
            return set()  # a value of another shape has a buffer of its own
        seen: set[Node] = set()
        while stack:
            for node in self.followers[stack.pop()]:
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
        return seen

    def _follow(self, read: Node) -> None:
        """Let nodes that see later assignments read the variable that ``read`` has read."""
        handle, value = read.inputs[0], read.outputs[0]
        if handle is None or value is None:
            return
        seeing = self.seeing(_variable(handle))
        self.handles[value] = self._identity(handle, read)
        stack = [value] if seeing else []
        while stack:
            value = stack.pop()
            for node, i in self.readers[value]:
                if node in seeing and node.op.role not in PRIMITIVES and node.inputs[i] is value:
                    self._read_late(node, i, read)
                passes = node.op.role in _PASSING and i == 0
                if passes or node.op.full_name == "Identity":
                    stack += [v for v in node.outputs if v is not None and v not in self.handles]
                    self._pass_on(node, value)

    def _pass_on(self, node: Node, value: Value) -> None:
        """Pass the reference from which ``value`` was read along with the value."""
        handle = self.handles[value]
        if node.op.role is None:
            outputs: Sequence[Value | None] = [self._identity(handle, node)]
        else:
            outputs = [None if v is None else Value(f"{v.name}#handle", ANY) for v in node.outputs]
            self._add(node, node.op, [handle, *node.inputs[1:]], outputs)
        for old, new in zip(node.outputs, outputs, strict=True):
            if old is not None and new is not None:
                self.handles[old] = new

    def _identity(self, handle: Value, node: Node) -> Value:
        """Return the handle as it is after ``node``, which may decide whether later nodes run."""
        if not node.control_inputs:
            return handle
        same = Value(f"{node.name}#handle", ANY)
        self._add(node, standard("Identity"), [handle], [same])
        return same

    def _add(
        self, node: Node, op: Op, inputs: Sequence[Value | None], outputs: Sequence[Value | None]
    ) -> None:
        name, before = f"{node.name}#handle", node.control_inputs
        self.nodes.append(node.derived(inputs, outputs, op=op, name=name, control_inputs=before))

    def _read_late(self, node: Node, index: int, read: Node) -> None:
        """Let ``node`` read the variable itself, after all other nodes that it waits for."""
        replaced, (was,) = node.inputs[index], read.outputs
        assert replaced is not None and was is not None
        value, name = Value(f"{node.name}#late_{index}", was.type), f"{node.name}#late_{index}"
        before = list(dict.fromkeys(self._before(node, replaced)))
        self.nodes.append(
            read.derived([self.handles[replaced]], [value], name=name, control_inputs=before)
        )
        node.inputs[index] = value
