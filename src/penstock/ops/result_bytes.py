"""Counts results with data-dependent sizes against the budget of a run.

``counted`` wraps the function of such a kernel. Before a call, it computes an upper bound of the
result's size from the sizes and integers in inputs and attributes. Only if this exceeds the rest of
the budget, it infers the size from the node's types and the contents of its inputs. Results without
such a bound, such as those of NonZero, are counted after the call. Results of at most 1 KiB do not
count: their number is at most the number of values in a plan, and lists count their elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from sys import getsizeof

import numpy as np

from penstock.core.checkpoints import THREAD
from penstock.core.types import STRING, RunValue, RunValues, TensorType, Type, type_of
from penstock.host.current_run import Budget, BudgetError, reserve
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import is_fused, type_of_result

SMALL_BYTES = 1024
"""Results up to this size do not count."""
# Bytes of the widest element.
_ITEM = 16
# Numbers in one input or attribute that may be dims, paddings, repetitions and the like.
_MOST_DIMS = 16

# Operations with integer inputs that do not make the result larger.
_PLACES = frozenset(
    {
        *("Compress", "Gather", "GatherElements", "GatherND", "GatherNd", "GatherV2", "Reshape"),
        *("ScatterElements", "ScatterND", "Slice", "Split", "SplitV", "Squeeze", "StridedSlice"),
        *("TopK", "TopKV2", "Transpose", "Trilu", "Unsqueeze"),
    }
)

# Operations that fractions in inputs make larger.
_SCALES = frozenset({"Range", "Resize", "Upsample"})

_ndarray = np.ndarray


def counted(
    node: Node, function: Callable[..., RunValue], reserves: bool = False
) -> Callable[..., RunValue]:
    """``function``, a kernel's, with its results counted against the budget of the current run; it
    ``reserves`` them if it asks for them itself."""
    factor = _ITEM * _growth_of_attributes(node)
    alike = node.op.elementwise and len(node.inputs) == 1  # never larger than the input
    by_value = not (node.op.elementwise or node.op.view or node.op.name in _PLACES)
    kinds = "iuf" if node.op.name in _SCALES else "iu"
    squares = "Diag" in node.op.name
    # Text is counted when it is created.
    text = not node.op.moves and not all(map(_is_number, node.outputs))

    def call(*inputs: RunValue) -> RunValue:
        run = THREAD.run
        if run is None:
            return function(*inputs)
        run.check()
        budget = run.budget
        if budget is None:
            return function(*inputs)
        bound = factor
        for x in () if alike or reserves else inputs:
            if x.__class__ is _ndarray:
                size = x.size
                if size > 1:
                    bound *= size
                if by_value and size <= _MOST_DIMS and x.dtype.kind in kinds:
                    bound *= _product(x.reshape(-1).tolist(), "f" in kinds)
                elif squares:
                    bound *= size
        if bound > budget.left and not reserves:
            reserve(result_bytes(node, inputs))
        result = function(*inputs)
        if result.__class__ is _ndarray:
            if text or result.nbytes > SMALL_BYTES or result.ndim > budget.max_dims:
                _count(budget, result, inputs, text)
        elif result.__class__ is tuple:
            for output in result:
                if output.__class__ is _ndarray:
                    _count(budget, output, inputs, text)
        return result

    return call


def _is_number(value: Value | None) -> bool:
    """Whether a value is known not to be text."""
    type_ = None if value is None else value.type
    dtype = type_.dtype if isinstance(type_, TensorType) else None
    return value is None or (dtype is not None and dtype != STRING)


def _count(budget: Budget, result: np.ndarray, inputs: RunValues, text: bool) -> None:
    """Count a result, with its ``text``, unless it is a view of an input."""
    if result.ndim > budget.max_dims:
        dims = f"{result.ndim} dims, more than Limits.max_dims = {budget.max_dims}"
        raise BudgetError(f"its result has {dims}")
    nbytes = -1
    if text and result.dtype == STRING:
        nbytes = result.nbytes + sum(map(getsizeof, result.reshape(-1).tolist()))
    elif result.nbytes <= SMALL_BYTES:
        return
    base = result.base
    if base is not None and any(x is base or getattr(x, "base", None) is base for x in inputs):
        return
    budget.keep(result, nbytes)


def result_bytes(node: Node, inputs: RunValues) -> int:
    """Bytes of the outputs of ``node`` for these inputs, inferred from types and contents; 0 if the
    kernel will refuse the inputs."""
    if any(x.__class__ is list for x in inputs):
        return 0  # lists count their elements themselves
    types = [None if x is None else type_of(x) for x in inputs]
    arrays = [x if x.__class__ is _ndarray else None for x in inputs]
    try:
        if is_fused(node):
            outputs: Sequence[Type] = [type_of_result(node, types)]
        else:
            outputs = node.op.infer(types, node.attrs, arrays)
    except Exception:
        return 0
    tensors = [t for t in outputs if isinstance(t, TensorType) and t.static]
    return sum(math.prod(t.dims) * (t.dtype.itemsize if t.dtype else 1) for t in tensors)


def _growth_of_attributes(node: Node) -> float:
    """A bound of the factor by which attributes make a result larger than the inputs."""
    growth = 1.0
    for value in node.attrs.values():
        values = value if isinstance(value, list | tuple) else [value]
        numbers = [x for x in values if isinstance(x, int | float)]
        if len(numbers) > _MOST_DIMS:
            numbers = [max(map(abs, numbers))]
        growth *= _product(numbers, False)
    return growth


def _product(numbers: Sequence[float], inverses: bool) -> float:
    """The product of 1 + abs(x), of fractions with 1/x: the steps of a Range."""
    product = 1.0
    for x in numbers:
        product *= 1.0 + abs(x) + (1.0 / abs(x) if inverses and x else 0.0)
    return product
