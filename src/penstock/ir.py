"""Graphs: nodes that consume and produce values, in SSA form.

A value has one producer at most, and says so; who consumes it is found by walking the nodes
(``Graph.consumers``). A node may carry graphs among its attributes (the branches of an If, the body
of a Loop); what such a graph takes from outside it simply refers to: the ``Value`` object is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.types import ANY, Type, constant_type

if TYPE_CHECKING:
    from penstock.ops.base import Op


class Value:
    """A named result of a node, an input of a graph (no producer), or a constant (``const``)."""

    __slots__ = ("const", "name", "producer", "type")

    def __init__(
        self,
        name: str,
        type: Type = ANY,
        producer: Node | None = None,
        const: np.ndarray | None = None,
    ) -> None:
        self.name = name
        self.type = constant_type(const) if const is not None and type is ANY else type
        self.producer = producer
        self.const = const

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


class Node:
    """One application of an operation.

    ``inputs`` and ``outputs`` are positional, ``None`` where an optional one is left out.
    ``control_inputs`` are nodes that must have run before, ``device`` is a full device name or "",
    ``origin`` says where the node came from and stands in every message about it.
    """

    __slots__ = ("attrs", "control_inputs", "device", "inputs", "name", "op", "origin", "outputs")

    def __init__(
        self,
        op: Op,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        control_inputs: Sequence[Node] = (),
        device: str = "",
        origin: str = "",
    ) -> None:
        self.op = op
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.attrs: dict[str, Any] = dict(attrs or {})
        self.name = name
        self.control_inputs = list(control_inputs)
        self.device = device
        self.origin = origin
        for output in self.outputs:
            if output is not None:
                output.producer = self

    @property
    def graphs(self) -> list[tuple[str, Graph]]:
        """The graphs among the attributes, by attribute name, in a fixed order."""
        return [(k, v) for k, v in self.attrs.items() if isinstance(v, Graph)]

    def __repr__(self) -> str:
        outputs = ", ".join(v.name if v is not None else "_" for v in self.outputs)
        inputs = ", ".join(v.name if v is not None else "_" for v in self.inputs)
        return f"{outputs} = {self.op.name}({inputs})"


class Graph:
    """Nodes in any order (``passes`` and ``order`` sort), with the values that enter and leave."""

    __slots__ = ("inputs", "name", "nodes", "outputs")

    def __init__(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        nodes: Sequence[Node],
        name: str = "",
    ) -> None:
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.nodes = list(nodes)
        self.name = name

    def consumers(self) -> dict[Value, list[Node]]:
        """Who consumes each value, nodes of nested graphs included; once for each use."""
        found: dict[Value, list[Node]] = {}
        for node in self.walk():
            for value in node.inputs:
                if value is not None:
                    found.setdefault(value, []).append(node)
        return found

    def walk(self) -> Iterator[Node]:
        """Every node, those of nested graphs after the node that carries them."""
        stack = [iter(self.nodes)]
        while stack:
            for node in stack[-1]:
                yield node
                inner = [graph for _, graph in node.graphs]
                if inner:
                    stack.extend(iter(graph.nodes) for graph in reversed(inner))
                    break
            else:
                stack.pop()

    def graphs(self) -> Iterator[Graph]:
        """This graph and every nested one."""
        yield self
        for node in self.walk():
            for _, graph in node.graphs:
                yield graph

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.nodes)} nodes)"


class Model:
    """Graphs, of which ``graphs[entry]`` is run; ``functions`` that nodes call by name; metadata."""

    __slots__ = ("entry", "functions", "graphs", "metadata", "path")

    def __init__(
        self,
        graphs: Mapping[str, Graph],
        entry: str,
        functions: Mapping[str, Graph] | None = None,
        metadata: Mapping[str, str] | None = None,
        path: str | None = None,
    ) -> None:
        self.graphs = dict(graphs)
        self.entry = entry
        self.functions = dict(functions or {})
        self.metadata = dict(metadata or {})
        self.path = path

    @property
    def graph(self) -> Graph:
        """The graph that a run starts with."""
        return self.graphs[self.entry]


def captures(graph: Graph) -> list[Value]:
    """The values that a nested graph takes from the graphs around it, in order of first use.

    Constants are not among them: they belong to no graph.
    """
    own = set(graph.inputs)
    for node in graph.walk():
        own.update(v for v in node.outputs if v is not None)
        for _, inner in node.graphs:
            own.update(inner.inputs)
    found: dict[Value, None] = {}
    for node in graph.walk():
        for value in node.inputs:
            if value is not None and value.const is None and value not in own:
                found[value] = None
    for each in graph.graphs():
        for value in each.outputs:
            if value.const is None and value not in own:
                found[value] = None
    return list(found)
