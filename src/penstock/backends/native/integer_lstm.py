"""TFLite's LSTM in 8-bit integer arithmetic."""

from __future__ import annotations

import numpy as np

from penstock.backends.native import family, part_ns
from penstock.backends.native.integer_panels import rows_of_codes, starts_of_sums, tiles_of_row
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor, Word
from penstock.core.types import TensorType
from penstock.host.native import library
from penstock.ir.graph import Node
from penstock.ops.common.dtypes import INT8, INT32
from penstock.ops.common.fixed_point import multiplier
from penstock.ops.work_estimate import Workload


def lstm_workload(node: Node) -> Workload | None:
    """Return the workload: two matrix products, and five activations per unit."""
    loaded, types = library(), [v.type for v in (node.inputs[0], node.outputs[0]) if v is not None]
    known = [t.dims for t in types if isinstance(t, TensorType) and t.static and len(t.dims) == 3]
    if loaded is None or len(known) < 2:
        return None
    (steps, rows, features), (*_, units) = known
    return _work(steps, rows, features, units, loaded.integer_speed)


def _work(steps: int, rows: int, features: int, units: int, speed: int) -> Workload:
    multiplied = 8 * steps * rows * units * (features + units)
    return Workload("codes product", flops=multiplied / speed + 5 * steps * rows * units)


@family("tflite.IntegerLstm", work=lstm_workload)
def integer_lstm_call(site: Site) -> NativeCall | None:
    """IntegerLstm with constant weights."""
    x, h, c = [site.input(i) for i in (0, 5, 6)]
    biases = [bias for i in (3, 4) if (bias := site.constant(i)) is not None]
    if x is None or h is None or c is None or 0 in (*x.dims, *site.output().dims):
        return None
    if x.dtype != INT8 or h.dtype != INT8 or c.dtype != np.int16:
        return None
    matrices = [weights for i in (1, 2) if (weights := site.weights(i)) is not None]
    if len(matrices) < 2 or len(biases) < 2:
        return None
    batch_first, units = site.attr("layout", 0), site.output().dims[2]
    batch, steps = x.dims[:2] if batch_first else x.dims[1::-1]
    held, features = [rows_of_codes(weights) for weights in matrices], x.dims[2]
    starts = [starts_of_sums(each, bias) for each, bias in zip(held, biases, strict=True)]
    sizes, columns = [tiles_of_row(k) for k in (features, units)], starts[0].size
    words: list[tuple[Word, ...]] = [
        (each.arrays[0], start, *size)
        for each, start, size in zip(held, starts, sizes, strict=True)
    ]
    numbers, shifts = [part.astype(INT32) for part in multiplier(np.array(site.attr("scales", [])))]
    room = sizes[0][0] + sizes[1][0] + 8 * columns
    step, row = (1, steps) if batch_first else (batch, 1)
    work = _work(steps, 1, features, units, site.library.integer_speed)
    return NativeCall(
        "integer_lstm",
        (
            *(Tensor(0), Tensor(5), Tensor(6), *words[0], *words[1]),
            *(site.result(), site.result(1), site.result(2)),
            *(numbers, shifts, WORKSPACE, room, columns),
            *(steps, units, features, int(site.attr("direction", "") == "reverse")),
            *(site.attr("cell_bits", 4), site.attr("cell_clip", 0), site.attr("zero", 0)),
            *(step * features, row * features, step * units, row * units),
        ),
        items=batch,
        item_ns=part_ns(work),
        workspace=batch * room,
        reordered=dict(zip((1, 2), held, strict=True)),
    )
