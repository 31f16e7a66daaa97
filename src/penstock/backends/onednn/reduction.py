"""Reductions along axes that are adjacent in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.backends.onednn.layouts import ITEM
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.core.types import FLOAT32
from penstock.ops.onnx.reduce import reduction_form

REDUCTIONS = {
    "ReduceMean": ("mean", "avg_exclude_padding"),
    "ReduceProd": ("mul", ""),
    "ReduceSum": ("sum", ""),
}
"""oneDNN's names of reductions, and of the equivalent pooling, if there is one

No maxima and minima: oneDNN turns infinities, with which models mask, into the largest finite
number.
"""


def reduction(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a reduction over constant axes.

    oneDNN has fast code for the innermost axes in memory. Other axes become a pooling with a window
    over all their elements, with the dims behind them as channels. Sums do not: a mean times a
    number is not always the integer that a sum would be.
    """
    node, x = desc.node, desc.input(0)
    if x is None or not x.dims or desc.post_ops:
        return None
    const = node.const(1)
    if node.input(1) is not None and const is None:
        return None
    axes: Sequence[int] = () if const is None else const.reshape(-1).tolist()
    if not axes and node.attrs.get("noop_with_empty_axes"):
        return None
    form = reduction_form(x.dims, FLOAT32, axes or None, True)
    taken = {axis for axis in form.axes if x.dims[axis] > 1}
    if not taken:
        return None
    algorithm, pooling = REDUCTIONS[node.op.name]
    rank = len(x.dims)
    innermost = max(axis for axis in range(rank) if x.dims[axis] > 1)
    if not pooling and innermost not in taken:
        return None
    # Axes of the input by those of the result.
    keeps = len(desc.output.dims) == rank
    kept = [axis for axis in range(rank) if keeps or axis not in form.axes]

    def create(context: SpecContext) -> BoundPrimitive:
        source, target = context.strides[desc.inputs[0]], context.strides[desc.outputs[0]]
        assert source is not None and target is not None
        order = _order(x.dims, source)
        places = [i for i, axis in enumerate(order) if axis in taken]
        first, last = places[0], places[-1]
        rest = order[:first] + order[last + 1 :]
        # The axes must be adjacent in memory, and the others in the order of the result.
        adjacent = last - first < len(places)
        if not adjacent or rest != [kept[axis] for axis in _order(desc.output.dims, target)]:
            raise DnnlError(UNIMPLEMENTED)
        groups = order[:first], order[first : last + 1], order[last + 1 :]
        before, count, after = (math.prod(x.dims[axis] for axis in axes) for axes in groups)
        if after == 1:
            ends = [context.packed((before, n)) for n in (count, 1)]
            return context.primitive("reduction", [f"reduction_{algorithm}", *ends, 0.0, 0.0])
        if not pooling:
            raise DnnlError(UNIMPLEMENTED)
        ends = [context.packed((before, after, n, 1), (0, 2, 3, 1)) for n in (count, 1)]
        windows = [[1, 1], [count, 1], [0, 0], [0, 0], [0, 0]]  # strides, kernel, no padding
        return context.primitive("pooling_forward", [f"pooling_{pooling}", *ends, *windows])

    # A reduction that is also a pooling reads any order of dims; a sum only the innermost axes.
    dims_order = () if pooling else tuple(range(rank))
    return PrimitiveSpec(desc, create, dims_order, (desc.inputs[0],))


def _order(dims: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The axes of more than one element, the outermost in memory first. Raises ``DnnlError``
    (unimplemented) if there are gaps between the elements."""
    order = sorted((axis for axis, n in enumerate(dims) if n > 1), key=lambda axis: -steps[axis])
    step = ITEM
    for axis in reversed(order):
        if steps[axis] != step:
            raise DnnlError(UNIMPLEMENTED)
        step *= dims[axis]
    return order
