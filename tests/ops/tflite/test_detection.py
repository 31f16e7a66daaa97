"""Boxes of objects out of a network's answers for anchors: TFLite_Detection_PostProcess: beside LiteRT."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers

from tests.support.litert import RNG, Op, check_operator, f


def detection(number: int, **options: Any) -> Op:
    """A detector of 20 boxes, with scores of the background and three classes."""
    given = {"max_detections": 6, "max_classes_per_detection": number, "num_classes": 3}
    given |= {"nms_score_threshold": 0.2, "nms_iou_threshold": 0.4, **options}
    given |= {"y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0}
    anchors = np.abs(f(20, 4)) + np.float32(0.1)
    return Op(
        "CUSTOM:TFLite_Detection_PostProcess",
        (f(1, 20, 4), RNG.random((1, 20, 4), np.float32), [anchors]),
        bytes(flexbuffers.Dumps(given)),
        ("float32",) * 4,
    )


OPS = [detection(1), detection(2), detection(1, use_regular_nms=True, detections_per_class=4)]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)
