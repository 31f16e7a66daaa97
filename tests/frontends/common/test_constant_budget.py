"""Bytes and dims of constants are bounded."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.weight_file import ConstantBudget

FLOAT32 = np.dtype(np.float32)


def test_elements_of_dims_are_counted():
    budget = ConstantBudget(ps.Limits())
    assert budget.count((2, 3), FLOAT32) == 6
    assert budget.count((), FLOAT32) == 1
    assert budget.count((0, 5), FLOAT32) == 0
    assert budget.total == 0


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ((1,) * 4, "4 dims, more than 3"),
        ((2, -1), "negative dim"),
        ((1 << 31, 1 << 31), "more than memory can hold"),
        ((0, 1 << 62), "more than memory can hold"),
    ],
)
def test_dims_that_numpy_cannot_have_are_refused(dims, text):
    with pytest.raises(TensorError, match=text):
        ConstantBudget(ps.Limits(max_dims=3)).count(dims, FLOAT32)


def test_bytes_are_spent_up_to_the_limit():
    budget = ConstantBudget(ps.Limits(max_constant_bytes=10))
    budget.spend(6)
    budget.spend(4)
    with pytest.raises(TensorError, match="take 11 bytes"):
        budget.spend(1)
