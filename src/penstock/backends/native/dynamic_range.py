"""Dense layers with float inputs and int8 weights, quantizing inputs at run time."""

from __future__ import annotations

import math

from penstock.backends.native import family, part_ns
from penstock.backends.native.integer_panels import rows_of_codes, starts_of_sums, tiles_of_row
from penstock.backends.native.integers import integer_workload
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.types import FLOAT32
from penstock.ops.common.dtypes import INT8
from penstock.ops.work_estimate import Workload

# As in c/products/dynamic_range.c.
_PANEL, _GROUP, _MOST_ROWS = 32, 4, 32
_BEHIND = 64  # bytes that are read past the last row
_LEAST_WORK = 1 << 22  # least operations of a piece if columns are divided


@family("tflite.DynamicRangeDense", work=integer_workload)
def dynamic_range_call(site: Site) -> NativeCall | None:
    """DynamicRangeDense with constant weights, scales and bias."""
    x, w, weights = site.tensor(0), site.tensor(1), site.weights(1)
    scales, bias = site.constant(2), site.constant(3)
    if weights is None or scales is None:
        return None
    if x.dtype != FLOAT32 or w.dtype != INT8 or 0 in (*x.dims, *w.dims):
        return None
    if bias is None and site.input(3) is not None:
        return None
    columns, depth = w.dims
    rows, (size, deep) = x.elements // depth, tiles_of_row(depth)
    block = min(_MOST_ROWS, rows)
    held = rows_of_codes(weights)
    panels, sums, _ = held.arrays
    blocks, every = -(-rows // block), -(-columns // _PANEL)
    parts = max(1, min(8 // blocks, 2 * block * columns * depth // _LEAST_WORK))
    some = -(-every // parts // _GROUP) * _GROUP
    pieces = blocks * -(-every // some)
    ops = 2 * block * columns * depth / site.library.integer_speed
    work = Workload("codes image, a part", block * depth, ops, 0, block * columns)
    return NativeCall(
        "dynamic_range_rows",
        (
            *(Tensor(0), panels, starts_of_sums(held), sums, scales.reshape(-1)),
            *(None if bias is None else bias.reshape(-1), site.result(), WORKSPACE),
            *(int(scales.size > 1), rows, columns, depth, size, deep, block, some, pieces),
            *(site.attr("asymmetric", 0), *map(float, site.attr("limits", (-math.inf, math.inf)))),
        ),
        items=1,
        item_ns=part_ns(work) * blocks,
        workspace=rows * (size + 8) + _BEHIND,
        stages=(2, pieces),
        reordered={1: held},
    )
