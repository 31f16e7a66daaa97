"""Recognition, by their values, of attention biases that depend on distance alone.

Models add numbers to the scores of a head that depend on the distance from key to query::

    ALiBi      slope[head] * (key - query), or slope[head] * key
    buckets    learned[bucket(query - key), head], one number from some distance on

A constant added to all scores of a row does not change its softmax, so both forms of ALiBi are
equivalent. Biases by distance are relative to that at distance 0 in the same row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import FLOAT32
from penstock.passes.lowering.row_rules import Stays
from penstock.passes.lowering.step_probes import Probe

_ERRORS = 4 * float(np.finfo(FLOAT32).eps)
"""the error bound of the difference of two float32 numbers, relative to both"""


def numbers_by_distance(
    biases: Sequence[tuple[Probe, np.ndarray]], window: int, lowest: float, name: str
) -> np.ndarray | None:
    """Return the bias by distance that ``biases`` add to the scores of rows that see ``window``
    positions, or all earlier ones: [heads, n + 1], for the first n distances and then the increment
    per position, as ``ops.internal.pages`` reads it; None if it is zero. The last probe is the
    longest. Numbers up to ``lowest`` mask positions. Raises ``Stays``, naming the bias ``name``."""
    shown = [(probe, np.where(bias <= lowest, 0, bias)) for probe, bias in biases]
    cases = [_relative(probe, bias, window) for probe, bias in shown]
    numbers, errors = cases[-1]
    # The last row sees the most positions. Other rows, and other probes, must agree with it.
    count = min(window or numbers.shape[2], numbers.shape[2])
    table = _table(numbers[:, -1, :count], errors[:, -1, :count], bool(window))
    if table is None or not all(_fits(table, *case) for case in cases):
        raise Stays(f"adds the bias {name!r} to its scores, which depends on more than distance")
    return table if table.any() else None


def _relative(probe: Probe, bias: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bias by head, row and distance, relative to distance 0, and its error bound, which
    is infinite for masked positions."""
    rows = bias.reshape(-1, *bias.shape[-2:]).astype(np.float64)
    numbers, errors = np.zeros_like(rows), np.full_like(rows, np.inf)
    for i, own in enumerate(probe.positions.tolist()):
        before = rows[:, i, own::-1][:, : window or None]
        seen = before.shape[1]
        numbers[:, i, :seen] = before - before[:, :1]
        # Slopes times key positions are large, and their absolute errors carry over to the
        # differences.
        errors[:, i, :seen] = _ERRORS * (np.abs(before) + np.abs(before[:, :1]))
    return numbers, errors


def _table(numbers: np.ndarray, errors: np.ndarray, is_window: bool) -> np.ndarray | None:
    """Return numbers [heads, n + 1] for the biases [heads, distances] of a row, with the least n
    from which on they grow linearly. None if they do not, unless all lie within a window."""
    count, most = numbers.shape[1], errors.max(1)
    half, distances = count // 2, np.arange(count)
    # Least-squares line through the farther half, whose numbers have independent rounding errors.
    x = distances[half:] - distances[half:].mean()
    slopes = (numbers[:, half:] - numbers[:, half:].mean(1, keepdims=True)) @ x / max(x @ x, 1)
    slopes[np.abs(slopes) * count <= most] = 0
    # ALiBi is linear from distance 0 on, where it is exact.
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
    """Whether biases by head, row and distance agree with a table."""
    if len(numbers) != len(table):
        return False
    last, distances = table.shape[1] - 2, np.arange(numbers.shape[2])
    further = np.maximum(distances - last, 0)
    wanted = table[:, np.minimum(distances, last)] + table[:, -1:].astype(np.float64) * further
    # The negation rejects NaN. Compared row by row, since there may be a million numbers.
    rows = range(numbers.shape[1])
    return not any((~(np.abs(numbers[:, i] - wanted) <= errors[:, i])).any() for i in rows)
