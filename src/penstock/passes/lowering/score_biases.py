"""Recognition of masks and position biases of attention by their values at probes.

::

    0 up to each row, then -inf          the mask of a decoder, or of a window
    numbers by distance up to each row   that with ALiBi, or with buckets (``distance_bias``)
    0, and -inf where a mask has 0       the mask of an encoder's outputs
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.records import NamedTuple
from penstock.ir.graph import Value
from penstock.ops.internal.packed import LOWEST
from penstock.passes.lowering.distance_bias import numbers_by_distance
from penstock.passes.lowering.lift_heads import LIFTED
from penstock.passes.lowering.row_rules import Stays
from penstock.passes.lowering.step_probes import Probe, Probes

_LOWEST_OF_ALL = -1e30
"""threshold of masked positions, below distance biases such as ALiBi's"""


class Seen(NamedTuple):
    """Positions that a row attends to: the last ``window``, 0 for all up to its own; and the bias
    ``by_distance`` of the scores, if any."""

    window: int = 0
    by_distance: np.ndarray | None = None

    def within(self, window: int) -> Seen:
        """Return this restricted to a window; 0 or less for none."""
        return self._replace(window=min(self.window or window, window)) if window > 0 else self


class ScoreBiases:
    """Classifies biases by their values at the ``probes`` of a graph."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._seen: dict[tuple[Value, ...], Seen] = {}
        self._known: list[tuple[list[np.ndarray], Seen]] = []

    def seen_before(self, biases: Sequence[Value], causal: bool) -> Seen:
        """Return the positions that a row attends to, up to its own, under these biases.
        ``causal``: later ones are masked anyway. Raises ``Stays``."""
        key = tuple(biases)
        if not key:
            if causal:
                return Seen()
            raise Stays("is not causal: rows attend to later rows")
        if key not in self._seen:
            self._seen[key] = self._seen_of(key, causal)
        return self._seen[key]

    def _seen_of(self, biases: Sequence[Value], causal: bool) -> Seen:
        cases, name = self._cases(biases, causal), biases[0].name
        # Layers have separate, possibly large biases with equal values.
        arrays = [bias for _, bias in cases]
        for others, seen in self._known:
            if all(map(np.array_equal, arrays, others)):
                return seen
        windows: list[int | None] = []
        for lowest in (LOWEST, _LOWEST_OF_ALL):
            windows = [probe.window(bias, lowest) for probe, bias in cases]
            if None not in windows:
                break
        else:
            raise Stays(f"has a mask {name!r} that is neither causal nor a sliding window")
        window = windows[-1] or 0
        # A window longer than a probe is only visible in a longer probe.
        ends = [probe.past + probe.rows for probe, _ in cases[:-1]]
        if windows[:-1] != [0 if window >= end else window for end in ends]:
            raise Stays(f"has a sliding window {name!r} whose size depends on the length")
        seen = Seen(window, numbers_by_distance(cases, window, lowest, name))
        self._known.append((arrays, seen))
        return seen

    def hides_absent(self, biases: Sequence[Value]) -> bool:
        """Whether these biases mask the positions where the mask of the encoder's output is 0;
        False if they mask none. Raises ``Stays`` if they do anything else."""
        if not biases:
            return False
        name, hides = biases[0].name, set()
        for probe, bias in self._cases(biases, causal=False):
            size = bias.shape[-1] if bias.ndim else 1
            present = np.ones(size, np.bool_) if probe.present is None else probe.present
            if size not in (1, present.size):
                raise Stays(f"has a cross attention bias {name!r} of another length")
            rows = bias.reshape(-1, size)
            rows = np.broadcast_to(rows, (len(rows), present.size))
            seen = rows > LOWEST
            if any(np.unique(row[own]).size > 1 for row, own in zip(rows, seen, strict=True)):
                raise Stays(f"adds {name!r} to cross attention scores, which is not a mask")
            if seen.all():
                hides |= set() if present.all() else {False}
            elif (seen == present).all():
                hides.add(True)
            else:
                raise Stays(
                    f"hides positions of the encoder's output by {name!r} other than those where "
                    "its mask is 0"
                )
        if len(hides) > 1:
            raise Stays(
                f"hides positions by {name!r} only for some of the masks of the encoder's output"
            )
        return hides == {True}

    def _cases(self, biases: Sequence[Value], causal: bool) -> list[tuple[Probe, np.ndarray]]:
        """Return the sum of biases at near probes and at a far one. Raises ``Stays``."""
        cases = [(probe, _total(biases, probe, causal)) for probe in self._probes.near]
        for probe in self._probes.far:
            if (total := _total(biases, probe, causal)) is not None:
                cases.append((probe, total))
                break
        known = [(probe, bias) for probe, bias in cases if bias is not None]
        if len(known) <= len(self._probes.near):
            raise Stays(f"has a mask {biases[0].name!r} that cannot be computed in advance")
        return known


def _total(biases: Sequence[Value], probe: Probe, causal: bool) -> np.ndarray | None:
    """Return the sum of all biases at a probe; None if unknown."""
    total: np.ndarray = np.zeros((), np.float32)
    try:
        arrays = [_computed(bias, probe) for bias in biases]
        if causal:
            before = np.arange(probe.past + probe.rows)
            arrays.append(before <= probe.positions[:, None])
        for array in arrays:
            if array is None:
                return None
            hides = array.dtype == np.bool_
            own = np.where(array, np.float32(0), np.float32(-np.inf)) if hides else array
            with np.errstate(over="ignore"):  # the lowest floats overflow to -inf
                total = total + own
    except ValueError:  # a table may have fewer positions than the probe
        return None
    return total


def _computed(value: Value | None, probe: Probe) -> np.ndarray | None:
    """Return the value of a bias: the model's, or a sum that ``RecognizeAttention`` added."""
    if value is None:
        return None
    source = value.name.removesuffix(LIFTED)
    if source in probe.values:
        known = probe.values[source]
        return known if source == value.name else known[None]
    if value.const is not None and (value.const.size == 1 or value.name == "axes"):
        return value.const
    node = value.producer
    operands = [] if node is None else [_computed(x, probe) for x in node.inputs]
    if node is None or any(x is None for x in operands):
        return None
    read = [x for x in operands if x is not None]
    if node.op.name == "Unsqueeze":
        return np.expand_dims(read[0], tuple(read[1].tolist()))
    if node.op.name == "Where":
        return np.where(*read)
    with np.errstate(over="ignore"):
        if node.op.name == "Mul":
            return read[0] * read[1]
        return read[0] + read[1] if node.op.name == "Add" else None
