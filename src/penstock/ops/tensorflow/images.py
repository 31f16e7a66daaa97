"""CropAndResize and NonMaxSuppression."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.crops import CropSampling, resized_crops
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import ints, pad_with_none, tensor
from penstock.ops.onnx.image import box_edges, shares, suppressed
from penstock.ops.registry import OUTPUT_COUNT
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.common import array_operator, lengths

# CropAndResize


def _infer_crop(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    image, boxes = tensor(types, 0).shape, tensor(types, 1).shape
    size = lengths(ints(types, consts, 3)) or (None, None)
    count, channels = boxes and boxes[0], image and image[-1]
    return (TensorType(FLOAT32, (count or None, *size, channels or None)),)


@array_operator("CropAndResize", infer=_infer_crop)
def crop_and_resize(
    image: np.ndarray,
    boxes: np.ndarray,
    which: np.ndarray,
    size: np.ndarray,
    *,
    method: str,
    extrapolation_value: float,
) -> np.ndarray:
    sampling = CropSampling(method == "nearest", extrapolation_value)
    return resized_crops(image, boxes, which, size, sampling)


# NonMaxSuppression


class Thresholds(NamedTuple):
    """A box is suppressed if its IoU with a better one exceeds ``overlap``, or equals it if
    ``inclusive``. With ``sigma``, its score is lowered instead, and it is suppressed when the
    score is at most ``least`` (Bodla et al., Soft-NMS, 2017)."""

    overlap: float
    least: float
    sigma: float = 0.0
    inclusive: bool = False


def _suppressed(
    boxes: np.ndarray, scores: np.ndarray, most: int, thresholds: Thresholds
) -> tuple[list[int], list[float]]:
    """The boxes to keep, best first, and their scores."""
    overlap, least, sigma, inclusive = thresholds
    if boxes.ndim != 2 or boxes.shape[1:] != (4,) or scores.shape != boxes.shape[:1]:
        raise ShapeError(f"boxes of shape {boxes.shape} do not match scores of {scores.shape}")
    if not 0 <= overlap <= 1:
        raise ShapeError(f"iou_threshold {overlap} must be between 0 and 1")
    if inclusive:
        overlap = float(np.nextafter(np.float32(overlap), np.float32(-1)))
    current = scores.astype(np.float32)
    alive = current > least
    if sigma <= 0:
        order = np.flatnonzero(alive)
        # A stable sort: of boxes with equal scores, the first one is better.
        order = order[np.argsort(-current[order], kind="stable")]
        best_ones = order[suppressed(box_edges(boxes[order]), most, boxes.dtype.type(overlap))]
        return best_ones.tolist(), current[best_ones].tolist()
    edges = box_edges(boxes)
    kept: list[int] = []
    kept_scores: list[float] = []
    while len(kept) < most and alive.any():
        checkpoint()
        best = int(np.argmax(np.where(alive, current, -np.inf)))
        kept.append(best)
        kept_scores.append(float(current[best]))
        alive[best] = False
        (iou,) = shares(edges[:, [best]], edges)
        weight = np.exp(np.float32(-0.5 / sigma) * iou * iou)
        if inclusive:  # TFLite suppresses by the overlap all the same
            weight[iou > overlap] = 0
        current = np.where(alive, current * weight, current).astype(np.float32)
        alive &= current > least
    return kept, kept_scores


def _infer_nms(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    most = lengths(ints(types, consts, 2)) if attrs.get("pad_to_max_output_size") else None
    indices = TensorType(INT32, (most[0] if most else None,))
    scores = TensorType(tensor(types, 1).dtype, indices.shape)
    outputs = {3: (indices, scores, TensorType(INT32, ())), 2: (indices, TensorType(INT32, ()))}
    return outputs.get(attrs.get("outputs", 1), (indices,))


@array_operator("NonMaxSuppression", infer=_infer_nms, prepared=OUTPUT_COUNT)
def non_max_suppression(
    boxes: np.ndarray,
    scores: np.ndarray,
    *limits: np.ndarray | None,
    pad_to_max_output_size: bool = False,
    inclusive: bool = False,
    count: int,
) -> common.Outputs:
    """All versions. V5 has ``sigma`` and scores as its second output; the last output of V4 and V5
    is the number of valid entries."""
    defaults = zip(pad_with_none(limits, 4), (0, 0.5, -np.inf, 0.0), strict=True)
    most, overlap, least, sigma = (d if x is None else float(x.item(0)) for x, d in defaults)
    limit = int(most)
    thresholds = Thresholds(overlap, least, sigma, inclusive)
    kept, own_scores = _suppressed(boxes, scores, limit, thresholds)
    valid = np.array(len(kept), np.int32)
    if pad_to_max_output_size:
        missing = limit - len(kept)
        kept, own_scores = kept + [0] * missing, own_scores + [0.0] * missing
    indices = np.array(kept, np.int32)
    if count == 3:
        return indices, np.array(own_scores, scores.dtype), valid
    return common.outputs([indices, valid][:count])


def _infer_combined(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    scores = tensor(types, 1).shape
    rules.check_shape("scores", scores, (None, None, None))
    batch, _, classes = scores or (None, None, None)
    limits = [ints(types, consts, 2), ints(types, consts, 3)]
    if attrs["pad_per_class"]:
        limits[0] = limits[0] and (rules.dim_product((limits[0][0], classes)),)
    rows = lengths([limit[0] if limit else None for limit in limits])
    known = rules.all_known(rows if attrs["pad_per_class"] else rows and rows[1:])
    dims = batch, min(known) if known else None
    kinds = [TensorType(FLOAT32, dims)] * 2
    return (TensorType(FLOAT32, (*dims, 4)), *kinds, TensorType(INT32, (batch,)))


@array_operator("CombinedNonMaxSuppression", infer=_infer_combined)
def combined(
    boxes: np.ndarray,
    scores: np.ndarray,
    per_class: np.ndarray,
    total: np.ndarray,
    overlap: np.ndarray,
    least: np.ndarray,
    *,
    pad_per_class: bool,
    clip_boxes: bool,
) -> tuple[np.ndarray, ...]:
    """Suppress boxes per class for each image of a batch, then keep the best of all classes."""
    if boxes.ndim != 4 or scores.ndim != 3 or boxes.shape[:2] != scores.shape[:2]:
        raise ShapeError(f"boxes of shape {boxes.shape} do not match scores of {scores.shape}")
    classes = scores.shape[2]
    if boxes.shape[2] not in (1, classes) or boxes.shape[3] != 4:
        raise ShapeError(f"boxes {boxes.shape} must be [batch, n, q, 4] with q 1 or {classes}")
    limit, rows = int(per_class.item(0)), int(total.item(0))
    if pad_per_class:
        rows = min(rows, limit * classes)
    batch = boxes.shape[0]
    boxes = np.broadcast_to(boxes, (batch, boxes.shape[1], classes, 4))
    out = np.zeros((batch, rows, 4), np.float32)
    values, class_ids = np.zeros((batch, rows), np.float32), np.zeros((batch, rows), np.float32)
    valid = np.zeros(batch, np.int32)
    thresholds = Thresholds(float(overlap.item(0)), float(least.item(0)))
    for b in range(batch):
        detections: list[tuple[float, int, int]] = []
        for class_ in range(classes):
            kept, marks = _suppressed(boxes[b, :, class_], scores[b, :, class_], limit, thresholds)
            detections += [(mark, class_, i) for i, mark in zip(kept, marks, strict=True)]
        detections.sort(key=lambda entry: -entry[0])
        detections = detections[:rows]
        valid[b] = len(detections)
        for row, (mark, class_, i) in enumerate(detections):
            out[b, row] = boxes[b, i, class_]
            values[b, row], class_ids[b, row] = mark, class_
    return np.clip(out, 0, 1) if clip_boxes else out, values, class_ids, valid
