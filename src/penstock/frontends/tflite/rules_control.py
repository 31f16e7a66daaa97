"""Rules of operators with subgraphs, and of variables.

A branch becomes a graph that reads its arguments from the surrounding graph; a condition, a body
and a called subgraph replace the operator. Nodes with effects wait for one another, and the outputs
of the entry for the last of them, so that a run has all effects in the order of the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.types import BOOL, INT64, TensorType, dtype_name
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import (
    OperatorConversion,
    SubgraphScope,
    dequantized,
    emit_quantized,
    operator_rule,
)
from penstock.ir.graph import Graph, Value
from penstock.ops.common.dtypes import INT32
from penstock.ops.internal.case import case_condition
from penstock.ops.registry import TENSORFLOW, TFLITE
from penstock.ops.tensorflow.state import variable_name

_TRUTH = TensorType(BOOL, ())


def _truth(c: OperatorConversion, value: Value) -> Value:
    """Return a condition of one element as a scalar."""
    if value.const is None and c.types.tensor(value).shape == ():
        return value
    return c.emit("Reshape", [value, []], {"allowzero": 1}, type_=_TRUTH)


def _used(
    c: OperatorConversion, option: str | int, arguments: list[Any], hint: str, results: int
) -> SubgraphScope:
    """Return the subgraph of a number, or of the number in an option, for these arguments, after
    checking its number of results."""
    if None in arguments:
        raise NodeError("leaves out an argument of its subgraph")
    index = option if isinstance(option, int) else c.option(option)
    scope = c.context.use(c.scope, index, arguments, f"{c.name}/{hint}")
    if len(scope.outputs) != results:
        raise NodeError(f"has {results} outputs, but {scope.where} gives {len(scope.outputs)}")
    return scope


def _condition(c: OperatorConversion, arguments: list[Any]) -> SubgraphScope:
    return _used(c, "cond_subgraph_index", arguments, "cond/", 1)


@operator_rule("IF", integers=True, outputs=None)
def if_(c: OperatorConversion) -> None:
    condition, *arguments = c.take(1, len(c.inputs))
    branches = {}
    for key in ("then", "else"):
        scope = _used(c, f"{key}_subgraph_index", arguments, f"{key}/", len(c.outputs))
        branches[f"{key}_branch"] = scope.graph(f"{c.name}/{key}")
    _emit_if(c, _truth(c, condition), branches)


def _emit_if(c: OperatorConversion, condition: Value, branches: dict[str, Graph]) -> None:
    """Emit the final node, an If with at least one output."""
    outputs = c.outputs
    # The If is needed for its effects, but ONNX's must have an output.
    if not outputs:
        outputs = [Value(c.fresh("ended"))]
        for graph in branches.values():
            graph.outputs = [Value(c.fresh("end"), const=np.array(True))]
    node = c.emit_final("If", [condition], branches, outputs=outputs)
    if any(graph.targets for graph in branches.values()):
        c.effect(node)


@operator_rule("STABLEHLO_CASE", integers=True, outputs=None)
def case(c: OperatorConversion) -> None:
    """A binary tree of If nodes; an index out of range takes the last branch."""
    index, *arguments = c.take(1, len(c.inputs))
    numbers = c.option("branch_subgraph_indices")
    if not numbers:
        raise NodeError("has no branches")
    scopes = [_used(c, n, arguments, f"{i}/", len(c.outputs)) for i, n in enumerate(numbers)]
    if len(scopes) == 1:
        _inline(c, scopes[0])
        return
    graphs = [scope.graph(f"{c.name}/{i}") for i, scope in enumerate(scopes)]
    attrs = {"branches": len(numbers)}
    branch = c.emit("BranchIndex", [index], attrs, domain=TENSORFLOW, type_=TensorType(INT32, ()))
    outputs = [value for value in c.outputs if value is not None]
    less, halves = case_condition(branch, graphs, outputs, c.name, origin=c.origin)
    c.nodes.append(less)
    node = c.emit_final("If", less.outputs, halves)
    if any(graph.targets for graph in graphs):
        c.effect(node)


@operator_rule("WHILE", integers=True, outputs=None)
def while_(c: OperatorConversion) -> None:
    """A Loop whose condition is computed before it, and again at the end of each iteration."""
    carried = c.take(0, len(c.inputs))
    before = _condition(c, carried)
    c.nodes += before.nodes
    start = _truth(c, before.outputs[0])
    prefix = c.unique(f"{c.name}/body")
    inside = [Value(f"{prefix}#{i}") for i in range(len(carried))]
    iteration = Value(f"{prefix}#iteration", TensorType(INT64, ()))
    going = Value(f"{prefix}#going", _TRUTH)
    once = _used(c, "body_subgraph_index", inside, "body/", len(c.outputs))
    after = _condition(c, list(once.outputs))
    # Nodes emitted from here on belong to the body, not to the surrounding graph.
    emitted = len(c.nodes)
    proceed = _truth(c, after.outputs[0])
    if proceed.producer is None:  # a constant condition, or a value of the surrounding graph
        proceed = c.emit("Identity", [proceed])
    tail, c.nodes = c.nodes[emitted:], c.nodes[:emitted]
    nodes = [*once.nodes, *after.nodes, *tail]
    targets = [scope.effect for scope in (once, after) if scope.effect is not None]
    body = Graph(
        [iteration, going, *inside], [proceed, *once.outputs], nodes, f"{c.name}/body", targets
    )
    node = c.emit_final("Loop", [None, start, *carried], {"body": body})
    if targets:
        c.effect(node)


@operator_rule("CALL", "STABLEHLO_COMPOSITE", integers=True, outputs=None)
def call(c: OperatorConversion) -> None:
    option = "subgraph" if c.op == "CALL" else "decomposition_subgraph_index"
    _inline(c, _used(c, option, c.take(0, len(c.inputs)), "", len(c.outputs)))


def _inline(c: OperatorConversion, scope: SubgraphScope) -> None:
    """Replace the operator by a subgraph."""
    c.nodes += scope.nodes
    if scope.effect is not None:
        c.effect(scope.effect)
    for value, output in zip(scope.outputs, c.outputs, strict=True):
        c.append("Identity", "", [value], [output], None, c.fresh("call"))


# Variables.


@operator_rule("CALL_ONCE", outputs=0)
def call_once(c: OperatorConversion) -> None:
    """Constants that it assigns are the initial values of variables. Computed values are assigned
    by the first run, which finds no value in the first of its variables."""
    scope = c.context.use(c.scope, c.option("init_subgraph_index"), [], f"{c.name}/")
    assigned = [node for node in scope.nodes if node.op.name == "AssignVariableOp"]
    handles = [v.producer.attrs for n in assigned if (v := n.inputs[0]) and v.producer]
    if len(handles) < len(assigned) or (scope.nodes and not assigned):
        raise InexpressibleError("it initializes the model with something else than variables")
    constants = [node.inputs[1] and node.inputs[1].const for node in assigned]
    others = len(scope.nodes) - len(assigned)
    if all(x is not None for x in constants) and others == len(handles):
        names = (variable_name(attrs, "") for attrs in handles)
        c.context.initial.update(zip(names, constants, strict=True))  # type: ignore[arg-type]
        return
    # The first variable represents all: they are assigned together, by the first run.
    container, name = handles[0]["container"], handles[0]["shared_name"]
    first = c.emit("VarHandleOp", [], c.variable_attrs(container, name), domain=TENSORFLOW)
    done = c.emit("VarIsInitializedOp", [first], domain=TENSORFLOW, type_=_TRUTH)
    c.effect(c.nodes[-1])
    branches = {"then_branch": Graph([], [], [], f"{c.name}/done")}
    branches["else_branch"] = scope.graph(f"{c.name}/first")  # its assignments are effects
    _emit_if(c, done, branches)


@operator_rule("VAR_HANDLE")
def var_handle(c: OperatorConversion) -> None:
    container, name = c.option("container"), c.option("shared_name")
    c.emit_tensorflow("VarHandleOp", [], **c.variable_attrs(container, name))


@operator_rule("READ_VARIABLE", integers=True)
def read_variable(c: OperatorConversion) -> None:
    (handle,) = c.take(1)
    dtype = c.output_dtypes[0]
    attrs: dict[str, Any] = {} if dtype is None else {"dtype": dtype_name(dtype)}
    node = handle.producer
    if node is not None and node.op.name == "VarHandleOp":
        attrs |= {key: node.attrs[key] for key in ("dtype", "shape") if key in node.attrs}
    c.effect(c.emit_final("ReadVariableOp", [handle], attrs, domain=TENSORFLOW))


@operator_rule("ASSIGN_VARIABLE", integers=True, outputs=0)
def assign_variable(c: OperatorConversion) -> None:
    c.effect(c.emit_final("AssignVariableOp", c.take(2), outputs=[], domain=TENSORFLOW))


STATE = "state "
"""the prefix of the names of variables that are tensors of the file"""


class State:
    """An input of an operator that it reads and writes as real numbers, or as ``codes``: a variable
    that is initially zero. If it is not a variable, the state is only read."""

    def __init__(self, c: OperatorConversion, index: int, *, codes: bool = False) -> None:
        self.c = c
        given = c.inputs[index] if index < len(c.inputs) else None
        self.handle: Value | None = None
        if given is not None:
            self.value = given
            return
        place = c.operator.inputs[index] if index < len(c.inputs) else -1
        if place == -1:
            raise NodeError(f"leaves out its state, input {index}")
        zeros = c.context.zeros(c.scope, place)
        self.quantization = c.context.declared(c.scope, place).quantization
        if self.quantization is not None:
            # The code of the real number 0 is the zero point.
            zeros = zeros + np.array(self.quantization.zero_points[0]).astype(zeros.dtype)
        self.quantization = None if codes else self.quantization
        self.dtype = zeros.dtype
        name = f"{STATE}{c.scope.index}:{place}"
        c.context.initial[name] = zeros
        self.handle = c.emit("VarHandleOp", [], c.variable_attrs("", name), domain=TENSORFLOW)
        attrs = {"dtype": zeros.dtype.name, "shape": list(zeros.shape)}
        type_ = TensorType(zeros.dtype, zeros.shape)
        value = c.emit("ReadVariableOp", [self.handle], attrs, domain=TENSORFLOW, type_=type_)
        c.effect(c.nodes[-1])
        self.value = dequantized(c, value, self.quantization) if self.quantization else value

    def write(self, value: Value) -> None:
        """Set the value that the next run, or the next operator, reads."""
        if self.handle is not None:
            name = self.c.fresh("assign")
            if self.quantization is not None:
                real, value = value, Value(self.c.fresh("codes"))
                emit_quantized(self.c, real, self.quantization, value, self.dtype)
            inputs = [self.handle, value]
            self.c.effect(self.c.append("AssignVariableOp", TENSORFLOW, inputs, [], None, name))


# Rules of tables, of sparse embeddings, of words, and of random numbers.
#
# The handle of a table is a value that no node computes: the rules know to which table it refers
# and what CALL_ONCE has put in it, so that a lookup reads the keys and values themselves.


@operator_rule("HASHTABLE", integers=True)
def hashtable(c: OperatorConversion) -> None:
    (handle,) = c.outputs
    assert handle is not None
    c.context.handles[handle] = c.option("table_id", "HashtableOptions")


def _number(c: OperatorConversion, handle: Value) -> int:
    if handle not in c.context.handles:
        raise InexpressibleError("its table is not made in the same subgraph")
    return c.context.handles[handle]


@operator_rule("HASHTABLE_IMPORT", outputs=0, integers=True)
def hashtable_import(c: OperatorConversion) -> None:
    """A table is filled once: later imports change nothing."""
    handle, keys, values = c.take(3)
    if keys.const is None or values.const is None:
        raise InexpressibleError("it fills a table with what is not constant")
    c.context.tables.setdefault(_number(c, handle), (keys, values))


def _contents(c: OperatorConversion, handle: Value) -> tuple[Value, Value]:
    contents = c.context.tables.get(_number(c, handle))
    if contents is None:
        raise NodeError("reads a table that nothing has filled before")
    return contents


@operator_rule("HASHTABLE_FIND", integers=True)
def hashtable_find(c: OperatorConversion) -> None:
    handle, query, other = c.take(3)
    c.emit_final("HashtableFind", [*_contents(c, handle), query, other], domain=TFLITE)


@operator_rule("HASHTABLE_SIZE", integers=True)
def hashtable_size(c: OperatorConversion) -> None:
    (handle,) = c.take(1)
    keys = _contents(c, handle)[0].const
    assert keys is not None
    c.emit_final("Identity", [[len(set(keys.reshape(-1).tolist()))]])


# Random numbers: of LiteRT's distributions, but not its draws.


def _seed(c: OperatorConversion) -> dict[str, float]:
    """With seeds other than 0, sessions draw the same numbers."""
    one, other = c.option("seed", "RandomOptions"), c.option("seed2", "RandomOptions")
    # A seed of ONNX is a float32, which represents whole numbers up to there.
    return {"seed": float((31 * one + other) % 2**24)} if one or other else {}


@operator_rule("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL")
def random(c: OperatorConversion) -> None:
    c.take(1)
    zeros = c.emit("ConstantOfShape", [c.vector(0)], value=np.zeros(1, np.float32))
    op = "RandomUniformLike" if c.op == "RANDOM_UNIFORM" else "RandomNormalLike"
    c.emit_final(op, [zeros], _seed(c))


@operator_rule("MULTINOMIAL")
def multinomial(c: OperatorConversion) -> None:
    x, _ = c.take(2)
    (count,) = c.constant_integers(1, "number of samples")
    # ONNX's numbers of int64 and int32.
    number = 7 if c.output_dtypes[0] == INT64 else 6
    attrs = {"sample_size": count, "dtype": number, **_seed(c)}
    c.emit_final("Multinomial", [c.cast(x, "float32")], attrs)
