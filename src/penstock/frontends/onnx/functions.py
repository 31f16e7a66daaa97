"""Functions of ONNX models: their table, and the size of a model with all calls expanded.

Bodies are not converted on their own: the importer imports a body for each call, with the values
and attributes of the call. The number of nodes can grow exponentially, so it is computed before
anything is expanded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidModel, shortened
from penstock.core.records import cached_property, dataclass
from penstock.frontends.common.diagnostics import Diagnostics
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.messages import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    NodeProto,
    OperatorSetIdProto,
)

Key = tuple[str, str, str]
"""domain, name and overload"""

if TYPE_CHECKING:
    from penstock.frontends.common.expansion import Census


@dataclass(frozen=True, eq=False)
class OnnxFunction:
    """A function of the file. ``title`` names it in messages; ``defaults`` are the values of
    attributes that a call leaves out."""

    title: str
    proto: FunctionProto
    defaults: Mapping[str, AttributeProto]

    @cached_property
    def opsets(self) -> Mapping[str, int]:
        return opsets_of(self.proto.opset_import)

    @cached_property
    def attributes(self) -> frozenset[str]:
        """The names of all attributes."""
        return frozenset(self.proto.attribute) | frozenset(self.defaults)


class FunctionTable:
    """The functions of a model, by domain, name and overload."""

    def __init__(self, protos: Iterable[FunctionProto]) -> None:
        self.table: dict[Key, OnnxFunction] = {}
        self.problems: list[str] = []
        for proto in protos:
            domain, name = plain_domain(proto.domain), decode_text(proto.name)
            suffix = f":{decode_text(proto.overload)}" if proto.overload else ""
            title = f"function {f'{domain}.' if domain else ''}{name}{suffix}"
            key = (domain, name, proto.overload)
            if not name:
                self.problems.append("the model has a function without a name; name it")
            if key in self.table:
                self.problems.append(f"the model has {title} twice; remove one")
            defaults = {a.name: a for a in proto.attribute_proto}
            self.table[key] = OnnxFunction(shortened(title), proto, defaults)

    def find(self, node: NodeProto) -> OnnxFunction | None:
        """Return the function that a node calls, or None for other nodes."""
        return self.table.get((plain_domain(node.domain), node.op_type, node.overload))

    def check(self, graph: GraphProto, diagnostics: Diagnostics) -> None:
        """Raise ``InvalidModel`` if functions call each other in a cycle, or if expanding them
        would create more nodes than a model may have."""
        # Few models have functions.
        from graphlib import CycleError

        from penstock.frontends.common.expansion import expanded_size, expanded_sizes

        functions = {key: self.census(function.proto.node) for key, function in self.table.items()}
        try:
            sizes = expanded_sizes(functions)
        except CycleError as error:
            circle = " -> ".join([self.table[key].title for key in reversed(error.args[1])])
            raise InvalidModel(
                f"functions of the model call themselves: {circle}; ONNX allows no recursion: use "
                "a Loop"
            ) from error
        diagnostics.check_nodes(expanded_size(self.census(graph.node), sizes))

    def census(self, nodes: Iterable[NodeProto]) -> Census:
        """Return the census of a body, including its nested graphs."""
        census: Counter[Key | None] = Counter()
        stack = [iter(nodes)]  # no recursion, since files may nest graphs arbitrarily deep
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            key = (plain_domain(node.domain), node.op_type, node.overload)
            census.update((None, key) if key in self.table else (None,))
            stack += [iter(graph.node) for graph in nested_graphs(node)]
        return census


def nested_graphs(node: NodeProto) -> list[GraphProto]:
    """Return the graphs among a node's attributes."""
    graphs: list[GraphProto] = []
    lists: list[GraphProto] = []
    for attribute in node.attribute:  # a loop, since this is called for each node
        if attribute.HasField("g"):
            graphs.append(attribute.g)
        lists += attribute.graphs
    return graphs + lists


def plain_domain(name: str) -> str:
    """Return the canonical name of a domain, since ONNX's own has two."""
    return "" if name == "ai.onnx" else name


def opsets_of(entries: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Return the opset of each domain that a model or function imports."""
    return {plain_domain(entry.domain): entry.version for entry in entries}
