"""Structured control flow: operations with graphs as attributes.

Their nodes have no kernels: an executor runs their graphs. Each operation is a generator that
yields a graph with its inputs, receives the outputs, and returns the outputs of the node, so that
the caller decides when and where a graph runs.

Attributes: ``then_branch`` and ``else_branch`` of If; ``body`` of Loop, Scan and SequenceMap.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import Any

import numpy as np

from penstock.core.errors import InternalError
from penstock.core.types import RunValue, RunValues, ShapeError, TensorType, Type
from penstock.host.current_run import keep, reserve
from penstock.ir.graph import Graph, Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Role, Types
from penstock.ops.registry import operator

Steps = Generator[tuple[Graph, RunValues], RunValues, list[Any]]

# Rows that a loop collects between two checks of the run's memory limit; bytes of a list entry.
_UNASKED, _REFERENCE_BYTES = 1024, 8


@operator("If", since=1, role=Role.IF)
@operator("Loop", since=1, role=Role.LOOP)
@operator("Scan", since=9, role=Role.SCAN)
@operator("SequenceMap", since=17, role=Role.SEQUENCE_MAP)
def control(node: Node, types: Types) -> Kernel:
    raise InternalError(f"{node.op.name} has no kernel: the executor runs its graphs")


def is_control(node: Node) -> bool:
    """Whether ``node`` has graphs that an executor runs, rather than a kernel."""
    return node.op.role in CONTROL


def loop_carried(node: Node) -> tuple[slice, slice]:
    """The positions of loop-carried values among the inputs, and among the outputs of the body.

    The positions among inputs apply to the node and to its body. The node's outputs begin with the
    final loop-carried values, followed by the stacked values of the body's other outputs.
    """
    if node.op.role is Role.LOOP:
        count = len(node.inputs) - 2  # after trip count and condition
        return slice(2, 2 + count), slice(1, 1 + count)
    count = len(node.inputs) - node.attrs["num_scan_inputs"] if node.op.role is Role.SCAN else 0
    return slice(0, count), slice(0, count)


def collects_rows(node: Node) -> bool:
    """Whether a node is a loop with outputs that are stacked from all iterations."""
    if node.op.role not in (Role.LOOP, Role.SCAN):
        return False
    return loop_carried(node)[1].stop < len(node.attrs["body"].outputs)


def _run_if(node: Node, inputs: RunValues) -> Steps:
    """ONNX If: one of two graphs without inputs, by a condition of one element."""
    branch = "then_branch" if truth(inputs[0]) else "else_branch"
    return list((yield node.attrs[branch], ()))


def _run_loop(node: Node, inputs: RunValues) -> Steps:
    """ONNX Loop: ``body(iteration, condition, *carried) -> (condition, *carried, *scanned)``."""
    limit, condition, *carried = inputs
    body: Graph = node.attrs["body"]
    outputs = body.outputs[1 + len(carried) :]
    scanned: list[list[Any]] = [[] for _ in outputs]
    go_on = condition is None or truth(condition)
    for i in count() if limit is None else range(read_trip_count(limit)):
        if not go_on:
            break
        # The body runs only where its condition holds.
        proceed, *results = yield body, (np.array(i, np.int64), np.array(True), *carried)
        go_on = truth(proceed)
        carried = results[: len(carried)]
        for rows, row in zip(scanned, results[len(carried) :], strict=True):
            add_row(rows, row)
    return [*carried, *(stack(r, 0, 0, v.type) for r, v in zip(scanned, outputs, strict=True))]


def _run_scan(node: Node, inputs: RunValues) -> Steps:
    """ONNX Scan: ``body(*states, *slices) -> (*states, *slices)`` along axes of the scan inputs."""
    body: Graph = node.attrs["body"]
    layout = ScanLayout(node)
    states, scans = list(inputs[: layout.states]), inputs[layout.states :]
    scanned: list[list[Any]] = [[] for _ in layout.output_axes]
    views = list(map(rows_of, scans, layout.input_axes, layout.input_backward))
    for i in range(same_length(*views)):
        # The ellipsis makes an element of a vector a 0-d array rather than a scalar.
        results = yield body, (*states, *(view[i, ...] for view in views))
        states = list(results[: layout.states])
        for rows, row in zip(scanned, results[layout.states :], strict=True):
            add_row(rows, row)
    row_types = [value.type for value in body.outputs[layout.states :]]
    outputs = zip(scanned, layout.output_axes, layout.output_backward, row_types, strict=True)
    return [*states, *(stack(*output) for output in outputs)]


def _run_sequence_map(node: Node, inputs: RunValues) -> Steps:
    """ONNX SequenceMap: apply the body to the elements of one or more sequences of equal length."""
    body: Graph = node.attrs["body"]
    first, *others = inputs
    results: list[RunValue] = [[] for _ in body.outputs]
    for i, element in enumerate(first):
        rest = (element_of(x, i) for x in others)
        for rows, row in zip(results, (yield body, (element, *rest)), strict=True):
            rows.append(keep(row))
    return results


def element_of(value: RunValue, index: int) -> RunValue:
    """Element ``index`` of a sequence; a tensor is passed unchanged to every iteration."""
    if not isinstance(value, list):
        return value
    if index >= len(value):
        raise ShapeError("the input sequences of SequenceMap must have the same length")
    return value[index]


class ScanLayout:
    """Axes and directions of a Scan node, one entry for each scan input and output.
    ``input_axes`` index the scanned tensors, ``output_axes`` the stacked ones."""

    def __init__(self, node: Node) -> None:
        n = node.attrs["num_scan_inputs"]
        self.states = len(node.inputs) - n
        outputs = len(node.attrs["body"].outputs) - self.states

        def entries(name: str, count: int) -> list[int]:
            return list(node.attrs.get(name) or [0] * count)

        self.input_axes = entries("scan_input_axes", n)
        self.output_axes = entries("scan_output_axes", outputs)
        self.input_backward = entries("scan_input_directions", n)
        self.output_backward = entries("scan_output_directions", outputs)


def rows_of(array: np.ndarray, axis: int, backward: int) -> np.ndarray:
    """A view of ``array`` with ``axis`` as its first axis, reversed if ``backward``."""
    if not -array.ndim <= axis < array.ndim:
        raise ShapeError(f"scan axis {axis} is out of range for shape {list(array.shape)}")
    view = np.moveaxis(array, axis, 0) if axis else array
    return view[::-1] if backward else view


def same_length(*arrays: np.ndarray) -> int:
    """The number of rows of each of a Scan's inputs; raise ``ShapeError`` if they differ."""
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise ShapeError(
            f"the scan inputs of Scan must have the same length, but have lengths {sorted(lengths)}"
        )
    return lengths.pop()


def row_type(type_: Type, axis: int) -> TensorType:
    """The type of the rows that are stacked along ``axis`` to a value of type ``type_``."""
    if not isinstance(type_, TensorType):
        return TensorType()
    if not type_.shape:
        return TensorType(type_.dtype)
    axis %= len(type_.shape)
    return TensorType(type_.dtype, type_.shape[:axis] + type_.shape[axis + 1 :])


def add_row(rows: list[Any], row: Any) -> None:
    """Append a row, and count it towards the run's memory limit. Rows that share one array count
    once; so that a loop does not collect references without limit, the memory for stacking is
    checked from time to time."""
    rows.append(keep(row))
    if len(rows) % _UNASKED == 0:
        reserve(len(rows) * (row.nbytes + _REFERENCE_BYTES))


def stack(rows: RunValues, axis: int, backward: int, type_: Type) -> np.ndarray:
    """Stack scanned rows into one tensor. Without rows it is empty, and unknown dims are 0."""
    if rows:
        reserve(len(rows) * rows[0].nbytes)
        return np.stack(rows[::-1] if backward else rows, axis)
    row = type_ if isinstance(type_, TensorType) else TensorType()
    dims = [dim if isinstance(dim, int) else 0 for dim in row.shape or ()]
    dims.insert(axis % (len(dims) + 1), 0)
    return np.empty(dims, row.dtype or np.float32)


def truth(condition: np.ndarray) -> bool:
    """The truth value of a condition, a tensor of one element."""
    if condition.size != 1:
        raise ShapeError(f"the condition must have one element, not shape {condition.shape}")
    return bool(condition.reshape(-1)[0])


def read_trip_count(value: RunValue) -> int:
    """The value of a trip count, an integer tensor of one element."""
    if value.size != 1 or value.dtype.kind not in "iu":
        raise ShapeError(
            "the trip count must be an integer tensor of one element, not "
            f"{value.dtype}{list(value.shape)}"
        )
    return int(value.item())


CONTROL: dict[Role | None, Callable[[Node, RunValues], Steps]] = {
    Role.IF: _run_if,
    Role.LOOP: _run_loop,
    Role.SCAN: _run_scan,
    Role.SEQUENCE_MAP: _run_sequence_map,
}
