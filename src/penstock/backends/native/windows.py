"""Col2Im over up to three axes."""

from __future__ import annotations

import math

import numpy as np

from penstock.backends.native import family, part_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.ops.common.windows import windows
from penstock.ops.work_estimate import Workload

_AXES = 3  # as in c/windows/windows.c
_SUFFIXES = {"float32": "float", "float64": "double"}


@family("Col2Im")
def col2im(site: Site) -> NativeCall | None:
    """Col2Im with constant shapes."""
    x, block, y = site.input(0), site.constant(2), site.output()
    if x is None or site.constant(1) is None or block is None or str_(x.dtype) not in _SUFFIXES:
        return None
    axes = windows(site.node.attrs, [int(k) for k in block], y.dims[2:])
    if len(axes) > _AXES or 0 in (*x.dims, *y.dims) or not all(a.addressable for a in axes):
        return None
    rows = [(1, 1, 1, 1, 1, 0)] * (_AXES - len(axes))
    rows += [(a.size, a.count, a.kernel, a.stride, a.dilation, a.begin) for a in axes]
    return NativeCall(
        f"col2im_{_SUFFIXES[str_(x.dtype)]}",
        (Tensor(0), site.result(), np.array(rows, np.int64)),
        items=y.dims[0] * y.dims[1],
        item_ns=part_ns(
            Workload(elements=20 * math.prod(a.kernel * a.count for a in axes), items=1)
        ),
    )
