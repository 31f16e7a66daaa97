"""The rates of compiled kernels, which all families use."""

from __future__ import annotations

import math

import pytest

from penstock.backends.native import RATES, cheaper, part_ns
from penstock.ops.work_estimate import Workload, estimate


def test_rates_are_positive():
    for name, row in RATES.items():
        assert all(rate >= 0 for rate in row), name
        assert row.bytes_per_s and row.flops_per_s and row.weights_per_s, name


def test_work_of_a_part_counts_no_call():
    assert part_ns(Workload("dense")) == 0
    assert part_ns(Workload("dense", flops=160)) == pytest.approx(1)


def test_faster_work_is_the_first_of_equal_ones():
    first, second = Workload("view"), Workload("view")
    assert cheaper(first, second) is first
    assert cheaper(None, second) is second
    assert cheaper(Workload("dense"), second) is second
    assert cheaper(None, None) is None
    assert estimate(RATES, None) == math.inf
