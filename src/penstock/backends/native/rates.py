"""Rates of the compiled kernels on one core, by family.

The estimate of a call compares backends; that of a part of it, in nanoseconds, divides the call
among threads. Rates were fitted to times of layers of common networks, on an Intel Xeon of the
generation of 2023 with AVX-512.
"""

from __future__ import annotations

from penstock.ops.work_estimate import Rates, RateTable, Work, estimate

# Of a call that does nothing.
_CALL = 0.12e-6

RATES: RateTable = {
    # Most families: bytes in the cache, additions, and rows or other parts of some overhead.
    "": Rates(_CALL, 60e9, element_s=0.05e-9, item_s=10e-9),
    "view": Rates(_CALL),
    # Bytes that are gathered one by one.
    "gather": Rates(_CALL, 8e9),
    # Estimated by another backend; the work has the seconds.
    "other": Rates(),
    # Products. Elements: of results whose rows do not fill whole vectors.
    "dense": Rates(0.2e-6, flops_per_s=160e9, weights_per_s=25e9, element_s=0.2e-9),
    "product float32": Rates(0.35e-6, flops_per_s=100e9),
    "product float64": Rates(0.35e-6, flops_per_s=2 / 0.035e-9),
    "product int32": Rates(0.35e-6, flops_per_s=100e9),
    "product int64": Rates(0.35e-6, flops_per_s=50e9),
    # Operations for each that the processor's instructions compute at once.
    "codes product": Rates(0.4e-6, flops_per_s=1e9, weights_per_s=35e9, item_s=50e-9),
    # Bytes of keys and values that are copied; elements are scores.
    "attention": Rates(0.35e-6, 4 / 0.3e-9, 150e9, element_s=0.2e-9),
    # Items are time steps.
    "recurrent": Rates(1e-6, flops_per_s=210e9, item_s=0.1e-6),
    # Images in their own order: elements are copied, items are groups. One filter alone is bound
    # by loads.
    "planes": Rates(0.5e-6, flops_per_s=140e9, element_s=0.17e-9, item_s=0.1e-6),
    "planes, one filter": Rates(0.5e-6, flops_per_s=100e9, element_s=0.17e-9, item_s=0.1e-6),
    # Channels innermost: elements of whole panels; items are lines of what a position sees.
    "image": Rates(flops_per_s=150e9, element_s=1.5e-9 / 16, item_s=4e-9),
    "depthwise image": Rates(bytes_per_s=40e9, flops_per_s=50e9),
    # As images; bytes are codes to copy. Calls take less than oneDNN's by as much as they do alone.
    "codes image": Rates(1.6e-6, 47e9, 2e9, 60e9, 10.4e-9 / 32, 6.9e-9),
    "codes layer": Rates(0.6e-6, 47e9, 2e9, 60e9, 10.4e-9 / 32, 6.9e-9),
    # Groups of one filter: items are pairs of taps to copy, operations pairs to multiply.
    # Parts of calls, where threads were divided by other measurements.
    "recurrent, a part": Rates(flops_per_s=100e9),
    "planes, a part": Rates(flops_per_s=40e9, item_s=100e-9),
    "codes image, a part": Rates(bytes_per_s=16e9, flops_per_s=200e9, item_s=50e-9),
    "depthwise codes image, a part": Rates(flops_per_s=64e9, element_s=50e-9, item_s=1 / 16e9),
    # Pixels that are gathered for each term, and products of them.
    "deformable": Rates(flops_per_s=1 / 0.03e-9, item_s=1.5e-9),
    "depthwise codes image": Rates(
        1.6e-6, flops_per_s=1 / 0.074e-9, element_s=0.55e-9, item_s=0.13e-9
    ),
}
"""``""`` is for families without a row"""


MOST_NS = 1e9
"""of a part: it does not look whether the run must stop, as NumPy's kernels do"""


def part_ns(work: Work) -> float:
    """Nanoseconds of so much work, a part of a call."""
    return RATES[work.family].busy(work) * 1e9


def faster(first: Work | None, second: Work | None) -> Work | None:
    """The work that takes less time."""
    return first if estimate(RATES, first) <= estimate(RATES, second) else second
