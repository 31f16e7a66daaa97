"""TFLite_Detection_PostProcess, beside LiteRT."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers

import penstock as ps
from tests.support.litert import RNG, Op, by_litert, check_operator, f


def detection(number: int, **options: Any) -> Op:
    """A detector of 20 boxes, with scores of the background and three classes."""
    given = {"max_detections": 6, "max_classes_per_detection": number, "num_classes": 3}
    given |= {"nms_score_threshold": 0.2, "nms_iou_threshold": 0.4}
    given |= {"y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0, **options}
    anchors = np.abs(f(20, 4)) + np.float32(0.1)
    return Op(
        "CUSTOM:TFLite_Detection_PostProcess",
        (f(1, 20, 4), RNG.random((1, 20, 4), np.float32), [anchors]),
        bytes(flexbuffers.Dumps(given)),
        ("float32",) * 4,
    )


OPS = [detection(1), detection(2), detection(1, use_regular_nms=True, detections_per_class=4)]
OPEN = [
    detection(1, max_detections=30),
    detection(1, nms_score_threshold=2.0),
    detection(2, use_regular_nms=True),
    detection(1, use_regular_nms=True, max_detections=99),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)


@pytest.mark.parametrize("op", OPEN, ids=range(len(OPEN)))
def test_results_are_0_behind_those_that_litert_gives(op: Op) -> None:
    """LiteRT leaves them as they are in memory."""
    want = by_litert(op.file, op.feeds)
    results = ps.compile(op.file).run(op.feeds).values()
    for got, other in zip(results, want, strict=True):
        assert got.shape == other.shape
        if got.ndim > 1:
            found = int(want[3][0])
            np.testing.assert_allclose(got[0, :found], other[0, :found], 1e-5, 1e-5)
            assert not got[0, found:].any()
        else:
            assert got == other


def test_a_box_has_scores_of_0_for_more_classes_than_there_are() -> None:
    op = detection(5)
    _, *results, count = ps.compile(op.file).run(op.feeds).values()
    _, *want, of_litert = by_litert(op.file, op.feeds)
    assert count == of_litert
    for got, other in zip(results, want, strict=True):
        assert got.shape == other.shape
        np.testing.assert_allclose(got.reshape(6, 5)[:, :3], other.reshape(6, 5)[:, :3], 1e-5)
    assert not results[1].reshape(6, 5)[:, 3:].any()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_detections", 0, "has 0 detections"),
        ("max_detections", 2**30, "has 1073741824 detections"),
        ("y_scale", "1", "has '1' as y_scale"),
        ("num_classes", math.inf, "has inf as num_classes"),
        ("num_classes", 7, "has scores of 4 classes, but options of 7"),
        ("detections_per_class", "many", "has 'many' as detections_per_class"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ps.InvalidModel, match=re.escape(reason)):
        ps.compile(detection(1, **{name: value}).file)
