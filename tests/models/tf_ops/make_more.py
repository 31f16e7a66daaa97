"""Makes ``more.npz.xz``, as ``make.py`` does ``cases.npz.xz``: what the others leave out."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from make import RNG, F, case, real, save
from make_text import words


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rows() -> None:
    """Segments without rows, and rows in parts."""
    none = {"data": real(0, 3), "segment_ids": numbers()}
    for name in ("Sum", "Max"):
        for count in (0, 2):
            label = f"UnsortedSegment{name}_none_{count}"
            case(label, f"UnsortedSegment{name}", none, num_segments=np.int32(count))
    empty = {"data": real(2, 0), "segment_ids": numbers(0, 1)}
    case("UnsortedSegmentSum_of_nothing", "UnsortedSegmentSum", empty, num_segments=np.int32(3))
    parts = {"data": real(5, 2), "partitions": numbers(0, 2, 0, 2, 0)}
    case("DynamicPartition", "DynamicPartition", parts, num_partitions=3)
    case("DynamicPartition_dynamic", "DynamicPartition", parts, num_partitions=4)
    places = {"data": words(*"abcdef").reshape(2, 3), "partitions": numbers(1, 0, 1, 1, 1, 0)}
    places["partitions"] = places["partitions"].reshape(2, 3)
    case("DynamicPartition_tables", "DynamicPartition", places, num_partitions=2)
    case("DynamicPartition_one", "DynamicPartition", places | {"data": real(2, 3, 4)}, **ONE)
    pieces = {
        "indices": [numbers(3, 0), numbers(1, 2).reshape(2, 1), np.array(0, np.int32), numbers()],
        "data": [real(2, 3), real(2, 1, 3), real(3), real(0, 3)],
    }
    case("DynamicStitch", "DynamicStitch", pieces)
    case("DynamicStitch_dynamic", "DynamicStitch", pieces)
    nothing = {"indices": [numbers()], "data": [real(0, 3)]}
    case("DynamicStitch_of_nothing", "DynamicStitch", nothing)
    apart = {"indices": pieces["indices"][:2], "data": pieces["data"][:2]}
    case("ParallelDynamicStitch", "ParallelDynamicStitch", apart)


ONE = {"num_partitions": 2}


def wide_products() -> None:
    x, y = (RNG.integers(-100, 100, shape).astype(np.int8) for shape in ((2, 3, 40), (40, 5)))
    case("BatchMatMulV3_int8", "BatchMatMulV3", {"x": x, "y": y}, Tout=tf.int32)
    turned = {"x": x, "y": np.abs(y.T).astype(np.uint8)}
    case("BatchMatMulV3_adjoint", "BatchMatMulV3", turned, Tout=tf.int32, adj_y=True)
    real_y = {"x": np.abs(x).astype(np.uint8), "y": y}
    case("BatchMatMulV3_dynamic", "BatchMatMulV3", real_y, Tout=tf.int32)


def soft_boxes() -> None:
    """A share beyond the threshold does not matter where scores are lowered."""
    low = np.round(RNG.uniform(size=(20, 2)) * 4) / 4
    boxes = np.concatenate([low, low + np.round(RNG.uniform(size=(20, 2)) * 3 + 1) / 4], 1)
    scores = (RNG.permutation(20) / 20).astype(F)
    given = {"boxes": boxes.astype(F), "scores": scores}
    limits = {"max_output_size": np.int32(12), "score_threshold": F(0.1)}
    for share, sigma in ((0.5, 0.5), (0.2, 0.3), (0.0, 1.0)):
        label = f"NonMaxSuppressionV5_{share}_{sigma}"
        more = {"iou_threshold": F(share), "soft_nms_sigma": F(sigma)}
        case(label, "NonMaxSuppressionV5", given, **limits, **more)


if __name__ == "__main__":
    for make in (rows, wide_products, soft_boxes):
        make()
    save("more")
