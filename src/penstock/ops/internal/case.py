"""Case: one of several branches, selected by an index.

Graph builders expand it to a binary tree of If nodes, which selects one of n branches by log2(n)
comparisons::

    Case(i) of 4 branches  ->  If(i < 2) { If(i < 1) { 0 } else { 1 } } else { If(i < 3) { 2 } ...

The importer expands TensorFlow's Case, and the parser of the text format ``penstock.Case``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import BOOL, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Op
from penstock.ops.registry import no_kernel, standard, unknown_types

CASE = Op("Case", "penstock", 1, 1, unknown_types, no_kernel("it becomes a tree of If nodes"))
"""Input: an integer tensor of one element. Attributes: the graphs ``branch_0``, ``branch_1`` ...,
and ``default``, which runs for any other index. They have no inputs, and the outputs of the
node."""


def expand_case(node: Node) -> list[Node]:
    """Convert a ``Case`` node to an If; return the nodes that compute its condition, then the node
    itself. Raises ``ValueError`` for invalid attributes or inputs."""
    graphs = dict(node.graphs)
    default = graphs.pop("default", None)
    names = [f"branch_{i}" for i in range(len(graphs))]
    others = len(node.attrs) - len(node.graphs)
    if default is None or not names or set(graphs) != set(names) or others:
        raise ValueError("Case must have the attributes branch_0, branch_1 ... and default")
    branches = [graphs[name] for name in names]
    index = node.inputs[0] if len(node.inputs) == 1 else None
    if index is None:
        raise ValueError("Case must have exactly one input, the index of the branch")
    for graph in (*branches, default):
        if graph.inputs or len(graph.outputs) != len(node.outputs):
            raise ValueError(
                f"a branch of Case must have no inputs and {len(node.outputs)} outputs, as the "
                f"node, but has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs"
            )
    outputs = [value for value in node.outputs if value is not None]
    name = node.name or (outputs[0].name if outputs else "case")
    tree = _Tree(index, branches, outputs, name, node.device, node.origin)
    low, is_low = tree.compare("GreaterOrEqual", 0)
    high, is_high = tree.compare("Less", len(branches))
    in_range = Value(f"{name}#in_range", TensorType(BOOL))
    both = tree.node("And", [is_low, is_high], [in_range], in_range.name)
    node.op, node.inputs = standard("If"), [in_range]
    node.attrs = {"then_branch": tree.graph(0, len(branches)), "else_branch": default}
    return [low, high, both, node]


def case_condition(
    index: Value,
    branches: Sequence[Graph],
    outputs: Sequence[Value],
    name: str,
    *,
    device: str = "",
    origin: str = "",
) -> tuple[Node, dict[str, Graph]]:
    """Return the node of the condition and the attributes of the If that runs ``branches[index]``.

    ``index`` must be in range, and there must be at least two branches. The results have the types
    of ``outputs``; the names of nodes begin with ``name``.
    """
    return _Tree(index, branches, outputs, name, device, origin).halves(0, len(branches))


@dataclass(frozen=True, slots=True)
class _Tree:
    """Builds the nodes of a tree, which share device and origin."""

    index: Value
    branches: Sequence[Graph]
    outputs: Sequence[Value]
    name: str
    device: str
    origin: str

    def node(
        self, op: str, inputs: Sequence[Value], outputs: Sequence[Value], name: str, **attrs: Any
    ) -> Node:
        device, origin = self.device, self.origin
        return Node(standard(op), inputs, outputs, attrs, name=name, device=device, origin=origin)

    def compare(self, op: str, bound: int) -> tuple[Node, Value]:
        """Return a node that compares the index with ``bound``."""
        type_ = self.index.type
        dtype = type_.dtype if isinstance(type_, TensorType) and type_.dtype else np.int64
        name = f"{self.name}#{op.lower()}_{bound}"
        output = Value(name, TensorType(BOOL))
        constant = Value(f"{name}_bound", const=np.array(bound, dtype))
        return self.node(op, [self.index, constant], [output], name), output

    def halves(self, first: int, end: int) -> tuple[Node, dict[str, Graph]]:
        middle = (first + end) // 2
        less, _ = self.compare("Less", middle)
        lower, upper = self.graph(first, middle), self.graph(middle, end)
        return less, {"then_branch": lower, "else_branch": upper}

    def graph(self, first: int, end: int) -> Graph:
        """The graph that runs one of the branches from ``first`` to ``end``."""
        if end - first == 1:
            return self.branches[first]
        less, halves = self.halves(first, end)
        name = f"{self.name}#{first}_{end}"
        outputs = [Value(f"{name}:{i}", value.type) for i, value in enumerate(self.outputs)]
        (condition,) = less.outputs
        assert condition is not None
        node = self.node("If", [condition], outputs, name, **halves)
        return Graph([], outputs, [less, node], name, [node])
