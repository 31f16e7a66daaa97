"""Convolutions: Conv and ConvTranspose, against NumPy's."""

from __future__ import annotations

import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("convolution")


@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 0, 2]}, {"auto_pad": "SAME_UPPER"}])
def test_torch_convolution_agrees_for_every_kind_of_padding(attrs):
    inputs = [floats(2, 4, 9, 8), floats(6, 2, 3, 3), floats(6)]
    check("Conv", inputs, strides=[2, 1], group=2, **attrs)


@pytest.mark.parametrize("attrs", [{}, {"pads": [1, 0, 0, 2]}, {"output_padding": [1, 0]}])
def test_torch_transposed_convolution_agrees_for_every_kind_of_padding(attrs):
    inputs = [floats(2, 4, 5, 6), floats(4, 3, 3, 3), floats(6)]
    check("ConvTranspose", inputs, strides=[2, 2], group=2, **attrs)
