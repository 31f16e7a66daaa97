"""Nodes of a graph that is built from weights: products, norms and embeddings of stored tensors.

Matrices stay as they are stored: those of blocks are read by MatMulNBits, those in 16 bits are cast
to float32 in the graph, which converts them once, when it is compiled. Matrices of checkpoints are
[outputs, inputs], and read as transposed views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.types import FLOAT32, INT64, Dim, TensorType
from penstock.frontends.common.builder import NodeBuilder, Operand, UniqueNames
from penstock.frontends.common.inferred_types import InferredTypes
from penstock.frontends.weights.block_codes import BlockCodes
from penstock.frontends.weights.tensors import StoredTensor, TensorStore
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.op import Attrs
from penstock.ops.registry import MICROSOFT

Attribute: TypeAlias = "int | float | str | Sequence[int]"


class ModelWriter:
    """A graph under construction. ``section`` names the part to which nodes belong."""

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self._inputs: list[Value] = []
        self._outputs: list[Value] = []
        self._output_dims: dict[str, tuple[Dim, ...]] = {}
        self._nodes: list[Node] = []
        self.metadata: dict[str, str] = {}
        """metadata about the graph, in addition to those of the files"""
        self._shared: dict[tuple[str, bool], Value] = {}
        """vectors and matrices of layers that share weights, by name and whether transposed"""
        self._types = InferredTypes()
        self._names = UniqueNames(lambda: [*store.tensors])
        self.section("model")

    # Graphs and nodes.

    def section(self, name: str) -> None:
        """Let later nodes belong to this part of the model."""
        origin = f"{name} in {self.store.label}"
        self._builder = NodeBuilder(
            name, [], [], {}, types=self._types, unique=self._names.unique, origin=origin
        )
        self._builder.nodes = self._nodes

    def input(self, name: str, dtype: np.dtype, shape: Sequence[Dim]) -> Value:
        value = Value(self._names.unique(name), TensorType(dtype, tuple(shape)))
        self._inputs.append(value)
        return value

    def output(self, name: str, value: Value, dims: Sequence[Dim]) -> None:
        """Make a node's result an output of this name; ``dims`` are shown as its shape."""
        value.name = self._names.unique(name)
        self._outputs.append(value)
        self._output_dims[value.name] = tuple(dims)

    def op(self, op: str, *inputs: Operand, domain: str = "", **attrs: Attribute) -> Value:
        """Add a node, and return its output. Integers become int64 constants."""
        return self._builder.emit(op, inputs, attrs, domain=domain)

    def several(self, op: str, inputs: Sequence[Operand], count: int, attrs: Attrs) -> list[Value]:
        """Add a node with several outputs, and return these."""
        return self._builder.emit_several(op, inputs, attrs, count=count)

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        """Return the last axis of ``x`` split into these sizes."""
        lengths = self.constant(np.array(sizes, np.int64), INT64)
        return self.several("Split", [x, lengths], len(sizes), {"axis": -1})

    def constant(self, data: np.ndarray | float, dtype: np.dtype = FLOAT32) -> Value:
        return self._builder.constant(data, dtype)

    def model(self, path: str | None, metadata: dict[str, str]) -> Model:
        from penstock.analysis.type_constraints import check_types

        graph = Graph(self._inputs, self._outputs, self._nodes, "main")
        return Model(
            {"main": graph},
            "main",
            metadata=metadata | self.metadata,
            path=path,
            check_types=check_types,
            output_dims=self._output_dims,
        )

    # Stored tensors.

    def vector(self, name: str, size: int, offset: float = 0.0) -> Value:
        """Return a vector as float32, with ``offset`` added to it."""
        tensor = self.store.get(name, (size,))
        key = tensor.name, False
        if key not in self._shared:
            elements = tensor.real()
            elements = elements + np.float32(offset) if offset else elements
            self._shared[key] = self.named(tensor.name, elements)
        return self._shared[key]

    def linear(
        self, x: Value, role: str, columns: int, rows: int, *, transposed: bool = True
    ) -> Value:
        """Return ``x`` times the matrix ``role`` [rows, columns], plus the bias if there is one. A
        matrix that is not ``transposed`` is stored as [columns, rows]."""
        shape = (rows, columns) if transposed else (columns, rows)
        tensor = self.store.get(f"{role}.weight", shape)
        y = self._product(x, tensor, transposed)
        if f"{role}.bias" in self.store:
            y = self.op("Add", y, self.vector(f"{role}.bias", rows))
        return y

    def norm(self, x: Value, role: str, size: int, epsilon: float, offset: float = 0.0) -> Value:
        """Divide the rows of ``x`` by their root mean square."""
        scale = self.vector(f"{role}.weight", size, offset)
        return self.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon)

    def layer_norm(
        self, x: Value, role: str, size: int, epsilon: float, *, biased: bool = True
    ) -> Value:
        """Subtract the mean of rows of ``x``, and divide them by their standard deviation."""
        kinds = ("weight", "bias") if biased else ("weight",)
        vectors = [self.vector(f"{role}.{kind}", size) for kind in kinds]
        return self.op("LayerNormalization", x, *vectors, axis=-1, epsilon=epsilon)

    def embedding(self, ids: Value, role: str, width: int) -> Value:
        """Return the rows ``ids`` of a table [any, width], as float32."""
        name = f"{role}.weight"
        tensor = self.store.get(name, (self.store.shape(name)[0], width))
        if tensor.is_packed:
            return self._gathered(ids, tensor)
        # Rows are cast, not the table, which stays as it is stored.
        rows = self.op("Gather", self.named(tensor.name, tensor.array()), ids, axis=0)
        return rows if tensor.format == "F32" else self._builder.cast(rows, "float32")

    def real(self, name: str, array: np.ndarray) -> Value:
        """Return a constant, cast to float32 in the graph."""
        value = self.named(name, array)
        return value if value.dtype == FLOAT32 else self._builder.cast(value, "float32")

    def named(self, name: str, array: np.ndarray) -> Value:
        return Value(self._names.unique(f"{name}/constant"), const=array)

    def _product(self, x: Value, tensor: StoredTensor, transposed: bool) -> Value:
        if not tensor.is_packed:
            key = tensor.name, transposed
            if key not in self._shared:
                array = tensor.array()
                # A view, so that what a kernel packs is held only in that form.
                self._shared[key] = self.real(tensor.name, array.T if transposed else array)
            return self.op("MatMul", x, self._shared[key])
        codes, constants = self._packed(tensor)
        sizes = {"N": codes.rows, "K": codes.columns, "block_size": codes.group}
        # Rows may become int8, as in the runtime for which these formats are made.
        sizes |= {"bits": codes.bits, "accuracy_level": 4}
        return self.op("MatMulNBits", x, *constants, domain=MICROSOFT, **sizes)

    def _packed(self, tensor: StoredTensor) -> tuple[BlockCodes, list[Value]]:
        """Return the codes of a matrix, and constants of codes, scales, and zeros if any."""
        codes = tensor.codes()
        blocks = codes.codes.reshape(codes.rows, codes.scales.shape[1], -1)
        parts = {"codes": blocks, "scales": codes.scales, "zeros": codes.zeros}
        constants = [
            self.named(f"{tensor.name}/{part}", array)
            for part, array in parts.items()
            if array is not None
        ]
        return codes, constants

    def _gathered(self, ids: Value, tensor: StoredTensor) -> Value:
        """Return rows of a table of blocks."""
        codes = tensor.codes()
        table, scales = (
            self.named(f"{tensor.name}/{part}", array)
            for part, array in (("table", codes.codes), ("factors", codes.scales))
        )
        sizes = {"bits": codes.bits, "block_size": codes.group}
        y = self.op("GatherBlockQuantized", table, ids, scales, domain=MICROSOFT, **sizes)
        if codes.zeros is None:
            return y
        # The operation only takes integer zeros: (code - zero) * scale is
        # (code - 8) * scale + (8 - zero) * scale.
        shifts = (np.float32(1 << (codes.bits - 1)) - codes.zeros) * codes.scales
        shift = self.op("Gather", self.named(f"{tensor.name}/shifts", shifts), ids, axis=0)
        blocks = self.op("Reshape", y, (0, 0, -1, codes.group))
        blocks = self.op("Add", blocks, self.op("Unsqueeze", shift, (3,)))
        return self.op("Reshape", blocks, (0, 0, codes.columns))
