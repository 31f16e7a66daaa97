"""Contexts to run passes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.ir.graph import Graph, Node
from penstock.passes.context import PassContext
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import graph_from_text


class AcceptingPolicy:
    """Has a kernel for each fused node that ``accepts`` is true of; remembers what it is asked."""

    def __init__(
        self, accepts: Callable[[Node], bool] = lambda node: True, faster: bool = True
    ) -> None:
        self.accepts = accepts
        self.faster = faster
        self.asked: list[Node] = []

    def has_kernel(self, node: Node) -> bool:
        self.asked.append(node)
        return self.accepts(node)

    def is_faster(self, node: Node) -> bool:
        return self.faster


def fusing_context(
    accepts: Callable[[Node], bool] = lambda node: True, **options: Any
) -> PassContext:
    """A context with a backend that has a kernel for each fused node that ``accepts`` is true of."""
    return PassContext(fusion=AcceptingPolicy(accepts), **options)


def optimized_text(text: str, opset: int = 20) -> Graph:
    """The graph of a text behind the passes that need no shapes of a run."""
    graph = graph_from_text(text, opset=opset)
    optimize(graph)
    return graph


def count_operations(graph: Graph) -> Counter[str]:
    """How many nodes of each operation a graph has, nested graphs included."""
    return Counter(node.op.name for node in graph.walk())
