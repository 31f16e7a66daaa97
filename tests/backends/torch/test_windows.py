"""Operations over windows: convolutions and pooling against NumPy's, and the padding of images."""

from __future__ import annotations

import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("windows")


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


@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 0, 2]}, {"auto_pad": "SAME_UPPER"}])
def test_torch_convolution_agrees_for_every_kind_of_padding(attrs):
    inputs = [floats(2, 4, 9, 8), floats(6, 2, 3, 3), floats(6)]
    check("Conv", inputs, strides=[2, 1], group=2, **attrs)


@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 0, 2]}, {"output_padding": [1, 0]}])
def test_torch_transposed_convolution_agrees_for_every_kind_of_padding(attrs):
    inputs = [floats(2, 4, 5, 6), floats(4, 3, 3, 3), floats(6)]
    check("ConvTranspose", inputs, strides=[2, 2], group=2, **attrs)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_torch_pooling_agrees_with_different_padding_at_both_ends(op):
    attrs = {"count_include_pad": 1} if op == "AveragePool" else {}
    check(op, [floats(1, 2, 9, 8)], kernel_shape=[3, 2], pads=[1, 0, 0, 1], **attrs)
