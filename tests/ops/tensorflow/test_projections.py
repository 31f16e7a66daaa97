"""Images transformed by projections. ``frontends/tensorflow/test_rules_images.py`` has the cases of
TensorFlow."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.ops.registry import TENSORFLOW
from penstock.testing import check_node
from tests.support.tf_operations import CASES


def test_quarter_turn_equals_rot90() -> None:
    image = np.arange(2 * 5 * 5 * 3, dtype=np.float32).reshape(2, 5, 5, 3)
    turn = np.array([[0, -1, 4, 1, 0, 0, 0, 0]], np.float32)
    for order in ("NEAREST", "BILINEAR"):
        check_node(
            "ImageProjectiveTransform",
            [image, turn, np.array([5, 5], np.int32), np.float32(0)],
            {"interpolation": order, "fill_mode": "CONSTANT"},
            domain=TENSORFLOW,
            expected=[np.rot90(image, 1, (1, 2))],
        )


def test_wrong_count_of_transforms_raises_with_both_counts() -> None:
    name = "ImageProjectiveTransformV2_uint8_dynamic"
    feeds = CASES.part(name, "in")
    feeds["transforms:0"] = np.zeros((2, 8), np.float32)
    session = ps.compile(CASES.graph(name))
    with pytest.raises(ps.PenstockError, match="2 transforms do not fit 1 images"):
        session.run(feeds)
