"""Normalization: by batch, instance, layer, group and across channels; softmax, against NumPy's."""

from __future__ import annotations

import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("normalization")


def test_torch_layer_normalization_broadcasts_its_scale():
    check("LayerNormalization", [floats(2, 3, 4), floats(4), floats(3, 4)], axis=1)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_torch_softmax_before_opset_13_flattens_the_axes_from_one_on(op, axis):
    attrs = {} if axis is None else {"axis": axis}
    check(op, [floats(2, 3, 4)], opset=11, **attrs)
