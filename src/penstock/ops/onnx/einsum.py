"""Einsum, lowered to transpositions, sums and matrix products when its shapes are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.core.records import NamedTuple
from penstock.core.types import Dim, RunValue, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.products import is_long, product_in_parts
from penstock.ops.common.shape_rules import Index, broadcast_dim, same_dtype, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.registry import operator

Labels: TypeAlias = tuple[str, ...]
"""one label per axis: a letter, or ``.0``, ``.1``, ... from the last axis of an ellipsis"""


class _Equation(NamedTuple):
    """The terms as written, with ``...`` for an ellipsis; ``output`` is None if it is implicit."""

    text: str
    terms: tuple[Labels, ...]
    output: Labels | None

    def expand(self, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
        """The labels of the axes of operands of the given ranks, and of the output."""
        extras = []
        for term, rank in zip(self.terms, ranks, strict=True):
            extras.append(rank - len(term) + ("..." in term))
            if extras[-1] < 0 or (extras[-1] and "..." not in term):
                raise ShapeError(
                    f"equation {self.text!r}: term {''.join(term)!r} does not match an operand "
                    f"of rank {rank}"
                )
        terms = [_replace(term, extra) for term, extra in zip(self.terms, extras, strict=True)]
        if self.output is not None:
            if max(extras) and "..." not in self.output:
                raise ShapeError(f"equation {self.text!r}: the output lacks the ellipsis")
            return terms, _replace(self.output, max(extras))
        labels = [label for term in self.terms for label in term if label != "..."]
        # In implicit mode, labels that occur more than once are summed; the others follow the
        # ellipsis in alphabetical order.
        once = sorted(label for label in labels if labels.count(label) == 1)
        return terms, (*_replace(("...",), max(extras)), *once)


def _replace(term: Labels, extra: int) -> Labels:
    # Numbered from the back, as the dims of ellipses broadcast aligned at the last axis.
    dots = tuple(f".{i}" for i in reversed(range(extra)))
    at = term.index("...") if "..." in term else len(term)
    return (*term[:at], *dots, *term[at + 1 :])


def parse_equation(text: str, operands: int) -> _Equation:
    """The equation of an Einsum of ``operands`` inputs."""

    def labels(term: str) -> Labels:
        before, dots, after = term.partition("...")
        # A letter is appended because ``isalpha`` is false for the empty term of a scalar.
        if not (before + after + "a").isascii() or not (before + after + "a").isalpha():
            raise ShapeError(
                f"equation {text!r}: term {term!r} must consist of letters and at most one ellipsis"
            )
        return (*before, *([dots] if dots else ()), *after)

    left, arrow, right = text.replace(" ", "").partition("->")
    terms = tuple(labels(term) for term in left.split(","))
    if len(terms) != operands:
        raise ShapeError(f"equation {text!r} has {len(terms)} terms for {operands} operands")
    output = labels(right) if arrow else None
    if output is not None:
        valid = {label for term in terms for label in term} | {"..."}
        if len(set(output)) != len(output) or not set(output) <= valid:
            raise ShapeError(
                f"equation {text!r}: each output label must be unique and occur in an operand"
            )
    return _Equation(text, terms, output)


def _label_sizes(terms: Sequence[Labels], shapes: Sequence[Shape]) -> dict[str, Dim]:
    """The dim of every label; dims of 1 broadcast."""
    sizes: dict[str, Dim] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, dim in zip(term, shape, strict=True):
            try:
                sizes[label] = broadcast_dim(sizes.get(label, 1), dim)
            except ShapeError:
                raise ShapeError(
                    f"label {label!r} has dims {sizes[label]} and {dim}, which must be equal or 1"
                ) from None
    return sizes


def _infer_einsum(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    equation = parse_equation(attrs["equation"], len(types))
    dtype = same_dtype(types, range(len(types)))
    shapes = [shape for i in range(len(types)) if (shape := tensor(types, i).shape) is not None]
    if len(shapes) < len(types):
        return (TensorType(dtype),)
    terms, output = equation.expand([len(shape) for shape in shapes])
    sizes = _label_sizes(terms, shapes)
    return (TensorType(dtype, tuple(sizes[label] for label in output)),)


Step: TypeAlias = Callable[[list[Any], Any, Any], None]
"""``step(values, out, workspace)`` replaces a value, appends one, or writes to ``out``"""

# Each contraction considers all pairs of the remaining operands, in total O(operands ** 3).
GREEDY = 16  # operands; beyond that they are contracted from left to right


def _pick(labels: Iterable[str], wanted: Iterable[str]) -> Labels:
    return tuple(x for x in labels if x in wanted)


def _axes(labels: Labels, order: Labels) -> tuple[int, ...]:
    return tuple(labels.index(x) for x in order if x in labels)


def _index(labels: Labels, order: Labels) -> Index:
    """The index that adds axes for the labels of ``order`` that are not in ``labels``."""
    return tuple(slice(None) if x in labels else None for x in order)


def _leading(
    output: Labels, batch: Labels, rows: Labels, columns: Labels
) -> tuple[Labels, Labels] | None:
    """The labels of the batch and of the columns of a matrix product whose result has the order of
    ``output``, or None. Labels of the right operand may be batch labels, along which the left
    operand broadcasts."""
    first = [k for k, label in enumerate(output) if label in (rows or columns)]
    start = first[0] if first else len(output)
    lead, rest = output[:start], output[start + len(rows) :]
    fits = (
        output[start:] == (*rows, *rest) and set(rest) <= set(columns) and set(batch) <= set(lead)
    )
    return (lead, rest) if fits and (rest or lead == batch) else None


class Product(NamedTuple):
    """A matrix product: the indices of two values, the permutation of their axes and the dims to
    reshape them to; the dims of the result as matrices and by label, and the permutation to the
    output."""

    values: tuple[int, int]
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    dims: tuple[tuple[int, ...], tuple[int, ...]]
    result: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def ordered(self) -> bool:
        return self.order == tuple(range(len(self.order)))


class EinsumLowering:
    """The steps of one Einsum of static shapes. ``operands`` maps the positions of values that are
    not contracted yet to their labels. Methods named ``add_*`` append a step, in this class one
    of NumPy."""

    def __init__(
        self, terms: Sequence[Labels], output: Labels, shapes: Sequence[Shape], dtype: np.dtype
    ) -> None:
        self.sizes: dict[str, Any] = _label_sizes(terms, shapes)
        self.dtype, self.output = dtype, output
        self.layout = Scratch()
        self.steps: list[Step] = []
        self.operands = dict(enumerate(terms))
        self.values = len(terms)
        for i, shape in enumerate(shapes):
            self._drop_repeated(i, shape)
        for i in range(len(terms)):
            self._sum(i)
        if len(terms) == 1:
            self._copy()
        while len(self.operands) > 1:
            self._contract(*self._cheapest())

    def routine(self) -> Routine:
        steps, size = self.steps, self.layout.size

        def into(*arguments: RunValue) -> None:
            workspace = arguments[-1] if size else None
            *values, out = arguments[:-1] if size else arguments
            for step in steps:
                step(values, out, workspace)

        return Routine(into, size)

    def _shape(self, labels: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.sizes[label] for label in labels)

    def _kept(self, *without: int) -> set[str]:
        """The labels of the output and of all operands except those at ``without``."""
        return set(self.output).union(*(v for k, v in self.operands.items() if k not in without))

    def _cheapest(self) -> tuple[int, int]:
        """The pair of operands whose contraction reduces the total number of elements most."""
        if len(self.operands) > GREEDY:
            first, second, *_ = self.operands
            return first, second

        def growth(pair: tuple[int, int]) -> int:
            a, b = (self.operands[i] for i in pair)
            result = (set(a) | set(b)) & self._kept(*pair)
            return prod(self._shape(result)) - prod(self._shape(a)) - prod(self._shape(b))

        return min(combinations(self.operands, 2), key=growth)

    def _drop_repeated(self, i: int, shape: Shape) -> None:
        """Take diagonals over repeated labels of an operand, and drop its axes that broadcast."""
        labels = self.operands[i]
        axes: dict[str, list[int]] = {}
        for axis, (label, dim) in enumerate(zip(labels, shape, strict=True)):
            if dim == self.sizes[label]:
                axes.setdefault(label, []).append(axis)
        if tuple(axes) != labels:
            self.operands[i] = tuple(axes)
            self.add_diagonal(i, self._shape(axes), list(axes.values()))

    def add_diagonal(self, i: int, dims: Sequence[int], groups: Sequence[list[int]]) -> None:
        """Replace each group of axes by its diagonal, and drop the axes that are in no group."""

        def step(values: list[np.ndarray], out: np.ndarray, workspace: np.ndarray) -> None:
            x = values[i]
            # A diagonal steps along all of its axes at once.
            strides = [sum([x.strides[axis] for axis in group]) for group in groups]
            values[i] = as_strided(x, dims, strides)

        self.steps.append(step)

    def _sum(self, i: int) -> None:
        """Sum an operand over the labels that occur nowhere else."""
        labels = self.operands[i]
        self.operands[i] = kept = _pick(labels, self._kept(i))
        if kept != labels:
            axes = tuple(k for k, label in enumerate(labels) if label not in kept)
            self.add_sum(i, axes, self._shape(kept))

    def add_sum(self, i: int, axes: tuple[int, ...], dims: tuple[int, ...]) -> None:
        field = self.layout.field(dims, self.dtype)

        def step(values: list[np.ndarray], out: np.ndarray, workspace: np.ndarray) -> None:
            values[i] = np.add.reduce(values[i], axes, out=field(workspace))

        self.steps.append(step)

    def _copy(self) -> None:
        """Copy the only operand into the output."""
        (labels,) = self.operands.values()
        self.add_copy(_axes(labels, self.output))

    def add_copy(self, axes: tuple[int, ...]) -> None:
        self.steps.append(lambda values, out, _: np.copyto(out, values[0].transpose(axes)))

    def _contract(self, i: int, j: int) -> None:
        """Contract two operands; the result becomes the first operand, so that many operands are
        contracted from left to right."""
        a, b = self.operands.pop(i), self.operands.pop(j)
        kept, last = self._kept(), not self.operands
        # Without a label to sum over, a broadcasting multiplication suffices.
        if set(a) & set(b) <= kept:
            labels = self.output if last else tuple(dict.fromkeys((*a, *b)))
            axes = _axes(a, labels), _axes(b, labels)
            self.add_multiply((i, j), axes, (_index(a, labels), _index(b, labels)), labels)
        else:
            labels, product = self._product((i, a), (j, b), kept, last)
            self.add_product(product)
        if not last:
            self.operands = {self.values: labels, **self.operands}
            self.values += 1

    def _product(
        self, left: tuple[int, Labels], right: tuple[int, Labels], kept: set[str], last: bool
    ) -> tuple[Labels, Product]:
        """Lower the contraction of two operands to a matrix product; return the result's labels
        too.
        """
        (i, a), (j, b) = left, right
        batch, inner = _pick(a, kept.intersection(b)), _pick(a, set(b) - kept)
        rows, columns, lead = _pick(a, set(a) - set(b)), _pick(b, set(b) - set(a)), batch
        if last:
            batch, rows, columns = (_pick(self.output, x) for x in (batch, rows, columns))
            order = _leading(self.output, batch, rows, columns)
            swapped = _leading(self.output, batch, columns, rows)
            # Do not transpose larger operands only to obtain the result in output order.
            lying = (*batch, *rows, *inner), (*batch, *inner, *columns)
            if (a, b) == lying and prod(self._shape(columns)) < prod(self._shape(inner)):
                swapped = None
            if order is None and swapped is not None:
                i, a, rows, j, b, columns = j, b, columns, i, a, rows
            lead, columns = order or swapped or (batch, columns)
        labels = (*lead, *rows, *columns)
        m, k, n = (prod(self._shape(x)) for x in (rows, inner, columns))
        outer = self._shape(lead)
        shared = [self.sizes[x] if x in a else 1 for x in lead]
        while shared and shared[0] == 1:  # np.matmul broadcasts missing leading dims
            del shared[0]
        product = Product(
            (i, j),
            (_axes(a, (*lead, *rows, *inner)), _axes(b, (*lead, *inner, *columns))),
            ((*shared, m, k), (*outer, k, n)),
            (*outer, m, n),
            self._shape(labels),
            _axes(labels, self.output) if last else tuple(range(len(labels))),
        )
        return labels, product

    def add_product(self, product: Product) -> None:
        (i, j), (axes_a, axes_b), (dims_a, dims_b), dims, shape, order = product
        last = not self.operands
        field = None if last and product.ordered else self.layout.field(dims, self.dtype)
        work = 2 * prod(dims) * dims_a[-1]
        multiply = product_in_parts if is_long(work, self.dtype) else np.matmul

        def step(values: list[np.ndarray], out: np.ndarray, workspace: np.ndarray) -> None:
            x = values[i].transpose(axes_a).reshape(dims_a)
            y = values[j].transpose(axes_b).reshape(dims_b)
            result = out.reshape(dims) if field is None else field(workspace)
            multiply(x, y, result)
            if not last:
                values.append(result.reshape(shape))
            elif field is not None:
                np.copyto(out, result.reshape(shape).transpose(order))

        self.steps.append(step)

    def add_multiply(
        self,
        values: tuple[int, int],
        axes: tuple[tuple[int, ...], tuple[int, ...]],
        index: tuple[Index, Index],
        labels: Labels,
    ) -> None:
        """Multiply two operands elementwise, broadcast to the axes of ``labels``."""
        (i, j), (axes_a, axes_b), (index_a, index_b) = values, axes, index
        field = self.layout.field(self._shape(labels), self.dtype) if self.operands else None

        def step(values: list[np.ndarray], out: np.ndarray, workspace: np.ndarray) -> None:
            x, y = values[i].transpose(axes_a)[index_a], values[j].transpose(axes_b)[index_b]
            result = out if field is None else field(workspace)
            np.multiply(x, y, result)
            if field is not None:
                values.append(result)

        self.steps.append(step)


@operator("Einsum", since=12, infer=_infer_einsum)
@by_shape(contiguous=True)
def einsum(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    shapes = [t.dims for t in inputs if t is not None]
    terms, output = expanded(node, shapes)
    return EinsumLowering(terms, output, shapes, static_type(outputs, 0)[1]).routine()


def expanded(node: Node, shapes: Sequence[Shape]) -> tuple[list[Labels], Labels]:
    """The labels of the axes of the operands of an Einsum, and of its output."""
    equation = parse_equation(node.attrs["equation"], len(node.inputs))
    return equation.expand([len(shape) for shape in shapes])
