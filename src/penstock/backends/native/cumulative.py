"""Cumulative sums and products."""

from __future__ import annotations

import math

from penstock.backends.native import family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.ops.common.shape_rules import normalize_axis

_COLUMNS, _ROWS = 128, 8  # of an item, as in c/rows/cumulative.c
# Unsigned integers wrap like signed ones.
_SUFFIXES = {
    **{name: name for name in ("float32", "float64", "int32", "int64")},
    "uint32": "int32",
    "uint64": "int64",
}


@family("CumProd", "CumSum")
def cumulative(site: Site) -> NativeCall | None:
    """CumSum and CumProd over a constant axis."""
    x, axis = site.tensor(0), site.constant(1)
    suffix = _SUFFIXES.get(str_(x.dtype))
    if suffix is None or axis is None or axis.size != 1 or not x.dims:
        return None
    place = normalize_axis(int(axis.item()), len(x.dims))
    outer, length, inner = math.prod(x.dims[:place]), x.dims[place], math.prod(x.dims[place + 1 :])
    exclusive, reverse = site.attr("exclusive", 0), site.attr("reverse", 0)
    last, outer = inner == 1, outer if length else 0
    return NativeCall(
        f"{site.node.op.name.lower()}_{suffix}",
        (Tensor(0), site.result(), outer, length, inner, exclusive, reverse),
        items=math.ceil(outer / _ROWS) if last else outer * math.ceil(inner / _COLUMNS),
        item_ns=rows_ns(6 * length * (_ROWS if last else min(inner, _COLUMNS))),
    )
