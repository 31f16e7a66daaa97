"""Graphs as documents of an artifact.

A document has all that its graphs refer to but arrays and stores of variables, which documents
share: a list of operations, one of values, and the graphs, whose nodes name these by their places.
A value is the name of a node's output, a pair of name and type of an input, or a list of name and
array of a constant::

    {"ops": [["", "Exp", 13]], "values": [["x", ["float32", [4]]], "y"],
     "graphs": {"main": {"inputs": [0], "outputs": [1], "nodes": [[0, [0], [1]]], ...}}}

A node is a list of operation, inputs and outputs, and then of as many as are not empty of
attributes, name, control inputs, device and origin. Attributes are as JSON has them; what JSON
lacks is an object of one key, which says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.artifact.writer import ArtifactWriter
from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import PenstockError
from penstock.core.types import MapType, OptionalType, SequenceType, TensorType, Type, dtype_name
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Op
from penstock.ops.internal.fused import Region
from penstock.ops.tensorflow.state import Store

LONG = 64
"""Numbers from which on a list of them is saved as an array."""


def encode_graphs(graphs: Mapping[str, Graph], writer: ArtifactWriter) -> dict[str, object]:
    """A document with ``graphs``, by name; the contents of constants go to ``writer``. Raises
    ``PenstockError`` for attributes that are no data."""
    encoder = _Encoder(writer)
    encoded = {name: encoder.graph(graph) for name, graph in graphs.items()}
    return {"ops": encoder.ops, "values": encoder.values, "graphs": encoded}


def encode_stores(writer: ArtifactWriter) -> list[dict[str, object]]:
    """The stores that graphs have referred to, with the values that variables start with."""
    return [
        {
            "constant": store.constant,
            "initial": {name: writer.array(array) for name, array in store.initial.items()},
        }
        for store in writer.stores
    ]


def encode_type(type_: Type) -> object:
    """A type: None if it is unknown."""
    match type_:
        case TensorType(dtype, shape, data):
            name = None if dtype is None else dtype_name(dtype)
            dims = None if shape is None else list(shape)
            return [name, dims] if data is None else [name, dims, list(data)]
        case SequenceType(element):
            return {"sequence": encode_type(element)}
        case OptionalType(element):
            return {"optional": encode_type(element)}
        case MapType(key, value):
            return {"map": [dtype_name(key), encode_type(value)]}
    return None


class _Encoder:
    """The lists of one document."""

    def __init__(self, writer: ArtifactWriter) -> None:
        self.writer = writer
        self.ops: list[Any] = []
        self.values: list[Any] = []
        self._op_index: dict[Op, int] = {}
        self._value_index: dict[Value, int] = {}

    def graph(self, graph: Graph) -> dict[str, object]:
        # Before the nodes, of which none makes them.
        inputs = [self.value(value, typed=True) for value in graph.inputs]
        place = {node: i for i, node in enumerate(graph.nodes)}
        nodes = [self.node(node, place) for node in with_checkpoints(graph.nodes)]
        return {
            "name": graph.name,
            "inputs": inputs,
            "outputs": [self.value(value) for value in graph.outputs],
            "nodes": nodes,
            "targets": [place[node] for node in graph.targets],
        }

    def node(self, node: Node, place: Mapping[Node, int]) -> list[object]:
        op = self._op_index.setdefault(node.op, len(self.ops))
        if op == len(self.ops):
            self.ops.append([node.op.domain, node.op.name, node.op.version])
        entry: list[object] = [
            op,
            [None if value is None else self.value(value) for value in node.inputs],
            [None if value is None else self.value(value) for value in node.outputs],
            {name: self.attribute(node, name, x) for name, x in node.attrs.items()},
            node.name,
            [place[before] for before in node.control_inputs],  # nodes of the same graph
            node.device,
            node.origin,
        ]
        while not entry[-1] and len(entry) > 3:
            entry.pop()
        return entry

    def value(self, value: Value, *, typed: bool = False) -> int:
        index = self._value_index.setdefault(value, len(self.values))
        if index == len(self.values):
            entry: Any = value.name
            if value.is_constant:
                entry = [value.name, None, self.writer.constant(value)]
            elif typed:
                entry = [value.name, encode_type(value.type)]
            self.values.append(entry)
        return index

    def attribute(self, node: Node, name: str, x: object) -> object:
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, list | tuple):
            return self._list(node, name, x)
        if isinstance(x, np.ndarray):
            return {"array": self.writer.array(x)}
        if isinstance(x, bytes):
            return {"bytes": x.hex()}
        if isinstance(x, np.dtype):
            return {"dtype": dtype_name(x)}
        if isinstance(x, Type):
            return {"type": encode_type(x)}
        if isinstance(x, Graph):
            return {"graph": self.graph(x)}
        if isinstance(x, Region):
            inputs = [self.value(value, typed=True) for value in x.inputs]
            return {"region": {"inputs": inputs, "nodes": [self.node(n, {}) for n in x.nodes]}}
        if isinstance(x, Store):
            return {"store": self.writer.stores.setdefault(x.model, len(self.writer.stores))}
        raise PenstockError(
            f"{node.label} cannot be saved: its attribute {name!r} is a {type(x).__name__}, which "
            "is a part of this process"
        )

    def _list(self, node: Node, name: str, x: Sequence[Any]) -> object:
        kinds = {*map(type, x)}  # exact types: True among integers must come back as True
        if len(x) >= LONG and isinstance(x, list) and (kinds == {float} or kinds == {int}):
            # Objects: integers may need more than 64 bits.
            array = np.array(x, np.float64 if kinds == {float} else object)
            if array.dtype == object and min(x) >= -(2**63) and max(x) < 2**63:
                array = array.astype(np.int64)
            if array.dtype != object:
                return {"list": self.writer.array(array)}
        elements = [self.attribute(node, name, element) for element in x]
        return elements if isinstance(x, list) else {"tuple": elements}
