"""The reference interpreter: runs nodes in their order on NumPy kernels, without a plan.

It defines what every executor must compute. Constant folding evaluates single nodes with it, and
the executor ``interpret`` (``executors/interpret.py``) runs whole graphs::

    values = {inputs: feeds}
    for node in graph.nodes:
        values[node.outputs] = evaluate(node, values[node.inputs])
    return values[graph.outputs]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.types import RunValue, type_of
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.kernel import Kernel, array_of
from penstock.ops.onnx.control_flow import CONTROL, is_control


def evaluate(
    node: Node, inputs: Sequence[RunValue], kernel: Kernel | None = None
) -> tuple[RunValue, ...]:
    """Return the outputs of one node without sub-graphs, given the values of its inputs. ``kernel``
    is the node's NumPy kernel; by default it is compiled for the types of ``inputs``."""
    if kernel is None:
        types = [
            None if v is None else type_of(x) for v, x in zip(node.inputs, inputs, strict=True)
        ]
        kernel = node.op.compile(node, types)
    result = kernel(*inputs)
    if not node.outputs:
        return ()  # the kernel may return None
    results = result if len(node.outputs) != 1 else (result,)
    return tuple(map(array_of, results))


class Interpreter:
    """Runs graphs. A subclass may override ``node`` to observe or check what nodes compute."""

    def run(
        self, graph: Graph, feeds: Sequence[RunValue], outer: Mapping[Value, RunValue]
    ) -> list[RunValue]:
        """Return the outputs of ``graph``, whose nodes must be sorted, for one value per input.
        ``outer`` has the values of enclosing graphs."""
        values = dict(outer)
        values.update(zip(graph.inputs, feeds, strict=True))

        def value_of(value: Value | None) -> RunValue:
            if value is None:
                return None
            return value.const if value.const is not None else values[value]

        for node in graph.nodes:
            results = self.node(node, [value_of(value) for value in node.inputs], values)
            values.update((v, x) for v, x in zip(node.outputs, results, strict=False) if v)
        return [value_of(value) for value in graph.outputs]

    def node(
        self, node: Node, inputs: Sequence[RunValue], values: Mapping[Value, RunValue]
    ) -> Sequence[RunValue]:
        """Return the outputs of one node. Its sub-graphs may read ``values``."""
        return self.control(node, inputs, values) if is_control(node) else evaluate(node, inputs)

    def control(
        self, node: Node, inputs: Sequence[RunValue], values: Mapping[Value, RunValue]
    ) -> Sequence[RunValue]:
        """Return the outputs of a node that runs sub-graphs."""
        steps = CONTROL[node.op.role](node, inputs)
        number = 0
        try:
            graph, feeds = next(steps)
            while True:
                self.enter(node, number)
                graph, feeds = steps.send(self.run(graph, feeds, values))
                number += 1
        except StopIteration as end:
            outputs: list[Any] = end.value
            return outputs

    def enter(self, node: Node, number: int) -> None:
        """Called before a sub-graph of ``node`` runs for the ``number``-th time, from 0."""
