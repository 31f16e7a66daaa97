"""The plain interpreter: one node after the other, nothing planned.

It is the meaning of every executor, serves constant folding, and is what tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import array_of
from penstock.ops.onnx.control_flow import CONTROL, is_control
from penstock.types import type_of


def evaluate(node: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of one node without graphs, from the values of its inputs."""
    types = [None if v is None else type_of(x) for v, x in zip(node.inputs, inputs, strict=True)]
    result = node.op.compile(node, types)(*inputs)
    results = result if len(node.outputs) != 1 else (result,)
    return tuple(array_of(x) for x in results)


def interpret(
    graph: Graph, feeds: Sequence[Any], outer: Mapping[Value, Any] | None = None
) -> list[Any]:
    """The outputs of ``graph``, whose nodes must be sorted, for one value for each input."""
    values: dict[Value, Any] = dict(outer or {})
    values.update(zip(graph.inputs, feeds, strict=True))

    def value_of(value: Value | None) -> Any:
        if value is None:
            return None
        return value.const if value.const is not None else values[value]

    for node in graph.nodes:
        inputs = [value_of(value) for value in node.inputs]
        if is_control(node):
            results = _controlled(node, inputs, values)
        else:
            results = list(evaluate(node, inputs))
        values.update((v, x) for v, x in zip(node.outputs, results, strict=False) if v is not None)
    return [value_of(value) for value in graph.outputs]


def _controlled(node: Node, inputs: Sequence[Any], around: Mapping[Value, Any]) -> list[Any]:
    """The outputs of a node that carries graphs, which read the values ``around`` them."""
    steps = CONTROL[node.op.role](node, inputs)
    try:
        graph, fed = next(steps)
        while True:
            graph, fed = steps.send(interpret(graph, fed, around))
    except StopIteration as end:
        made: list[Any] = end.value
        return made
