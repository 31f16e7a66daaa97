"""Elementwise kernels: single functions of torch, and formulas of several, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("elementwise")


@pytest.mark.parametrize("shift", [0.0, 90.0, -90.0])
def test_torch_softplus_is_exact_far_from_zero(shift):
    check("Softplus", [floats(3, 5) + np.float32(shift)])
