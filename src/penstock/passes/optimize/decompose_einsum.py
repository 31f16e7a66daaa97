"""Decomposition of Einsum into operations with faster kernels, which can be fused::

Einsum(a, b; "bqhd,bkhd->bhqk")    becomes    MatMul(Transpose(a), Transpose(b))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.onnx.einsum import EinsumLowering, Labels, Product, expanded
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Expansion, replace_nodes

_DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64")))


class DecomposeEinsum(Pass):
    """Replace each Einsum of static shapes, except diagonals."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        return replace_nodes(graph, {"Einsum": _nodes})


def _nodes(node: Node) -> Sequence[Node] | None:
    if node.outputs[0] is None:
        return None
    types = [value.type for value in node.inputs if value is not None]
    known = [type_ for type_ in types if isinstance(type_, TensorType) and type_.static]
    if len(known) < len(types) or known[0].dtype not in _DTYPES:
        return None
    shapes = [type_.dims for type_ in known]
    terms, output = expanded(node, shapes)
    if not min(map(math.prod, shapes)) or any(len(set(term)) < len(term) for term in terms):
        return None  # nothing to compute, or a diagonal
    return _EinsumNodes(node, terms, output, shapes, known[0].dtype).parts.nodes


class _EinsumNodes(EinsumLowering):
    """Builder of an Einsum's nodes; ``known`` are the values of its steps so far."""

    def __init__(
        self,
        node: Node,
        terms: Sequence[Labels],
        output: Labels,
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype,
    ) -> None:
        self.parts = Expansion(node)
        self.known: list[Value | None] = list(node.inputs)
        super().__init__(terms, output, shapes, dtype)
        (result,) = node.outputs
        assert result is not None
        inputs = [self.known[-1], self._constant(self._shape(output))]
        self.parts.finish("Reshape", inputs, result, allowzero=1)

    def _constant(self, numbers: Sequence[int]) -> Value:
        return self.parts.constant(np.array(numbers, np.int64))

    def _arranged(
        self, value: Value | None, axes: Sequence[int], dims: tuple[int, ...] | None = None
    ) -> Value:
        """Return a value transposed to this order of axes, then reshaped to these dims."""
        assert value is not None
        value = self.parts.transposed(value, axes)
        return value if dims is None else self.parts.reshaped(value, dims)

    def add_diagonal(self, i: int, dims: Sequence[int], groups: Sequence[list[int]]) -> None:
        axes = [axis for (axis,) in groups]
        value = self.known[i]
        assert value is not None and value.rank is not None
        dropped = [axis for axis in range(value.rank) if axis not in axes]
        self.known[i] = self._arranged(value, [*axes, *dropped], tuple(dims))

    def add_sum(self, i: int, axes: tuple[int, ...], dims: tuple[int, ...]) -> None:
        numbers = self._constant(axes)
        self.known[i] = self.parts.add("ReduceSum", [self.known[i], numbers], keepdims=0)

    def add_copy(self, axes: tuple[int, ...]) -> None:
        self.known.append(self._arranged(self.known[0], axes))

    def add_product(self, product: Product) -> None:
        (i, j), (axes_a, axes_b), (dims_a, dims_b), dims, shape, order = product
        x = self._arranged(self.known[i], axes_a, dims_a)
        y = self._arranged(self.known[j], axes_b, dims_b)
        if dims[-2:] == (1, 1):  # a dot product, which needs no MatMul
            y = self._arranged(y, range(len(dims_b)), (*dims_b[:-2], 1, dims_b[-2]))
            numbers = self._constant([len(dims) - 1])
            terms = self.parts.add("Mul", [x, y])
            result = self.parts.add("ReduceSum", [terms, numbers], keepdims=1)
        else:
            result = self.parts.add("MatMul", [x, y])
        result = self._arranged(result, range(len(dims)), shape)
        self.known.append(self._arranged(result, order))

    def add_multiply(
        self,
        values: tuple[int, int],
        axes: tuple[tuple[int, ...], tuple[int, ...]],
        index: tuple[tuple[Any, ...], tuple[Any, ...]],
        labels: Labels,
    ) -> None:
        operands = []
        for i, order, places in zip(values, axes, index, strict=True):
            value = self.known[i]
            assert value is not None and isinstance(value.type, TensorType)
            moved = iter([value.type.dims[axis] for axis in order])
            dims = tuple([1 if place is None else next(moved) for place in places])
            operands.append(self._arranged(value, order, dims))
        self.known.append(self.parts.add("Mul", operands))
