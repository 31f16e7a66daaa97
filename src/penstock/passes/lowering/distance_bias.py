"""Attention biases that depend on distance alone, recognized by their values.

Models add numbers to the scores of a head that depend on how far a key is before its query::

    ALiBi      slope[head] * (key - query), or slope[head] * key
    buckets    learned[bucket(query - key), head], one number from some distance on

Rows that differ by a number for all keys of a row are equal behind softmax, so that both forms of
ALiBi are. Numbers by distance are those relative to distance 0 of the same row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import FLOAT32
from penstock.passes.lowering.row_rules import Stays
from penstock.passes.lowering.step_probes import Probe

_ERRORS = 4 * float(np.finfo(FLOAT32).eps)
"""how far the difference of two numbers of float32 may be off, relative to both"""


def numbers_by_distance(
    biases: Sequence[tuple[Probe, np.ndarray]], window: int, lowest: float, name: str
) -> np.ndarray | None:
    """Return the bias by distance that ``biases``, at probes of which the last is the longest, add
    to scores of rows that see ``window`` positions, or all before them: [heads, n + 1], for the
    first n distances and for each position beyond them, as ``ops.internal.pages`` reads it; None if
    it is zero. Numbers up to ``lowest`` hide positions. Raises ``Stays`` with the ``name`` of the
    bias."""
    shown = [(probe, np.where(bias <= lowest, 0, bias)) for probe, bias in biases]
    cases = [_relative(probe, bias, window) for probe, bias in shown]
    numbers, errors = cases[-1]
    # The last row sees the most. Others, and other probes, must have the same numbers.
    count = min(window or numbers.shape[2], numbers.shape[2])
    table = _table(numbers[:, -1, :count], errors[:, -1, :count], bool(window))
    if table is None or not all(_fits(table, *case) for case in cases):
        raise Stays(f"adds the bias {name!r} to its scores, which depends on more than distance")
    return table if table.any() else None


def _relative(probe: Probe, bias: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bias by head, row and distance, relative to distance 0, and a bound of its error,
    which is infinite where nothing is seen."""
    rows = bias.reshape(-1, *bias.shape[-2:]).astype(np.float64)
    numbers, errors = np.zeros_like(rows), np.full_like(rows, np.inf)
    for i, own in enumerate(probe.positions.tolist()):
        before = rows[:, i, own::-1][:, : window or None]
        seen = before.shape[1]
        numbers[:, i, :seen] = before - before[:, :1]
        # Slopes times positions of keys are large, and their differences as exact as they are.
        errors[:, i, :seen] = _ERRORS * (np.abs(before) + np.abs(before[:, :1]))
    return numbers, errors


def _table(numbers: np.ndarray, errors: np.ndarray, is_window: bool) -> np.ndarray | None:
    """Numbers [heads, n + 1] for those [heads, distances] of a row: the fewest behind which they
    grow evenly, which in a window they need not. None if they do nowhere."""
    count, most = numbers.shape[1], errors.max(1)
    half, distances = count // 2, np.arange(count)
    # The line of least squares through the farther half, whose numbers are rounded one by one.
    x = distances[half:] - distances[half:].mean()
    slopes = (numbers[:, half:] - numbers[:, half:].mean(1, keepdims=True)) @ x / max(x @ x, 1)
    slopes[np.abs(slopes) * count <= most] = 0
    # ALiBi is a line from distance 0 on, where it is exact.
    if (np.abs(numbers - slopes[:, None] * distances) <= errors).all():
        return _columns(numbers[:, :1], slopes)
    line = numbers[:, -1:] + slopes[:, None] * (distances - distances[-1])
    (uneven,) = (~(np.abs(numbers - line) <= most[:, None])).any(0).nonzero()
    begin = int(uneven[-1]) + 1 if uneven.size else 0
    if begin <= half:
        return _columns(numbers[:, : begin + 1], slopes)
    return _columns(numbers, np.zeros_like(slopes)) if is_window else None


def _columns(numbers: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    return np.column_stack([numbers, slopes]).astype(FLOAT32)


def _fits(table: np.ndarray, numbers: np.ndarray, errors: np.ndarray) -> bool:
    """Whether numbers by head, row and distance are those of a table."""
    if len(numbers) != len(table):
        return False
    last, distances = table.shape[1] - 2, np.arange(numbers.shape[2])
    further = np.maximum(distances - last, 0)
    wanted = table[:, np.minimum(distances, last)] + table[:, -1:].astype(np.float64) * further
    # The negation refuses NaN. Row by row, since there may be a million numbers.
    rows = range(numbers.shape[1])
    return not any((~(np.abs(numbers[:, i] - wanted) <= errors[:, i])).any() for i in rows)
