"""The table of rates of this backend."""

from __future__ import annotations

from penstock.backends.torch.rates import RATES


def test_calls_take_microseconds_and_rates_are_positive():
    for family, rates in RATES.items():
        assert 0 < rates.call_s < 1e-5, family
        assert min(rates.bytes_per_s, rates.flops_per_s, rates.weights_per_s) > 0, family


def test_other_families_have_rates():
    assert "" in RATES
