"""The rates of compiled kernels, which all families use."""

from __future__ import annotations

import math

import pytest

from penstock.backends.native import RATES, faster, part_ns
from penstock.ops.work_estimate import Work, estimate


def test_rates_are_positive():
    for name, row in RATES.items():
        assert all(rate >= 0 for rate in row), name
        assert row.bytes_per_s and row.flops_per_s and row.weights_per_s, name


def test_work_of_a_part_counts_no_call():
    assert part_ns(Work("dense")) == 0
    assert part_ns(Work("dense", flops=160)) == pytest.approx(1)


def test_faster_work_is_the_first_of_equal_ones():
    first, second = Work("view"), Work("view")
    assert faster(first, second) is first
    assert faster(None, second) is second
    assert faster(Work("dense"), second) is second
    assert faster(None, None) is None
    assert estimate(RATES, None) == math.inf
