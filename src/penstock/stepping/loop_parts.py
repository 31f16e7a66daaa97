"""A model in parts: the nodes before, between and after its loops, and the bodies of the loops.

::

    x ──> part 0 ──> Loop ──> part 1 ──> y            part 1 also reads values of part 0
                      │
                    body: state in, number of the iteration, values read from outside
                          ──> whether to continue, state out, rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.analysis.type_inference import infer_types
from penstock.core.errors import InvalidInput
from penstock.core.records import NamedTuple, replace
from penstock.core.types import BOOL, INT64, TensorType
from penstock.frontends.load import check_and_sort
from penstock.ir.graph import Graph, Model, Node, Value, all_reads, captures, clone, is_framed, sort
from penstock.ir.op import Role
from penstock.ops.internal.joined_steps import WRITTEN
from penstock.ops.onnx.control_flow import loop_carried
from penstock.ops.registry import standard
from penstock.passes.context import PassContext
from penstock.passes.pipeline import PASSES, STRUCTURE, run_passes

ITERATION, CONDITION, GOES_ON = (f"{WRITTEN}{n}" for n in ("iteration", "condition", "goes_on"))
"""inputs of a body, and the output that says whether another iteration follows"""


class LoopBody(NamedTuple):
    """The ``model`` of an iteration: ``state`` has the outputs that are fed back, by inputs, and
    ``rows`` the outputs that are collected. ``trips`` and ``goes_on`` are the values of the loop's
    bounds, ``first`` those of its initial state, and ``outside`` those that its inputs read, by the
    inputs' names; ``results`` are the values that it returns, the state's first."""

    model: Model
    state: Mapping[str, str]
    rows: Sequence[str]
    trips: str | np.ndarray | None
    goes_on: str | np.ndarray | None
    first: Mapping[str, str | np.ndarray]
    outside: Mapping[str, str]
    results: Sequence[str | None]
    label: str


class LoopParts(NamedTuple):
    """The ``inputs`` of a model, the values of its ``outputs`` by name, and the ``models`` of its
    parts, each with the loops after it."""

    inputs: Sequence[str]
    outputs: Mapping[str, str]
    parts: Sequence[tuple[Model | None, Sequence[LoopBody]]]


def loop_parts(model: Model) -> LoopParts:
    """Return the parts of a model around its outermost loops. Raises ``InvalidInput`` if no loop
    can be run by itself."""
    graph = clone(model.graph)
    run_passes((*STRUCTURE, PASSES["fold_constants"]), graph, PassContext())
    if is_framed(graph) or graph.targets or not all(node.op.pure for node in graph.walk()):
        raise InvalidInput("the model has loops of frames, or effects, which runs cannot share")
    sort(graph)
    infer_types(graph)
    reasons = {node: _reason(node) for node in graph.nodes if node.op.role is Role.LOOP}
    loops = {node for node, reason in reasons.items() if reason is None}
    if not loops:
        why = [f"{node.label} {reason}" for node, reason in reasons.items()]
        raise InvalidInput(": ".join(["the model has no loop that runs can share", *why]))
    names = [value.name for value in model.graph.outputs]
    outputs = _named(graph, names)
    level = _levels(graph, loops)
    parts = []
    # There is always a part after the last loop, which may be empty.
    for number in range(max(level[loop] for loop in loops) + 2):
        own = [node for node in graph.nodes if level[node] == number]
        inner = [node for node in own if node not in loops]
        part = _part(model, graph, inner) if inner else None
        parts.append((part, [_body(model, node) for node in own if node in loops]))
    return LoopParts([value.name for value in graph.inputs], outputs, parts)


def _levels(graph: Graph, loops: set[Node]) -> dict[Node, int]:
    """Return how many of ``loops`` end before each node, along the longest path to it."""
    level: dict[Node, int] = {}
    for node in graph.nodes:
        before = [v.producer for v in all_reads(node) if v.producer in level]
        level[node] = max([level[p] + (p in loops) for p in before if p is not None], default=0)
    return level


def _named(graph: Graph, names: Sequence[str]) -> dict[str, str]:
    """Return the values of outputs by name; constants become values of nodes."""
    for i, value in enumerate(graph.outputs):
        if value.is_constant:
            graph.outputs[i] = Value(f"{value.name}/output", value.type)
            graph.nodes.append(Node(standard("Identity"), [value], [graph.outputs[i]]))
    return {name: value.name for name, value in zip(names, graph.outputs, strict=True)}


def _reason(node: Node) -> str | None:
    """Return why a loop cannot be run by itself, or None if it can."""
    entering, leaving = loop_carried(node)
    body: Graph = node.attrs["body"]
    values = [*body.inputs[entering], *body.outputs[leaving], *captures(body)]
    if not node.inputs[entering]:
        return "carries nothing"
    for value in (*values, *[v for v in node.inputs if v is not None]):
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.dtype is None or type_.shape is None:
            return f"carries or reads {value}, which is not a tensor of known rank"
    return None


def _part(model: Model, graph: Graph, nodes: Sequence[Node]) -> Model:
    """Return a model of some nodes, which returns outputs and the values that others read."""
    own = {value for node in nodes for value in node.outputs if value is not None}
    others = [node for node in graph.nodes if node not in set(nodes)]
    wanted = dict.fromkeys([v for node in others for v in all_reads(node) if v in own])
    wanted |= dict.fromkeys([v for v in graph.outputs if v in own])
    read = dict.fromkeys([v for node in nodes for v in all_reads(node) if v not in own])
    part = clone(Graph([*read], [*wanted], nodes, graph.name))
    return _model(model, part)


def _model(model: Model, graph: Graph) -> Model:
    derived = replace(
        model, graphs={"main": graph}, entry="main", aliases={}, output_dims={}, artifact=None
    )
    check_and_sort(derived)
    return derived


def _body(model: Model, node: Node) -> LoopBody:
    entering, leaving = loop_carried(node)
    body: Graph = node.attrs["body"]
    read = captures(body)
    copy = clone(Graph([*body.inputs, *read], body.outputs, body.nodes, node.label))
    count, condition, *carried = copy.inputs[: len(body.inputs)]
    count.name, condition.name = ITERATION, CONDITION
    count.type, condition.type = TensorType(INT64, ()), TensorType(BOOL, ())
    for i, value in enumerate(carried):
        value.name = f"{WRITTEN}state{i}"
    outside = {}
    for i, (value, source) in enumerate(zip(copy.inputs[len(body.inputs) :], read, strict=True)):
        value.name = f"{WRITTEN}outside{i}"
        outside[value.name] = source.name
    after = [GOES_ON, *[f"{WRITTEN}state{i}/next" for i in range(len(carried))]]
    after += [f"{WRITTEN}rows{i}" for i in range(len(copy.outputs) - len(after))]
    for i, name in enumerate(after):
        # An output may be an input, a constant, or another output.
        output = Value(name, copy.outputs[i].type)
        copy.nodes.append(Node(standard("Identity"), [copy.outputs[i]], [output]))
        copy.outputs[i] = output
    given = node.inputs[entering]
    return LoopBody(
        _model(model, copy),
        {value.name: f"{value.name}/next" for value in carried},
        after[leaving.stop :],
        _source(node.inputs[0]),
        _source(node.inputs[1]),
        {own.name: _known(value) for own, value in zip(carried, given, strict=True)},
        outside,
        [None if value is None else value.name for value in node.outputs],
        node.label,
    )


def _source(value: Value | None) -> str | np.ndarray | None:
    return None if value is None else _known(value)


def _known(value: Value | None) -> str | np.ndarray:
    """Return the name of a value, or its contents."""
    assert value is not None
    return value.name if value.const is None else value.const
