"""What a bias adds to scores by distance alone, told by its values.

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
"""how far numbers of float32 may be off, relative to the largest of their row"""


def numbers_by_distance(
    biases: Sequence[tuple[Probe, np.ndarray]], window: int, lowest: float, name: str
) -> np.ndarray | None:
    """What biases at some probes, the longest of which is the last one, add to the scores of rows
    that see ``window`` positions, or all before them: [heads, n + 1], for the first n distances and
    for each position beyond them, as ``ops.internal.pages`` reads it. None for nothing. Numbers up
    to ``lowest`` hide positions. Raises ``Stays`` for the bias of that name."""
    shown = [(probe, np.where(bias <= lowest, 0, bias)) for probe, bias in biases]
    cases = [_relative(probe, bias, window) for probe, bias in shown]
    numbers, errors = cases[-1]
    table = _table(numbers[:, -1], errors[:, -1], window)
    if table is None or not all(_fits(table, *case, window) for case in cases):
        raise Stays(f"adds numbers to scores that depend on more than distances, by {name!r}")
    return table if table.any() else None


def _relative(probe: Probe, bias: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """What is added to scores by head, row and distance, relative to distance 0 and 0 where nothing
    is seen, and how far it may be off, by head and row."""
    positions = probe.positions
    rows = bias.reshape(-1, *bias.shape[-2:]).astype(np.float64)
    errors = _ERRORS * np.abs(rows).max(-1)
    numbers = np.zeros_like(rows)
    for i, own in enumerate(positions.tolist()):
        seen = min(own + 1, window or own + 1)
        numbers[:, i, :seen] = rows[:, i, own::-1][:, :seen] - rows[:, i, own, None]
    return numbers, errors


def _table(numbers: np.ndarray, errors: np.ndarray, window: int) -> np.ndarray | None:
    """Numbers [heads, n + 1] for those [heads, distances] of the last row of a probe: the fewest
    behind which they grow evenly. None if that is nowhere."""
    count = min(window, numbers.shape[1]) if window else numbers.shape[1]
    half, distances = count // 2, np.arange(count)
    numbers = numbers[:, :count]
    x = distances[half:] - distances[half:].mean()
    tail = numbers[:, half:] - numbers[:, half:].mean(1, keepdims=True)
    slopes = tail @ x / max(x @ x, 1)
    slopes[np.abs(slopes) * count <= errors] = 0
    line = numbers[:, -1:] + slopes[:, None] * (distances - distances[-1])
    (uneven,) = (~(np.abs(numbers - line) <= errors[:, None])).any(0).nonzero()
    begin = int(uneven[-1]) + 1 if uneven.size else 0
    if begin > half:
        if not window:
            return None
        begin, slopes = count - 1, np.zeros_like(slopes)
    return np.column_stack([numbers[:, : begin + 1], slopes]).astype(FLOAT32)


def _fits(table: np.ndarray, numbers: np.ndarray, errors: np.ndarray, window: int) -> bool:
    """Whether numbers by head, row and distance are those of a table."""
    if len(numbers) != len(table):
        return False
    last, rows = table.shape[1] - 2, numbers.shape[1]
    distances = np.arange(numbers.shape[2])
    further = np.maximum(distances - last, 0)
    wanted = table[:, np.minimum(distances, last)] + table[:, -1:].astype(np.float64) * further
    seen = np.arange(numbers.shape[2] - rows + 1, numbers.shape[2] + 1)
    if window:
        seen = np.minimum(seen, window)
    for i, count in enumerate(seen.tolist()):
        off = np.abs(numbers[:, i, :count] - wanted[:, :count])
        if not (off <= errors[:, i, None]).all():
            return False
    return True
