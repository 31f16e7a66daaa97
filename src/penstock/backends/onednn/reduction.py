"""Reductions along axes that are adjacent in memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from penstock.backends.onednn.layouts import ITEM
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ops.onnx.reduce import reduction_form
from penstock.types import FLOAT32


class _Algorithms(NamedTuple):
    """oneDNN's name of a reduction, and the equivalent pooling, if there is one."""

    reduction: str
    pooling: str = ""


# No maxima and minima: oneDNN turns infinities, with which models mask, into the largest finite
# number.
REDUCTIONS = {
    "ReduceMean": _Algorithms("mean", "avg_exclude_padding"),
    "ReduceProd": _Algorithms("mul"),
    "ReduceSum": _Algorithms("sum"),
}


def reduction(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a reduction over constant axes.

    oneDNN has fast code for the innermost axes in memory. Other axes become a pooling with a window
    over all their elements, with the dims behind them as channels. Sums do not: a mean times a
    number is not always the integer that a sum would be.
    """
    node, x = desc.node, desc.input(0)
    if x is None or not x.dims or len(desc.post_ops):
        return None
    axes: Sequence[int] = ()
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        const = node.inputs[1].const
        if const is None:
            return None
        axes = const.reshape(-1).tolist()
    if not axes and node.attrs.get("noop_with_empty_axes"):
        return None
    form = reduction_form(x.dims, FLOAT32, axes or None, True)
    taken = {axis for axis in form.axes if x.dims[axis] > 1}
    if not taken:
        return None
    algorithms = REDUCTIONS[node.op.name]
    rank = len(x.dims)
    innermost = max(axis for axis in range(rank) if x.dims[axis] > 1)
    if not algorithms.pooling and innermost not in taken:
        return None
    # Axes of the input by those of the result.
    kept = range(rank)
    if len(desc.output.dims) < rank:
        kept = [axis for axis in kept if axis not in form.axes]  # type: ignore[assignment]

    def create(context: SpecContext) -> BoundPrimitive:
        source, target = context.strides[desc.inputs[0]], context.strides[desc.outputs[0]]
        assert source is not None and target is not None
        before, count, after = _grouped(x.dims, source, taken)
        rest = [axis for axis in _order(x.dims, source) if axis not in taken]
        if rest != [kept[axis] for axis in _order(desc.output.dims, target)]:
            raise DnnlError(UNIMPLEMENTED)
        return _primitive(context, algorithms, before, count, after)

    # A reduction that is also a pooling reads any order of dims; a sum only the innermost axes.
    dims_order = () if algorithms.pooling else tuple(range(rank))
    return PrimitiveSpec(desc, create, dims_order, (desc.inputs[0],))


def _primitive(
    context: SpecContext, algorithms: _Algorithms, before: int, count: int, after: int
) -> BoundPrimitive:
    if after == 1:
        ends = [context.packed((before, n)) for n in (count, 1)]
        return context.primitive(
            "reduction", [f"reduction_{algorithms.reduction}", *ends, 0.0, 0.0]
        )
    if not algorithms.pooling:
        raise DnnlError(UNIMPLEMENTED)
    ends = [context.packed((before, after, n, 1), (0, 2, 3, 1)) for n in (count, 1)]
    geometry = [[1, 1], [count, 1], [0, 0], [0, 0], [0, 0]]  # strides, kernel, no gaps or padding
    algorithm = f"pooling_{algorithms.pooling}"
    return context.primitive("pooling_forward", [algorithm, *ends, *geometry])


def _order(dims: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The axes of more than one element, the outermost in memory first.

    Raises ``DnnlError`` (unimplemented) if there are gaps between the elements.
    """
    order = sorted((axis for axis, n in enumerate(dims) if n > 1), key=lambda axis: -steps[axis])
    step = ITEM
    for axis in reversed(order):
        if steps[axis] != step:
            raise DnnlError(UNIMPLEMENTED)
        step *= dims[axis]
    return order


def _grouped(
    dims: Sequence[int], steps: Sequence[int], taken: Collection[int]
) -> tuple[int, int, int]:
    """The numbers of elements before the axes ``taken``, in them, and behind them; raises
    ``DnnlError`` (unimplemented) if the axes are not adjacent in memory."""
    order = _order(dims, steps)
    places = [i for i, axis in enumerate(order) if axis in taken]
    if places[-1] - places[0] >= len(places):
        raise DnnlError(UNIMPLEMENTED)

    def size(axes: Iterable[int]) -> int:
        return math.prod(dims[axis] for axis in axes)

    return size(order[: places[0]]), size(taken), size(order[places[-1] + 1 :])
