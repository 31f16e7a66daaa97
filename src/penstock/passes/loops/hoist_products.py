"""Hoisting of products: tensors that a loop reads in slices are multiplied before the loop.

::

    for i in range(n):                              p = MatMul(xs, w)
        x = Gather(xs, i)                           for i in range(n):
        h = Tanh(MatMul(x, w) + MatMul(h, u))           h = Tanh(Gather(p, i) + MatMul(h, u))

Exporters write loops of recurrent cells in this form: ``x`` is a slice that Gather takes of a
tensor from outside the loop, at any index, or a scan input. A product of many rows reads the
weights once, not in each iteration. A constant bias of a Gemm, or of an Add after the product, is
hoisted as well; other addends of a Gemm stay in the loop, and ``MatMul(Concat(x, h), w)`` is split
to hoist the part of ``x``. The pass skips Loops that may end long before they have read all slices,
and products of more than 128 MiB.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import compress

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, replace
from penstock.core.types import FLOAT32, TensorType, Type, is_static
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ir.op import Role
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.onnx.control_flow import ScanLayout
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.loops.loop_rows import MOST_BYTES, trips_of
from penstock.passes.rewrite import names_of, new_name, swapped

_FEWEST_SLICES, _LEAST_READ = 2, 0.5
"""the least number of slices that pays off, and the least fraction of them that a Loop must read"""
_REAL = (FLOAT32, np.dtype(np.float64))


class HoistProducts(Pass):
    """Move such products before Loops and Scans."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.framed:
            return False
        readers, changed = readers_of(graph), False
        taken = names_of(graph)
        for outer in graph.graphs():
            nodes: list[Node] = []
            for node in with_checkpoints(outer.nodes):
                if node.op.role in (Role.LOOP, Role.SCAN):
                    hoister = _Hoister(node, readers, taken)
                    changed |= hoister.hoist()
                    nodes += hoister.before
                nodes.append(node)
            outer.nodes = nodes
        if changed:
            prune(graph)
        return changed


@dataclass(frozen=True, eq=False)
class _Slice:
    """A value of a body that is a slice of ``source`` along ``axis``: the output of ``gather``, or
    if this is None the scan input of index ``scan``."""

    source: Value
    axis: int
    gather: Node | None
    scan: int = 0


@dataclass(frozen=True, eq=False)
class _Product:
    """``x @ weights + bias + other``; ``other``, of a Gemm, is not broadcast."""

    x: Value
    weights: np.ndarray
    bias: np.ndarray | None
    other: Value | None = None


class _Hoister:
    """Rewrites the body of one loop. ``before``: the nodes to insert before the loop. ``taken``:
    the names of the values of all graphs, since nodes move between graphs."""

    def __init__(self, loop: Node, readers: Readers, taken: Counter[str]) -> None:
        self.loop, self.readers, self.taken = loop, readers, taken
        self.body: Graph = loop.attrs["body"]
        self.before: list[Node] = []
        self.own = {*self.body.inputs}
        for node in self.body.nodes:
            self.own.update(value for value in node.outputs if value is not None)
        self.trips = trips_of(loop)
        self.nodes: list[Node] = []

    def hoist(self) -> bool:
        """Hoist products out of the loop. Return whether the loop has changed."""
        changed = False
        for node in with_checkpoints(list(self.body.nodes)):
            changed |= self._visit(node)
        self.body.nodes = self.nodes
        if changed and self.loop.op.role is Role.SCAN:
            # A Loop captures the tensor that it slices; a Scan has it as an input, which may now be
            # unread.
            self._drop_unread()
        return changed

    def _drop_unread(self) -> None:
        """Drop unread scan inputs."""
        loop, layout = self.loop, ScanLayout(self.loop)
        read = readers_of(self.body)
        kept = [x in read for x in self.body.inputs[layout.states :]]
        scanned, n = self.body.inputs, layout.states
        loop.inputs[n:] = compress(loop.inputs[n:], kept)
        scanned[n:] = compress(scanned[n:], kept)
        loop.attrs["scan_input_axes"] = list(compress(layout.input_axes, kept))
        loop.attrs["scan_input_directions"] = list(compress(layout.input_backward, kept))
        loop.attrs["num_scan_inputs"] = sum(kept)

    def _visit(self, node: Node) -> bool:
        if (biased := self._biased(node)) is not None:
            self._add_before(node, *biased)
            return True
        product = _product_of(node)
        if product is None or not self._gains(product.x):
            self.nodes.append(node)
            return False
        (y,) = node.outputs
        assert y is not None
        if product.other is None:
            self._compute(product, y, node)
            return True
        # The addend of a Gemm may differ between iterations, so it is added in the loop.
        result = self._value(y, "product", y.type)
        self._compute(replace(product, other=None), result, node)
        self.nodes.append(node.derived([result, product.other], [y], {}, op=standard("Add")))
        return True

    def _gains(self, x: Value) -> bool:
        """Whether ``x`` is a slice, a view of one, or a Concat with one."""
        whole = self._slice(x) is not None or self._view(x) is not None
        return whole or self._parts(x) is not None

    # Biases.

    def _biased(self, node: Node) -> tuple[_Slice, Value] | None:
        """Return the slice of products to which ``node`` adds a constant row, and that row."""
        if node.op.full_name != "Add" or node.control_inputs:
            return None
        for x, bias in swapped(node):
            if x is None or bias is None or bias.const is None or not _is_real(x):
                continue
            (y,), slice_ = node.outputs, self._slice(x)
            added = slice_ is not None and slice_.source.producer in self.before
            # For a reader of the product without bias, the product would be hoisted twice.
            if slice_ is None or not added or y is None or len(self.readers.get(x, ())) > 1:
                continue
            row = bias.const.size == bias.const.shape[-1:][0] if bias.const.ndim else False
            if row and bias.dtype == x.dtype and y.shape == x.shape:
                return slice_, bias
        return None

    def _add_before(self, node: Node, slice_: _Slice, bias: Value) -> None:
        """Add ``bias`` to the products of all slices before the loop."""
        (y,) = node.outputs
        assert y is not None and bias.const is not None
        sums = self._value(y, "every", slice_.source.type)
        row = _constant(bias.const.reshape(-1), y, "bias")
        add = standard("Add")
        self.before.append(node.derived([slice_.source, row], [sums], {}, op=add))
        self._take(slice_, sums, y)

    # Slices.

    def _slice(self, x: Value) -> _Slice | None:
        """Return the tensor of which ``x`` is a slice, if products of all its slices pay off."""
        node = x.producer
        if x in self.body.inputs:
            return self._scanned(x)
        if node is None or x not in self.own or node.op.full_name != "Gather":
            return None
        source = node.inputs[0]
        if source is None or source in self.own or node.control_inputs or not _is_real(source):
            return None
        dims = source.dims
        if len(dims) < 2:
            return None
        axis = normalize_axis(node.attrs.get("axis", 0), len(dims))
        # A product sums along the last axis, so slices along it are not rows of a product.
        if axis == len(dims) - 1 or not _is_real(x) or dims[axis] < _FEWEST_SLICES:
            return None
        if node.inputs[1] not in self.own:  # the same slice in all iterations
            return None
        if self.trips is None or self.trips < _LEAST_READ * dims[axis]:
            return None
        return _Slice(source, axis, node)

    def _scanned(self, x: Value) -> _Slice | None:
        if self.loop.op.role is not Role.SCAN:
            return None
        layout, place = ScanLayout(self.loop), self.body.inputs.index(x)
        source = self.loop.inputs[place] if place >= layout.states else None
        if source is None or not _is_real(source) or not _is_real(x):
            return None
        dims, scan = source.dims, place - layout.states
        axis = normalize_axis(layout.input_axes[scan], len(dims))
        if len(dims) < 2 or axis == len(dims) - 1 or dims[axis] < _FEWEST_SLICES:
            return None
        return _Slice(source, axis, None, scan)

    def _view(self, x: Value) -> Value | None:
        """Return the slice of which ``x`` is a reshape that keeps the last dim, or None."""
        node = x.producer
        if node is None or x not in self.own or "reshapes" not in node.op.traits:
            return None
        before = node.inputs[0]
        # A view must keep the axis along which the product sums.
        if before is None or node.control_inputs or not _is_real(x) or not _is_real(before):
            return None
        alike = (
            x.shape is not None and before.shape is not None and x.shape[-1:] == before.shape[-1:]
        )
        return before if alike and before.shape and self._slice(before) is not None else None

    def _parts(self, x: Value) -> Sequence[Value] | None:
        """Return the operands of a Concat along the last axis, if one of them is a slice."""
        node = x.producer
        if (
            node is None
            or x not in self.own
            or node.op.full_name != "Concat"
            or node.control_inputs
        ):
            return None
        # For another reader the parts would be joined anyway, and nothing would be saved.
        if len(self.readers.get(x, ())) != 1 or x.rank is None or not 1 < len(node.inputs) <= 4:
            return None
        if normalize_axis(node.attrs["axis"], x.rank) != x.rank - 1:
            return None
        parts = [part for part in node.inputs if part is not None and _is_real(part)]
        whole = len(parts) == len(node.inputs)
        return parts if whole and any(self._slice(part) is not None for part in parts) else None

    # Rewriting.

    def _compute(self, product: _Product, y: Value, beside: Node) -> None:
        """Compute ``product`` as ``y``, before the loop as far as possible."""
        slice_, view = self._slice(product.x), self._view(product.x)
        parts = self._parts(product.x)
        if slice_ is not None and self._has_room(product, slice_):
            self._hoist(product, slice_, y, beside)
        elif view is not None:
            self._view_product(product, view, y, beside)
        elif parts is not None:
            self._add_products(product, parts, y, beside)
        else:
            self._emit(product, product.x, y, beside, self.nodes)

    def _emit(self, product: _Product, x: Value, y: Value, beside: Node, nodes: list[Node]) -> None:
        """Append the nodes of the product of ``x`` to ``nodes``."""
        weights = _constant(product.weights, y, "weights")
        if product.bias is None:
            nodes.append(beside.derived([x, weights], [y], {}, op=standard("MatMul")))
            return
        total = self._value(y, "product", y.type)
        nodes.append(beside.derived([x, weights], [total], {}, op=standard("MatMul")))
        bias = _constant(product.bias, y, "bias")
        nodes.append(beside.derived([total, bias], [y], {}, op=standard("Add")))

    def _value(self, beside: Value, name: str, type_: Type) -> Value:
        """Return a new value with a unique name."""
        return Value(new_name(f"{beside.name}/{name}", self.taken), type_)

    def _has_room(self, product: _Product, slice_: _Slice) -> bool:
        """Whether the products of all slices take at most ``MOST_BYTES``."""
        dims, weights = slice_.source.dims, product.weights
        return math.prod(dims[:-1]) * weights.shape[1] * weights.itemsize <= MOST_BYTES

    def _hoist(self, product: _Product, slice_: _Slice, y: Value, beside: Node) -> None:
        """Multiply all slices before the loop, and let ``y`` be a slice of the product."""
        source = slice_.source
        dims = (*source.dims[:-1], product.weights.shape[1])
        every = self._value(y, "every", TensorType(source.dtype, dims))
        self._emit(product, source, every, beside, self.before)
        self._take(slice_, every, y)

    def _take(self, slice_: _Slice, every: Value, y: Value) -> None:
        """Let ``y`` be the slice of ``every`` that ``slice_`` is of its source."""
        gather = slice_.gather
        if gather is not None:
            attrs = {"axis": slice_.axis}
            self.nodes.append(gather.derived([every, *gather.inputs[1:]], [y], attrs))
            return
        loop, layout = self.loop, ScanLayout(self.loop)
        backward = layout.input_backward[slice_.scan]
        loop.attrs["scan_input_axes"] = [*layout.input_axes, slice_.axis]
        loop.attrs["scan_input_directions"] = [*layout.input_backward, backward]
        loop.attrs["num_scan_inputs"] += 1
        loop.inputs.append(every)
        # The slice of the products is now a scan input, which no node of the body computes.
        y.producer = None
        self.body.inputs.append(y)

    def _view_product(self, product: _Product, before: Value, y: Value, beside: Node) -> None:
        """Compute ``y`` as a reshape of the product of ``before``."""
        dims = y.dims
        result = self._value(y, "viewed", TensorType(y.dtype, (*before.dims[:-1], dims[-1])))
        self._compute(replace(product, x=before), result, beside)
        shape = _constant(np.array(dims, np.int64), y, "dims")
        self.nodes.append(beside.derived([result, shape], [y], {}, op=standard("Reshape")))

    def _add_products(
        self, product: _Product, parts: Sequence[Value], y: Value, beside: Node
    ) -> None:
        """Compute ``y`` as the sum of the products of a Concat's parts and rows of the weights."""
        begin, bias, total = 0, product.bias, None
        for number, part in enumerate(parts):
            end = begin + part.dims[-1]
            result = self._value(y, f"part{number}", y.type)
            # The bias is added once, to the product of the first part.
            self._compute(_Product(part, product.weights[begin:end], bias), result, beside)
            begin, bias = end, None
            if total is not None:
                last = number == len(parts) - 1
                sum_ = y if last else self._value(y, f"sum{number}", y.type)
                inputs = [total, result]
                self.nodes.append(beside.derived(inputs, [sum_], {}, op=standard("Add")))
                result = sum_
            total = result


def _is_real(value: Value) -> bool:
    type_ = value.type
    return is_static(type_) and type_.dtype in _REAL and type_.elements > 0


def _product_of(node: Node) -> _Product | None:
    """Return the product of rows and constant weights that ``node`` computes, or None."""
    if node.op.full_name not in ("MatMul", "Gemm") or node.control_inputs:
        return None
    x, weights, bias, (y,) = node.inputs[0], node.const(1), node.const(2), node.outputs
    if x is None or weights is None or weights.ndim != 2 or y is None or not _is_real(y):
        return None
    if not _is_real(x) or weights.dtype != x.dtype:
        return None
    attrs, other = node.attrs, None
    if node.op.name == "Gemm":
        if node.input(2) is not None and bias is None:
            other = node.input(2)
            if other is None or not _is_real(other) or attrs.get("beta", 1.0) != 1:
                return None
            if other.type.elements != y.type.elements:  # type: ignore[union-attr]
                return None
        if attrs.get("transA"):
            return None
        weights = weights.T if attrs.get("transB") else weights
        alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
        if alpha != 1 or (bias is not None and (beta != 1 or bias.size != bias.shape[-1:][0])):
            return None
    if x.dims[-1:] != weights.shape[:1]:
        return None
    return _Product(x, weights, None if bias is None else bias.reshape(-1), other)


def _constant(array: np.ndarray, beside: Value, name: str) -> Value:
    return Value(f"{beside.name}/{name}", const=np.ascontiguousarray(array))
