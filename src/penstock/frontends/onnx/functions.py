"""Functions of ONNX models: which there are, and what a model amounts to once they are expanded.

Bodies are not converted on their own: ``onnx.py`` imports a body anew for each call, with the
values and attributes of the call. That can multiply, so it is counted before anything is expanded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, OperatorSetIdProto

from penstock.analysis.verify import function_cycle
from penstock.errors import InvalidModel
from penstock.frontends.onnx.schemas import Schema
from penstock.frontends.onnx.tensors import text
from penstock.limits import Limits

Key = tuple[str, str, str]
"""Domain, name and overload."""


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A body of nodes with formal inputs and outputs. ``title`` is what messages call it;
    ``defaults`` are the attributes that have a value where a call gives none.
    """

    title: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    nodes: Sequence[NodeProto]
    opsets: Mapping[str, int]
    defaults: Mapping[str, AttributeProto]
    attributes: frozenset[str]

    @staticmethod
    def of(proto: FunctionProto, title: str, defaults: Mapping[str, AttributeProto]) -> Function:
        return Function(
            title,
            tuple(proto.input),
            tuple(proto.output),
            proto.node,
            imported(proto.opset_import),
            defaults,
            frozenset(proto.attribute) | frozenset(defaults),
        )

    @staticmethod
    def of_schema(schema: Schema) -> Function:
        """What ONNX defines an operation by."""
        assert schema.function is not None
        return Function.of(schema.function, f"the definition of {schema}", schema.default_protos)


class Functions:
    """The functions of a model, by domain, name and overload."""

    def __init__(self, protos: Iterable[FunctionProto]) -> None:
        self.table: dict[Key, Function] = {}
        self.problems: list[str] = []
        for proto in protos:
            domain, name, overload = plain_domain(proto.domain), text(proto.name), proto.overload
            title = f"{domain}.{name}" if domain else name
            title = f"function {title}:{text(overload)}" if overload else f"function {title}"
            key = (domain, name, overload)
            if not name:
                self.problems.append("the model has a function without a name; name it")
            if key in self.table:
                self.problems.append(f"the model has {title} twice; remove one")
            defaults = {a.name: a for a in proto.attribute_proto}
            self.table[key] = Function.of(proto, title, defaults)

    def find(self, node: NodeProto) -> Function | None:
        """The function that a node calls, if it calls one."""
        return self.table.get((plain_domain(node.domain), node.op_type, node.overload))

    def check(self, graph: GraphProto, limits: Limits) -> None:
        """Raise ``InvalidModel`` where functions call each other in a circle, or where expanding
        them would make more nodes than ``limits`` allow.
        """
        census = {key: self.census(function.nodes) for key, function in self.table.items()}
        titles = {key: function.title for key, function in self.table.items()}
        calls = {titles[key]: [titles[c] for c in called] for key, (_, called) in census.items()}
        cycle = function_cycle(calls)
        if cycle is not None:
            chain = " -> ".join([*cycle, cycle[0]])
            raise InvalidModel(
                f"functions of the model call each other without end: {chain}; ONNX allows no "
                "recursion: use a Loop"
            )
        sizes: dict[Key, int] = {}

        def expanded(own: int, called: Mapping[Key, int]) -> int:
            return own + sum(count * sizes[callee] for callee, count in called.items())

        graph_of_calls = {key: called for key, (_, called) in census.items()}
        for key in TopologicalSorter(graph_of_calls).static_order():
            sizes[key] = expanded(*census[key])
        most = limits.max_nodes
        if most is not None and expanded(*self.census(graph.node)) > most:
            raise InvalidModel(
                f"the model has more nodes than Limits.max_nodes = {most} once its functions are "
                "expanded; raise the limit if you trust the model"
            )

    def census(self, nodes: Iterable[NodeProto]) -> tuple[int, Counter[Key]]:
        """How many nodes there are, nested graphs included, and those of them that are calls."""
        own = 0
        calls: Counter[Key] = Counter()
        stack = [iter(nodes)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            key = (plain_domain(node.domain), node.op_type, node.overload)
            own += 1
            if key in self.table:
                calls[key] += 1
            stack += [iter(graph.node) for graph in nested(node)]
        return own, calls


def nested(node: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    found = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            found.append(attribute.g)
        found.extend(attribute.graphs)
    return found


def plain_domain(name: str) -> str:
    """A domain by its one name: that of ONNX itself has two."""
    return "" if name == "ai.onnx" else name


def imported(entries: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """The opset of each domain that a model or function imports."""
    return {plain_domain(entry.domain): entry.version for entry in entries}
