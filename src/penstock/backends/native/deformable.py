"""DeformConv of images in float32 and float64."""

from __future__ import annotations

import math

from penstock.backends.native import family, part_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.checkpoints import UNCHECKED_S
from penstock.core.types import FLOAT32
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.windows import windows
from penstock.ops.work_estimate import Workload

_PANEL, _FILTERS, _TERMS = 32, 256, 192  # as in c/windows/deformable.c
_MOST_PIXELS = 2**24  # along an axis of an image, whose positions are float32
_KERNELS = {FLOAT32: ("deformable", 1), FLOAT64: ("deformable_float64", 2)}  # and relative times


@family("DeformConv")
def deform_conv(site: Site) -> NativeCall | None:
    """Return the call for 2-D images; None for other ranks and dtypes, or for large kernels."""
    x, w, y = site.tensor(0), site.tensor(1), site.output()
    given = [t for t in site.tensors if t is not None]
    if len(x.dims) != 4 or 0 in (*x.dims, *w.dims, *y.dims):
        return None
    if x.dtype not in _KERNELS or any(t.dtype != x.dtype for t in given):
        return None
    if math.prod(w.dims[2:]) > _TERMS:
        return None
    axes = windows(site.node.attrs, w.dims[2:], x.dims[2:])
    if math.prod(x.dims[2:]) >= _MOST_PIXELS or not all(axis.addressable for axis in axes):
        return None
    groups = site.attr("group", 1)
    filters, terms = w.dims[0] // groups, math.prod(w.dims[1:])
    kernel, factor = _KERNELS[x.dtype]
    pixels = factor * terms * _PANEL
    item_ns = part_ns(Workload("deformable", flops=pixels * min(filters, _FILTERS), items=pixels))
    if item_ns > UNCHECKED_S * 1e9:
        return None
    blocks = math.ceil(math.prod(y.dims[2:]) / _PANEL) * math.ceil(filters / _FILTERS)
    return NativeCall(
        kernel,
        (
            *[None if site.input(i) is None else Tensor(i) for i in range(5)],
            *(site.result(), x.dims[1], w.dims[0], groups, site.attr("offset_group", 1)),
            *(*x.dims[2:], *y.dims[2:], *w.dims[2:]),
            *[axis.stride for axis in axes],
            *[axis.dilation for axis in axes],
            *[axis.begin for axis in axes],
        ),
        items=x.dims[0] * groups * blocks,
        item_ns=item_ns,
    )
