"""Infer the types of all values of a graph from the types of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import PenstockError
from penstock.core.types import (
    ANY,
    BOOL,
    INT64,
    Dim,
    OptionalType,
    SequenceType,
    ShapeError,
    TensorType,
    Type,
    join,
    without_data,
)
from penstock.ir.describe import compile_error
from penstock.ir.graph import Contents, Graph, Node, Value
from penstock.ir.op import Role
from penstock.ops.onnx.control_flow import ScanLayout, loop_carried, read_trip_count

# A carried type is widened at most once for each dim, for its rank and for its dtype; nested
# optionals and sequences add few rounds. After more rounds the types are considered unknown.
_MOST_ROUNDS = 70

Settled = dict[Node, list[Type]]
"""The types of loop-carried values, as widened by earlier rounds over the loops around them.

Every round over a loop's body visits its inner loops again. If these started from scratch, the work
would double with every level of nesting."""


def infer_types(graph: Graph, *, certain: bool = True, settled: Settled | None = None) -> None:
    """Set the type of every value that a node of ``graph`` or of a nested graph produces.

    ``certain``: every node of this graph runs whenever the graph does, so that a node that cannot
    run is an error of the model. In a branch or body it may never run: its outputs stay unknown.
    ``settled``: the types that enclosing loops have found so far.
    """
    settled = {} if settled is None else settled
    for node in with_checkpoints(graph.nodes):
        types = node_types(node, certain=certain, settled=settled)
        for i, value in enumerate(node.outputs):
            if value is not None:
                value.type = types[i] if i < len(types) else ANY


def node_types(
    node: Node, *, certain: bool = True, settled: Settled | None = None
) -> Sequence[Type]:
    """Return the types of a node's outputs as far as known, and set those in its graphs."""
    try:
        if node.op.role in _CONTROL_TYPES:
            return _CONTROL_TYPES[node.op.role](node, {} if settled is None else settled)
        types: list[Type | None] = []
        consts: list[np.ndarray | None] = []
        for value in node.inputs:
            types.append(None if value is None else value.type)
            if value is None or value.is_held:
                consts.append(None if value is None else value.const)
        # Constants that were released are restored only when their contents are needed.
        contents = consts if len(consts) == len(types) else Contents(node.inputs)
        return node.op.infer(types, node.attrs, contents)
    except PenstockError:
        raise
    except Exception as error:
        # The branch may be the one that these shapes never take.
        if isinstance(error, ShapeError) and not certain:
            return ()
        raise compile_error(node, error) from error


def _if(node: Node, settled: Settled) -> Sequence[Type]:
    for branch in (node.attrs["then_branch"], node.attrs["else_branch"]):
        infer_types(branch, certain=False, settled=settled)
    return types_of_branches(node)


def types_of_branches(node: Node) -> Sequence[Type]:
    """Return the types of an If's outputs, given those of its branches' outputs."""
    pairs = zip(node.attrs["then_branch"].outputs, node.attrs["else_branch"].outputs, strict=True)
    return [join(a.type, b.type) for a, b in pairs]


def _loop(node: Node, settled: Settled) -> Sequence[Type]:
    body: Graph = node.attrs["body"]
    iteration, condition = body.inputs[:2]
    iteration.type = TensorType(INT64, ())  # ONNX fixes both types, whatever a file declares
    condition.type = TensorType(BOOL, ())
    final = _settle(node, settled)
    limit = node.inputs[0]
    trips: Dim = None
    limit_type = _type(limit)
    if isinstance(limit_type, TensorType) and limit_type.static and limit_type.elements != 1:
        raise ShapeError(f"a trip count must be one integer, not {limit_type}")
    # A condition may end the loop before its limit does.
    if limit is not None and limit.const is not None and _always(node):
        trips = max(0, read_trip_count(limit.const))
    collected = body.outputs[loop_carried(node)[1].stop :]
    return [*final, *(_stacked(v.type, trips, 0) for v in collected)]


def _always(node: Node) -> bool:
    """Whether a Loop's condition is always true, so that only the limit ends the loop."""
    before, body = node.inputs[1], node.attrs["body"]
    after = body.outputs[0]
    return (before is None or _is_true(before)) and (after is body.inputs[1] or _is_true(after))


def _is_true(value: Value) -> bool:
    return value.const is not None and value.const.size == 1 and bool(value.const.all())


def _scan(node: Node, settled: Settled) -> Sequence[Type]:
    body: Graph = node.attrs["body"]
    layout = ScanLayout(node)
    n = layout.states
    length: Dim = None
    scanned = zip(node.inputs[n:], body.inputs[n:], layout.input_axes, strict=True)
    for value, inside, axis in scanned:
        inside.type = TensorType(None if value is None else value.dtype)
        if value is not None and (shape := value.shape) is not None:
            if not -len(shape) <= axis < len(shape):
                raise ShapeError(f"scan axis {axis} is out of range for {value.type}")
            axis %= len(shape)
            length = shape[axis] if length is None else length  # all sequences have one length
            inside.type = TensorType(value.dtype, shape[:axis] + shape[axis + 1 :])
    final = _settle(node, settled)
    outputs = zip(body.outputs[n:], layout.output_axes, strict=True)
    return [*final, *(_stacked(v.type, length, axis) for v, axis in outputs)]


def _sequence_map(node: Node, settled: Settled) -> Sequence[Type]:
    body: Graph = node.attrs["body"]
    for value, inner in zip(node.inputs, body.inputs, strict=False):
        type_ = _type(value)
        inner.type = type_.element if isinstance(type_, SequenceType) else type_
    infer_types(body, certain=False, settled=settled)
    return [SequenceType(value.type) for value in body.outputs]


def _settle(node: Node, settled: Settled) -> list[Type]:
    """Return types of carried values that hold in every iteration."""
    body: Graph = node.attrs["body"]
    entering, leaving = loop_carried(node)
    starts = [without_data(_type(value)) for value in node.inputs[entering]]
    return _fixed_point(node, starts, body.inputs[entering], body.outputs[leaving], settled)


def _fixed_point(
    node: Node,
    types: list[Type],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    settled: Settled,
) -> list[Type]:
    """Return ``types`` of the ``inputs`` of a loop's body, widened until they also hold for
    ``outputs``, which are the inputs of the next iteration."""
    body: Graph = node.attrs["body"]
    if node in settled:
        types = [join(a, b) for a, b in zip(types, settled[node], strict=True)]
    for _ in range(_MOST_ROUNDS):
        for value, type_ in zip(inputs, types, strict=True):
            value.type = type_
        infer_types(body, certain=False, settled=settled)
        wider = [join(type_, without_data(v.type)) for type_, v in zip(types, outputs, strict=True)]
        settled[node] = wider  # the next round of a loop around this one starts from here
        if wider == types:
            return types
        types = wider
    # An example is a sequence that each iteration nests once more.
    types = settled[node] = [ANY] * len(types)
    for value in inputs:
        value.type = ANY
    infer_types(body, certain=False, settled=settled)
    return types


def _frame(node: Node, settled: Settled) -> Sequence[Type]:
    body: Graph = node.attrs["body"]
    for value, inner in zip(node.inputs, body.inputs, strict=True):
        inner.type = without_data(_type(value))
    starts: list[Type] = []
    again: list[Node] = []
    for merge in body.nodes:
        sources = {v.producer.op.role: v.producer for v in merge.inputs if v and v.producer}
        if merge.op.role is Role.MERGE and Role.NEXT_ITERATION in sources:
            starts.append(_type(sources[Role.ENTER].inputs[0]))
            again.append(sources[Role.NEXT_ITERATION])
    merged = [value for node in again if (value := node.outputs[0]) is not None]
    updates = [value for node in again if (value := node.inputs[0]) is not None]
    _fixed_point(node, starts, merged, updates, settled)
    return [value.type for value in body.outputs]


def _stacked(type_: Type, length: Dim, axis: int) -> Type:
    """Return the type of stacked rows of type ``type_``, or only its dtype if it is unknown."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return TensorType(type_.dtype if isinstance(type_, TensorType) else None, None)
    rank = len(type_.shape) + 1
    axis = axis % rank if -rank <= axis < rank else 0
    return TensorType(type_.dtype, (*type_.shape[:axis], length, *type_.shape[axis:]))


def _type(value: Value | None) -> Type:
    return OptionalType(ANY) if value is None else value.type


_CONTROL_TYPES: dict[Role | None, Callable[[Node, Settled], Sequence[Type]]] = {
    Role.IF: _if,
    Role.LOOP: _loop,
    Role.SCAN: _scan,
    Role.SEQUENCE_MAP: _sequence_map,
    Role.FRAME: _frame,
}
