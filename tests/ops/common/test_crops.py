"""Boxes cut out of images."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import ShapeError
from penstock.ops.common.crops import CropSampling, resized_crops

IMAGE = np.arange(24, dtype=np.float32).reshape(1, 4, 6, 1)
WHOLE = np.array([[0, 0, 1, 1]], np.float32)
FIRST = np.array([0])


def crop(boxes, size, nearest=False, outside=-1.0, which=FIRST, image=IMAGE):
    sampling = CropSampling(nearest, outside)
    return resized_crops(image, np.array(boxes, np.float32), which, np.array(size), sampling)


@pytest.mark.parametrize("nearest", [False, True])
def test_whole_image_in_its_own_size_is_the_image(nearest):
    np.testing.assert_array_equal(crop(WHOLE, (4, 6), nearest), IMAGE)


def test_box_that_ends_before_it_begins_is_flipped():
    np.testing.assert_array_equal(crop([[1, 1, 0, 0]], (4, 6)), IMAGE[:, ::-1, ::-1])


def test_single_sample_is_the_middle_of_the_box():
    assert crop(WHOLE, (1, 1)).item() == IMAGE.mean()


def test_bilinear_samples_lie_between_and_nearest_ones_round_away_from_zero():
    row = np.array([0, 10], np.float32).reshape(1, 1, 2, 1)
    assert crop(WHOLE, (1, 5), image=row).ravel().tolist() == [0, 2.5, 5, 7.5, 10]
    assert crop(WHOLE, (1, 5), True, image=row).ravel().tolist() == [0, 0, 10, 10, 10]


def test_samples_beyond_the_image_are_the_value_outside():
    y = crop([[-1, 0, 0, 0]], (2, 1))
    assert y.ravel().tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("boxes", "size", "which"),
    [([[0, 0, 1]], (2, 2), FIRST), (WHOLE, (0, 2), FIRST), (WHOLE, (2, 2), np.array([1]))],
)
def test_boxes_that_do_not_fit_are_refused(boxes, size, which):
    with pytest.raises(ShapeError):
        crop(boxes, size, which=which)
