"""Inverses and determinants of small square matrices."""

from __future__ import annotations

import math

from penstock.backends.native import family, rows_ns
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.types import FLOAT32
from penstock.ops.common.dtypes import FLOAT64

_MOST_SIDE = 256  # as in c/products/inverse.c: LAPACK, via NumPy, is faster above
_MOST_ITEMS = 64  # of determinants, each with workspace for a matrix


@family("Det", "com.microsoft.Inverse")
def inverse_call(site: Site) -> NativeCall | None:
    """Inverse of com.microsoft, and Det."""
    x = site.tensor(0)
    if x.dtype not in (FLOAT32, FLOAT64) or not x.elements or x.dims[-1] > _MOST_SIDE:
        return None
    side, count, inverts = x.dims[-1], math.prod(x.dims[:-2]), site.node.op.name == "Inverse"
    each = 1 if inverts else math.ceil(count / _MOST_ITEMS)
    items = math.ceil(count / each)
    return NativeCall(
        f"{site.node.op.name.lower()}_{x.dtype.name}",
        (Tensor(0), site.result(), None if inverts else WORKSPACE, count, each, side),
        items=items,
        item_ns=rows_ns(each * side**2 * (8 + side), rows=each),
        workspace=0 if inverts else items * side**2 * x.dtype.itemsize,
        inplace=(0,) if inverts else (),
    )
