"""Losses."""

from __future__ import annotations

import math

from penstock.backends.native import family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor

_REDUCTIONS = ("none", "sum", "mean")  # as in c/tables/loss.c
_BLOCK = 2**12  # targets of an item


@family("NegativeLogLikelihoodLoss")
def negative_log_likelihood(site: Site) -> NativeCall | None:
    """NegativeLogLikelihoodLoss."""
    x, target, weights = site.tensor(0), site.tensor(1), site.input(2)
    if str_(x.dtype) not in ("float32", "float64"):
        return None
    if str_(target.dtype) not in ("int32", "int64") or not x.elements:
        return None
    reduction = _REDUCTIONS.index(site.attr("reduction", "mean"))
    ignored, size = site.attr("ignore_index", None), target.elements
    block = size if reduction else _BLOCK
    is_weighted = weights is not None
    return NativeCall(
        f"loss_{x.dtype}",
        (
            *(Tensor(0), Tensor(1), Tensor(2) if is_weighted else None, site.result()),
            *(size, x.dims[1], math.prod(x.dims[2:]), block, int(str_(target.dtype) == "int64")),
            *(int(ignored is not None), ignored or 0, reduction),
        ),
        items=math.ceil(size / block),
        item_ns=rows_ns(20 * min(block, size)),
        can_fail=True,
    )
