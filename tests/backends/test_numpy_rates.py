"""The table of NumPy's rates."""

from __future__ import annotations

from penstock.backends import numpy_rates
from penstock.backends.numpy_rates import RATES


def test_each_operation_has_one_row():
    names = [name for _, names in numpy_rates._ROWS for name in names.split() or [""]]
    assert len(names) == len(RATES)


def test_products_run_faster_than_other_arithmetic():
    assert RATES["MatMul"].flops_per_s > RATES[""].flops_per_s > RATES["GridSample"].flops_per_s


def test_all_rates_are_positive():
    assert all(rates.call_s > 0 and rates.bytes_per_s > 0 for rates in RATES.values())
