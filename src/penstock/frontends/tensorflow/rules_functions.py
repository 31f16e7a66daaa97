"""Rules of operations that take functions: calls become bodies, functions become graphs.

A call runs the nodes on which its results and control outputs depend, or all nodes if the node's
operation is the function itself. The body runs when all arguments exist and are live, and no result
is live before everything that must run has run: to other nodes a call is one node. So each argument
passes through an Identity, for which nodes of the body wait that would otherwise wait for nothing,
and so does each result.

A function that calls itself, perhaps through others, remains a function: calls of it are ``Call``
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.errors import shortened
from penstock.core.records import dataclass, field
from penstock.core.types import BOOL, INT64, TensorType
from penstock.frontends.common.diagnostics import ConversionError, NodeError
from penstock.frontends.tensorflow.conversion import Conversion, ConversionContext, rule
from penstock.frontends.tensorflow.scope import GraphScope
from penstock.frontends.tensorflow.tensors import FunctionReference, declared_type
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Attrs
from penstock.ops.common.dtypes import INT32
from penstock.ops.internal.case import case_condition
from penstock.ops.registry import TENSORFLOW, standard


@dataclass(frozen=True, slots=True)
class FunctionBody:
    """One use of a function's body: its nodes, its results, and nodes that run even if their
    outputs are not read."""

    nodes: list[Node]
    results: list[Value]
    controls: list[Node]

    def graph(self, name: str, inputs: Sequence[Value] = ()) -> Graph:
        return Graph(inputs, self.results, self.nodes, name, self.controls)


def remaining_function(
    context: ConversionContext, name: str, function: FunctionReference
) -> Graph | None:
    """Return the graph of a function that remains one; ``None`` if it is invalid."""
    schema = context.library.schema(function.name)
    if schema is None:
        return None
    inputs = []
    try:
        for i, argument in enumerate(schema.inputs):
            dtypes = argument.types({**schema.defaults, **function.attrs})
            types = enumerate(declared_type(dtype) for dtype in dtypes)
            inputs += [Value(f"{name}/{argument.name}#{i}_{j}", type_) for j, type_ in types]
        return _import_body(context, function, inputs, f"{name}/", 1).graph(name, inputs)
    except (ConversionError, ValueError) as error:
        where = context.diagnostics.where
        context.diagnostics.problem(f"function {name!r} of {where} {error}")
        return None


def _import_body(
    context: ConversionContext,
    function: FunctionReference,
    arguments: Sequence[Value],
    prefix: str,
    depth: int,
    anchors: Sequence[Node] = (),
) -> FunctionBody:
    """Import the body of a function for these arguments."""
    proto = context.library.functions[function.name]
    schema = context.library.schema(function.name)
    where = f"function {shortened(function.name)!r} of {context.diagnostics.where}"
    context.diagnostics.check_depth(depth, where)
    if schema is None:
        return FunctionBody([], [], [])
    bound = {**schema.defaults, **function.attrs}
    constants = context.library.constants
    scope = GraphScope(where, constants, prefix, depth, bound, function=True, anchors=anchors)
    rest = list(arguments)
    for argument in schema.inputs:
        count = argument.times(bound)
        scope.arguments[argument.name], rest = rest[:count], rest[count:]
    if rest or sum(map(len, scope.arguments.values())) < len(arguments):
        raise NodeError(f"gives {len(arguments)} arguments, which are not those of {where}")
    context.import_nodes(scope, proto.node_def)
    outputs = [output.name for output in proto.signature.output_arg]
    results = [_result(scope, output, proto.ret.get(output)) for output in outputs]
    names = [node for _, node in sorted(proto.control_ret.items()) if node in scope.final_nodes]
    controls = dict.fromkeys(scope.final_nodes[name] for name in names)
    return FunctionBody(scope.nodes, results, list(controls))


def _result(scope: GraphScope, name: str, source: str | None) -> Value:
    if source is None:
        raise NodeError(f"calls {scope.where}, which has no value for its result {name!r}")
    try:
        reference = scope.find(source)
    except KeyError as error:
        raise NodeError(
            f"calls {scope.where}, whose result {name!r} is {source!r}, {error.args[0]}"
        ) from error
    return Value(source) if reference is None else reference.value  # None is reported already


@dataclass(eq=False)
class FunctionExpansion:
    """Replaces one node by the bodies of functions. ``starts`` are nodes that run when all
    arguments exist."""

    c: Conversion
    starts: list[Node] = field(default_factory=list)

    def arguments(self, values: Sequence[Value]) -> list[Value]:
        """Return copies of the arguments, which exist when all arguments do."""
        c = self.c
        copies = [c.emit("Identity", [value], type_=value.type) for value in values]
        self.starts = list(c.nodes)
        # A body without arguments would run at once, before the nodes that the call waits for.
        if not copies and c.controls:
            self.starts.append(c.append("NoOp", TENSORFLOW, [], [], None, f"{c.stem}#start"))
        return copies

    def functions(self, key: str) -> list[FunctionReference]:
        """Return the functions that an attribute names. Raises ``NodeError``."""
        value = self.c.attrs.get(key)
        functions: list[Any] = value if isinstance(value, list) else [value]
        for function in functions:
            if not isinstance(function, FunctionReference):
                raise NodeError(f"has no function as its attribute {key!r}")
            if self.c.context.library.schema(function.name) is None:
                raise NodeError(f"names a function {function.name!r}, which is not in the library")
        return functions

    def body(
        self,
        function: FunctionReference,
        arguments: Sequence[Value],
        hint: str,
        anchors: Sequence[Node] = (),
        results: Sequence[Value] = (),
    ) -> FunctionBody:
        """Return the body of a function, or a node that calls it, with results of the types of
        ``results``."""
        c = self.c
        library = c.context.library
        prefix = c.context.prefixes.unique(f"{c.stem}/{hint}" if hint else c.stem)
        if function.name not in library.recursive:
            depth = c.scope.depth + 1
            return _import_body(c.context, function, arguments, prefix, depth, anchors)
        outputs = [Value(f"{prefix}call:{i}", value.type) for i, value in enumerate(results)]
        attrs = {"function": library.remaining_name(function)}
        node = _node(c, "Call", arguments, outputs, attrs, f"{prefix}call")
        node.control_inputs += anchors
        return FunctionBody([node], outputs, [node])

    def graph(self, function: FunctionReference, arguments: Sequence[Value], hint: str) -> Graph:
        """Return the body as a graph without inputs of its own."""
        body = self.body(function, arguments, hint, results=self.c.outputs)
        if len(body.results) != len(self.c.outputs):
            raise NodeError(
                f"has {len(self.c.outputs)} outputs, but {function.name!r} gives "
                f"{len(body.results)}"
            )
        return body.graph(f"{self.c.stem}/{hint}")

    def finish(self, results: Sequence[Value], controls: Sequence[Node]) -> None:
        """Emit the call's own node, which returns the results when everything has run."""
        c = self.c
        if len(results) != len(c.outputs):
            raise NodeError(f"has {len(c.outputs)} outputs, but its function gives {len(results)}")
        waits = list(dict.fromkeys([*self.starts, *controls]))  # each once, in a fixed order
        if not results:
            c.emit_final("NoOp", [], domain=TENSORFLOW).control_inputs += waits
            return
        first = c.emit_final("Identity", results[:1], outputs=c.outputs[:1])
        first.control_inputs += waits
        for output, value in zip(c.outputs[1:], results[1:], strict=True):
            c.emit_extra_output(output, "Identity", [value]).control_inputs += waits


def _node(
    c: Conversion,
    op: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    attrs: Attrs | None,
    name: str,
) -> Node:
    """Return a node of TensorFlow inside a graph of the converted node, without emitting it."""
    operation = standard(op, TENSORFLOW)
    return Node(operation, inputs, outputs, attrs, name=name, device=c.device, origin=c.origin)


@rule("PartitionedCall", "StatefulPartitionedCall")
def call(c: Conversion) -> None:
    """A call, or a node whose operation is a function of the library: then all its nodes run."""
    expansion = FunctionExpansion(c)
    direct = c.op in c.context.library.functions
    function = FunctionReference(c.op, c.attrs) if direct else expansion.functions("f")[0]
    arguments = expansion.arguments(c.inputs)
    body = expansion.body(function, arguments, "", expansion.starts, c.outputs)
    c.scope.nodes += body.nodes
    expansion.finish(body.results, body.nodes if direct else body.controls)


@rule("If", "StatelessIf")
def if_(c: Conversion) -> None:
    expansion = FunctionExpansion(c)
    condition, *arguments = c.inputs
    branches = {
        key: expansion.graph(function, arguments, key)
        for key in ("then_branch", "else_branch")
        for function in expansion.functions(key)
    }
    truth = c.emit("ToBool", [condition], domain=TENSORFLOW, type_=_TRUTH)
    c.emit_final("If", [truth], branches)


@rule("Case", "StatelessCase")
def case(c: Conversion) -> None:
    """A binary tree of If nodes; an index out of range takes the last branch."""
    expansion = FunctionExpansion(c)
    index, *arguments = c.inputs
    functions = expansion.functions("branches")
    if not functions:
        raise NodeError("has no branches")
    graphs = [
        expansion.graph(function, arguments, f"branch_{i}") for i, function in enumerate(functions)
    ]
    attrs = {"branches": len(graphs)}
    branch = c.emit("BranchIndex", [index], attrs, domain=TENSORFLOW, type_=TensorType(INT32, ()))
    if len(graphs) == 1:
        c.scope.nodes += graphs[0].nodes
        # BranchIndex checks the index's type, and must run even if nothing reads it.
        expansion.starts = [c.nodes[-1]]
        expansion.finish(graphs[0].outputs, graphs[0].targets)
        return
    less, halves = case_condition(
        branch, graphs, c.outputs, c.stem, device=c.device, origin=c.origin
    )
    c.nodes.append(less)
    c.emit_final("If", less.outputs, halves)


@rule("While", "StatelessWhile")
def while_(c: Conversion) -> None:
    """A Loop whose condition is computed before it, and again at the end of each iteration."""
    expansion = FunctionExpansion(c)
    condition, body = expansion.functions("cond") + expansion.functions("body")
    carried = expansion.arguments(c.inputs)
    types = [Value(f"{c.stem}#truth", TensorType(BOOL))]
    before = expansion.body(condition, carried, "cond", expansion.starts, types)
    c.scope.nodes += before.nodes
    start = c.emit("ToBool", [_condition(before)], domain=TENSORFLOW, type_=_TRUTH)
    # The condition's control outputs run before the loop.
    c.nodes[-1].control_inputs += before.controls
    # Names of the body must not clash with others.
    prefix = c.context.prefixes.unique(f"{c.stem}/body")
    inside = [Value(f"{prefix}#{i}", value.type) for i, value in enumerate(c.outputs)]
    iteration = Value(f"{prefix}#iteration", TensorType(INT64, ()))
    going = Value(f"{prefix}#going", _TRUTH)
    # Handles that no iteration replaces are those of before the loop: their facts are known.
    kept = {
        i
        for i, dtype in enumerate(c.attrs["T"])
        if dtype == "resource" and c.context.library.returns_argument(body.name, i)
    }
    given = [carried[i] if i in kept else value for i, value in enumerate(inside)]
    once = expansion.body(body, given, "body", results=c.outputs)
    if len(once.results) != len(c.outputs):
        raise NodeError(f"carries {len(c.outputs)} values, but its body gives {len(once.results)}")
    once.results[:] = [inside[i] if i in kept else x for i, x in enumerate(once.results)]
    following = [carried[i] if i in kept else x for i, x in enumerate(once.results)]
    after = expansion.body(condition, following, "cond", results=types)
    name = f"{prefix}#condition"
    proceed = Value(name, _TRUTH)
    truth = _node(c, "ToBool", [_condition(after)], [proceed], None, name)
    truth.control_inputs += after.controls
    graph = Graph(
        [iteration, going, *inside],
        [proceed, *once.results],
        [*once.nodes, *after.nodes, truth],
        f"{c.stem}/body",
        once.controls,
    )
    c.emit_final("Loop", [None, start, *carried], {"body": graph})


_TRUTH = TensorType(BOOL, ())


def _condition(body: FunctionBody) -> Value:
    """Return the result of a condition. Raises ``NodeError``."""
    if len(body.results) != 1:
        raise NodeError(f"has a condition that gives {len(body.results)} values instead of one")
    return body.results[0]
