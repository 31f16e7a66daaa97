"""Padding of windows gives images of the size that the operation takes."""

from __future__ import annotations

import pytest

from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch


@pytest.mark.parametrize(
    ("attrs", "alike"),
    [
        ({}, [0, 0]),
        ({"pads": [1, 2, 1, 2]}, [1, 2]),
        ({"pads": [1, 0, 0, 2]}, None),
        ({"auto_pad": "SAME_UPPER"}, None),
        ({"auto_pad": "VALID"}, [0, 0]),
    ],
)
def test_padding_that_is_alike_at_both_ends_is_left_to_the_operation(attrs, alike):
    from penstock.backends.torch.windows import Padding

    assert Padding(attrs, (3, 3)).alike == alike


@pytest.mark.parametrize(("mode", "corner"), [("SAME_UPPER", (0, 0)), ("SAME_LOWER", (1, 1))])
def test_same_padding_adds_the_odd_element_at_its_end(mode, corner):
    import torch

    from penstock.backends.torch.windows import Padding

    padding = Padding({"auto_pad": mode}, (2, 2))
    padded = padding.pad(torch.zeros(1, 1, 3, 4), 7.0)
    assert padded.shape == (1, 1, 4, 5)
    assert (padded[0, 0, corner[0] : corner[0] + 3, corner[1] : corner[1] + 4] == 0).all()
    assert padded.sum() == 7 * (20 - 12)


def test_image_that_needs_no_padding_is_passed_on():
    import torch

    from penstock.backends.torch.windows import Padding

    x = torch.zeros(1, 1, 4, 4)
    assert Padding({}, (2, 2)).pad(x) is x
