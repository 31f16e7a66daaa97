"""Reductions along axes, places of extreme elements, sorting, and running sums, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("reduce")


@pytest.mark.parametrize("axes", [[0], [-1], [0, 2], []])
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_torch_reduction_of_no_elements_gives_what_numpy_gives(op, axes):
    check(op, [np.zeros((2, 0, 3), np.float32), np.array(axes, np.int64)], (1,))


def test_torch_top_k_takes_the_first_of_equal_elements():
    x = np.array([[1, 3, 3, 2, 3, 1]], np.float32)
    check("TopK", [x, np.array([4], np.int64)], outputs=2)
    check("TopK", [x, np.array([4], np.int64)], outputs=2, largest=0)
