"""Boxes in images: what is cut out of them, and which of many overlapping ones to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Kernel, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import ints, tensor
from penstock.ops.registry import TENSORFLOW, operator
from penstock.ops.tensorflow.arrays import lengths
from penstock.types import FLOAT32, ShapeError, TensorType, Type

# CropAndResize


def _infer_crop(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    image, boxes = tensor(types, 0).shape, tensor(types, 1).shape
    size = lengths(ints(types, consts, 3)) or (None, None)
    count, channels = boxes and boxes[0], image and image[-1]
    return (TensorType(FLOAT32, (count or None, *size, channels or None)),)


def _positions(low: np.ndarray, high: np.ndarray, length: int, count: int) -> np.ndarray:
    """Where in a dim of the image the samples of each box lie; boxes are in parts of the dim."""
    if count > 1:
        step = (high - low) * np.float32(length - 1) / np.float32(count - 1)
        first = low * np.float32(length - 1)
        return first[:, np.newaxis] + np.arange(count, dtype=np.float32) * step[:, np.newaxis]
    return (np.float32(0.5) * (low + high) * np.float32(length - 1))[:, np.newaxis]


@operator("CropAndResize", domain=TENSORFLOW, infer=_infer_crop)
def crop_and_resize(node: Node, types: Types) -> Kernel:
    """Samples outside of the image are the attribute ``extrapolation_value``."""
    outside = np.float32(node.attrs["extrapolation_value"])
    nearest = node.attrs["method"] == "nearest"

    def function(
        image: np.ndarray, boxes: np.ndarray, which: np.ndarray, size: np.ndarray
    ) -> np.ndarray:
        if image.ndim != 4 or boxes.ndim != 2 or boxes.shape[1:] != (4,):
            raise ShapeError(f"an image of {image.shape} and boxes of {boxes.shape}")
        if which.shape != boxes.shape[:1] or size.shape != (2,) or (size <= 0).any():
            raise ShapeError(f"{boxes.shape[0]} boxes with images {which.shape}, size {size}")
        if which.size and not 0 <= which.min() <= which.max() < image.shape[0]:
            raise ShapeError(f"boxes are of images {which.tolist()}, of {image.shape[0]}")
        height, width = image.shape[1:3]
        y = _positions(boxes[:, 0], boxes[:, 2], height, int(size[0]))
        x = _positions(boxes[:, 1], boxes[:, 3], width, int(size[1]))
        inside = ((y >= 0) & (y <= height - 1))[:, :, None] & ((x >= 0) & (x <= width - 1))[:, None]
        y, x = np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)
        sampled = _nearest(image, which, y, x) if nearest else _bilinear(image, which, y, x)
        return np.where(inside[..., np.newaxis], sampled, outside).astype(np.float32)

    return Kernel(function)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Halves away from zero, as C rounds."""
    return np.floor(x + np.float32(0.5)).astype(np.int64)


def _nearest(image: np.ndarray, which: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    rows, columns = _rounded(y), _rounded(x)
    return image[which[:, None, None], rows[:, :, None], columns[:, None, :]]


def _bilinear(image: np.ndarray, which: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    top, left = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    bottom, right = np.ceil(y).astype(np.int64), np.ceil(x).astype(np.int64)
    down = (y - top).astype(np.float32)[:, :, None, None]
    along = (x - left).astype(np.float32)[:, None, :, None]

    def corner(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        corners = image[which[:, None, None], rows[:, :, None], columns[:, None, :]]
        return corners.astype(np.float32)

    above = corner(top, left) + (corner(top, right) - corner(top, left)) * along
    below = corner(bottom, left) + (corner(bottom, right) - corner(bottom, left)) * along
    return above + (below - above) * down


# NonMaxSuppression


def _areas(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper corners of boxes, whichever way they are given, and their areas."""
    low = np.minimum(boxes[..., :2], boxes[..., 2:])
    high = np.maximum(boxes[..., :2], boxes[..., 2:])
    sides = high - low
    return low, high, sides[..., 0] * sides[..., 1]


def _suppressed(
    boxes: np.ndarray, scores: np.ndarray, most: int, overlap: float, least: float, sigma: float
) -> tuple[list[int], list[float]]:
    """Which boxes to keep, best first, and their scores.

    A box goes that overlaps a better one by more than ``overlap`` of what they cover together; with
    a ``sigma`` its score is lowered instead, and it goes when that is at most ``least``
    (Bodla et al., Soft-NMS, 2017).
    """
    if boxes.ndim != 2 or boxes.shape[1:] != (4,) or scores.shape != boxes.shape[:1]:
        raise ShapeError(f"boxes of {boxes.shape} with scores of {scores.shape}")
    if not 0 <= overlap <= 1:
        raise ShapeError(f"iou_threshold {overlap} is not between 0 and 1")
    low, high, areas = _areas(boxes)
    current = scores.astype(np.float32)
    alive = current > least
    kept: list[int] = []
    kept_scores: list[float] = []
    while len(kept) < most and alive.any():
        best = int(np.argmax(np.where(alive, current, -np.inf)))
        kept.append(best)
        kept_scores.append(float(current[best]))
        alive[best] = False
        shared = np.maximum(np.minimum(high, high[best]) - np.maximum(low, low[best]), 0)
        common = shared[:, 0] * shared[:, 1]
        together = areas + areas[best] - common
        with np.errstate(invalid="ignore", divide="ignore"):
            iou = np.where((areas > 0) & (areas[best] > 0), common / together, 0)
        if sigma > 0:
            weight = np.where(iou <= overlap, np.exp(np.float32(-0.5 / sigma) * iou * iou), 0)
            current = np.where(alive, current * weight, current).astype(np.float32)
            alive &= current > least
        else:
            alive &= iou <= overlap
    return kept, kept_scores


def _one(x: Any, default: float) -> float:
    return default if x is None else float(np.asarray(x).reshape(-1)[0])


def _infer_nms(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    most = lengths(ints(types, consts, 2)) if attrs.get("pad_to_max_output_size") else None
    indices = TensorType(INT32, (most[0] if most else None,))
    scores = TensorType(tensor(types, 1).dtype, indices.shape)
    outputs = {3: (indices, scores, TensorType(INT32, ())), 2: (indices, TensorType(INT32, ()))}
    return outputs.get(attrs.get("outputs", 1), (indices,))


@operator("NonMaxSuppression", domain=TENSORFLOW, infer=_infer_nms)
def non_max_suppression(node: Node, types: Types) -> Kernel:
    """All versions: with a sigma (V5) there are scores as the second output, and with either of the
    last two versions the number of valid entries as the last."""
    pads = bool(node.attrs.get("pad_to_max_output_size"))
    default = node.attrs.get("iou_threshold", 0.5)
    count = len(node.outputs)

    def function(
        boxes: np.ndarray,
        scores: np.ndarray,
        most: np.ndarray,
        overlap: Any = None,
        least: Any = None,
        sigma: Any = None,
    ) -> Any:
        limit = int(_one(most, 0))
        kept, own_scores = _suppressed(
            boxes,
            scores,
            limit,
            _one(overlap, default),
            _one(least, -np.inf),
            _one(sigma, 0.0),
        )
        valid = np.array(len(kept), np.int32)
        if pads:
            missing = limit - len(kept)
            kept, own_scores = kept + [0] * missing, own_scores + [0.0] * missing
        indices = np.array(kept, np.int32)
        if count == 1:
            return indices
        if count == 2:
            return indices, valid
        return indices, np.array(own_scores, scores.dtype), valid

    return Kernel(function)


@operator("CombinedNonMaxSuppression", domain=TENSORFLOW)
def combined(node: Node, types: Types) -> Kernel:
    """Class by class for each image of a batch, and then the best of all classes."""
    pads, clips = bool(node.attrs["pad_per_class"]), bool(node.attrs["clip_boxes"])

    def function(
        boxes: np.ndarray,
        scores: np.ndarray,
        per_class: np.ndarray,
        total: np.ndarray,
        overlap: np.ndarray,
        least: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        if boxes.ndim != 4 or scores.ndim != 3 or boxes.shape[:2] != scores.shape[:2]:
            raise ShapeError(f"boxes of {boxes.shape} with scores of {scores.shape}")
        classes = scores.shape[2]
        if boxes.shape[2] not in (1, classes) or boxes.shape[3] != 4:
            raise ShapeError(f"boxes of {boxes.shape} for {classes} classes")
        limit, most = int(_one(per_class, 0)), int(_one(total, 0))
        rows = min(most, limit * classes) if pads else most
        batch = boxes.shape[0]
        out = np.zeros((batch, rows, 4), np.float32)
        values, class_ids = np.zeros((batch, rows), np.float32), np.zeros((batch, rows), np.float32)
        valid = np.zeros(batch, np.int32)
        for b in range(batch):
            detections: list[tuple[float, int, int]] = []
            for class_ in range(classes):
                own = boxes[b, :, class_ if boxes.shape[2] > 1 else 0]
                kept, marks = _suppressed(
                    own, scores[b, :, class_], limit, _one(overlap, 0.5), _one(least, -np.inf), 0.0
                )
                detections += [(mark, class_, i) for i, mark in zip(kept, marks, strict=True)]
            detections.sort(key=lambda entry: -entry[0])
            detections = detections[:rows]
            valid[b] = len(detections)
            for row, (mark, class_, i) in enumerate(detections):
                out[b, row] = boxes[b, i, class_ if boxes.shape[2] > 1 else 0]
                values[b, row], class_ids[b, row] = mark, class_
        return np.clip(out, 0, 1) if clips else out, values, class_ids, valid

    return Kernel(function)
