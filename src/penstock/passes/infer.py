"""Types of all values, from the types of the graph's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import InvalidModel
from penstock.ir import Graph, Node, Value
from penstock.ops.control import CONTROL, ScanLayout
from penstock.types import (
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
)

# A carried type is widened at most once a dim, once for its rank and once for its dtype; nested
# optionals and sequences add little. Past that something is wrong, and nothing is claimed.
_MOST_ROUNDS = 70


def infer_types(graph: Graph, *, certain: bool = True) -> None:
    """Set the type of every value that a node of ``graph`` produces, nested graphs included.

    ``certain``: every node of this graph runs whenever the graph does, so one that can never run is
    an error of the model; in a branch or body it may not run at all, and its outputs stay unknown.
    """
    for node in graph.nodes:
        set_types(node, certain=certain)


def set_types(node: Node, *, certain: bool = True) -> None:
    """Set the types of one node's outputs from those of its inputs."""
    types = node_types(node, certain=certain)
    for i, value in enumerate(node.outputs):
        if value is not None:
            value.type = types[i] if i < len(types) else ANY


def node_types(node: Node, *, certain: bool = True) -> Sequence[Type]:
    """The types of a node's outputs, as far as they can be known."""
    try:
        if node.op.name in CONTROL:
            return _CONTROL_TYPES[node.op.name](node)
        inputs = node.inputs
        return node.op.infer(
            [None if v is None else v.type for v in inputs],
            node.attrs,
            [None if v is None else v.const for v in inputs],
        )
    except ShapeError as error:
        if not certain:
            return ()
        raise InvalidModel(f"{describe(node)}: {error}") from error


def describe(node: Node) -> str:
    """A node for an error message: operation, origin and the types at hand."""
    types = ", ".join("none" if v is None else f"{v.name}: {v.type}" for v in node.inputs)
    return f"{node.op.name} ({node.origin or node.name}) with inputs ({types})"


def _if(node: Node) -> Sequence[Type]:
    branches = [node.attrs["then_branch"], node.attrs["else_branch"]]
    for branch in branches:
        infer_types(branch, certain=False)
    outputs = zip(*[branch.outputs for branch in branches], strict=True)
    return [join(a.type, b.type) for a, b in outputs]


def _loop(node: Node) -> Sequence[Type]:
    body: Graph = node.attrs["body"]
    limit, _, *initial = node.inputs
    iteration, condition, *carried = body.inputs
    iteration.type = TensorType(INT64, ())
    condition.type = TensorType(BOOL, ())
    count = len(carried)
    final = _settle(body, carried, [_type(v) for v in initial], body.outputs[1 : 1 + count])
    trips: Dim = None
    if limit is not None and limit.const is not None and _always(body):
        trips = max(0, int(np.asarray(limit.const).reshape(-1)[0]))
    scanned = [_stacked(v.type, trips, 0, trips) for v in body.outputs[1 + count :]]
    return [*final, *scanned]


def _always(body: Graph) -> bool:
    """Whether a Loop's condition stays true: it is constant, or handed through."""
    condition = body.outputs[0]
    return condition is body.inputs[1] or (
        condition.const is not None and bool(np.all(condition.const))
    )


def _scan(node: Node) -> Sequence[Type]:
    body: Graph = node.attrs["body"]
    layout = ScanLayout(node)
    n = layout.states
    length: Dim = None
    for value, scanned, axis in zip(
        node.inputs[n:], body.inputs[n:], layout.input_axes, strict=True
    ):
        kind = _type(value)
        scanned.type = TensorType(kind.dtype if isinstance(kind, TensorType) else None, None)
        if isinstance(kind, TensorType) and kind.shape is not None:
            if not -len(kind.shape) <= axis < len(kind.shape):
                raise ShapeError(f"scan axis {axis} is out of range for {kind}")
            axis %= len(kind.shape)
            dim = kind.shape[axis]
            length = dim if length is None else length
            scanned.type = TensorType(kind.dtype, kind.shape[:axis] + kind.shape[axis + 1 :])
    initial = [_type(v) for v in node.inputs[:n]]
    final = _settle(body, body.inputs[:n], initial, body.outputs[:n])
    outputs = zip(body.outputs[n:], layout.output_axes, strict=True)
    return [*final, *(_stacked(v.type, length, axis, None) for v, axis in outputs)]


def _sequence_map(node: Node) -> Sequence[Type]:
    body: Graph = node.attrs["body"]
    for value, inner in zip(node.inputs, body.inputs, strict=False):
        kind = _type(value)
        inner.type = kind.element if isinstance(kind, SequenceType) else kind
    infer_types(body, certain=False)
    return [SequenceType(value.type) for value in body.outputs]


def _settle(
    body: Graph, inputs: Sequence[Value], initial: Sequence[Type], outputs: Sequence[Value]
) -> list[Type]:
    """Types of carried values that hold in every iteration, the first and the last included."""
    types = [_no_data(kind) for kind in initial]
    for _ in range(_MOST_ROUNDS):
        for value, kind in zip(inputs, types, strict=True):
            value.type = kind
        infer_types(body, certain=False)
        wider = [
            _no_data(join(kind, value.type)) for kind, value in zip(types, outputs, strict=True)
        ]
        if wider == types:
            return types
        types = wider
    types = [ANY] * len(types)
    for value in inputs:
        value.type = ANY
    infer_types(body, certain=False)
    return types


def _stacked(kind: Type, length: Dim, axis: int, trips: Dim) -> Type:
    """The type of scanned rows of type ``kind``; of none at all, only the dtype is known."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return TensorType(kind.dtype if isinstance(kind, TensorType) else None, None)
    rank = len(kind.shape) + 1
    axis = axis % rank if -rank <= axis < rank else 0
    return TensorType(kind.dtype, (*kind.shape[:axis], length, *kind.shape[axis:]))


def _type(value: Value | None) -> Type:
    return OptionalType(ANY) if value is None else value.type


def _no_data(kind: Type) -> Type:
    return kind.without_data() if isinstance(kind, TensorType) else kind


_CONTROL_TYPES = {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}
