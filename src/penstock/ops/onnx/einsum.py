"""Einsum, lowered to transpositions, sums and matrix products when its shapes are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Kernel, Types
from penstock.ops.common.shape_rules import broadcast_dim, same_dtype, tensor
from penstock.ops.common.specialize import Routine, ScratchLayout, Tensors, specialized
from penstock.ops.registry import operator
from penstock.types import Dim, Shape, ShapeError, TensorType, Type

Labels: TypeAlias = tuple[str, ...]
"""One for each axis: a letter, or for those of an ellipsis ``.0``, ``.1``, ... from the back"""


class _Equation(NamedTuple):
    """Terms as written, an ellipsis being ``...``; ``output`` is ``None`` where it is implied."""

    text: str
    terms: tuple[Labels, ...]
    output: Labels | None

    def expand(self, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
        """The labels of every axis of operands of these ranks, and of the output."""
        terms, widest = [], 0
        for term, rank in zip(self.terms, ranks, strict=True):
            extra = rank - len(term) + ("..." in term)
            if extra < 0 or (extra and "..." not in term):
                raise ShapeError(
                    f"term {''.join(term)!r} of {self.text!r} does not fit rank {rank}"
                )
            widest = max(widest, extra)
            terms.append(_replace(term, extra))
        if self.output is not None:
            if widest and "..." not in self.output:
                raise ShapeError(f"the output of {self.text!r} lacks the ellipsis of its operands")
            return terms, _replace(self.output, widest)
        seen = [label for term in self.terms for label in term if label != "..."]
        once = sorted(label for label in seen if seen.count(label) == 1)
        return terms, (*_replace(("...",), widest), *once)


def _replace(term: Labels, extra: int) -> Labels:
    dots = tuple(f".{i}" for i in reversed(range(extra)))
    at = term.index("...") if "..." in term else len(term)
    return (*term[:at], *dots, *term[at + 1 :])


def parse_equation(text: str, operands: int) -> _Equation:
    """The equation of an Einsum of so many operands."""

    def labels(term: str) -> Labels:
        before, dots, after = term.partition("...")
        if not (before + after + "a").isascii() or not (before + after + "a").isalpha():
            raise ShapeError(f"term {term!r} of {text!r} is not of letters and one ellipsis")
        return (*before, *([dots] if dots else ()), *after)

    left, arrow, right = text.replace(" ", "").partition("->")
    terms = tuple(labels(term) for term in left.split(","))
    if len(terms) != operands:
        raise ShapeError(f"{text!r} is for {len(terms)} operands, not for {operands}")
    output = labels(right) if arrow else None
    if output is not None:
        valid = {label for term in terms for label in term} | {"..."}
        if len(set(output)) != len(output) or not set(output) <= valid:
            raise ShapeError(f"the output of {text!r} has a label twice, or one no operand has")
    return _Equation(text, terms, output)


def _label_sizes(terms: Sequence[Labels], shapes: Sequence[Shape]) -> dict[str, Dim]:
    """The dim of every label; dims of 1 broadcast."""
    sizes: dict[str, Dim] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, dim in zip(term, shape, strict=True):
            try:
                sizes[label] = broadcast_dim(sizes.get(label, 1), dim)
            except ShapeError:
                raise ShapeError(f"label {label!r} has dims {sizes[label]} and {dim}") from None
    return sizes


def _infer_einsum(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    equation = parse_equation(attrs["equation"], len(types))
    dtype = same_dtype(types, range(len(types)))
    shapes = [tensor(types, i).shape for i in range(len(types))]
    full = [shape for shape in shapes if shape is not None]
    if len(full) < len(shapes):
        return (TensorType(dtype, None),)
    terms, output = equation.expand([len(shape) for shape in full])
    sizes = _label_sizes(terms, full)
    return (TensorType(dtype, tuple(sizes[label] for label in output)),)


# Lowering

Step: TypeAlias = Callable[[list[Any], Any, Any], None]
"""``step(values, out, workspace)`` reads and writes the list of values, or writes ``out``"""


class _Lowering:
    """Builds the steps of one Einsum over known sizes."""

    def __init__(self, sizes: dict[str, int], dtype: np.dtype, output: Labels) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self.output = output
        self.layout = ScratchLayout()
        self.steps: list[Step] = []
        self.results = 0

    def shape(self, labels: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.sizes[label] for label in labels)

    def size(self, labels: Sequence[str]) -> int:
        return prod(self.shape(labels))

    def distinct(self, slot: int, labels: Labels, shape: Sequence[int]) -> Labels:
        """An operand with every label once (diagonals) and without axes that broadcast."""
        axes: dict[str, list[int]] = {}
        for axis, (label, dim) in enumerate(zip(labels, shape, strict=True)):
            if dim == self.sizes[label]:
                axes.setdefault(label, []).append(axis)
        kept = tuple(axes)
        if kept == labels:
            return kept
        dims, groups = self.shape(kept), list(axes.values())

        def step(values: list[Any], out: Any, workspace: Any) -> None:
            x = values[slot]
            strides = [sum([x.strides[axis] for axis in group]) for group in groups]
            values[slot] = as_strided(x, dims, strides)

        self.steps.append(step)
        return kept

    def summed(self, slot: int, labels: Labels, keep: set[str]) -> Labels:
        """An operand summed over the labels that nobody else has."""
        axes = tuple(i for i, label in enumerate(labels) if label not in keep)
        if not axes:
            return labels
        kept = tuple(label for label in labels if label in keep)
        field = self.layout.field(self.shape(kept), self.dtype)

        def step(values: list[Any], out: Any, workspace: Any) -> None:
            values[slot] = np.add.reduce(values[slot], axes, out=field(workspace))

        self.steps.append(step)
        return kept

    def paired(
        self, a: tuple[int, Labels], b: tuple[int, Labels], keep: set[str], slot: int, last: bool
    ) -> Labels:
        """Two operands into one (``slot``), or into the output, summed over what nobody keeps."""
        if not set(a[1]) & set(b[1]) - keep:
            return self.multiplied(a, b, slot, last)
        batch = tuple(x for x in a[1] if x in b[1] and x in keep)
        inner = tuple(x for x in a[1] if x in b[1] and x not in keep)
        rows = tuple(x for x in a[1] if x not in b[1])
        columns = tuple(x for x in b[1] if x not in a[1])
        if last and (*batch, *rows, *columns) != self.output:
            batch = tuple(x for x in self.output if x in batch)
            rows = tuple(x for x in self.output if x in rows)
            columns = tuple(x for x in self.output if x in columns)
            if (*batch, *columns, *rows) == self.output:
                a, b, rows, columns = b, a, columns, rows
        product_labels = (*batch, *rows, *columns)
        axes_a = tuple(a[1].index(x) for x in (*batch, *rows, *inner))
        axes_b = tuple(b[1].index(x) for x in (*batch, *inner, *columns))
        outer = self.shape(batch)
        shape_a = (*outer, self.size(rows), self.size(inner))
        shape_b = (*outer, self.size(inner), self.size(columns))
        product = (*outer, self.size(rows), self.size(columns))
        direct = last and product_labels == self.output
        field = None if direct else self.layout.field(product, self.dtype)
        order = tuple(product_labels.index(x) for x in self.output) if last else ()
        shape = self.shape(product_labels)
        left, right = a[0], b[0]

        def step(values: list[Any], out: Any, workspace: Any) -> None:
            x = values[left].transpose(axes_a).reshape(shape_a)
            y = values[right].transpose(axes_b).reshape(shape_b)
            result = out.reshape(product) if field is None else field(workspace)
            np.matmul(x, y, result)
            if not last:
                values[slot] = result.reshape(shape)
            elif field is not None:
                np.copyto(out, result.reshape(shape).transpose(order))

        self.steps.append(step)
        return product_labels

    def multiplied(
        self, a: tuple[int, Labels], b: tuple[int, Labels], slot: int, last: bool
    ) -> Labels:
        """Two operands into one, or into the output, with nothing to sum."""
        result_labels = self.output if last else tuple(dict.fromkeys((*a[1], *b[1])))
        field = None if last else self.layout.field(self.shape(result_labels), self.dtype)

        def aligned(labels: Labels) -> tuple[tuple[int, ...], tuple[Any, ...]]:
            axes = tuple(labels.index(x) for x in result_labels if x in labels)
            return axes, tuple(slice(None) if x in labels else None for x in result_labels)

        (axes_a, index_a), (axes_b, index_b) = aligned(a[1]), aligned(b[1])
        left, right = a[0], b[0]

        def step(values: list[Any], out: Any, workspace: Any) -> None:
            x = values[left].transpose(axes_a)[index_a]
            y = values[right].transpose(axes_b)[index_b]
            result = out if field is None else field(workspace)
            np.multiply(x, y, result)
            if field is not None:
                values[slot] = result

        self.steps.append(step)
        return result_labels

    def copied(self, slot: int, labels: Labels) -> None:
        """The one operand that is left, into the output."""
        axes = tuple(labels.index(x) for x in self.output if x in labels)
        index = tuple(slice(None) if x in labels else None for x in self.output)

        def step(values: list[Any], out: Any, workspace: Any) -> None:
            np.copyto(out, values[slot].transpose(axes)[index])

        self.steps.append(step)

    def routine(self) -> Routine:
        steps, size, blank = self.steps, self.layout.size, [None] * self.results

        def into(*arguments: Any) -> None:
            workspace = arguments[-1] if size else None
            *values, out = arguments[:-1] if size else arguments
            values += blank
            for step in steps:
                step(values, out, workspace)

        return Routine(into, size)


GREEDY = 16  # operands; beyond that they are contracted from left to right


def _cheapest(operands: dict[int, Labels], keep: Callable[..., set[str]], size: Any) -> Any:
    """The pair of operands whose contraction shrinks the total most."""
    slots = list(operands)
    if len(slots) > GREEDY:
        return slots[0], slots[1]

    def growth(pair: tuple[int, int]) -> int:
        a, b = operands[pair[0]], operands[pair[1]]
        result = (set(a) | set(b)) & keep(*pair)
        return size(tuple(result)) - size(a) - size(b)

    return min(combinations(slots, 2), key=growth)


def lower_einsum(
    terms: Sequence[Labels], output: Labels, shapes: Sequence[tuple[int, ...]], dtype: np.dtype
) -> Routine:
    """The routine of an Einsum whose terms, output and shapes are these."""
    sizes: dict[str, Any] = _label_sizes(terms, shapes)
    lowering = _Lowering(sizes, dtype, output)
    operands: dict[int, Labels] = {}
    for slot, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        operands[slot] = lowering.distinct(slot, term, shape)

    def keep(*without: int) -> set[str]:
        return set(output).union(*(v for k, v in operands.items() if k not in without))

    for slot in list(operands):
        operands[slot] = lowering.summed(slot, operands[slot], keep(slot))
    if len(operands) == 1:
        lowering.copied(0, operands[0])
    while len(operands) > 1:
        i, j = _cheapest(operands, keep, lowering.size)
        kept, last = keep(i, j), len(operands) == 2
        slot = len(terms) + lowering.results
        lowering.results += 1
        a, b = operands.pop(i), operands.pop(j)
        labels = lowering.paired((i, a), (j, b), kept, slot, last)
        # First in line, so that operands beyond the greedy search fold from left to right.
        operands = {slot: labels, **operands}
    return lowering.routine()


@operator("Einsum", since=12, infer=_infer_einsum)
def einsum(node: Node, types: Types) -> Kernel:
    equation = parse_equation(node.attrs["equation"], len(node.inputs))

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        shapes = [t.dims for t in inputs if t is not None]
        terms, output = equation.expand([len(shape) for shape in shapes])
        type_ = outputs[0]
        assert type_ is not None and type_.dtype is not None
        return lower_einsum(terms, output, shapes, type_.dtype)

    return specialized(node, types, make, contiguous=True)
