"""Ranges of values over samples, and the part of each range that codes cover.

Values near the ends of a range are rare: clipping some of them allows finer steps for all others.
``CLIPPINGS`` are the methods to choose the clipped elements, from a sample of the elements.

If a range clips elements in many of the samples, the error is measured. If it clips them in
few samples, or in none, further samples may have larger errors: such an end is moved to a value
that hardly any sample reaches (``reached``), estimated from the ends of each sample::

    the largest elements of the samples    . . :: : .  .      |
    an end of these                             ^ stays       ^ moves there
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.core.checkpoints import report_progress
from penstock.core.errors import InvalidInput
from penstock.core.records import dataclass, field
from penstock.core.types import FLOAT32
from penstock.observers.ranges import Range, range_of
from penstock.quantizing.rewriting import ValueRange
from penstock.quantizing.samples import Samples
from penstock.session.session import Session

_MOST_ELEMENTS = 1 << 16  # that are kept of a value
_LEAST_ELEMENTS = 64  # of a sample
_BINS = 2048
_SHARES = np.linspace(1.0, 0.3, 36)  # of the range that are tried
_LEVELS = 256
# The share of the samples with elements beyond the end of a range, from which on that stays.
_MEASURED = 0.25
_REACHING = 1e-3  # the share of samples that may reach beyond an end that was moved


@dataclass
class ValueStatistics:
    """Statistics of a value: its range, and for each sample its range, some of its elements and, if
    requested, its means along an axis; and the number of its elements."""

    range: Range = field(default_factory=Range)
    ranges: list[Range] = field(default_factory=list)
    parts: list[np.ndarray] = field(default_factory=list)
    means: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    @property
    def elements(self) -> np.ndarray:
        return np.concatenate(self.parts)


Statistics = Mapping[str, ValueStatistics]


def observe(
    session: Session, names: Sequence[str], samples: Samples, axes: Mapping[str, int]
) -> Statistics:
    """The statistics of values over samples, with the values of one sample in memory at a time.
    ``axes``: the axes along which to compute means. Raises ``InvalidInput`` if a value is not
    finite."""
    found = {name: ValueStatistics() for name in names}
    most = max(_MOST_ELEMENTS // len(samples), _LEAST_ELEMENTS)
    for i, sample in enumerate(samples):
        report_progress("record ranges", i, len(samples))
        values = session.run(sample, fetches=list(names))
        for name in names:
            array, own = np.asarray(values.pop(name), FLOAT32), found[name]
            if name in axes and array.size:
                others = tuple(a for a in range(array.ndim) if a != axes[name] % array.ndim)
                own.means.append(array.mean(axis=others))
            flat, own.size = array.reshape(-1), array.size
            own.ranges.append(range_of(flat))
            own.range |= own.ranges[-1]
            if own.range.nonfinite:
                raise InvalidInput(
                    f"{samples.where(i)}: value {name!r} is infinite or NaN: quantize cannot "
                    "choose a range for it. Leave this sample out, or find the cause with "
                    "penstock.NanGuard"
                )
            # An odd step, which no dim of a model repeats itself by.
            step = max(flat.size // most, 1) | 1
            own.parts.append(flat[::step].copy())
    return found


Clipping = Callable[[Range, np.ndarray], ValueRange]
"""Chooses the range that codes cover, from the full range and a sample of the elements"""


def min_max(range_: Range, elements: np.ndarray) -> ValueRange:
    """The full range."""
    if range_.min > range_.max:  # no elements
        return ValueRange(0.0, 0.0)
    return ValueRange.of(range_.min, range_.max)


def percentile(range_: Range, elements: np.ndarray, percent: float = 99.99) -> ValueRange:
    """All but the elements beyond a percentile on either side."""
    whole = min_max(range_, elements)
    if not elements.size:
        return whole
    # Of both sides: an activation may have its rare elements on either.
    low, high = np.percentile(elements, [100 - percent, percent])
    return ValueRange.of(max(float(low), whole.low), min(float(high), whole.high))


def squared_error(range_: Range, elements: np.ndarray) -> ValueRange:
    """The range with the least squared error of codes."""
    whole = min_max(range_, elements)
    if not elements.size:
        return whole
    counts, edges = np.histogram(elements, _BINS, (whole.low, whole.high or 1.0))
    edges = edges.astype(np.float64)  # squares of large numbers leave the range of float32
    centers, weights = (edges[1:] + edges[:-1]) / 2, counts
    used = weights > 0
    centers, weights = centers[used], weights[used]
    best, least = whole, np.inf
    for share in _SHARES:
        for tried in _shrunk(whole, float(share)):
            scale = float(tried.scale)
            codes = np.clip(np.rint(centers / scale) + tried.zero, 0, 255)
            difference = (codes - tried.zero) * scale - centers
            # Within a step, the error is the rounding error, which centers of bins do not show.
            error = float(np.dot(weights, np.maximum(difference**2, scale * scale / 12)))
            if error < least:
                best, least = tried, error
    return best


def _shrunk(whole: ValueRange, share: float) -> list[ValueRange]:
    """The range with both ends, or one, nearer to 0."""
    if whole.low == 0 or whole.high == 0 or share == 1:
        return [ValueRange(whole.low * share, whole.high * share)]
    return [
        ValueRange(whole.low * share, whole.high * share),
        ValueRange(whole.low * share, whole.high),
        ValueRange(whole.low, whole.high * share),
    ]


def entropy(range_: Range, elements: np.ndarray) -> ValueRange:
    """The range with the least Kullback-Leibler divergence (Migacz 2017, "8-bit inference with
    TensorRT"), with both ends in the same proportion to the full range."""
    whole = min_max(range_, elements)
    if not elements.size or whole.low == whole.high:
        return whole
    counts, edges = np.histogram(elements, _BINS, (whole.low, whole.high))
    best, least = whole, np.inf
    for share in _SHARES:
        low, high = whole.low * share, whole.high * share
        inside = (edges[:-1] >= low) & (edges[1:] <= high)
        own = counts[inside].astype(np.float64)
        if len(own) < _LEVELS // 2 or not own.any():
            continue
        # Counts outside are added to the ends.
        below = counts[edges[:-1] < low].sum()
        clipped = own.copy()
        clipped[0] += below
        clipped[-1] += counts.sum() - own.sum() - below
        level = np.arange(len(own)) * _LEVELS // len(own)
        sums = np.bincount(level, own, _LEVELS)
        used = np.bincount(level, own > 0, _LEVELS)
        spread = np.where(own > 0, (sums / np.maximum(used, 1))[level], 0.0)
        p, q = clipped / clipped.sum(), spread / max(spread.sum(), 1.0)
        seen = p > 0
        divergence = float(np.sum(p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-9))))
        if divergence < least:
            best, least = ValueRange.of(float(low), float(high)), divergence
    return best


CLIPPINGS: Mapping[str, Clipping] = {
    "min-max": min_max,
    "percentile": percentile,
    "entropy": entropy,
    "squared-error": squared_error,
}
"""ways to choose the range that codes cover, by the names that users give them"""


def clipped(statistics: Statistics, clipping: str) -> dict[str, ValueRange]:
    """The ranges that codes of values cover."""
    choose, ranges = CLIPPINGS[clipping], {}
    for name, own in statistics.items():
        chosen, some = choose(own.range, own.elements), [r for r in own.ranges if r.min <= r.max]
        ranges[name] = ValueRange.of(
            -reached(-chosen.low, [-r.min for r in some]),
            reached(chosen.high, [r.max for r in some]),
        )
    return ranges


def reached(end: float, largest: Sequence[float]) -> float:
    """Return the new end of a range from the largest elements of the samples: the value that one
    sample in a thousand reaches, if few exceed ``end``. The largest of many elements has nearly a
    Gumbel distribution; its mean and deviation are estimated from the samples."""
    if len(largest) < 2 or end <= 0:
        return end
    if sum(own > end for own in largest) > _MEASURED * len(largest):
        return end
    deviation = float(np.std(largest, ddof=1)) * math.sqrt(6) / math.pi
    far = float(np.mean(largest)) - deviation * (np.euler_gamma + math.log(_REACHING))
    return max(end, far)
