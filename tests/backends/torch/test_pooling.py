"""Pooling over windows: MaxPool, AveragePool and the global ones, against NumPy's."""

from __future__ import annotations

import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("pooling")


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_torch_pooling_agrees_with_different_padding_at_both_ends(op):
    attrs = {"count_include_pad": 1} if op == "AveragePool" else {}
    check(op, [floats(1, 2, 9, 8)], kernel_shape=[3, 2], pads=[1, 0, 0, 1], **attrs)
