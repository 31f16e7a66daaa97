"""RoiAlign, MaxRoiPool, CropAndResize, NonMaxSuppression: their boxes follow from data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.backends.native import by_memory, family, part_ns, rows_ns
from penstock.backends.native.kernel import WORKSPACE, Finish, NativeCall, Site, Tensor
from penstock.core.checkpoints import UNCHECKED_S
from penstock.core.traced import int64s
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.ir.layout import strides_of
from penstock.ops.common.dtypes import FLOAT64, INT32
from penstock.ops.registry import MICROSOFT
from penstock.ops.work_estimate import Workload

_WORDS, _BESIDE, _MOST_BINS, _MOST_WIDTH = 4, 32, 512, 4096  # as in c/windows/regions.c
_MOST_SIZE = 2**24  # of an image, whose positions are float32


@family("RoiAlign", work=by_memory)
def roi_align(site: Site) -> NativeCall | None:
    """RoiAlign in float32 and float64."""
    x, rois, images, y = site.tensor(0), site.tensor(1), site.tensor(2), site.output()
    if 0 in (*x.dims, *y.dims):
        return None
    if x.dtype not in (FLOAT32, FLOAT64) or rois.dtype != x.dtype or images.dtype != INT64:
        return None
    if max(x.dims[2:]) >= _MOST_SIZE:
        return None
    shifted = site.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    ratio: int = max(site.attr("sampling_ratio", 0), 0)
    samples = ratio**2 * y.dims[3]  # of a row of bins; without a ratio, of the whole image
    samples = samples or math.ceil(x.dims[2] / y.dims[2]) * x.dims[3]
    item_ns = rows_ns(100 * x.dims[1] * samples, rows=10)
    if item_ns > UNCHECKED_S * 1e9:
        return None
    return NativeCall(
        "roi_align" if x.dtype == FLOAT32 else "roi_align_float64",
        (
            *(Tensor(0), Tensor(1), Tensor(2), site.result()),
            *(*x.dims, *y.dims[2:]),
            ratio,
            int(site.attr("mode", "avg") == "max"),
            int(shifted),
            float(site.attr("spatial_scale", 1.0)),
        ),
        items=y.dims[0] * y.dims[2],
        item_ns=item_ns,
        can_fail=True,
    )


@family("MaxRoiPool", work=by_memory)
def max_roi_pool(site: Site) -> NativeCall | None:
    """MaxRoiPool in float32."""
    x, rois, y = site.tensor(0), site.tensor(1), site.output()
    if 0 in (*x.dims, *y.dims) or y.dims[3] > _MOST_BINS:
        return None
    if x.dims[3] > _MOST_WIDTH or not x.dtype == rois.dtype == FLOAT32:
        return None
    rows = math.ceil(x.dims[2] / y.dims[2]) + 2
    item_ns = part_ns(
        Workload(elements=20 * x.dims[1] * (5 * y.dims[3] + rows * x.dims[3]), items=10)
    )
    if item_ns > UNCHECKED_S * 1e9:
        return None
    return NativeCall(
        "max_roi_pool",
        (
            *(Tensor(0), Tensor(1), site.result()),
            *(*x.dims, *y.dims[2:]),
            float(site.attr("spatial_scale", 1.0)),
        ),
        items=y.dims[0] * y.dims[2],
        item_ns=item_ns,
        can_fail=True,
    )


@family("com.microsoft.CropAndResize", "tensorflow.CropAndResize", work=by_memory)
def crop_and_resize(site: Site) -> NativeCall | None:
    """CropAndResize of ONNX Runtime, whose channels are axis 1, and of TensorFlow's, the last."""
    x, boxes, images, y = site.tensor(0), site.tensor(1), site.tensor(2), site.output()
    if len(x.dims) != 4 or 0 in (*x.dims, *y.dims):
        return None
    if not x.dtype == boxes.dtype == FLOAT32 or images.dtype != INT32 or boxes.dims[1:] != (4,):
        return None
    first = site.node.op.domain == MICROSOFT
    order = (1, 2, 3) if first else (3, 1, 2)
    steps = [[strides_of(t.dims, 1)[axis] for axis in order] for t in (x, y)]
    sizes = [t.dims[axis] for t in (x, y) for axis in order]
    item_ns = rows_ns(20 * sizes[0] * sizes[5], rows=10)
    if images.dims != boxes.dims[:1] or max(x.dims) >= _MOST_SIZE or item_ns > UNCHECKED_S * 1e9:
        return None
    return NativeCall(
        "crop_and_resize",
        (
            *(Tensor(0), Tensor(1), Tensor(2), site.result()),
            *(x.dims[0], *sizes[:3], *sizes[4:]),
            *int64s(*steps),
            int(site.attr("mode" if first else "method", "bilinear") == "nearest"),
            int(first),
            float(site.attr("extrapolation_value", 0.0)),
        ),
        items=y.dims[0] * sizes[4],
        item_ns=item_ns,
        can_fail=True,
    )


def _suppressed(site: Site, capacity: int, classes: int) -> Finish:
    """Makes the results of what each class of each image keeps, and how much: ONNX's are rows of
    image, class and box; TensorFlow's are of one class."""
    places, outputs = np.arange(capacity), len(site.node.outputs)

    def of_onnx(results: tuple[np.ndarray, ...]) -> np.ndarray:
        kept, counts = results
        row, place = np.nonzero(places < counts[:, None])
        selected = np.empty((len(row), 3), np.int64)
        np.divmod(row, classes, selected[:, 0], selected[:, 1])
        selected[:, 2] = kept[row, place]
        return selected

    def of_tensorflow(results: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | np.ndarray:
        count = results[-1].reshape(())
        made = [of[0, : count.item()].copy() for of in results[:-1]]
        return (*made, count) if outputs > 1 else made[0]

    scores = site.tensor(1)
    rows = scores.elements // scores.dims[-1]
    dtypes = (INT32, FLOAT32)[: max(outputs - 1, 1)]
    writes = *[TensorType(t, (rows, capacity)) for t in dtypes], TensorType(INT32, (rows,))
    return Finish(writes, of_tensorflow if site.node.op.domain else of_onnx)


def _kept(site: Site, is_padded: bool) -> tuple[Tensor | None, ...]:
    """Return the results of a call: boxes; their number, which a padded result may lack; scores."""
    outputs = len(site.node.outputs)
    counts = site.result(max(outputs - 1, 1)) if outputs > 1 or not is_padded else None
    return site.result(0), counts, site.result(1) if outputs == 3 else None


def _are_numbers(site: Site, dtypes: Sequence[np.dtype], needed: int) -> bool:
    """Whether inputs have these dtypes, and one element from the third on; the first are needed."""
    tensors = [site.input(i) for i in range(len(dtypes))]
    return all(
        i >= needed if x is None else x.dtype == dtype and (i < 2 or x.elements == 1)
        for i, (x, dtype) in enumerate(zip(tensors, dtypes, strict=True))
    )


@family("NonMaxSuppression", "tensorflow.NonMaxSuppression", data_dependent=True)
def suppress(site: Site) -> NativeCall | None:
    """NonMaxSuppression. What each class of each image keeps is written to a row of its own."""
    is_onnx, scored, limit = not site.node.op.domain, len(site.node.outputs) == 3, site.constant(2)
    dtypes = (FLOAT32, FLOAT32, INT64 if is_onnx else INT32, *[FLOAT32] * 3)
    if not _are_numbers(site, dtypes, needed=3 if is_onnx else 5 + scored):
        return None
    boxes, scores, *given = [site.input(i) for i in (0, 1, 3, 4, 5)]
    if boxes is None or scores is None or (limit is None and not is_onnx):
        return None
    if len(scores.dims) != (3 if is_onnx else 1):
        return None
    images, classes, count = scores.dims if is_onnx else (1, 1, *scores.dims)
    if boxes.dims != ((images, count, 4) if is_onnx else (count, 4)):
        return None
    padded = count if limit is None else max(int(limit.item()), 0)
    capacity = min(padded, count)
    item_ns = rows_ns((30 if scored else 4) * count * capacity, rows=2 * count)
    if not images * classes * capacity or item_ns > UNCHECKED_S * 1e9:
        return None
    is_padded = site.attr("pad_to_max_output_size", False)
    if is_padded and None in site.tensors[-len(site.node.outputs) :]:
        return None
    return NativeCall(
        "suppress",
        (
            *(Tensor(0), Tensor(1), None if limit is not None else Tensor(2)),
            *(None if x is None else Tensor(i) for i, x in enumerate(given, 3)),
            *(*_kept(site, is_padded), WORKSPACE),
            *(classes, count, capacity, int(bool(site.attr("center_point_box", 0)))),
            *(int(site.attr("inclusive", False)), padded if is_padded else 0),
        ),
        items=images * classes,
        item_ns=item_ns,
        workspace=images * classes * _WORDS * 8 * (count + _BESIDE),
        can_fail=True,
        finish=None if is_padded else _suppressed(site, capacity, classes),
    )
