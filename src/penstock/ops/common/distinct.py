"""Rows that differ from one another, in the order of their first places."""

from __future__ import annotations

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.host.native import library

_UNCHECKED = 2**18  # rows between two looks at whether the run must stop


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for the distinct rows of [N, K], of any bytes, the first place of each [M], the index
    of each row among them [N], and the number of rows equal to each [M], all int64."""
    rows, compiled = np.ascontiguousarray(rows), library()
    if compiled is not None:
        found: tuple[np.ndarray, np.ndarray, np.ndarray]
        found = compiled.functions.distinct(rows, _UNCHECKED, checkpoint)
        return found
    keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
    _, first, numbers, counts = np.unique(keys, True, True, True)
    return in_order(np.argsort(first), first, numbers, counts)


def in_order(
    order: np.ndarray, first: np.ndarray, numbers: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the result of ``distinct_rows`` with its distinct rows [M] in another ``order``."""
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return first[order], ranks[numbers], counts[order]


def of_equal_bytes(x: np.ndarray) -> np.ndarray:
    """An array whose elements have equal bytes where those of ``x`` are equal, or both NaN."""
    if x.dtype.kind != "f":
        return x
    same = x + x.dtype.type(0)  # -0 becomes 0
    np.copyto(same, np.nan, where=np.isnan(x))
    return same
