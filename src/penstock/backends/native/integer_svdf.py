"""TFLite's SVDF in 8-bit integer arithmetic."""

from __future__ import annotations

import numpy as np

from penstock.backends.native import family, part_ns
from penstock.backends.native.integer_panels import rows_of_codes, starts_of_sums, tiles_of_row
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.types import TensorType
from penstock.host.native import library
from penstock.ir.graph import Node
from penstock.ops.common.dtypes import INT8, INT16, INT32
from penstock.ops.common.fixed_point import multiplier
from penstock.ops.work_estimate import Workload

# As in c/recurrent/integer_svdf.c.
_MOST_ROWS, _ROW_BYTES = 8, 32768


def svdf_workload(node: Node) -> Workload | None:
    """Return the workload: feature products, and a multiplication per memory element."""
    loaded, types = library(), [v.type for v in (*node.inputs[:2], node.inputs[5]) if v is not None]
    known = [t.dims for t in types if isinstance(t, TensorType) and t.static and len(t.dims) == 2]
    if loaded is None or len(known) < 3:
        return None
    (rows, features), (filters, _), (_, held) = known
    return _work(rows, features, filters, held, loaded.integer_speed)


def _work(rows: int, features: int, filters: int, held: int, speed: int) -> Workload:
    return Workload("codes product", flops=2 * rows * (features * filters / speed + held))


@family("tflite.IntegerSvdf", work=svdf_workload)
def integer_svdf_call(site: Site) -> NativeCall | None:
    """IntegerSvdf with constant weights."""
    x, memory, weights = site.tensor(0), site.tensor(5), site.weights(1)
    times, added, bias = [site.constant(i) for i in (2, 3, 4)]
    if 0 in (*x.dims, *memory.dims):
        return None
    if weights is None or times is None or added is None or bias is None:
        return None
    if (x.dtype, memory.dtype, times.dtype) != (INT8, INT16, INT16):
        return None
    (batch, features), (filters, steps) = x.dims, times.shape
    held, (size, deep) = rows_of_codes(weights), tiles_of_row(features)
    numbers, shifts = [part.astype(INT32) for part in multiplier(np.array(site.attr("scales", [])))]
    block = min(_MOST_ROWS, _ROW_BYTES // size, batch)
    if block < 1:
        return None
    work = _work(block, features, filters, filters * steps, site.library.integer_speed)
    return NativeCall(
        "integer_svdf",
        (
            *(Tensor(0), Tensor(5), held.arrays[0], starts_of_sums(held, added)),
            *(size, deep, times, bias),
            *(site.result(), site.result(1), numbers, shifts),
            *(features, filters, steps, bias.size, site.attr("zero", 0), batch, block),
        ),
        items=-(-batch // block),
        item_ns=part_ns(work),
        reordered={1: held},
    )
