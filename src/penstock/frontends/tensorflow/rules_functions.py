"""Functions of the library: calls become bodies, and what takes functions takes graphs.

What runs is what a call needs: the nodes that its results and its control outputs depend on, or
where a node's operation is the function itself, all. A body runs when all of its arguments are
there and live, and none of its results is live before all that has to run has run: the call is one
node as far as anybody around it can see. So each argument goes through an Identity, for which wait
all nodes of the body that would otherwise wait for nothing, and so does each result.

A function that calls itself, perhaps through others, stays one: its calls are ``Call`` nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidModel
from penstock.frontends.tensorflow.attrs import Function
from penstock.frontends.tensorflow.conversion import Conversion, NodeError, Rule, Scope
from penstock.frontends.tensorflow.proto.graphdef_pb2 import FunctionDef
from penstock.frontends.tensorflow.types import declared_type
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.dtypes import INT32
from penstock.ops.registry import TENSORFLOW, find
from penstock.types import BOOL, INT64, TensorType

if TYPE_CHECKING:
    from penstock.frontends.tensorflow.importer import Importer


@dataclass(frozen=True, slots=True)
class Body:
    """A function's body in one place: its nodes, its results, and the nodes that must run even if
    nobody reads what they make."""

    nodes: list[Node]
    results: list[Value]
    controls: list[Node]

    def graph(self, name: str) -> Graph:
        return Graph([], self.results, self.nodes, name, self.controls)


def define(importer: Importer, name: str, called: tuple[FunctionDef, Mapping[str, Any]]) -> None:
    """Add a function that remains one to the model."""
    proto, attrs = called
    schema = importer.library.schema(proto.signature.name)
    if schema is None:
        return
    inputs = []
    for i, argument in enumerate(schema.inputs):
        kinds = argument.types({**schema.defaults, **attrs})
        named = enumerate(declared_type(kind) for kind in kinds)
        inputs += [Value(f"{name}/{argument.name}#{i}_{j}", kind) for j, kind in named]
    try:
        body = _imported(importer, proto, attrs, inputs, f"{name}/", 1, [])
    except (NodeError, ValueError) as error:
        importer.problems.append(f"function {name!r} of {importer.where} {error}")
        return
    importer.functions[name] = Graph(inputs, body.results, body.nodes, name, body.controls)


def _imported(
    importer: Importer,
    proto: FunctionDef,
    attrs: Mapping[str, Any],
    arguments: Sequence[Value],
    prefix: str,
    depth: int,
    anchors: Sequence[Node],
    *,
    everything: bool = False,
) -> Body:
    """The body of a function for these arguments."""
    name = proto.signature.name
    schema = importer.library.schema(name)
    where = f"function {name!r} of {importer.where}"
    if depth > importer.limits.max_depth:
        raise InvalidModel(
            f"{where} nests deeper than Limits.max_depth = {importer.limits.max_depth}; raise the "
            "limit if you trust the model"
        )
    if schema is None:
        return Body([], [], [])
    bound = {**schema.defaults, **attrs}
    scope = Scope(where, importer.limits, prefix, depth, bound, function=True)
    scope.anchors = list(anchors)
    left = list(arguments)
    for argument in schema.inputs:
        count = argument.times(bound)
        scope.arguments[argument.name], left = left[:count], left[count:]
    if left or sum(map(len, scope.arguments.values())) < len(arguments):
        raise NodeError(f"gives {len(arguments)} arguments, which are not those of {where}")
    importer.fill(scope, proto.node_def)
    outputs = [output.name for output in proto.signature.output_arg]
    results = [_result(scope, output, proto.ret.get(output)) for output in outputs]
    named = [scope.made[each] for each in proto.control_ret.values() if each in scope.made]
    controls = list(scope.nodes) if everything else named
    return Body(scope.nodes, results, list(dict.fromkeys(controls)))


def _result(scope: Scope, name: str, source: str | None) -> Value:
    if source is None:
        raise NodeError(f"calls {scope.where}, which does not say what its result {name!r} is")
    try:
        found = scope.find(source)
    except KeyError as error:
        raise NodeError(
            f"calls {scope.where}, whose result {name!r} is {source!r}, {error.args[0]}"
        ) from error
    return Value(source) if found is None else found.value  # which is reported already


class Expansion:
    """Where one node's functions are put in the place of their names."""

    def __init__(self, c: Conversion) -> None:
        self.c = c
        self.starts: list[Node] = []

    def arguments(self, values: Sequence[Value]) -> list[Value]:
        """What the functions get: there when all of it is."""
        c = self.c
        made = [c.node("Identity", [value], type=value.type) for value in values]
        self.starts = list(c.emitted)
        if not made and c.controls:
            self.starts.append(c.effect("NoOp", "start"))
        return made

    def function(self, key: str) -> Function:
        """The function that an attribute names."""
        return self.known(self.c.attrs.get(key), key)

    def known(self, found: Any, key: str) -> Function:
        if not isinstance(found, Function):
            raise NodeError(f"has no function as its attribute {key!r}")
        if self.c.importer.library.schema(found.name) is None:
            raise NodeError(f"names a function {found.name!r}, which is not in the library")
        return found

    def body(
        self,
        function: Function,
        arguments: Sequence[Value],
        word: str,
        anchors: Sequence[Node] = (),
        results: Sequence[Value] = (),
        *,
        everything: bool = False,
    ) -> Body:
        """What stands for a call: the body, or a node that calls. ``results``: of what types."""
        c = self.c
        library = c.importer.library
        prefix = c.importer.prefix(f"{c.name}/{word}" if word else c.name)
        if function.name not in library.recursive:
            proto = library.functions[function.name]
            depth = c.scope.depth + 1
            return _imported(
                c.importer,
                proto,
                function.attrs,
                arguments,
                prefix,
                depth,
                anchors,
                everything=everything,
            )
        op = find("Call", TENSORFLOW)
        assert op is not None
        made = [Value(f"{prefix}call:{i}", value.type) for i, value in enumerate(results)]
        node = Node(
            op,
            arguments,
            made,
            {"function": library.named(function)},
            name=f"{prefix}call",
            control_inputs=anchors,
            device=c.device,
            origin=c.origin,
        )
        return Body([node], made, [node])

    def graph(self, function: Function, arguments: Sequence[Value], word: str) -> Graph:
        """The body as a graph without inputs of its own."""
        body = self.body(function, arguments, word, results=self.c.outputs)
        if len(body.results) != len(self.c.outputs):
            raise NodeError(
                f"has {len(self.c.outputs)} outputs, but {function.name!r} gives "
                f"{len(body.results)}"
            )
        return body.graph(f"{self.c.name}/{word}")

    def finish(self, results: Sequence[Value], controls: Sequence[Node]) -> None:
        """The call's own node, which gives the results when all has run."""
        c = self.c
        if len(results) != len(c.outputs):
            raise NodeError(f"has {len(c.outputs)} outputs, but its function gives {len(results)}")
        waits = list(dict.fromkeys([*self.starts, *controls]))
        if not results:
            c.end("NoOp", [], domain=TENSORFLOW).control_inputs += waits
            return
        first = c.end("Identity", results[:1], outputs=c.outputs[:1])
        first.control_inputs += waits
        for output, value in zip(c.outputs[1:], results[1:], strict=True):
            c.further(output, "Identity", [value]).control_inputs += waits


def call(c: Conversion) -> None:
    """PartitionedCall, and the stateful one."""
    expansion = Expansion(c)
    _call(c, expansion, expansion.function("f"), everything=False)


def direct_call(c: Conversion) -> None:
    """A node whose operation is a function of the library."""
    attrs = {key: value for key, value in c.attrs.items() if not key.startswith("_")}
    _call(c, Expansion(c), Function(c.op, attrs), everything=True)


def _call(c: Conversion, expansion: Expansion, function: Function, *, everything: bool) -> None:
    arguments = expansion.arguments(c.inputs)
    body = expansion.body(
        function, arguments, "", expansion.starts, c.outputs, everything=everything
    )
    c.scope.nodes += body.nodes
    expansion.finish(body.results, body.controls)


def if_(c: Conversion) -> None:
    expansion = Expansion(c)
    condition, *arguments = c.inputs
    branches = {
        key: expansion.graph(expansion.function(key), arguments, key)
        for key in ("then_branch", "else_branch")
    }
    truth = c.node("ToBool", [condition], domain=TENSORFLOW, type=TensorType(BOOL, ()))
    c.end("If", [truth], branches)


def case(c: Conversion) -> None:
    """If inside of If, halving what is left; out of range, the last branch."""
    expansion = Expansion(c)
    index, *arguments = c.inputs
    named = c.attrs.get("branches")
    if not isinstance(named, list) or not named:
        raise NodeError("has no branches")
    functions = [expansion.known(each, "branches") for each in named]
    graphs = [expansion.graph(each, arguments, f"branch_{i}") for i, each in enumerate(functions)]
    kind = TensorType(INT32, ())
    chosen = c.node("BranchIndex", [index], {"branches": len(graphs)}, domain=TENSORFLOW, type=kind)
    if len(graphs) == 1:
        c.scope.nodes += graphs[0].nodes
        expansion.starts = [c.emitted[-1]]
        expansion.finish(graphs[0].outputs, graphs[0].targets)
        return
    halves, less = _halves(c, chosen, graphs, 0, len(graphs))
    c.emitted.append(less)
    c.end("If", less.outputs, halves)


def _halves(
    c: Conversion, index: Value, graphs: Sequence[Graph], first: int, end: int
) -> tuple[dict[str, Graph], Node]:
    """The two sides of an If that chooses among graphs from ``first`` to ``end``, and the node that
    makes its condition."""
    middle = (first + end) // 2
    bound = Value(f"{c.name}#{middle}", const=np.array(middle, np.int32))
    name = f"{c.name}#less_{middle}"
    made = Value(name, TensorType(BOOL, ()))
    op = find("Less")
    assert op is not None
    less = Node(op, [index, bound], [made], name=name, device=c.device, origin=c.origin)
    sides = [_side(c, index, graphs, a, b) for a, b in ((first, middle), (middle, end))]
    return {"then_branch": sides[0], "else_branch": sides[1]}, less


def _side(c: Conversion, index: Value, graphs: Sequence[Graph], first: int, end: int) -> Graph:
    if end - first == 1:
        return graphs[first]
    halves, less = _halves(c, index, graphs, first, end)
    name = f"{c.name}#{first}_{end}"
    made = [Value(f"{name}:{i}", value.type) for i, value in enumerate(c.outputs)]
    op = find("If")
    assert op is not None
    node = Node(op, less.outputs, made, halves, name=name, device=c.device, origin=c.origin)
    return Graph([], made, [less, node], name, [node])


def while_(c: Conversion) -> None:
    """A Loop whose condition is computed before it, and again at the end of each iteration."""
    expansion = Expansion(c)
    condition, body = expansion.function("cond"), expansion.function("body")
    carried = expansion.arguments(c.inputs)
    before = expansion.body(condition, carried, "cond", expansion.starts, [_a_truth(c)])
    c.scope.nodes += before.nodes
    start = c.node("ToBool", _one(before.results), domain=TENSORFLOW, type=TensorType(BOOL, ()))
    c.emitted[-1].control_inputs += before.controls
    prefix = c.importer.prefix(f"{c.name}/body")
    inside = [Value(f"{prefix}#{i}", value.type) for i, value in enumerate(c.outputs)]
    iteration = Value(f"{prefix}#iteration", TensorType(INT64, ()))
    going = Value(f"{prefix}#going", TensorType(BOOL, ()))
    made = expansion.body(body, inside, "body", results=c.outputs)
    if len(made.results) != len(c.outputs):
        raise NodeError(f"carries {len(c.outputs)} values, but its body gives {len(made.results)}")
    after = expansion.body(condition, made.results, "cond", results=[_a_truth(c)])
    truth = _to_bool(c, _one(after.results), f"{prefix}#condition", after.controls)
    (proceed,) = truth.outputs
    assert proceed is not None
    graph = Graph(
        [iteration, going, *inside],
        [proceed, *made.results],
        [*made.nodes, *after.nodes, truth],
        f"{c.name}/body",
        made.controls,
    )
    c.end("Loop", [None, start, *carried], {"body": graph})


def _a_truth(c: Conversion) -> Value:
    return Value(f"{c.name}#truth", TensorType(BOOL))


def _one(results: Sequence[Value]) -> Sequence[Value]:
    if len(results) != 1:
        raise NodeError(f"has a condition that gives {len(results)} values instead of one")
    return results


def _to_bool(c: Conversion, value: Sequence[Value], name: str, after: Sequence[Node]) -> Node:
    op = find("ToBool", TENSORFLOW)
    assert op is not None
    made = Value(name, TensorType(BOOL, ()))
    return Node(
        op, value, [made], name=name, control_inputs=after, device=c.device, origin=c.origin
    )


RULES: dict[str, Rule] = {
    "PartitionedCall": call,
    "StatefulPartitionedCall": call,
    "If": if_,
    "StatelessIf": if_,
    "Case": case,
    "StatelessCase": case,
    "While": while_,
    "StatelessWhile": while_,
}
