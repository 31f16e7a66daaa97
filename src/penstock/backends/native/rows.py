"""Reductions of short rows, and the places of their extremes."""

from __future__ import annotations

import math

import numpy as np

from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.ops.common.shape_rules import normalize_axes

_FLOATS = ("float32", "float64")
_OF_INTEGERS = ("sum", "sumsquare", "prod", "max", "min", "argmax", "argmin")
_LONG = 64
"""elements of a row up to which a loop over them is faster than NumPy and oneDNN"""


def _axes(site: Site, rank: int) -> tuple[int, ...] | None:
    """The axes of a reduction; None if they are not known."""
    if site.node.op.name.startswith("Arg"):
        return normalize_axes([site.attr("axis", 0)], rank)
    spelled = site.attr("axes", ())
    if site.input(1) is not None:
        const = site.constant(1)
        if const is None:
            return None
        spelled = const.reshape(-1).tolist()
    if not len(spelled):
        return () if site.attr("noop_with_empty_axes", 0) else tuple(range(rank))
    return normalize_axes(spelled, rank)


def row_reduction(site: Site) -> NativeCall | None:
    """ReduceSum and the like, ArgMax and ArgMin, over the innermost axes."""
    x, name = site.input(0), site.node.op.name.lower().removeprefix("reduce")
    dtypes = (*_FLOATS, "int32", "int64") if name in _OF_INTEGERS else _FLOATS
    if x is None or not x.dims or str(x.dtype) not in dtypes:
        return None
    axes = _axes(site, len(x.dims))
    long = [i for i, dim in enumerate(x.dims) if dim != 1]
    if not axes or any(i not in axes for i in long if i > min(axes)):
        return None
    count = math.prod(x.dims[i] for i in axes)
    if not 0 < count <= _LONG:
        return None
    words = (Tensor(0), site.result(), count, bool(site.attr("select_last_index", 0)))
    rows = int(np.prod(x.dims)) // count
    return NativeCall(f"rows_{name}_{x.dtype}", words, rows, 3 + count)
