"""Elements picked and replaced by index: gathers and scatters, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("index")


@pytest.mark.parametrize("op", ["Gather", "GatherElements"])
def test_torch_gather_counts_negative_indices_from_the_end(op):
    check(op, [floats(4, 3), np.array([[-1, 0, 2], [1, -3, 0]], np.int64)], axis=0)
