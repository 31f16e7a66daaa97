"""Rates of oneDNN's primitives on one core of an Intel Xeon of the generation of 2023, with AVX-512
and AMX: fitted to times of the layers of common networks, each primitive by itself."""

from __future__ import annotations

from math import inf

from penstock.backends.costs import Rates, RatesByFamily

# A call that copies nothing; a convolution among others takes less (``codegen.sequences``).
_CALL, _CONVOLUTION = 1.2e-6, 0.65e-6

RATES: RatesByFamily = {
    "": Rates(_CALL, 20e9, 100e9),
    "codes product": Rates(_CALL, 20e9, 100e9, item_s=0.2e-6),
    "reduction": Rates(_CALL, 20e9, 100e9, item_s=0.13e-6),
    "product": Rates(_CALL, 60e9, 157e9, weights_per_s=60e9),
    "recurrent": Rates(_CALL, flops_per_s=160e9, item_s=0.35e-6),
    "convolution": Rates(_CONVOLUTION, 60e9, 180e9, element_s=4e-9, item_s=20e-9),
    "first convolution": Rates(_CALL, 60e9, 180e9, element_s=4e-9, item_s=20e-9),
    "depthwise convolution": Rates(_CONVOLUTION, 60e9, 75e9, element_s=4e-9),
    "first depthwise convolution": Rates(_CALL, 60e9, 75e9, element_s=4e-9),
    "codes convolution": Rates(4e-6, inf, 600e9, 30e9, 0.23e-9, 1.1e-9),
    "codes convolution by tiles": Rates(4e-6, inf, 2700e9, 30e9, 0.23e-9, 1.1e-9),
    "codes depthwise convolution": Rates(5.5e-6, flops_per_s=35e9, element_s=0.04e-9),
}
"""What an item is: of products, a matrix; of reductions, a short row; of recurrent layers, a step;
of convolutions, a tap of a group; of those of codes, a position of the result. What an element is:
of convolutions, a position of the result of a transposed one."""
