"""Rates of PyTorch's kernels on its CPU device, roughly; ``"view"``: what copies nothing. Devices
are measured before they are compared with the host."""

from __future__ import annotations

from penstock.backends.costs import Rates, RatesByFamily

RATES: RatesByFamily = {"": Rates(2e-6, 10e9, 100e9), "view": Rates(2e-6)}
