"""A subgraph, or one use of it, while it is imported: what its tensors stand for."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.records import dataclass, field
from penstock.frontends.tflite.flatbuffer import FlatTable
from penstock.ir.graph import Graph, Node, Value


@dataclass(eq=False)
class SubgraphScope:
    """One use of subgraph ``index``. ``callers`` are the subgraphs that it is used in, and
    ``prefix`` stands before the names of its values and nodes.

    ``values`` has the values of the tensors that have been written so far. ``effect`` is the last
    node with effects: the next one waits for it.
    """

    index: int
    table: FlatTable
    where: str
    prefix: str
    callers: tuple[int, ...]
    values: dict[int, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    effect: Node | None = None

    @property
    def outputs(self) -> list[Value]:
        """The values that the subgraph gives."""
        return [self.values[index] for index in self.table.outputs]

    def graph(self, name: str, inputs: Sequence[Value] = ()) -> Graph:
        """The subgraph as a nested graph."""
        targets = () if self.effect is None else [self.effect]
        return Graph(inputs, self.outputs, self.nodes, name, targets)
