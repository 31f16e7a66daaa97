"""Boxes of objects out of a network's answers for anchors: TFLite_Detection_PostProcess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.onnx.image import box_edges, suppressed
from penstock.ops.registry import ATTRS, TFLITE, array_operator


def _entries(attrs: Attrs) -> int:
    most, classes = attrs["max_detections"], attrs["max_classes_per_detection"]
    if not (1 <= most < 2**20 and 1 <= classes < 2**10):
        raise ShapeError(f"{most} detections of up to {classes} classes")
    return int(most * min(classes, attrs["num_classes"]))


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    count = _entries(attrs)
    of_each = TensorType(FLOAT32, (1, count))
    return TensorType(FLOAT32, (1, count, 4)), of_each, of_each, TensorType(FLOAT32, (1,))


@array_operator(
    "TFLite_Detection_PostProcess", domain=TFLITE, infer=_infer, arity=(3, 4), prepared=ATTRS
)
def detection(encoded: np.ndarray, scores: np.ndarray, anchors: np.ndarray, *, attrs: Attrs) -> Any:
    """Encoded boxes [1, N, 4], scores of classes [1, N, C], anchors [N, 4] as (y, x, h, w). Gives
    boxes (y0, x0, y1, x1), their classes, their scores, and how many of these there are. If there
    is one class more than ``num_classes``, the first is that of the background."""
    count, most = _entries(attrs), int(attrs["max_detections"])
    scales = np.array([attrs[f"{name}_scale"] for name in "yxhw"], np.float32)
    if anchors.ndim != 2 or encoded.shape[:2] != (1, len(anchors)) or scores.ndim != 3:
        raise ShapeError(f"boxes {encoded.shape}, scores {scores.shape}, anchors {anchors.shape}")
    boxes = _decoded(encoded[0, :, :4] / scales, anchors)
    own = scores[0, :, scores.shape[2] - int(attrs["num_classes"]) :]
    select = _by_class if attrs.get("use_regular_nms") else _by_box
    found = select(boxes, own, attrs)
    detections = len(found[0])
    results = np.zeros((count, 4), np.float32), *np.zeros((2, count), np.float32)
    for result, part in zip(results, found, strict=True):
        result[:detections] = part
    valid = detections * most // count
    return *(result[np.newaxis] for result in results), np.array([valid], np.float32)


def _decoded(offsets: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    centre = offsets[:, :2] * anchors[:, 2:] + anchors[:, :2]
    half = np.float32(0.5) * np.exp(offsets[:, 2:]) * anchors[:, 2:]
    return np.concatenate([centre - half, centre + half], axis=1)


def _chosen(boxes: np.ndarray, scores: np.ndarray, most: int, attrs: Attrs) -> np.ndarray:
    """The boxes with the highest scores that overlap none that was chosen before."""
    order = np.flatnonzero(scores >= attrs["nms_score_threshold"])
    # Other algorithms of NumPy order equal scores by the instructions that the processor has.
    order = order[np.argsort(-scores[order], kind="stable")]
    threshold = boxes.dtype.type(attrs["nms_iou_threshold"])
    return order[suppressed(box_edges(boxes[order]), most, threshold)]


_Found = tuple[np.ndarray, np.ndarray, np.ndarray]


def _by_box(boxes: np.ndarray, scores: np.ndarray, attrs: Attrs) -> _Found:
    """Boxes chosen by their highest score, each with its best classes."""
    number = min(int(attrs["max_classes_per_detection"]), scores.shape[1])
    chosen = _chosen(boxes, scores.max(axis=1), int(attrs["max_detections"]), attrs)
    classes = np.argsort(-scores[chosen], axis=1, kind="stable")[:, :number]
    own = np.take_along_axis(scores[chosen], classes, axis=1)
    return np.repeat(boxes[chosen], number, axis=0), classes.reshape(-1), own.reshape(-1)


def _by_class(boxes: np.ndarray, scores: np.ndarray, attrs: Attrs) -> _Found:
    """Boxes chosen for each class on its own; of all of these the best."""
    most = int(attrs.get("detections_per_class", 100))
    chosen = [_chosen(boxes, row, most, attrs) for row in scores.T]
    places = np.concatenate(chosen)
    classes = np.repeat(np.arange(len(chosen)), [len(part) for part in chosen])
    own = scores[places, classes]
    best = np.argsort(-own, kind="stable")[: int(attrs["max_detections"])]
    return boxes[places[best]], classes[best], own[best]
